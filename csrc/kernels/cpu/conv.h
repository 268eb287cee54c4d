// The convolution engine of short_conv and gate_conv. Both convolve rows that are a scalar times a source row,
//     n[t, g] = scale[t, g] * x[t, g]
//     short_conv: x is its input, scale = rstd        gate_conv: x = value for every g, scale = beta
// and add the source itself times another scalar (self: 1, or alpha). What differs is where the rows lie and which
// scalars. Included once per instruction set by the kernel bodies (no include guard; see foreach_isa.h), after vec.h.

namespace engram::cpu::ENGRAM_ISA {

// Channels handled together. A row of a tile is 1 KiB in float, so the rows in reach of the taps, the taps and their
// gradients stay in the first-level cache while time runs, and what is written is contiguous enough for the
// prefetchers.
constexpr int64_t kTile = 256;
// Positions that rows are fetched before their turn: those of a tile lie too far apart for the processor to see them
// coming.
constexpr int64_t kAhead = 2;

// The usual four taps are worth a loop of their own (Taps = 4, else 0 = any number), except where it would never be
// fast.
#if defined(__x86_64__) && !defined(ENGRAM_HAS_F16C)
template <typename A> constexpr int kUsualTaps = 0;
#else
template <typename A> constexpr int kUsualTaps = std::is_same_v<A, double> ? 0 : 4;
#endif

// Scratch of the kernels: on cache lines, so that no vector lies across two, and left as it comes.
template <typename A> struct ScratchAllocator {
  using value_type = A;
  ScratchAllocator() = default;
  template <typename U> ScratchAllocator(const ScratchAllocator<U>&) {}
  A* allocate(size_t n) { return static_cast<A*>(::operator new(n * sizeof(A), std::align_val_t{64})); }
  void deallocate(A* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  template <typename U> void construct(U*) {}
  bool operator==(const ScratchAllocator&) const { return true; }
};
template <typename A> using Scratch = std::vector<A, ScratchAllocator<A>>;

// One block of time of one batch row, with the positions around it that it reads (before) or that read from it (after).
struct Stretch {
  const ShortConvShape& shape;
  int64_t base;                     // row * (P + T): flat index of position 0 among document ids and mask
  int64_t token;                    // row * T - P: what turns a position into the flat index of its token
  int64_t past;                     // row * P: flat index of position 0 among the positions before the first token
  int64_t first, begin, end, last;  // first <= begin: the block is [begin, end), its surroundings [first, last)
  std::vector<int64_t> start;       // start[t - first]: no tap of t reaches below it

  Stretch(const ShortConvShape& s, int64_t block, bool after) : shape(s) {
    const int64_t blocks = conv_blocks_per_row(s), reach = (s.taps - 1) * s.dilation;
    const int64_t row = block / blocks, positions = s.past + s.tokens;
    base = row * positions;
    token = row * s.tokens - s.past;
    past = row * s.past;
    begin = s.past + block % blocks * kConvBlock;
    end = std::min(positions, begin + kConvBlock);
    first = std::max<int64_t>(0, begin - reach);
    last = after ? std::min(positions, end + reach) : end;
    start.resize(last - first);
    const int64_t* ids = s.document_ids ? s.document_ids + base : nullptr;
    // Where a document began before `first` does not matter to the block and what lies after it.
    for (int64_t t = first, from = ids ? first : 0; t < last; ++t) {
      if (ids && t > first && ids[t] != ids[t - 1]) from = t;
      start[t - first] = from;
    }
  }
  bool masked(int64_t t) const { return shape.mask && !shape.mask[base + t]; }
  // Position that tap j of t reads, or -1; t within [begin, last).
  int64_t source(int64_t t, int64_t j) const {
    const int64_t from = t - (shape.taps - 1 - j) * shape.dilation;
    return from >= start[t - first] && !masked(from) ? from : -1;
  }
  // Position that reads t through tap j, or -1; t within the block.
  int64_t target(int64_t t, int64_t j) const {
    const int64_t to = t + (shape.taps - 1 - j) * shape.dilation;
    return to < last && start[to - first] <= t && !masked(to) ? to : -1;
  }
};

// The rows and scalars of a stretch. Scalars are indexed [t - first][g]; at masked positions they are not read.
template <typename K> struct ConvSource {
  using A = accumulate_t<K>;
  const K* rows;                        // of tokens: rows + token * token_stride + g * branch_stride
  const K* past_rows;                   // of the positions before the first token, likewise
  int64_t token_stride, branch_stride;  // branch_stride 0: one row for all branches
  const A* scale;
  const A* self;  // null: the source itself is not added

  const K* row(const Stretch& stretch, int64_t t, int64_t g) const {
    return (t < stretch.shape.past ? past_rows + (stretch.past + t) * token_stride
                                   : rows + (stretch.token + t) * token_stride) +
           g * branch_stride;
  }
};

// Which row each tap of one position reads, and its scalar: a row of the tile's scratch, or zeros where the tap does
// not count. Adding those zeros keeps the order of the sum, so that a position's result does not depend on what else is
// in the batch. With the usual number of taps it lives in registers: a trip through memory would wait, in order, behind
// the stores of the row before.
template <typename A> struct TapStorage {
  std::vector<const A*> rows;
  std::vector<A> scales;
  explicit TapStorage(int64_t taps) : rows(taps), scales(taps) {}
};
template <int Taps, typename A> struct TapRows {
  const A* rows[Taps];
  A scales[Taps];
  explicit TapRows(TapStorage<A>&) {}
};
template <typename A> struct TapRows<0, A> {
  const A** rows;
  A* scales;
  explicit TapRows(TapStorage<A>& storage) : rows(storage.rows.data()), scales(storage.scales.data()) {}
};

// The taps' weights for one tile of one branch: weight j is `first + j * stride`.
template <typename A> struct TapWeights {
  const A* first;
  int64_t stride, count;
};

// step(lanes, d, z, input) for every vector of a row: z = sum_j weights[j] * input(j), input(j) = scales[j] * rows[j].
// Taps: their number when the compiler knows it (pointers and scalars stay in registers), 0 = any.
template <int Taps, typename A, typename Step>
ENGRAM_INLINE void convolve(const TapRows<Taps, A>& taps, const TapWeights<A>& weights, int64_t width, Step&& step) {
  if constexpr (Taps > 0) {
    vec<A> scales[Taps];
    for (int j = 0; j < Taps; ++j) scales[j] = broadcast(taps.scales[j]);
    for_each_vec<A>(0, width, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      vec<A> inputs[Taps], z{};
      for (int j = 0; j < Taps; ++j) {
        inputs[j] = scales[j] * lanes.get(taps.rows[j] + d);
        z += lanes.get(weights.first + j * weights.stride + d) * inputs[j];
      }
      step(lanes, d, z, [&](int64_t j) ENGRAM_INLINE_LAMBDA { return inputs[j]; });
    });
  } else {
    const auto inputs = [&](auto lanes, int64_t j, int64_t d)
                            ENGRAM_INLINE_LAMBDA { return taps.scales[j] * lanes.get(taps.rows[j] + d); };
    for_each_vec<A>(0, width, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      vec<A> z{};
      for (int64_t j = 0; j < weights.count; ++j)
        z += lanes.get(weights.first + j * weights.stride + d) * inputs(lanes, j, d);
      step(lanes, d, z, [&](int64_t j) ENGRAM_INLINE_LAMBDA { return inputs(lanes, j, d); });
    });
  }
}

