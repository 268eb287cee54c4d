#ifndef ENGRAM_ISA
#include "kernels/short_conv.h"
#define ENGRAM_BODY "kernels/cpu/short_conv.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename A> void short_conv_fold(const ShortConvWeights<A>& a, int64_t begin, int64_t end) {
  for (int64_t j = 0; j < a.kernel; ++j) {
    for (int64_t i = begin; i < end; ++i) {
      a.taps[j * a.count + i] =
          a.norm_weight ? a.weight[i * a.kernel + j] * a.norm_weight[i] : a.weight[i * a.kernel + j];
    }
  }
}

template <typename A> void short_conv_unfold(const ShortConvWeights<A>& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    A grad_norm = 0;
    for (int64_t j = 0; j < a.kernel; ++j) {
      A total = 0;
      for (int64_t p = 0; p < a.parts; ++p) total += a.partials[(p * a.kernel + j) * a.count + i];
      a.grad_weight[i * a.kernel + j] = a.norm_weight ? a.norm_weight[i] * total : total;
      grad_norm += a.weight[i * a.kernel + j] * total;
    }
    if (a.grad_norm_weight) a.grad_norm_weight[i] = grad_norm;
  }
}

template <typename T> void short_conv_forward(const ShortConvForward<T>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(short_conv_forward, a, begin, end);
}
template <typename T> void short_conv_backward(const ShortConvBackward<T>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(short_conv_backward, a, begin, end);
}

#define INSTANTIATE(T)                                                               \
  template void short_conv_forward<T>(const ShortConvForward<T>&, int64_t, int64_t); \
  template void short_conv_backward<T>(const ShortConvBackward<T>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(A)                                                            \
  template void short_conv_fold<A>(const ShortConvWeights<A>&, int64_t, int64_t); \
  template void short_conv_unfold<A>(const ShortConvWeights<A>&, int64_t, int64_t);
INSTANTIATE(float) INSTANTIATE(double)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"
#include "kernels/cpu/conv.h"

namespace engram::cpu::ENGRAM_ISA {

template <int Taps, typename T>
ENGRAM_TARGET void short_conv_forward_blocks(const ShortConvForward<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const ShortConvShape& s = a.shape;
  const int64_t D = s.dim, G = s.branches;
  TapStorage<A> taps(s.taps);
  ConvTile<T> tile;
  std::vector<A> rstd, ones;
  for (int64_t block = begin; block < end; ++block) {
    const Stretch stretch(s, block, false);
    // Positions before the block belong to another block's output: their statistics are recomputed beside it.
    rstd.assign((stretch.last - stretch.first) * G, A(0));
    ones.assign(rstd.size(), A(1));
    for (int64_t t = stretch.first; t < stretch.last; ++t) {
      for (int64_t g = 0; g < G; ++g) {
        const int64_t at = (stretch.base + t) * G + g;
        A& r = rstd[(t - stretch.first) * G + g];
        if (!stretch.masked(t)) r = s.norm ? A(1) / std::sqrt(sum_squares(a.x + at * D, D) / A(D) + a.eps) : A(1);
        if (t >= stretch.begin) a.rstd[at] = r;
      }
    }
    const ConvSource<T> source{a.x, nullptr, G * D, D, rstd.data(), s.residual ? ones.data() : nullptr};
    conv_forward_block<Taps>(stretch, source, a.taps, static_cast<const T*>(nullptr), a.out, tile, taps);
    for (int64_t t = stretch.begin; t < stretch.end && s.residual; ++t) {
      if (stretch.masked(t)) copy_or_zero(a.out + (stretch.base + t) * G * D, a.x + (stretch.base + t) * G * D, G * D);
    }
  }
}

template <int Taps, typename T>
ENGRAM_TARGET void short_conv_backward_parts(const ShortConvBackward<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const ShortConvShape& s = a.shape;
  const int64_t blocks = s.batch * conv_blocks_per_row(s), G = s.branches, GD = G * s.dim, size = s.taps * GD;
  TapStorage<A> taps(s.taps);
  ConvTile<T> tile;
  ConvScratch<A> scratch;
  std::vector<A> ones, P, Q;
  for (int64_t p = begin; p < end; ++p) {
    A* part = a.partials + p * size;
    std::fill(part, part + size, A(0));
    for (int64_t block = blocks * p / a.parts; block < blocks * (p + 1) / a.parts; ++block) {
      const Stretch stretch(s, block, true);
      ones.assign((stretch.last - stretch.first) * G, A(1));
      P.resize((stretch.end - stretch.begin) * G);
      Q.resize(P.size());
      const ConvSource<T> source{
          a.x, nullptr, GD, s.dim, a.rstd + (stretch.base + stretch.first) * G, s.residual ? ones.data() : nullptr};
      for (int64_t g = 0; g < G; ++g) {
        conv_backward_block<Taps>(stretch, source, a.taps, a.grad_out, g, g + 1, a.grad_x, part, P.data(), Q.data(),
                                  tile, taps, scratch);
      }
      for (int64_t t = stretch.begin; t < stretch.end && s.residual; ++t) {
        if (stretch.masked(t))
          copy_or_zero(a.grad_x + (stretch.base + t) * GD, a.grad_out + (stretch.base + t) * GD, GD);
      }
    }
  }
}

template <typename T> ENGRAM_TARGET void short_conv_forward(const ShortConvForward<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  if (a.shape.taps == 4) short_conv_forward_blocks<kUsualTaps<A> >(a, begin, end);
  else short_conv_forward_blocks<0>(a, begin, end);
}
template <typename T>
ENGRAM_TARGET void short_conv_backward(const ShortConvBackward<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  if (a.shape.taps == 4) short_conv_backward_parts<kUsualTaps<A> >(a, begin, end);
  else short_conv_backward_parts<0>(a, begin, end);
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
