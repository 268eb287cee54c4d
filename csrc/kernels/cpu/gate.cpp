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

#define INSTANTIATE(H, K)                                                       \
  template void gate_forward<H, K>(const GateForward<H, K>&, int64_t, int64_t); \
  template void gate_backward<H, K>(const GateBackward<H, K>&, int64_t, int64_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(A)                                                 \
  template void multiply<A>(const A*, const A*, A*, int64_t, int64_t); \
  template void gate_weights<A>(const GateWeights<A>&, int64_t, int64_t);
INSTANTIATE(float) INSTANTIATE(double)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"
#include "kernels/cpu/gate_token.h"

namespace engram::cpu::ENGRAM_ISA {

template <typename H, typename K> void gate_forward(const GateForward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  const int64_t D = a.dim, G = a.branches;
  const bool residual = a.options.residual, streaming = streams(a.out, D, a.tokens * G * D);
  for (int64_t i = begin; i < end; ++i) {
    if (a.mask && !a.mask[i]) {
      std::fill_n(a.stats + i * G * kGateStats, G * kGateStats, A(0));
      copy_or_zero(a.out + i * G * D, residual ? a.hidden + i * G * D : nullptr, G * D);
      continue;
    }
    const K* value = a.value + i * D;
    for (int64_t g = 0; g < G; ++g) {
      const int64_t at = (i * G + g) * D;
      A* stats = a.stats + (i * G + g) * kGateStats;
      gate_scores(a.hidden + at, a.key + at, a.weight ? a.weight + g * D : nullptr, D, a.options, stats);
      const A alpha = gate_alpha(stats[0], a.options);
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        vec<A> y = alpha * lanes.get(value + d);
        if (residual) y += lanes.get(a.hidden + at + d);
        lanes.put(a.out + at + d, y, streaming);
      });
    }
  }
  finish_streams();
}

template <typename H, typename K> void gate_backward(const GateBackward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  const int64_t D = a.dim, G = a.branches, GD = G * D;
  std::vector<A> grad_value(D);
  for (int64_t p = begin; p < end; ++p) {
    A* part = a.partials ? a.partials + p * GD : nullptr;
    if (part) std::fill(part, part + GD, A(0));
    for (int64_t i = a.tokens * p / a.parts; i < a.tokens * (p + 1) / a.parts; ++i) {
      if (a.mask && !a.mask[i]) {
        copy_or_zero(a.grad_hidden + i * GD, a.options.residual ? a.grad_out + i * GD : nullptr, GD);
        copy_or_zero<K>(a.grad_key + i * GD, nullptr, GD);
        copy_or_zero<K>(a.grad_value + i * D, nullptr, D);
        continue;
      }
      std::fill(grad_value.begin(), grad_value.end(), A(0));
      for (int64_t g = 0; g < G; ++g) {
        const int64_t at = (i * G + g) * D;
        const A* stats = a.stats + (i * G + g) * kGateStats;
        const A alpha = gate_alpha(stats[0], a.options);
        vec<A> grad_alpha{};
        for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
          const vec<A> dy = lanes.get(a.grad_out + at + d);
          grad_alpha += dy * lanes.get(a.value + i * D + d);
          lanes.put(grad_value.data() + d, lanes.get(grad_value.data() + d) + alpha * dy);
        });
        gate_grads(sum<A>(grad_alpha), stats, a.grad_out + at, a.hidden + at, a.key + at,
                   a.weight ? a.weight + g * D : nullptr, D, a.options, a.grad_hidden + at, a.grad_key + at,
                   part ? part + g * D : nullptr);
      }
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        lanes.put(a.grad_value + i * D + d, lanes.get(grad_value.data() + d));
      });
    }
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
