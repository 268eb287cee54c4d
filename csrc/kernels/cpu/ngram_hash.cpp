#ifndef ENGRAM_ISA
#include "kernels/ngram_hash.h"
#define ENGRAM_BODY "kernels/cpu/ngram_hash.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

int64_t ngram_hash(const NgramHash& a, int64_t begin, int64_t end) { return ENGRAM_CALL(ngram_hash, a, begin, end); }

int64_t ngram_hash_bad_history(const NgramHash& a) {
  const int64_t H = a.orders - 1;
  if (!a.history || !a.token_map) return kNoBadId;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t s = H - 1; s >= 0 && a.history[b * H + s] >= 0; --s) {
      if (a.history[b * H + s] >= a.vocab) return b * H + s;
    }
  }
  return kNoBadId;
}

}  // namespace engram::cpu

#else

namespace engram::cpu::ENGRAM_ISA {

// The columns of all layers, ready to reduce a mix by. Two exact ways without a division:
//
// One column at a time: inverse = floor((2^64 - 1) / p) makes the quotient exact or one too small for any 0 <= u < 2^63;
// a negative x is reflected first: floormod(x, p) = p - 1 - (~x mod p).
//
// Eight at a time (AVX-512, 4096 <= p < 2^62): the quotient in double has a relative error below 3 * 2^-53, so for
// |x| <= 2^63 it is off by less than one, the remainder lies in [-p, 2p), and one correction each way is enough.
struct Columns {
  struct Modulus {
    uint64_t p, inverse;
    int64_t offset;
  };
  std::vector<Modulus> moduli;     // [L, C]
  std::vector<int64_t> p, offset;  // [L, N-1, groups, 8], padded
  std::vector<double> reciprocal;
  int64_t heads, groups;  // groups of 8 heads an order
  bool wide;              // whether every modulus suits the second way

  explicit Columns(const NgramHash& a) : moduli(a.layers * a.columns), heads(a.columns / (a.orders - 1)) {
    groups = (heads + 7) / 8;
    wide = true;
    for (size_t i = 0; i < moduli.size(); ++i) {
      const uint64_t m = static_cast<uint64_t>(a.moduli[i]);
      moduli[i] = {m, UINT64_MAX / m, a.offsets[i]};
      wide = wide && m >= 4096 && m < uint64_t{1} << 62;
    }
#if defined(ENGRAM_HAS_AVX512)
    const size_t lists = a.layers * (a.orders - 1);
    p.assign(lists * groups * 8, 4096);
    offset.assign(p.size(), 0);
    reciprocal.assign(p.size(), 1.0 / 4096);
    for (size_t i = 0; i < moduli.size() && wide; ++i) {
      const size_t at = i / heads * groups * 8 + i % heads;
      p[at] = static_cast<int64_t>(moduli[i].p);
      offset[at] = moduli[i].offset;
      reciprocal[at] = 1.0 / static_cast<double>(p[at]);
    }
#else
    wide = false;
#endif
  }

