#ifndef ENGRAM_ISA
#include "kernels/gate.h"
#define ENGRAM_BODY "kernels/cpu/gate.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename A> void multiply(const A* a, const A* b, A* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) out[i] = a[i] * b[i];
}
template <typename H, typename K> void gate_forward(const GateForward<H, K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(gate_forward, a, begin, end);
}
template <typename H, typename K> void gate_backward(const GateBackward<H, K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(gate_backward, a, begin, end);
}
template <typename A> void gate_weights(const GateWeights<A>& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    A total = 0;
    for (int64_t p = 0; p < a.parts; ++p) total += a.partials[p * a.count + i];
    if (a.grad_hidden_weight) a.grad_hidden_weight[i] = a.key_weight ? a.key_weight[i] * total : total;
    if (a.grad_key_weight) a.grad_key_weight[i] = a.hidden_weight ? a.hidden_weight[i] * total : total;
  }
}

#define INSTANTIATE(H, K)                                                            \
  template void gate_forward<H, K>(const GateForward<H, K>&, int64_t, int64_t);      \
  template void gate_backward<H, K>(const GateBackward<H, K>&, int64_t, int64_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(A)                                                        \
  template void multiply<A>(const A*, const A*, A*, int64_t, int64_t);        \
  template void gate_weights<A>(const GateWeights<A>&, int64_t, int64_t);
INSTANTIATE(float) INSTANTIATE(double)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"

namespace engram::cpu::ENGRAM_ISA {

// sigmoid(signed square root of s)
template <typename A> ENGRAM_INLINE A gate_alpha(A s, const GateOptions<A>& o) {
  const A magnitude = std::sqrt(std::abs(s) < o.clamp ? o.clamp : std::abs(s));  // a NaN score stays NaN
  const A u = s == 0 && !o.copysign ? A(0) : std::copysign(magnitude, s);
  return sigmoid_scalar(u);
}

template <typename H, typename K> void gate_forward(const GateForward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  const int64_t D = a.dim;
  const GateOptions<A>& o = a.options;
  const A scale = A(1) / std::sqrt(A(D));
  for (int64_t i = begin; i < end; ++i) {
    const K* value = a.value + i * D;
    for (int64_t g = 0; g < a.branches; ++g) {
      const int64_t at = (i * a.branches + g) * D;
      const H* hidden = a.hidden + at;
      H* out = a.out + at;
      A* stats = a.stats + (i * a.branches + g) * kGateStats;
      if (a.mask && !a.mask[i]) {
        stats[0] = stats[1] = stats[2] = 0;
        if (o.residual) std::memcpy(static_cast<void*>(out), hidden, D * sizeof(H));
        else std::memset(static_cast<void*>(out), 0, D * sizeof(H));
        continue;
      }
      const K* key = a.key + at;
      const A* weight = a.weight ? a.weight + g * D : nullptr;
      vec<A> hh{}, kk{}, hk{};
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        const vec<A> h = lanes.get(hidden + d), k = lanes.get(key + d);
        hh += h * h;
        kk += k * k;
        hk += weight ? h * k * lanes.get(weight + d) : h * k;
      });
      const A rstd_h = o.norm_hidden ? A(1) / std::sqrt(sum<A>(hh) / A(D) + o.eps) : A(1);
      const A rstd_k = o.norm_key ? A(1) / std::sqrt(sum<A>(kk) / A(D) + o.eps) : A(1);
      const A s = sum<A>(hk) * rstd_h * rstd_k * scale;
      const vec<A> alpha = broadcast(gate_alpha(s, o));
      stats[0] = s;
      stats[1] = rstd_h;
      stats[2] = rstd_k;
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        vec<A> y = alpha * lanes.get(value + d);
        if (o.residual) y += lanes.get(hidden + d);
        lanes.put(out + d, y);
      });
    }
  }
}

template <typename H, typename K>
ENGRAM_INLINE void gate_backward_token(const GateBackward<H, K>& a, int64_t i, accumulate_t<H>* grad_value,
                                       accumulate_t<H>* part) {
  using A = accumulate_t<H>;
  const int64_t D = a.dim;
  const GateOptions<A>& o = a.options;
  const A scale = A(1) / std::sqrt(A(D));
  const K* value = a.value + i * D;
  for (int64_t g = 0; g < a.branches; ++g) {
    const int64_t at = (i * a.branches + g) * D;
    const H *grad_out = a.grad_out + at, *hidden = a.hidden + at;
    const K* key = a.key + at;
    H* grad_hidden = a.grad_hidden + at;
    K* grad_key = a.grad_key + at;
    const A* weight = a.weight ? a.weight + g * D : nullptr;
    const A* stats = a.stats + (i * a.branches + g) * kGateStats;
    const A s = stats[0], rstd_h = stats[1], rstd_k = stats[2], alpha = gate_alpha(s, o);

    vec<A> gv{};
    for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      const vec<A> dy = lanes.get(grad_out + d);
      gv += dy * lanes.get(value + d);
      const vec<A> share = alpha * dy;
      lanes.put(grad_value + d, g ? lanes.get(grad_value + d) + share : share);
    });
    const A grad_u = sum<A>(gv) * alpha * (A(1) - alpha);
    const A ds = std::abs(s) < o.clamp ? A(0) : grad_u * A(0.5) / std::sqrt(std::abs(s));
    const A c = ds * rstd_h * rstd_k * scale;
    const A pull_h = o.norm_hidden ? ds * s * rstd_h * rstd_h / A(D) : A(0);
    const A pull_k = o.norm_key ? ds * s * rstd_k * rstd_k / A(D) : A(0);
    for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      const vec<A> h = lanes.get(hidden + d), k = lanes.get(key + d);
      const vec<A> cw = weight ? c * lanes.get(weight + d) : broadcast(c);
      vec<A> dh = cw * k - pull_h * h;
      if (o.residual) dh += lanes.get(grad_out + d);
      lanes.put(grad_hidden + d, dh);
      lanes.put(grad_key + d, cw * h - pull_k * k);
      if (part) lanes.put(part + g * D + d, lanes.get(part + g * D + d) + c * h * k);
    });
  }
}

template <typename H, typename K> void gate_backward(const GateBackward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  const int64_t D = a.dim, GD = a.branches * D;
  std::vector<A> grad_value(D);
  for (int64_t p = begin; p < end; ++p) {
    A* part = a.partials ? a.partials + p * GD : nullptr;
    if (part) std::fill(part, part + GD, A(0));
    for (int64_t i = a.tokens * p / a.parts; i < a.tokens * (p + 1) / a.parts; ++i) {
      if (a.mask && !a.mask[i]) {
        if (a.options.residual) std::memcpy(static_cast<void*>(a.grad_hidden + i * GD), a.grad_out + i * GD, GD * sizeof(H));
        else std::memset(static_cast<void*>(a.grad_hidden + i * GD), 0, GD * sizeof(H));
        std::memset(static_cast<void*>(a.grad_key + i * GD), 0, GD * sizeof(K));
        std::memset(static_cast<void*>(a.grad_value + i * D), 0, D * sizeof(K));
        continue;
      }
      gate_backward_token(a, i, grad_value.data(), part);
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        lanes.put(a.grad_value + i * D + d, a.branches ? lanes.get(grad_value.data() + d) : vec<A>{});
      });
    }
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