// A tile of source rows in the accumulation type, [last - first, kTile], and a row of zeros behind them.
template <typename K> struct ConvTile {
  using A = accumulate_t<K>;
  Scratch<A> buffer;
  A* rows = nullptr;
  A* zeros = nullptr;

  void fill(const Stretch& stretch, const ConvSource<K>& source, int64_t g, int64_t tile, int64_t width) {
    const int64_t count = stretch.last - stretch.first;
    buffer.resize((count + 1) * kTile);
    rows = buffer.data();
    zeros = rows + count * kTile;
    std::fill(zeros, zeros + kTile, A(0));
    for (int64_t i = 0; i < count; ++i) {
      if (stretch.masked(stretch.first + i)) continue;  // never read
      const K* from = source.row(stretch, stretch.first + i, g) + tile;
      const K* ahead = from + std::min(kAhead, count - 1 - i) * source.token_stride;
      for_each_vec<A>(0, width, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
        __builtin_prefetch(ahead + d);
        lanes.put(rows + i * kTile + d, lanes.get(from + d));
      });
    }
  }
  template <int Taps>
  ENGRAM_INLINE void aim(const Stretch& stretch, const ConvSource<K>& source, int64_t t, int64_t g,
                         TapRows<Taps, A>& taps) const {
    const int64_t G = stretch.shape.branches, count = Taps ? Taps : stretch.shape.taps;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t from = stretch.source(t, j);
      taps.rows[j] = from < 0 ? zeros : rows + (from - stretch.first) * kTile;
      taps.scales[j] = from < 0 ? A(0) : source.scale[(from - stretch.first) * G + g];
    }
  }
};

