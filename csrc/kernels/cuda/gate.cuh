// The gate of one token and branch, shared by gate and gate_conv.
#pragma once
#include "../gate.h"
#include "reduce.cuh"

#include <cmath>

namespace engram::cuda {

// sigmoid(signed square root of s)
template <typename A> __device__ __forceinline__ A gate_alpha(A s, const GateOptions<A>& o) {
  const A magnitude = std::sqrt(std::abs(s) < o.clamp ? o.clamp : std::abs(s));  // a NaN score stays NaN
  const A u = s == 0 && !o.copysign ? A(0) : std::copysign(magnitude, s);
  return A(1) / (A(1) + std::exp(-u));
}

// A sum that keeps what its additions round away: scores near zero are differences of large sums, and the gate is steep
// there.
template <typename A> struct CarefulSum {
  A sum = 0, lost = 0;
  __device__ __forceinline__ void add(A x) {
    const A total = sum + x, from_x = total - sum;
    lost += (sum - (total - from_x)) + (x - from_x);
    sum = total;
  }
  __device__ __forceinline__ double value() const {  // what is lost to an infinite sum is not a number
    return lost == lost ? static_cast<double>(sum) + static_cast<double>(lost) : static_cast<double>(sum);
  }
};

template <typename A> struct GateScores {
  A s, rstd_h, rstd_k;
};

// By one warp; the result is in every lane. weight(d): the weights from column d on, asked for only where `weighted`.
template <bool kVector, typename H, typename K, typename Weight>
__device__ __forceinline__ GateScores<accumulate_t<H>> gate_scores(const H* hidden, const K* key, bool weighted,
                                                                   const Weight& weight, int64_t D,
                                                                   const GateOptions<accumulate_t<H>>& o) {
  using A = accumulate_t<H>;
  constexpr int N = kLaneElements<H>;
  A hh = 0, kk = 0;
  CarefulSum<A> hk;
  const auto add = [&](int64_t d, bool with_weight) {
    const auto h = load<N, kVector>(hidden + d, D - d);
    const auto k = load<N, kVector, Reuse::no>(key + d, D - d);
    A product = 0;
    if (with_weight) {
      const auto w = weight(d);
#pragma unroll
      for (int i = 0; i < N; ++i) product += h[i] * k[i] * w[i];
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) product += h[i] * k[i];
    }
    hk.add(product);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      hh += h[i] * h[i];
      kk += k[i] * k[i];
    }
  };
  const int64_t first = static_cast<int64_t>(threadIdx.x % kWarp) * N;
  if (weighted) {
#pragma unroll 4
    for (int64_t d = first; d < D; d += kWarp * N) add(d, true);
  } else {
#pragma unroll 4
    for (int64_t d = first; d < D; d += kWarp * N) add(d, false);
  }
  const A mean_h = warp_sum(hh) / A(D), mean_k = warp_sum(kk) / A(D);
  GateScores<A> r;
  r.rstd_h = o.norm_hidden ? reciprocal_root(mean_h + o.eps) : A(1);
  r.rstd_k = o.norm_key ? reciprocal_root(mean_k + o.eps) : A(1);
  const double product = warp_sum(hk.value());
  r.s = static_cast<A>(product) * r.rstd_h * r.rstd_k * (A(1) / std::sqrt(A(D)));
  return r;
}

template <bool kVector, typename H, typename K>
__device__ __forceinline__ GateScores<accumulate_t<H>> gate_scores(const H* hidden, const K* key,
                                                                   const accumulate_t<H>* weight, int64_t D,
                                                                   const GateOptions<accumulate_t<H>>& o) {
  const auto from = [&](int64_t d) { return load<kLaneElements<H>, kVector>(weight + d, D - d); };
  return gate_scores<kVector>(hidden, key, weight != nullptr, from, D, o);
}

// What the stats of a row say about its gradients, each still to be multiplied by P = <grad_out, value>.
template <typename A> struct Slope {
  A alpha;           // of the value
  A score;           // d s / d P; where it is 0 the score passes no gradient, whatever P is
  A cross;           // of w * key in grad_hidden, of w * hidden in grad_key
  A pull_h, pull_k;  // of hidden in grad_hidden, of key in grad_key
};

template <typename A>
__device__ __forceinline__ Slope<A> slope_of(const A* stats, int64_t dim, const GateOptions<A>& o) {
  const A s = stats[0], rstd_h = stats[1], rstd_k = stats[2], alpha = gate_alpha(s, o), D = A(dim);
  Slope<A> r;
  r.alpha = alpha;
  r.score = std::abs(s) < o.clamp ? A(0) : alpha * (A(1) - alpha) * (A(0.5) / std::sqrt(std::abs(s)));
  r.cross = r.score * rstd_h * rstd_k * (A(1) / std::sqrt(D));
  r.pull_h = o.norm_hidden ? r.score * s * rstd_h * rstd_h / D : A(0);
  r.pull_k = o.norm_key ? r.score * s * rstd_k * rstd_k / D : A(0);
  return r;
}

// One element's gradients; returns its share of R, the sum that both norm weights are made of.
template <typename A>
__device__ __forceinline__ A row_gradients(const Slope<A>& r, A P, A w, A h, A k, A passed_on, A& grad_h, A& grad_k) {
  const A cross = r.cross * P;
  grad_h = cross * w * k - r.pull_h * P * h + passed_on;
  grad_k = cross * w * h - r.pull_k * P * k;
  return cross * h * k;
}

}  // namespace engram::cuda
