#ifndef ENGRAM_ISA
#include "kernels/short_conv.h"
#define ENGRAM_BODY "kernels/cpu/short_conv.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename A> void short_conv_fold(const ShortConvWeights<A>& a, int64_t begin, int64_t end) {
  for (int64_t j = 0; j < a.kernel; ++j) {
    for (int64_t i = begin; i < end; ++i) {
      a.taps[j * a.count + i] = a.norm_weight ? a.weight[i * a.kernel + j] * a.norm_weight[i] : a.weight[i * a.kernel + j];
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

#define INSTANTIATE(T)                                                                    \
  template void short_conv_forward<T>(const ShortConvForward<T>&, int64_t, int64_t);      \
  template void short_conv_backward<T>(const ShortConvBackward<T>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(A)                                                                  \
  template void short_conv_fold<A>(const ShortConvWeights<A>&, int64_t, int64_t);       \
  template void short_conv_unfold<A>(const ShortConvWeights<A>&, int64_t, int64_t);
INSTANTIATE(float) INSTANTIATE(double)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"

namespace engram::cpu::ENGRAM_ISA {

// Channels handled together: the taps and the scratch rows of a tile stay in the first-level cache.
constexpr int64_t kTile = 256;

// For a stretch of one batch row: which positions are masked, and where each one's document begins.
struct Stretch {
  const ShortConvShape& shape;
  int64_t row, begin, end;     // positions [begin, end) of batch row `row`
  std::vector<int64_t> start;  // start[t - begin]: no tap of t reaches below it

  Stretch(const ShortConvShape& s, int64_t row, int64_t begin, int64_t end)
      : shape(s), row(row), begin(begin), end(end), start(end - begin) {
    const int64_t* ids = s.document_ids ? s.document_ids + row * s.tokens : nullptr;
    const int64_t reach = (s.taps - 1) * s.dilation;
    int64_t from = begin;
    if (ids) while (from > 0 && begin - from < reach && ids[from - 1] == ids[begin]) --from;
    else from = 0;
    for (int64_t t = begin; t < end; ++t) {
      if (ids && t > begin && ids[t] != ids[t - 1]) from = t;
      start[t - begin] = from;
    }
  }
  bool masked(int64_t t) const { return shape.mask && !shape.mask[row * shape.tokens + t]; }
  // Position that tap j of t reads, or -1.
  int64_t source(int64_t t, int64_t j) const {
    const int64_t from = t - (shape.taps - 1 - j) * shape.dilation;
    return from >= start[t - begin] && !masked(from) ? from : -1;
  }
};

// z of one vector of channels: sum over the taps that count.
template <typename T>
struct Taps {
  using A = accumulate_t<T>;
  int64_t count = 0;
  struct Tap { const T* x; const A* weight; A rstd; int64_t j; };
  std::vector<Tap> taps;

  explicit Taps(int64_t kernel) : taps(kernel) {}
  void gather(const Stretch& stretch, int64_t t, const T* x, const A* rstd, const A* weights, int64_t g) {
    const ShortConvShape& s = stretch.shape;
    const int64_t GD = s.branches * s.dim;
    count = 0;
    for (int64_t j = 0; j < s.taps; ++j) {
      const int64_t from = stretch.source(t, j);
      if (from < 0) continue;
      const int64_t at = stretch.row * s.tokens + from;
      taps[count++] = {x + at * GD + g * s.dim, weights + j * GD + g * s.dim, rstd[at * s.branches + g], j};
    }
  }
  template <typename Lanes> ENGRAM_INLINE vec<A> apply(Lanes lanes, int64_t d) const {
    vec<A> z{};
    for (int64_t i = 0; i < count; ++i) z += lanes.get(taps[i].weight + d) * (taps[i].rstd * lanes.get(taps[i].x + d));
    return z;
  }
};

template <typename T> ENGRAM_INLINE accumulate_t<T> conv_rstd(const T* x, const ShortConvShape& s, accumulate_t<T> eps) {
  using A = accumulate_t<T>;
  return s.norm ? A(1) / std::sqrt(sum_squares(x, s.dim) / A(s.dim) + eps) : A(1);
}

template <typename T> void short_conv_forward(const ShortConvForward<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const ShortConvShape& s = a.shape;
  const int64_t D = s.dim, G = s.branches, blocks = short_conv_blocks_per_row(s);
  Taps<T> taps(s.taps);
  std::vector<A> halo;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t row = block / blocks, t0 = block % blocks * kShortConvBlock;
    const int64_t t1 = std::min(s.tokens, t0 + kShortConvBlock);
    const int64_t first = std::max<int64_t>(0, t0 - (s.taps - 1) * s.dilation);
    const Stretch stretch(s, row, t0, t1);
    for (int64_t g = 0; g < G; ++g) {
      // Positions before the block belong to another block's output: their statistics are recomputed beside it.
      halo.assign((t1 - first) * G, A(0));
      A* rstd = halo.data() - (row * s.tokens + first) * G;
      for (int64_t t = first; t < t1; ++t) {
        const int64_t at = (row * s.tokens + t) * G + g;
        if (!stretch.masked(t)) rstd[at] = conv_rstd(a.x + at * D, s, a.eps);
        if (t >= t0) a.rstd[at] = rstd[at];
      }
      for (int64_t t = t0; t < t1; ++t) {
        const int64_t at = ((row * s.tokens + t) * G + g) * D;
        const T* x = a.x + at;
        T* out = a.out + at;
        if (stretch.masked(t)) {
          if (s.residual) std::memcpy(static_cast<void*>(out), x, D * sizeof(T));
          else std::memset(static_cast<void*>(out), 0, D * sizeof(T));
          continue;
        }
        taps.gather(stretch, t, a.x, rstd, a.taps, g);
        for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
          vec<A> y = taps.apply(lanes, d);
          if (s.silu) y *= sigmoid(y);
          if (s.residual) y += lanes.get(x + d);
          lanes.put(out + d, y);
        });
      }
    }
  }
}

// One block of one branch: a = silu'(z) * grad_out for the block and the positions after it that read from it, tile by
// tile of channels, then q, S and <q, n>; grad_x last, when <q, n> over the whole row is known.
template <typename T> void short_conv_backward_block(const ShortConvBackward<T>& a, int64_t block, int64_t g, Taps<T>& taps,
                                                     std::vector<accumulate_t<T>>& scratch, accumulate_t<T>* part) {
  using A = accumulate_t<T>;
  const ShortConvShape& s = a.shape;
  const int64_t D = s.dim, G = s.branches, GD = G * D, K = s.taps, reach = (K - 1) * s.dilation;
  const int64_t blocks = short_conv_blocks_per_row(s), row = block / blocks, t0 = block % blocks * kShortConvBlock;
  const int64_t t1 = std::min(s.tokens, t0 + kShortConvBlock), t2 = std::min(s.tokens, t1 + reach);
  const Stretch stretch(s, row, t0, t2);
  const int64_t base = row * s.tokens;

  scratch.assign((t2 - t0) * D + (t1 - t0) * D + (t1 - t0), A(0));
  A* grad_z = scratch.data();             // [t2 - t0, D]
  A* q = grad_z + (t2 - t0) * D;          // [t1 - t0, D]
  A* pull = q + (t1 - t0) * D;            // [t1 - t0]: <q, n> / D

  for (int64_t tile = 0; tile < D; tile += kTile) {
    const int64_t tile_end = std::min(D, tile + kTile);
    for (int64_t t = t0; t < t2; ++t) {
      if (stretch.masked(t)) continue;  // its grad_z stays zero
      taps.gather(stretch, t, a.x, a.rstd, a.taps, g);
      const T* grad_out = a.grad_out + (base + t) * GD + g * D;
      A* dz = grad_z + (t - t0) * D;
      const bool own = t < t1;
      for_each_vec<A>(tile, tile_end, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        vec<A> grad = lanes.get(grad_out + d);
        if (s.silu) {
          const vec<A> z = taps.apply(lanes, d), sg = sigmoid(z);
          grad *= sg * (A(1) + z * (A(1) - sg));
        }
        lanes.put(dz + d, grad);
        if (own) {
          for (int64_t i = 0; i < taps.count; ++i) {
            A* p = part + taps.taps[i].j * GD + g * D + d;
            lanes.put(p, lanes.get(p) + grad * (taps.taps[i].rstd * lanes.get(taps.taps[i].x + d)));
          }
        }
      });
    }
  }
  for (int64_t t = t0; t < t1; ++t) {
    if (stretch.masked(t)) continue;
    const T* x = a.x + (base + t) * GD + g * D;
    const A rstd = a.rstd[(base + t) * G + g];
    A* qt = q + (t - t0) * D;
    for (int64_t j = 0; j < K; ++j) {
      const int64_t to = t + (K - 1 - j) * s.dilation;
      if (to >= t2 || stretch.start[to - t0] > t) continue;
      const A *dz = grad_z + (to - t0) * D, *w = a.taps + j * GD + g * D;
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        lanes.put(qt + d, lanes.get(qt + d) + lanes.get(w + d) * lanes.get(dz + d));
      });
    }
    vec<A> dot{};
    if (s.norm) {
      for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA { dot += lanes.get(qt + d) * lanes.get(x + d); });
    }
    pull[t - t0] = s.norm ? sum<A>(dot) * rstd / A(D) : A(0);
  }
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t at = (base + t) * GD + g * D;
    const T *x = a.x + at, *grad_out = a.grad_out + at;
    T* grad_x = a.grad_x + at;
    if (stretch.masked(t)) {
      if (s.residual) std::memcpy(static_cast<void*>(grad_x), grad_out, D * sizeof(T));
      else std::memset(static_cast<void*>(grad_x), 0, D * sizeof(T));
      continue;
    }
    const A rstd = a.rstd[(base + t) * G + g], p = pull[t - t0];
    const A* qt = q + (t - t0) * D;
    for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      vec<A> grad = rstd * (lanes.get(qt + d) - p * (rstd * lanes.get(x + d)));
      if (s.residual) grad += lanes.get(grad_out + d);
      lanes.put(grad_x + d, grad);
    });
  }
}

template <typename T> void short_conv_backward(const ShortConvBackward<T>& a, int64_t begin, int64_t end) {
  const ShortConvShape& s = a.shape;
  const int64_t blocks = s.batch * short_conv_blocks_per_row(s), size = s.taps * s.branches * s.dim;
  Taps<T> taps(s.taps);
  std::vector<accumulate_t<T>> scratch;
  for (int64_t p = begin; p < end; ++p) {
    accumulate_t<T>* part = a.partials + p * size;
    std::fill(part, part + size, accumulate_t<T>(0));
    for (int64_t block = blocks * p / a.parts; block < blocks * (p + 1) / a.parts; ++block) {
      for (int64_t g = 0; g < s.branches; ++g) short_conv_backward_block(a, block, g, taps, scratch, part);
    }
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
