// What a token contributes to the output and to the convolution, shared by gate_conv and decode.
#pragma once
#include "../gate_conv.h"
#include "conv.cuh"
#include "gate.cuh"

namespace engram::cuda {

// What a token and branch contribute: alpha * value to the output, beta * value to the convolution.
template <typename A> struct Factors {
  A alpha, beta, rx;
};

// stats: the row of the token, [3 G + 1].
template <typename A>
__device__ __forceinline__ Factors<A> factors_of(const A* stats, int64_t g, int64_t branches, A conv_eps, bool norm,
                                                 const GateOptions<A>& o) {
  Factors<A> f;
  f.alpha = gate_alpha(stats[g * kGateStats], o);
  f.rx = norm ? reciprocal_root(f.alpha * f.alpha * stats[branches * kGateStats] + conv_eps) : A(1);
  f.beta = f.alpha * f.rx;
  return f;
}

// The row of position t: of a token, or of the past where t is negative. Both are [B, .., pitch].
template <typename T>
__device__ __forceinline__ const T* row_at(const ShortConvShape& s, const T* tokens, const T* past, int64_t b,
                                           int64_t t, int64_t pitch) {
  return t < 0 ? past + ((b + 1) * s.past + t) * pitch : tokens + (b * s.tokens + t) * pitch;
}

}  // namespace engram::cuda
