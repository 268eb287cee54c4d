// gate followed by short_conv in one: the gated value x[t,g] = alpha[t,g] * v[t] is a scalar times the shared value, so
// it never goes to memory and its norm needs one reduction of v per token.
//
//   s, alpha   as in gate.h, from hidden, key and the norm weights       m[t] = mean_d v[t]^2
//   rx   = (alpha^2 m + conv_eps)^-1/2  (1 without a norm)               beta = alpha * rx
//   z[t] = sum_j taps[j] * beta[t - (K-1-j) * dilation] * v[t - (K-1-j) * dilation]          taps as in short_conv.h
//   out  = alpha * v + silu(z)  (+ hidden)
//
// Backward, with a = silu'(z) * grad_out, and S, q as in short_conv.h for n = beta * v:
//   P = <grad_out, v>,  Q = <q, v>
//   grad_value = sum_g (alpha * grad_out + beta * q) - v / D * sum_g beta^3 Q      (last term only with a norm)
//   grad_alpha = P + conv_eps * rx^3 * Q        (P + Q without a norm), from where on it is the gate's backward
//
// With a state, P positions come before the first token: of them only value and stats are known, which is all that taps
// read. They get no gradient.
//
// Saved between the two: stats [B, T, 3 G + 1] = (s, rstd_h, rstd_k) of every branch, then m.
#pragma once
#include "gate.h"
#include "short_conv.h"

namespace engram {

template <typename H, typename K> struct GateConvForward {
  using A = accumulate_t<H>;
  const H* hidden;      // [B, T, G, D]
  const K* key;         // [B, T, G, D]
  const K* value;       // [B, T, D]
  const A* weight;      // [G, D], hidden_weight * key_weight; null = ones
  const A* taps;        // [K, G, D]
  H* out;               // [B, T, G, D], every element written
  A* stats;             // [B, T, 3 G + 1], every element written (zeros at masked tokens)
  const K* past_value;  // [B, P, D]; null where P = 0
  const A* past_stats;  // [B, P, 3 G + 1]
  A conv_eps;
  GateOptions<A> options;  // residual: add hidden
  ShortConvShape shape;    // norm, silu: of the convolution
};

template <typename H, typename K> struct GateConvBackward {
  using A = accumulate_t<H>;
  const H* grad_out;  // [B, T, G, D]
  const H* hidden;
  const K* key;
  const K* value;
  const A* weight;
  const A* taps;
  const A* stats;
  const K* past_value;  // as in the forward
  const A* past_stats;
  H* grad_hidden;    // [B, T, G, D], every element written
  K* grad_key;       // [B, T, G, D], every element written
  K* grad_value;     // [B, T, D], every element written
  A* gate_partials;  // [parts, G, D], R of gate.h; null = not wanted
  A* conv_partials;  // [parts, K, G, D], S of short_conv.h
  A* scratch;        // CUDA: [gate_conv_scratch(shape)], in any state; CPU: null
  int64_t parts;     // part p owns the time blocks [blocks * p / parts, blocks * (p + 1) / parts)
  A conv_eps;
  GateOptions<A> options;
  ShortConvShape shape;
};

// CUDA goes through the convolution and through the gate in two kernels. Between them lie, for every token, grad_value
// but for its last term [D], and P and Q of every branch, added up over slices of the columns [G, slices, 2].
constexpr int64_t kGateConvSlice = 64;
inline int64_t gate_conv_scratch(const ShortConvShape& s) {
  return s.batch * s.tokens * (s.dim + s.branches * 2 * ((s.dim + kGateConvSlice - 1) / kGateConvSlice));
}

namespace cpu {
template <typename H, typename K>
void gate_conv_stats(const GateConvForward<H, K>&, int64_t begin, int64_t end);  // tokens
template <typename H, typename K>
void gate_conv_forward(const GateConvForward<H, K>&, int64_t begin, int64_t end);  // blocks
template <typename H, typename K>
void gate_conv_backward(const GateConvBackward<H, K>&, int64_t begin, int64_t end);  // parts
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
template <typename H, typename K> cudaError_t gate_conv_forward(const GateConvForward<H, K>&, cudaStream_t);
template <typename H, typename K> cudaError_t gate_conv_backward(const GateConvBackward<H, K>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