  // rows[h] = offset + floormod(mix, p) for the heads of list `list` = (layer, order).
  inline __attribute__((always_inline)) ENGRAM_TARGET void reduce(int64_t mix, int64_t list, int64_t* rows) const {
#if defined(ENGRAM_HAS_AVX512)
    if (wide) {
      const __m512i x = _mm512_set1_epi64(mix);
      const __m512d value = _mm512_set1_pd(static_cast<double>(mix));
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = (list * groups + g) * 8;
        const __m512i modulus = _mm512_loadu_si512(p.data() + at);
        const __m512d quotient = _mm512_maskz_mul_pd(0xff, value, _mm512_loadu_pd(reciprocal.data() + at));
        const __m512i q = _mm512_maskz_cvt_roundpd_epi64(0xff, quotient, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        __m512i r = x - _mm512_maskz_mullo_epi64(0xff, q, modulus);
        r = _mm512_maskz_min_epu64(0xff, r, r + modulus);
        r = _mm512_maskz_min_epu64(0xff, r, r - modulus);
        r = r + _mm512_loadu_si512(offset.data() + at);
        const int64_t left = heads - g * 8;
        _mm512_mask_storeu_epi64(rows + g * 8, static_cast<__mmask8>(left >= 8 ? 0xff : (1 << left) - 1), r);
      }
      return;
    }
#endif
    const uint64_t sign = static_cast<uint64_t>(mix >> 63), u = static_cast<uint64_t>(mix) ^ sign;
    for (int64_t h = 0; h < heads; ++h) {
      const Modulus& m = moduli[list * heads + h];
      const uint64_t quotient = static_cast<uint64_t>((static_cast<unsigned __int128>(u) * m.inverse) >> 64);
      uint64_t r = u - quotient * m.p;
      r -= r >= m.p ? m.p : 0;
      rows[h] = m.offset + static_cast<int64_t>((r ^ sign) + (m.p & sign));
    }
  }
};

ENGRAM_TARGET int64_t ngram_hash(const NgramHash& a, int64_t begin, int64_t end) {
  if (begin >= end) return kNoBadId;
  const int64_t N = a.orders, T = a.tokens, lookback = N - 1;
  const Columns columns(a);
  int64_t bad = kNoBadId;

  // tokens[lookback + i]: token at position `from + i` of the current run; visible: how many, itself included, may be seen.
  constexpr int64_t kRun = 1024, kAhead = 16;  // the map outgrows the nearer caches: its entries are fetched ahead
  std::vector<int64_t> tokens(lookback + kRun);
  // What is visible at `begin` depends on the positions before it: walk them without storing.
  const int64_t first = std::max(begin / T * T, begin - lookback);
  int64_t visible = 0;
  for (int64_t from = first, until; from < end; from = until) {
    const int64_t row = from / T;
    until = std::min({end, (row + 1) * T, from + kRun});
    if (from % T == 0) {
      visible = 0;
      for (int64_t s = 0; a.history && s < lookback; ++s) {
        const int64_t id = a.history[row * lookback + s];
        const bool blocked = id < 0 || (a.token_map && id >= a.vocab);
        visible = blocked ? 0 : visible + 1;
        tokens[s] = blocked ? 0 : a.token_map ? a.token_map[id] : id;
      }
    } else if (from != first) {  // the run before ends where this one begins
      std::copy_n(tokens.begin() + kRun, lookback, tokens.begin());
    }
    for (int64_t i = from; i < until; ++i) {
      if (a.token_map && i + kAhead < until) {
        const int64_t ahead = a.token_ids[i + kAhead];
        if (ahead >= 0 && ahead < a.vocab) __builtin_prefetch(a.token_map + ahead);
      }
      int64_t id = 0;
      bool blocked = a.mask && !a.mask[i];
      if (!blocked) {
        id = a.token_ids[i];
        if (a.token_map) {
          blocked = id < 0 || id >= a.vocab;
          if (blocked && bad == kNoBadId && i >= begin) bad = i;
          id = blocked ? 0 : a.token_map[id];
        }
      }
      if (a.document_ids && i % T != 0 && a.document_ids[i] != a.document_ids[i - 1]) visible = 0;
      visible = blocked ? 0 : std::min(visible + 1, N);
      int64_t* token = tokens.data() + lookback + (i - from);
      *token = id;
      if (i < begin) continue;
      for (int64_t l = 0; l < a.layers; ++l) {
        const int64_t* multipliers = a.multipliers + l * N;
        int64_t* rows = a.rows + (l * a.batch * T + i) * a.columns;
        const auto term = [&](int64_t s) ENGRAM_TARGET __attribute__((always_inline)) {
          return static_cast<uint64_t>(s < visible ? token[-s] : a.pad) * static_cast<uint64_t>(multipliers[s]);
        };
        uint64_t mix = term(0);
        for (int64_t n = 1; n < N; ++n, rows += columns.heads) {
          mix ^= term(n);
          columns.reduce(static_cast<int64_t>(mix), l * lookback + n - 1, rows);
        }
      }
    }
  }
  return bad;
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
