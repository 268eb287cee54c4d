#ifndef ENGRAM_ISA
#include "kernels/decode.h"
#include "kernels/row_plan.h"
#define ENGRAM_BODY "kernels/cpu/decode.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

void decode_marks(const DecodeStep& step, const DecodeMarks& marks, int64_t begin, int64_t end) {
  const RingMarks& h = step.history;
  for (int64_t b = begin; b < end; ++b) {
    decode_token_marks(step, marks, b);
    for (int64_t i = 0; i < step.conv.reach; ++i) decode_past_marks(step, marks, b, i);
    for (int64_t i = 0; i < h.reach; ++i) {
      const int64_t p = h.position[b] - h.reach + i, slot = h.slot(b, p);
      const bool same = p >= 0 && h.visible[slot] && h.runs[slot] == marks.runs[b * step.tokens];
      marks.history[b * h.reach + i] = same ? step.ids[slot] : -1;
    }
  }
}

template <typename K> int64_t decode_memory(const DecodeProducts<K>& a, int64_t begin, int64_t end) {
  return ENGRAM_CALL(decode_memory, a, begin, end);
}
template <typename K> void decode_project(const DecodeProducts<K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(decode_project, a, begin, end);
}
template <typename H, typename K> void decode_weights(const Decode<H, K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(decode_weights, a, begin, end);
}

template <typename K> void decode_past(const DecodeProducts<K>& a, int64_t begin, int64_t end) {
  const RingMarks& ring = a.step.conv;
  const int64_t P = ring.reach, D = a.dim, S = a.branches * kGateStats + 1;
  for (int64_t b = begin; b < end; ++b) {
    for (int64_t i = 0; i < P; ++i) {
      if (!a.marks.visible[b * (P + a.step.tokens) + i]) continue;
      const int64_t slot = ring.slot(b, ring.position[b] - P + i), to = b * P + i;
      std::copy_n(a.ring_value + slot * D, D, a.past_value + to * D);
      std::copy_n(a.ring_stats + slot * S, S, a.past_stats + to * S);
    }
  }
}

template <typename H, typename K> void decode_append(const Decode<H, K>& a, int64_t begin, int64_t end) {
  const DecodeStep& s = a.step;
  const int64_t T = s.tokens, P = s.conv.reach, D = a.dim, S = a.branches * kGateStats + 1;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t length = s.length(b);
    for (int64_t t = first_kept(s.history, length); t < length; ++t)
      s.ids[s.history.slot(b, s.history.position[b] + t)] = a.marks.ids[b * T + t];
    for (int64_t t = first_kept(s.conv, length); t < length; ++t) {
      const int64_t slot = s.conv.slot(b, s.conv.position[b] + t);
      std::copy_n(a.value + (b * T + t) * D, D, a.ring_value + slot * D);
      std::copy_n(a.mix.stats + (b * T + t) * S, S, a.ring_stats + slot * S);
    }
    append_marks(s.history, b, length, a.marks.runs + b * T, a.marks.documents + b * T, a.marks.hashed + b * T);
    append_marks(s.conv, b, length, a.marks.conv_runs + b * (P + T) + P, a.marks.conv_documents + b * T,
                 a.marks.visible + b * (P + T) + P);
  }
}

