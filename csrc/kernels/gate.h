// Context gate: how much of the shared value each residual branch takes in.
//
//   rstd_h = (mean_d hidden^2 + eps)^-1/2      rstd_k = (mean_d key^2 + eps)^-1/2     (1 for an input without a norm)
//   s      = sum_d hidden * w * key * rstd_h * rstd_k / sqrt(D)                       w = hidden_weight * key_weight
//   u      = sign(s) * sqrt(max(|s|, clamp))          alpha = sigmoid(u)
//   out[i, g, :] = alpha[i, g] * value[i, :]  (+ hidden[i, g, :])
//
// Backward, with c = rstd_h * rstd_k / sqrt(D):
//   ds  = <grad_out, value> * alpha (1 - alpha) * 0.5 / sqrt|s|   where |s| >= clamp, else 0
//   grad_value  = sum_g alpha * grad_out
//   grad_hidden = ds * (c * w * key    - s * rstd_h^2 / D * hidden)  (+ grad_out)   second term only with a norm
//   grad_key    = ds * (c * w * hidden - s * rstd_k^2 / D * key)
//   R           = sum_i ds * c * hidden * key
//   grad_hidden_weight = key_weight * R,  grad_key_weight = hidden_weight * R
//
// Masked tokens: out is zero (hidden with the residual), and so are their gradients (grad_out to hidden with the
// residual).
#pragma once
#include "scalar.h"

namespace engram {

template <typename A> struct GateOptions {
  A eps, clamp;
  bool norm_hidden, norm_key;
  bool copysign;  // u(+0) = +sqrt(clamp), u(-0) = -sqrt(clamp); otherwise u(0) = 0
  bool residual;
};

// stats[i][g]: s, rstd_h, rstd_k.
constexpr int64_t kGateStats = 3;

template <typename H, typename K> struct GateForward {
  using A = accumulate_t<H>;
  const H* hidden;   // [tokens, G, D]
  const K* key;      // [tokens, G, D]
  const K* value;    // [tokens, D]
  const A* weight;   // [G, D], w; null = ones
  const bool* mask;  // [tokens], null = none
  H* out;            // [tokens, G, D], every element written
  A* stats;          // [tokens, G, 3], every element written (zeros at masked tokens)
  int64_t tokens, branches, dim;
  GateOptions<A> options;
};

template <typename H, typename K> struct GateBackward {
  using A = accumulate_t<H>;
  const H* grad_out;  // [tokens, G, D]
  const H* hidden;
  const K* key;
  const K* value;
  const A* weight;  // [G, D], w; null = ones
  const A* stats;   // [tokens, G, 3]
  const bool* mask;
  H* grad_hidden;  // [tokens, G, D], every element written
  K* grad_key;     // [tokens, G, D], every element written
  K* grad_value;   // [tokens, D], every element written
  A* partials;  // [parts, G, D]: R of part p's tokens [tokens * p / parts, tokens * (p + 1) / parts); null = not wanted
  int64_t tokens, branches, dim, parts;
  GateOptions<A> options;
};

// Folds the partials in part order: grad_hidden_weight and grad_key_weight, each only where not null.
template <typename A> struct GateWeights {
  const A* partials;       // [parts, count]
  const A* hidden_weight;  // [count], null = ones
  const A* key_weight;     // [count], null = ones
  A* grad_hidden_weight;   // [count] or null
  A* grad_key_weight;      // [count] or null
  int64_t parts, count;    // count = G * D
};

namespace cpu {
template <typename A> void multiply(const A* a, const A* b, A* out, int64_t begin, int64_t end);            // w = a * b
template <typename H, typename K> void gate_forward(const GateForward<H, K>&, int64_t begin, int64_t end);  // tokens
template <typename H, typename K> void gate_backward(const GateBackward<H, K>&, int64_t begin, int64_t end);  // parts
template <typename A> void gate_weights(const GateWeights<A>&, int64_t begin, int64_t end);                   // columns
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
template <typename A> cudaError_t multiply(const A* a, const A* b, A* out, int64_t count, cudaStream_t);
template <typename H, typename K> cudaError_t gate_forward(const GateForward<H, K>&, cudaStream_t);
template <typename H, typename K> cudaError_t gate_backward(const GateBackward<H, K>&, cudaStream_t);
template <typename A> cudaError_t gate_weights(const GateWeights<A>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
