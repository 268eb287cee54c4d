#include "kernels/ngram_hash.h"

#include <algorithm>
#include <vector>

namespace engram::cpu {
namespace {

// floormod(x, p) without a division. inverse = floor((2^64 - 1) / p) makes the quotient exact or one too small for any
// 0 <= u < 2^63; a negative x is reflected first: floormod(x, p) = p - 1 - (~x mod p).
struct Modulus {
  uint64_t p, inverse;
  int64_t offset;
};

inline int64_t reduce(int64_t x, const Modulus& m) {
  const uint64_t sign = static_cast<uint64_t>(x >> 63), u = static_cast<uint64_t>(x) ^ sign;
  const uint64_t quotient = static_cast<uint64_t>((static_cast<unsigned __int128>(u) * m.inverse) >> 64);
  uint64_t r = u - quotient * m.p;
  r -= r >= m.p ? m.p : 0;
  return m.offset + static_cast<int64_t>((r ^ sign) + (m.p & sign));
}

}  // namespace

int64_t ngram_hash(const NgramHash& a, int64_t begin, int64_t end) {
  if (begin >= end) return kNoBadId;
  const int64_t N = a.orders, C = a.columns, heads = C / (N - 1), T = a.tokens;
  std::vector<Modulus> moduli(a.layers * C);
  for (size_t i = 0; i < moduli.size(); ++i) {
    const uint64_t p = static_cast<uint64_t>(a.moduli[i]);
    moduli[i] = {p, UINT64_MAX / p, a.offsets[i]};
  }
  std::vector<int64_t> window(N);  // window[s] = token s steps back, newest first
  int64_t visible = 0;             // how many of them may be seen from the current position, itself included
  int64_t bad = kNoBadId;

  const auto push = [&](int64_t token) {
    std::copy_backward(window.begin(), window.end() - 1, window.end());
    window[0] = token;
    visible = std::min(visible + 1, N);
  };
  const auto start_row = [&](int64_t row) {
    visible = 0;
    for (int64_t s = 0; a.history && s < N - 1; ++s) {
      const int64_t id = a.history[row * (N - 1) + s];
      if (id < 0 || (a.token_map && id >= a.vocab)) visible = 0;
      else push(a.token_map ? a.token_map[id] : id);
    }
  };

  // What is visible at `begin` depends on the N - 1 positions before it: walk them without storing.
  const int64_t first = std::max(begin / T * T, begin - (N - 1));
  for (int64_t i = first; i < end; ++i) {
    const int64_t t = i % T;
    if (t == 0) start_row(i / T);
    else if (i == first) visible = 0;

    int64_t id = 0;
    bool blocked = a.mask && !a.mask[i];
    if (!blocked) {
      id = a.token_ids[i];
      if (a.token_map) {
        if (id < 0 || id >= a.vocab) {
          blocked = true;
          if (bad == kNoBadId && i >= begin) bad = i;
        } else {
          id = a.token_map[id];
        }
      }
    }
    if (a.document_ids && t > 0 && a.document_ids[i] != a.document_ids[i - 1]) visible = 0;
    if (blocked) visible = 0;
    else push(id);
    if (i < begin) continue;

    for (int64_t l = 0; l < a.layers; ++l) {
      const int64_t* multipliers = a.multipliers + l * N;
      const Modulus* m = moduli.data() + l * C;
      int64_t* rows = a.rows + (l * a.batch * T + i) * C;
      const auto term = [&](int64_t s) {
        return static_cast<uint64_t>(s < visible ? window[s] : a.pad) * static_cast<uint64_t>(multipliers[s]);
      };
      uint64_t mix = term(0);
      for (int64_t n = 1; n < N; ++n, m += heads, rows += heads) {
        mix ^= term(n);
        for (int64_t h = 0; h < heads; ++h) rows[h] = reduce(static_cast<int64_t>(mix), m[h]);
      }
    }
  }
  return bad;
}

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