// out[t, g] = (self * x) + silu(z) (+ hidden) for the block.
template <int Taps, typename H, typename K>
ENGRAM_TARGET void conv_forward_block(const Stretch& stretch, const ConvSource<K>& source,
                                      const accumulate_t<K>* weights, const H* hidden, H* out, ConvTile<K>& tile_rows,
                                      TapStorage<accumulate_t<K>>& storage) {
  using A = accumulate_t<K>;
  const ShortConvShape& s = stretch.shape;
  const int64_t D = s.dim, G = s.branches;
  // Copies: what is written may, for all the compiler knows, be where the originals lie.
  const bool adds_self = source.self;
  const bool silu = s.silu, streaming = streams(out, D, s.batch * s.tokens * G * D);
  for (int64_t tile = 0; tile < D; tile += kTile) {
    const int64_t width = std::min(kTile, D - tile);
    for (int64_t g = 0; g < G; ++g) {
      if (g == 0 || source.branch_stride) tile_rows.fill(stretch, source, g, tile, width);
      const TapWeights<A> tap_weights{weights + g * D + tile, G * D, s.taps};
      for (int64_t t = stretch.begin; t < stretch.end; ++t) {
        const int64_t at = ((stretch.token + t) * G + g) * D + tile;
        if (stretch.masked(t)) {
          copy_or_zero(out + at, hidden ? hidden + at : nullptr, width);
          continue;
        }
        TapRows<Taps, A> taps(storage);
        tile_rows.template aim<Taps>(stretch, source, t, g, taps);
        const A* x = tile_rows.rows + (t - stretch.first) * kTile;
        const A self = source.self ? source.self[(t - stretch.first) * G + g] : A(0);
        convolve<Taps>(taps, tap_weights, width,
                       [&](auto lanes, int64_t d, vec<A> z, const auto&) ENGRAM_INLINE_LAMBDA {
                         vec<A> y = silu ? z * sigmoid_for<H>(z) : z;
                         if (adds_self) y += self * lanes.get(x + d);
                         if (hidden) y += lanes.get(hidden + at + d);
                         lanes.put(out + at + d, y, streaming);
                       });
      }
    }
  }
  finish_streams();
}

template <typename A> struct ConvScratch {
  Scratch<A> grad_z;  // [last - begin, kTile]
  Scratch<A> grad_x;  // [end - begin, D]
  Scratch<A> S;       // [K, kTile]: in `part` the taps may lie a multiple of 4 KiB apart, where loads wait for stores
};