#define INSTANTIATE(K)                                                           \
  template int64_t decode_memory<K>(const DecodeProducts<K>&, int64_t, int64_t); \
  template void decode_project<K>(const DecodeProducts<K>&, int64_t, int64_t);   \
  template void decode_past<K>(const DecodeProducts<K>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(H, K)                                                    \
  template void decode_weights<H, K>(const Decode<H, K>&, int64_t, int64_t); \
  template void decode_append<H, K>(const Decode<H, K>&, int64_t, int64_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"

namespace engram::cpu::ENGRAM_ISA {

template <typename K> ENGRAM_TARGET int64_t decode_memory(const DecodeProducts<K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<K>;
  const int64_t T = a.step.tokens, P = a.step.conv.reach, C = a.hash.columns, d = a.row_width;
  int64_t bad = kNoBadRow;
  for (int64_t i = begin; i < end; ++i) {
    A* memory = a.memory + i * a.width;
    if (!a.marks.visible[i / T * (P + T) + P + i % T]) {
      std::fill_n(memory, a.width, A(0));
      continue;
    }
    const int64_t* rows = a.hash.rows + i * C;
    for (int64_t c = 0; c < C; ++c) {
      if (rows[c] >= 0 && rows[c] < a.table_rows) {
        const char* row = reinterpret_cast<const char*>(a.table + rows[c] * d);
        for (int64_t byte = 0; byte < d * static_cast<int64_t>(sizeof(K)); byte += 64) __builtin_prefetch(row + byte);
      } else if (bad == kNoBadRow) {
        bad = i * C + c;
      }
    }
    if (bad != kNoBadRow) return bad;
    for (int64_t c = 0; c < C; ++c) {
      for_each_vec<A>(0, d, [&](auto lanes, int64_t e) ENGRAM_INLINE_LAMBDA {
        lanes.put(memory + c * d + e, lanes.get(a.table + rows[c] * d + e));
      });
    }
  }
  return bad;
}

// out[n][r] = <w[r], x[n]> + bias[r]: every product in the order of the library's one tree, however many there are.
template <int Rows, int Tokens, typename K>
ENGRAM_INLINE void products(const K* w, const accumulate_t<K>* x, const K* bias, int64_t width, K* out, int64_t pitch) {
  using A = accumulate_t<K>;
  vec<A> sums[Rows][Tokens] = {};
  for_each_vec<A>(0, width, [&](auto lanes, int64_t e) ENGRAM_INLINE_LAMBDA {
    vec<A> row[Rows];
    for (int r = 0; r < Rows; ++r) {
      row[r] = lanes.get(w + r * width + e);
      __builtin_prefetch(w + (r + Rows) * width + e);  // where the next rows begin, no pattern leads there
    }
    for (int n = 0; n < Tokens; ++n) {
      const vec<A> memory = lanes.get(x + n * width + e);
      for (int r = 0; r < Rows; ++r) sums[r][n] += row[r] * memory;
    }
  });
  for (int r = 0; r < Rows; ++r) {
    for (int n = 0; n < Tokens; ++n)
      out[n * pitch + r] = static_cast<K>(sum<A>(sums[r][n]) + (bias ? static_cast<A>(bias[r]) : A(0)));
  }
}

// Of all tokens, so that the rows come from memory once.
template <int Rows, typename K>
ENGRAM_INLINE void project_rows(const K* w, const accumulate_t<K>* x, const K* bias, int64_t width, int64_t tokens,
                                K* out, int64_t pitch) {
  int64_t n = 0;
  for (; n + 4 <= tokens; n += 4) products<Rows, 4>(w, x + n * width, bias, width, out + n * pitch, pitch);
  for (; n + 2 <= tokens; n += 2) products<Rows, 2>(w, x + n * width, bias, width, out + n * pitch, pitch);
  if (n < tokens) products<Rows, 1>(w, x + n * width, bias, width, out + n * pitch, pitch);
}

template <typename K> ENGRAM_TARGET void decode_project(const DecodeProducts<K>& a, int64_t begin, int64_t end) {
  const int64_t D = a.dim, GD = a.branches * D, tokens = a.step.batch * a.step.tokens, keys = decode_groups(GD);
  for (int64_t group = begin; group < end; ++group) {
    const bool is_key = group < keys;
    const int64_t pitch = is_key ? GD : D, first = (is_key ? group : group - keys) * kDecodeRows,
                  last = std::min(pitch, first + kDecodeRows);
    const K *w = is_key ? a.key_proj : a.value_proj, *bias = is_key ? a.key_bias : a.value_bias;
    K* out = is_key ? a.key : a.value;
    const auto at = [&](int64_t r) { return bias ? bias + r : nullptr; };
    if (last - first == kDecodeRows) {
      project_rows<kDecodeRows>(w + first * a.width, a.memory, at(first), a.width, tokens, out + first, pitch);
    } else {
      for (int64_t r = first; r < last; ++r)
        project_rows<1>(w + r * a.width, a.memory, at(r), a.width, tokens, out + r, pitch);
    }
  }
}

// n neighbours of a weight, ones where there is none.
template <typename A> ENGRAM_INLINE void widen(const AnyFloat& w, int64_t at, int64_t n, A* to) {
  const auto each = [&](const auto* from) ENGRAM_INLINE_LAMBDA {
    if constexpr (std::is_same_v<accumulate_t<std::remove_cvref_t<decltype(*from)> >, A>) {
      for_each_vec<A>(0, n,
                      [&](auto lanes, int64_t i) ENGRAM_INLINE_LAMBDA { lanes.put(to + i, lanes.get(from + at + i)); });
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(from[at + i]);
    }
  };
  if (!w.data) std::fill_n(to, n, A(1));
  else if (w.type == FloatType::float64) each(static_cast<const double*>(w.data));
  else if (w.type == FloatType::float32) each(static_cast<const float*>(w.data));
  else if (w.type == FloatType::float16) each(static_cast<const Half*>(w.data));
  else each(static_cast<const BFloat16*>(w.data));
}

template <typename H, typename K> ENGRAM_TARGET void decode_weights(const Decode<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  constexpr int64_t kPiece = 256;
  const int64_t count = a.branches * a.dim, kernel = a.mix.shape.taps;
  const int64_t step = kernel < kPiece ? kPiece / kernel : 1;
  A one[kPiece], other[kPiece];
  for (int64_t i = begin; i < end; i += step) {
    const int64_t n = std::min(step, end - i);
    if (a.weight) {
      widen(a.hidden_weight, i, n, one);
      widen(a.key_weight, i, n, other);
      for (int64_t c = 0; c < n; ++c) a.weight[i + c] = one[c] * other[c];
    }
    widen(a.conv_norm_weight, i, n, other);
    for (int64_t first = 0; first < kernel; first += kPiece) {
      const int64_t here = std::min(kPiece, kernel - first);
      widen(a.conv_weight, i * kernel + first, n * here, one);
      const auto transpose = [&](auto pitch) ENGRAM_INLINE_LAMBDA {
        for (int64_t j = 0; j < pitch; ++j)
          for (int64_t c = 0; c < n; ++c) a.taps[(first + j) * count + i + c] = one[c * pitch + j] * other[c];
      };
      if (here == 4) transpose(std::integral_constant<int64_t, 4>());
      else transpose(here);
    }
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
