// The dilated causal convolution over time, shared by short_conv and gate_conv.
#pragma once
#include "../short_conv.h"
#include "reduce.cuh"

namespace engram::cuda {

constexpr int kTaps = 4;      // of the fast kernels; fewer taps are padded in front
constexpr int kMaxHalo = 64;  // (kTaps - 1) * dilation of the fast kernels
constexpr int kTile = 64;     // tokens of a block of the fast forward kernels

// ---- Which taps count ----

// Positions are counted from the first token: those of the past are negative. What documents and mask have at t:
__device__ __forceinline__ int64_t position_at(const ShortConvShape& s, int64_t b, int64_t t) {
  return b * (s.past + s.tokens) + s.past + t;
}

__device__ __forceinline__ bool counts(const ShortConvShape& s, int64_t b, int64_t t) {
  return t >= -s.past && t < s.tokens && (!s.mask || s.mask[position_at(s, b, t)]);
}

// How many positions before t, at most `limit`, belong to the same run of document ids. Those before all that there is
// belong to every run: counts() leaves them out.
__device__ inline int64_t reach_back(const ShortConvShape& s, int64_t b, int64_t t, int64_t limit) {
  if (!s.document_ids) return limit;
  const int64_t *id = s.document_ids + position_at(s, b, t), before = s.past + t;
  int64_t reach = 0;
  while (reach < limit && reach < before && id[-reach - 1] == id[-reach]) ++reach;
  return reach == before ? limit : reach;
}

// A factor that no tap has, for positions that do not count; not a zero, because 0 * inf is not one.
template <typename A> __device__ __forceinline__ bool skipped(A scale) { return scale < A(0); }

template <typename T, int N>
__device__ __forceinline__ void load_taps(const accumulate_t<T>* taps, const ShortConvShape& s, int64_t g, int64_t d,
                                          accumulate_t<T> (&to)[kTaps][N]) {
  const int skip = kTaps - static_cast<int>(s.taps);
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      to[j][i] =
          j >= skip && d + i < s.dim ? __ldg(taps + ((j - skip) * s.branches + g) * s.dim + d + i) : accumulate_t<T>(0);
  }
}

inline bool few_taps(const ShortConvShape& s) { return s.taps <= kTaps && (kTaps - 1) * s.dilation <= kMaxHalo; }

template <typename A> __device__ __forceinline__ A silu_slope(A z) {
  const A p = sigmoid(z);
  return p * (A(1) + z * (A(1) - p));
}

// Part p owns blocks of kConvBlock tokens: row and first token of the i-th of all blocks.
struct TimeBlock {
  int64_t b, t0, t1;
  __device__ __forceinline__ TimeBlock(const ShortConvShape& s, int64_t i) {
    const int64_t per_row = (s.tokens + kConvBlock - 1) / kConvBlock;
    b = i / per_row;
    t0 = i % per_row * kConvBlock;
    t1 = t0 + kConvBlock < s.tokens ? t0 + kConvBlock : s.tokens;
  }
};

}  // namespace engram::cuda