// Backward of the block for the branches [g0, g1) that share a source row: adds S to `part` ([K, G, D]), writes
// P = <grad_out, x> and Q = <q, x> ([end - begin, G], either may be null) and the gradient of the source rows.
template <int Taps, typename H, typename K>
ENGRAM_TARGET void conv_backward_block(const Stretch& stretch, const ConvSource<K>& source,
                                       const accumulate_t<K>* weights, const H* grad_out, int64_t g0, int64_t g1,
                                       K* grad_rows, accumulate_t<K>* part, accumulate_t<K>* P, accumulate_t<K>* Q,
                                       ConvTile<K>& tile_rows, TapStorage<accumulate_t<K>>& storage,
                                       ConvScratch<accumulate_t<K>>& scratch) {
  using A = accumulate_t<K>;
  const ShortConvShape& s = stretch.shape;
  const int64_t D = s.dim, G = s.branches, GD = G * D, K_ = s.taps, begin = stretch.begin, end = stretch.end;
  const bool silu = s.silu, adds_self = source.self;
  scratch.grad_z.resize((stretch.last - begin) * kTile);
  scratch.grad_x.resize((end - begin) * D);
  if (g0 == g1) std::fill(scratch.grad_x.begin(), scratch.grad_x.end(), A(0));  // no branch writes there
  scratch.S.resize(K_ * kTile);
  for (int64_t i = 0; i < end - begin; ++i) std::fill(P + i * G + g0, P + i * G + g1, A(0));
  for (int64_t i = 0; i < end - begin; ++i) std::fill(Q + i * G + g0, Q + i * G + g1, A(0));

  for (int64_t tile = 0; tile < D; tile += kTile) {
    const int64_t width = std::min(kTile, D - tile);
    tile_rows.fill(stretch, source, g0, tile, width);
    for (int64_t g = g0; g < g1; ++g) {
      const TapWeights<A> tap_weights{weights + g * D + tile, GD, K_};
      A* S = scratch.S.data();
      for (int64_t j = 0; j < K_; ++j) std::copy_n(part + j * GD + g * D + tile, width, S + j * kTile);
      // grad_z of the block and of the positions after it that read from it; S over the block.
      for (int64_t t = begin; t < stretch.last; ++t) {
        if (stretch.masked(t)) continue;  // never read
        TapRows<Taps, A> taps(storage);
        tile_rows.template aim<Taps>(stretch, source, t, g, taps);
        const H* dy = grad_out + (stretch.token + t) * GD + g * D + tile;
        A* dz = scratch.grad_z.data() + (t - begin) * kTile;
        const H* ahead = dy + std::min(kAhead, stretch.last - 1 - t) * GD;
        const bool own = t < end;
        convolve<Taps>(taps, tap_weights, width,
                       [&](auto lanes, int64_t d, vec<A> z, const auto& input) ENGRAM_INLINE_LAMBDA {
                         __builtin_prefetch(ahead + d);
                         vec<A> grad = lanes.get(dy + d);
                         if (silu) {
                           const vec<A> sg = sigmoid(z);  // in full: the weights' gradients may be float32
                           grad *= sg * (A(1) + z * (A(1) - sg));
                         }
                         lanes.put(dz + d, grad);
                         if (own) {
                           for (int64_t j = 0; j < (Taps ? Taps : K_); ++j) {
                             lanes.put(S + j * kTile + d, lanes.get(S + j * kTile + d) + grad * input(j));
                           }
                         }
                       });
      }
      for (int64_t j = 0; j < K_; ++j) std::copy_n(S + j * kTile, width, part + j * GD + g * D + tile);
      // q is the same convolution backwards in time, over grad_z with scale 1.
      for (int64_t t = begin; t < end; ++t) {
        if (stretch.masked(t)) continue;
        TapRows<Taps, A> back(storage);
        for (int64_t j = 0; j < (Taps ? Taps : K_); ++j) {
          const int64_t to = stretch.target(t, j);
          back.rows[j] = to < 0 ? tile_rows.zeros : scratch.grad_z.data() + (to - begin) * kTile;
          back.scales[j] = A(1);
        }
        const int64_t at = (t - stretch.first) * G + g;
        const A *x = tile_rows.rows + (t - stretch.first) * kTile, scale = source.scale[at],
                self = source.self ? source.self[at] : A(0);
        const H* dy = grad_out + (stretch.token + t) * GD + g * D + tile;
        A* grad_x = scratch.grad_x.data() + (t - begin) * D + tile;
        vec<A> p{}, qx{};
        convolve<Taps>(back, tap_weights, width,
                       [&](auto lanes, int64_t d, vec<A> q, const auto&) ENGRAM_INLINE_LAMBDA {
                         const vec<A> v = lanes.get(x + d), gy = lanes.get(dy + d);
                         p += gy * v;
                         qx += q * v;
                         vec<A> grad = scale * q;
                         if (adds_self) grad += self * gy;
                         lanes.put(grad_x + d, g == g0 ? grad : lanes.get(grad_x + d) + grad);
                       });
        P[(t - begin) * G + g] += sum<A>(p);
        Q[(t - begin) * G + g] += sum<A>(qx);
      }
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    K* to = grad_rows + (stretch.token + t) * source.token_stride + g0 * source.branch_stride;
    if (stretch.masked(t)) {
      copy_or_zero<K>(to, nullptr, D);
      continue;
    }
    A pull = 0;
    for (int64_t g = g0; g < g1 && s.norm; ++g) {
      const A scale = source.scale[(t - stretch.first) * G + g];
      pull += scale * scale * scale * Q[(t - begin) * G + g];
    }
    pull /= A(D);
    const K* x = source.row(stretch, t, g0);
    const A* grad_x = scratch.grad_x.data() + (t - begin) * D;
    for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      lanes.put(to + d, lanes.get(grad_x + d) - pull * lanes.get(x + d));
    });
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
