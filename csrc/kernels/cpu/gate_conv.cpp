#ifndef ENGRAM_ISA
#include "kernels/gate_conv.h"
#define ENGRAM_BODY "kernels/cpu/gate_conv.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename H, typename K> void gate_conv_stats(const GateConvForward<H, K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(gate_conv_stats, a, begin, end);
}
template <typename H, typename K> void gate_conv_forward(const GateConvForward<H, K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(gate_conv_forward, a, begin, end);
}
template <typename H, typename K> void gate_conv_backward(const GateConvBackward<H, K>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(gate_conv_backward, a, begin, end);
}

#define INSTANTIATE(H, K)                                                                \
  template void gate_conv_stats<H, K>(const GateConvForward<H, K>&, int64_t, int64_t);   \
  template void gate_conv_forward<H, K>(const GateConvForward<H, K>&, int64_t, int64_t); \
  template void gate_conv_backward<H, K>(const GateConvBackward<H, K>&, int64_t, int64_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"
#include "kernels/cpu/conv.h"
#include "kernels/cpu/gate_token.h"

namespace engram::cpu::ENGRAM_ISA {

template <typename H, typename K>
ENGRAM_TARGET void gate_conv_stats(const GateConvForward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  const int64_t D = a.shape.dim, G = a.shape.branches, width = G * kGateStats + 1;
  for (int64_t i = begin; i < end; ++i) {
    A* stats = a.stats + i * width;
    if (a.shape.mask && !a.shape.mask[i + (i / a.shape.tokens + 1) * a.shape.past]) {
      std::fill_n(stats, width, A(0));
      continue;
    }
    for (int64_t g = 0; g < G; ++g) {
      const int64_t at = (i * G + g) * D;
      gate_scores(a.hidden + at, a.key + at, a.weight ? a.weight + g * D : nullptr, D, a.options,
                  stats + g * kGateStats);
    }
    stats[width - 1] = sum_squares(a.value + i * D, D) / A(D);
  }
}

// alpha, beta and rx of every position and branch of a stretch, from the saved statistics.
template <typename A> struct GateScalars {
  std::vector<A> alpha, beta, rx;

  void compute(const Stretch& stretch, const A* stats, const A* past_stats, A conv_eps, const GateOptions<A>& options) {
    const int64_t G = stretch.shape.branches, count = (stretch.last - stretch.first) * G, width = G * kGateStats + 1;
    alpha.assign(count, A(0));
    beta.assign(count, A(0));
    rx.assign(count, A(1));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = stretch.first + i / G;
      if (stretch.masked(t)) continue;
      const A* row =
          (t < stretch.shape.past ? past_stats + (stretch.past + t) * width : stats + (stretch.token + t) * width);
      alpha[i] = gate_alpha(row[i % G * kGateStats], options);
      if (stretch.shape.norm) rx[i] = A(1) / std::sqrt(alpha[i] * alpha[i] * row[width - 1] + conv_eps);
      beta[i] = alpha[i] * rx[i];
    }
  }
};

template <int Taps, typename H, typename K>
ENGRAM_TARGET void gate_conv_forward_blocks(const GateConvForward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  TapStorage<A> taps(a.shape.taps);
  ConvTile<K> tile;
  GateScalars<A> scalars;
  for (int64_t block = begin; block < end; ++block) {
    const Stretch stretch(a.shape, block, false);
    scalars.compute(stretch, a.stats, a.past_stats, a.conv_eps, a.options);
    const ConvSource<K> source{a.value, a.past_value, a.shape.dim, 0, scalars.beta.data(), scalars.alpha.data()};
    conv_forward_block<Taps>(stretch, source, a.taps, a.options.residual ? a.hidden : nullptr, a.out, tile, taps);
  }
}

template <int Taps, typename H, typename K>
ENGRAM_TARGET void gate_conv_backward_parts(const GateConvBackward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  const ShortConvShape& s = a.shape;
  const int64_t D = s.dim, G = s.branches, GD = G * D, width = G * kGateStats + 1,
                blocks = s.batch * conv_blocks_per_row(s);
  const bool streaming =
      streams(a.grad_hidden, D, s.batch * s.tokens * GD) && streams(a.grad_key, D, s.batch * s.tokens * GD);
  TapStorage<A> taps(s.taps);
  ConvTile<K> tile;
  ConvScratch<A> scratch;
  GateScalars<A> scalars;
  std::vector<A> P, Q;
  for (int64_t p = begin; p < end; ++p) {
    A* conv_part = a.conv_partials + p * s.taps * GD;
    A* gate_part = a.gate_partials ? a.gate_partials + p * GD : nullptr;
    std::fill_n(conv_part, s.taps * GD, A(0));
    if (gate_part) std::fill_n(gate_part, GD, A(0));
    for (int64_t block = blocks * p / a.parts; block < blocks * (p + 1) / a.parts; ++block) {
      const Stretch stretch(s, block, true);
      scalars.compute(stretch, a.stats, a.past_stats, a.conv_eps, a.options);
      P.resize((stretch.end - stretch.begin) * G);
      Q.resize(P.size());
      const ConvSource<K> source{a.value, a.past_value, D, 0, scalars.beta.data(), scalars.alpha.data()};
      conv_backward_block<Taps>(stretch, source, a.taps, a.grad_out, 0, G, a.grad_value, conv_part, P.data(), Q.data(),
                                tile, taps, scratch);
      for (int64_t t = stretch.begin; t < stretch.end; ++t) {
        const int64_t i = stretch.token + t;
        if (stretch.masked(t)) {
          copy_or_zero(a.grad_hidden + i * GD, a.options.residual ? a.grad_out + i * GD : nullptr, GD);
          copy_or_zero<K>(a.grad_key + i * GD, nullptr, GD);
          continue;
        }
        for (int64_t g = 0; g < G; ++g) {
          const int64_t at = i * GD + g * D, here = (t - stretch.begin) * G + g;
          const A rx = scalars.rx[(t - stretch.first) * G + g];
          const A grad_alpha = P[here] + (s.norm ? a.conv_eps * rx * rx * rx : A(1)) * Q[here];
          gate_grads(grad_alpha, a.stats + i * width + g * kGateStats, a.grad_out + at, a.hidden + at, a.key + at,
                     a.weight ? a.weight + g * D : nullptr, D, a.options, a.grad_hidden + at, a.grad_key + at,
                     gate_part ? gate_part + g * D : nullptr, streaming);
        }
      }
    }
  }
  finish_streams();
}

template <typename H, typename K>
ENGRAM_TARGET void gate_conv_forward(const GateConvForward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  if (a.shape.taps == 4) gate_conv_forward_blocks<kUsualTaps<A> >(a, begin, end);
  else gate_conv_forward_blocks<0>(a, begin, end);
}
template <typename H, typename K>
ENGRAM_TARGET void gate_conv_backward(const GateConvBackward<H, K>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<H>;
  if (a.shape.taps == 4) gate_conv_backward_parts<kUsualTaps<A> >(a, begin, end);
  else gate_conv_backward_parts<0>(a, begin, end);
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
