// Short convolution: RMS norm, dilated causal depthwise convolution over time, SiLU, residual.
//
//   rstd[t,g] = (mean_d x^2 + eps)^-1/2  (1 without a norm)         n[t] = x[t] * rstd[t]
//   z[t]      = sum_j taps[j] * n[t - (K-1-j) * dilation]           taps[j] = weight[.., j] * norm_weight
//   out[t]    = (x[t]) + silu(z[t])
//
// A tap counts when its position exists, belongs to the same run of equal document ids as t, and is not masked.
//
// Backward, with a = silu'(z) * grad_out (zero at masked t):
//   S[j]   = sum_t a[t] * n[t - (K-1-j) * dilation]
//   grad_weight = norm_weight * S,  grad_norm_weight = sum_j weight * S
//   q[t]   = sum_j taps[j] * a[t + (K-1-j) * dilation]
//   grad_x = rstd * (q - n * <q, n> / D)  (+ grad_out)    second term only with a norm
//
// Masked tokens: out is zero (x with the residual), grad_x is zero (grad_out with the residual).
#pragma once
#include "scalar.h"

namespace engram {

struct ShortConvShape {
  int64_t batch, tokens, branches, dim;  // B, T, G, D
  int64_t taps, dilation;                // K, distance between two taps
  bool norm, silu, residual;
  const int64_t* document_ids;  // [B, P + T], null = one document a row
  const bool* mask;             // [B, P + T], null = none
  int64_t past = 0;  // P: positions before the first token, there to be read by taps (gate_conv with a state)
};

template <typename T> struct ShortConvForward {
  using A = accumulate_t<T>;
  const T* x;     // [B, T, G, D]
  const A* taps;  // [K, G, D]
  T* out;         // [B, T, G, D], every element written
  A* rstd;        // [B, T, G], every element written (zero at masked tokens)
  A eps;
  ShortConvShape shape;
};

template <typename T> struct ShortConvBackward {
  using A = accumulate_t<T>;
  const T* grad_out;  // [B, T, G, D]
  const T* x;
  const A* taps;  // [K, G, D]
  const A* rstd;  // [B, T, G]
  T* grad_x;      // [B, T, G, D], every element written
  A* partials;    // [parts, K, G, D]: S of part p, which owns blocks [blocks * p / parts, blocks * (p + 1) / parts)
  int64_t parts;
  ShortConvShape shape;
};

// Time is cut into blocks of a fixed number of tokens, each within one batch row: block i is row i / blocks_per_row.
constexpr int64_t kConvBlock = 128;
inline int64_t conv_blocks_per_row(const ShortConvShape& s) { return (s.tokens + kConvBlock - 1) / kConvBlock; }

// Between the layout of the parameters ([G, D, K], [G, D]) and that of the kernels ([K, G, D]).
template <typename A> struct ShortConvWeights {
  const A* weight;               // [G, D, K]
  const A* norm_weight;          // [G, D], null = ones
  A* taps;                       // fold: [K, G, D] = weight * norm_weight
  const A* partials;             // unfold: [parts, K, G, D], summed in part order
  A* grad_weight;                // unfold: [G, D, K]
  A* grad_norm_weight;           // unfold: [G, D] or null
  int64_t parts, kernel, count;  // K, G * D
};

namespace cpu {
template <typename A>
void short_conv_fold(const ShortConvWeights<A>&, int64_t begin, int64_t end);  // columns of [G * D]
template <typename A> void short_conv_unfold(const ShortConvWeights<A>&, int64_t begin, int64_t end);
template <typename T> void short_conv_forward(const ShortConvForward<T>&, int64_t begin, int64_t end);    // blocks
template <typename T> void short_conv_backward(const ShortConvBackward<T>&, int64_t begin, int64_t end);  // parts
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
template <typename A> cudaError_t short_conv_fold(const ShortConvWeights<A>&, cudaStream_t);
template <typename A> cudaError_t short_conv_unfold(const ShortConvWeights<A>&, cudaStream_t);
template <typename T> cudaError_t short_conv_forward(const ShortConvForward<T>&, cudaStream_t);
template <typename T> cudaError_t short_conv_backward(const ShortConvBackward<T>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
