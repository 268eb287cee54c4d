#include "gate_conv.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnThreads = 640;  // of the gate's backward, as in gate.cu

// ---- Forward ----

// One warp a branch of a token, and one more a token for the mean square of its value.
template <typename H, typename K, bool kVector>
__global__ void __launch_bounds__(kThreads) gate_conv_stats_kernel(const GateConvForward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr int N = kLaneElements<H>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t D = a.shape.dim, G = a.shape.branches, rows = a.shape.batch * a.shape.tokens * (G + 1);
  for (int64_t row = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; row < rows;
       row += int64_t{gridDim.x} * (kThreads / kWarp)) {
    const int64_t token = row / (G + 1), g = row - token * (G + 1);
    A* stats = a.stats + token * (G * kGateStats + 1) + g * kGateStats;
    if (a.shape.mask && !a.shape.mask[position_at(a.shape, token / a.shape.tokens, token % a.shape.tokens)]) {
      if (lane < (g < G ? kGateStats : 1)) stats[lane] = 0;
    } else if (g == G) {
      A sum = 0;
      for (int64_t d = lane * N; d < D; d += kWarp * N) {
        const auto v = load<N, kVector>(a.value + token * D + d, D - d);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += v[i] * v[i];
      }
      sum = warp_sum(sum);
      if (lane == 0) stats[0] = sum / A(D);
    } else {
      const int64_t at = (token * G + g) * D;
      const GateScores<A> r =
          gate_scores<kVector>(a.hidden + at, a.key + at, a.weight ? a.weight + g * D : nullptr, D, a.options);
      if (lane < kGateStats) stats[lane] = lane == 0 ? r.s : lane == 1 ? r.rstd_h : r.rstd_k;
    }
  }
}

// Block = (batch row, tile of kTile tokens, branch; group of columns); thread c owns N neighbouring columns and their
// taps. The branches of a tile lie side by side: they read the same values, which come out of the cache. kPast: the
// rows before the first token may be those of the past.
template <typename H, typename K, bool kVector, bool kPast>
__global__ void __launch_bounds__(kThreads) gate_conv_forward_kernel(const GateConvForward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr int N = kLaneElements<H>;
  ENGRAM_SHARED(A, alpha, [kTile]);
  ENGRAM_SHARED(A, beta, [kMaxHalo + kTile]);  // of position t0 - halo + i, or skipped
  ENGRAM_SHARED(int, reach, [kTile]);
  const ShortConvShape s = a.shape;
  const int dilation = static_cast<int>(s.dilation), halo = (kTaps - 1) * dilation,
            skip = kTaps - static_cast<int>(s.taps);
  const int64_t tiles = (s.tokens + kTile - 1) / kTile;
  const int64_t g = blockIdx.x % s.branches, tile = blockIdx.x / s.branches % tiles,
                b = blockIdx.x / s.branches / tiles;
  const int64_t t0 = tile * kTile, d = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N, available = s.dim - d;
  const int tokens = static_cast<int>(s.tokens - t0 < kTile ? s.tokens - t0 : kTile);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);

  for (int i = thread; i < halo + tokens; i += threads) {
    const int64_t t = t0 - halo + i;
    const bool used = counts(s, b, t);
    Factors<A> f{A(0), A(-1), A(0)};
    if (used)
      f = factors_of(row_at(s, a.stats, a.past_stats, b, t, s.branches * kGateStats + 1), g, s.branches, a.conv_eps,
                     s.norm, a.options);
    beta[i] = f.beta;
    if (i >= halo) alpha[i - halo] = f.alpha;
  }
  for (int i = thread; i < tokens; i += threads) reach[i] = static_cast<int>(reach_back(s, b, t0 + i, halo));
  A taps[kTaps][N];
  load_taps<H>(a.taps, s, g, d, taps);
  __syncthreads();
  if (available <= 0) return;

  const K* value = a.value + (b * s.tokens + t0) * s.dim + d;
  const K* past = kPast ? a.past_value + ((b + 1) * s.past + t0) * s.dim + d : nullptr;
  const auto value_at = [&](int i) { return (kPast && t0 + i < 0 ? past : value) + i * s.dim; };
  const int64_t row = ((b * s.tokens + t0) * s.branches + g) * s.dim + d, pitch = s.branches * s.dim;
#pragma unroll 2
  for (int i = 0; i < tokens; ++i) {
    const auto passed_on =
        a.options.residual ? load<N, kVector, Reuse::no>(a.hidden + row + i * pitch, available) : zero_pack<H, N>();
    if (skipped(beta[halo + i])) {
      store<kVector>(a.out + row + i * pitch, passed_on, available);
      continue;
    }
    const auto v = load<N, kVector>(value + i * s.dim, available);
    A z[N] = {};
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int back = (kTaps - 1 - j) * dilation;
      if (j < skip || back > reach[i] || skipped(beta[halo + i - back])) continue;
      const A factor = beta[halo + i - back];
      const auto tap = back == 0 ? v : load<N, kVector>(value_at(i - back), available);
#pragma unroll
      for (int n = 0; n < N; ++n) z[n] += taps[j][n] * (tap[n] * factor);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      z[n] = alpha[i] * v[n] + (s.silu ? z[n] * sigmoid(z[n]) : z[n]);
      if (a.options.residual) z[n] += passed_on[n];
    }
    store<kVector>(a.out + row + i * pitch, narrow<H, N>(z), available);
  }
}

// What every position contributes to the convolution, straight from the stats: for the kernels that take any shape.
template <typename H, typename K> struct Source {
  using A = accumulate_t<H>;
  const ShortConvShape& s;
  const GateOptions<A>& options;
  const K *value, *past_value;
  const A *taps, *stats, *past_stats;
  A conv_eps;
  int64_t b, g;

  __device__ __forceinline__ Factors<A> factors(int64_t t) const {
    return factors_of(row_at(s, stats, past_stats, b, t, s.branches * kGateStats + 1), g, s.branches, conv_eps, s.norm,
                      options);
  }
  __device__ __forceinline__ A value_at(int64_t t, int64_t d) const {
    return static_cast<A>(row_at(s, value, past_value, b, t, s.dim)[d]);
  }
  __device__ __forceinline__ A tap(int64_t j, int64_t d) const { return taps[(j * s.branches + g) * s.dim + d]; }
  __device__ __forceinline__ int64_t limit() const { return (s.taps - 1) * s.dilation; }
  __device__ A convolve(int64_t t, int64_t d, int64_t reach) const {
    A z = 0;
    for (int64_t j = 0; j < s.taps; ++j) {
      const int64_t back = (s.taps - 1 - j) * s.dilation;
      if (back <= reach && counts(s, b, t - back)) z += tap(j, d) * (value_at(t - back, d) * factors(t - back).beta);
    }
    return z;
  }
  // silu'(z) * grad_out
  __device__ A grad_z(const H* grad_out, int64_t t, int64_t d, int64_t reach) const {
    const A slope = s.silu ? silu_slope(convolve(t, d, reach)) : A(1);
    return slope * static_cast<A>(grad_out[((b * s.tokens + t) * s.branches + g) * s.dim + d]);
  }
};

// Any number of taps, any dilation: a block a row of the output, each thread a column at a time.
template <typename H, typename K>
__global__ void __launch_bounds__(kThreads) gate_conv_any_kernel(const GateConvForward<H, K> a) {
  using A = accumulate_t<H>;
  const ShortConvShape s = a.shape;
  const int64_t g = blockIdx.x % s.branches, t = blockIdx.x / s.branches % s.tokens,
                b = blockIdx.x / s.branches / s.tokens;
  const int64_t row = (b * s.tokens + t) * s.branches + g;
  const bool used = counts(s, b, t);
  const Source<H, K> source{s, a.options, a.value, a.past_value, a.taps, a.stats, a.past_stats, a.conv_eps, b, g};
  for (int64_t d = threadIdx.x; d < s.dim; d += kThreads) {
    const H passed_on = a.options.residual ? a.hidden[row * s.dim + d] : H(0.0f);
    H y = passed_on;
    if (used) {
      const A z = source.convolve(t, d, reach_back(s, b, t, source.limit()));
      const A x = source.factors(t).alpha * source.value_at(t, d);
      y = static_cast<H>(x + (s.silu ? z * sigmoid(z) : z) + (a.options.residual ? static_cast<A>(passed_on) : A(0)));
    }
    a.out[row * s.dim + d] = y;
  }
}

// ---- Backward, first half: through the convolution ----

constexpr int kSlice = static_cast<int>(kGateConvSlice);  // columns of a warp
constexpr int kSweepThreads = 128;
constexpr int kSweepSlices = kSweepThreads / kWarp;

// The scratch: what grad_value is before the last term, then the columns of a slice summed, P and Q of every branch.
template <typename H, typename K> struct Scratch {
  using A = accumulate_t<H>;
  A *grad_value, *sums;
  int64_t slices;
  __device__ __forceinline__ explicit Scratch(const GateConvBackward<H, K>& a)
      : grad_value(a.scratch),
        sums(a.scratch + a.shape.batch * a.shape.tokens * a.shape.dim),
        slices((a.shape.dim + kSlice - 1) / kSlice) {}
  __device__ __forceinline__ A* pair(int64_t row, int64_t slice) const { return sums + (row * slices + slice) * 2; }
};

// Block = (part; group of columns); a thread owns two neighbouring columns in every branch, with their taps and their
// S. It sweeps a block of tokens once for every residue modulo the dilation, as in short_conv.cu, and emits a token
// when its last reader has passed. Sums over columns stop at the warp, so there is no barrier in the sweep.
template <typename H, typename K, int G>
__global__ void __launch_bounds__(kSweepThreads) gate_conv_sweep_kernel(const GateConvBackward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr int N = 2;
  constexpr bool kVector = true;
  ENGRAM_SHARED(A, alpha, [kConvBlock + 2 * kMaxHalo][G]);  // of position t0 - halo + i
  ENGRAM_SHARED(A, beta, [kConvBlock + 2 * kMaxHalo][G]);   // or skipped
  ENGRAM_SHARED(int, reach, [kConvBlock + kMaxHalo]);       // of position t0 + i
  const ShortConvShape s = a.shape;
  const Scratch<H, K> scratch(a);
  const int dilation = static_cast<int>(s.dilation), halo = (kTaps - 1) * dilation,
            skip = kTaps - static_cast<int>(s.taps);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t part = blockIdx.x, d = (int64_t{blockIdx.y} * kSweepThreads + threadIdx.x) * N, available = s.dim - d;
  const int64_t slice = int64_t{blockIdx.y} * kSweepSlices + threadIdx.x / kWarp, pitch = G * s.dim;
  const bool active = available > 0;

  A taps[G][kTaps][N], S[G][kTaps][N] = {};
#pragma unroll
  for (int g = 0; g < G; ++g) load_taps<H>(a.taps, s, g, d, taps[g]);
  const int64_t blocks = s.batch * ((s.tokens + kConvBlock - 1) / kConvBlock);
  for (int64_t index = blocks * part / a.parts; index < blocks * (part + 1) / a.parts; ++index) {
    const TimeBlock block(s, index);
    const int tokens = static_cast<int>(block.t1 - block.t0);
    __syncthreads();  // the block before is done with shared memory
    for (int i = thread; i < (tokens + 2 * halo) * G; i += kSweepThreads) {
      const int64_t t = block.t0 - halo + i / G;
      Factors<A> f{A(0), A(-1), A(0)};
      if (counts(s, block.b, t))
        f = factors_of(row_at(s, a.stats, a.past_stats, block.b, t, G * kGateStats + 1), i % G, G, a.conv_eps, s.norm,
                       a.options);
      alpha[i / G][i % G] = f.alpha;
      beta[i / G][i % G] = f.beta;
    }
    for (int i = thread; i < tokens + halo; i += kSweepThreads)
      reach[i] = block.t0 + i < s.tokens ? static_cast<int>(reach_back(s, block.b, block.t0 + i, halo)) : 0;
    __syncthreads();

    // From here on positions are counted from t0.
    const int64_t token0 = block.b * s.tokens + block.t0;
    const auto used = [&](int p) { return p < tokens + halo && !skipped(beta[p + halo][0]); };
    const auto load_value_from = [&](const K* value, int64_t position0, int p) {
      return active && used(p) ? load<N, kVector>(value + (position0 + p) * s.dim + d, available) : zero_pack<K, N>();
    };
    const auto load_value = [&](int p) { return load_value_from(a.value, token0, p); };
    const auto load_grad = [&](int p, int g) {
      return active && used(p) ? load<N, kVector>(a.grad_out + (token0 + p) * pitch + g * s.dim + d, available)
                               : zero_pack<H, N>();
    };
    for (int r = 0; r < dilation && r < tokens; ++r) {
      Pack<K, N> v[kTaps];         // at p - halo, ..., p - dilation, p
      A grad_z[G][kTaps][N] = {};  // silu'(z) * grad_out, at the same positions
      unsigned bits[kTaps] = {};   // bit j: tap j counts there
      // Before the first block of a row lies the past.
      const K* before = block.t0 == 0 ? a.past_value + (block.b + 1) * s.past * s.dim : a.value + token0 * s.dim;
#pragma unroll
      for (int j = 1; j < kTaps; ++j) v[j] = load_value_from(before, 0, r - (kTaps - j) * dilation);
      Pack<K, N> next_value = load_value(r);
      Pack<H, N> next_grad[G];
#pragma unroll
      for (int g = 0; g < G; ++g) next_grad[g] = load_grad(r, g);
      for (int p = r; p < tokens + halo; p += dilation) {
#pragma unroll
        for (int j = 0; j + 1 < kTaps; ++j) {
          v[j] = v[j + 1];
          bits[j] = bits[j + 1];
#pragma unroll
          for (int g = 0; g < G; ++g)
#pragma unroll
            for (int n = 0; n < N; ++n) grad_z[g][j][n] = grad_z[g][j + 1][n];
        }
        v[kTaps - 1] = next_value;
        Pack<H, N> grad[G];
#pragma unroll
        for (int g = 0; g < G; ++g) grad[g] = next_grad[g];
        next_value = load_value(p + dilation);
#pragma unroll
        for (int g = 0; g < G; ++g) next_grad[g] = load_grad(p + dilation, g);

        unsigned now = 0;
        if (used(p)) {
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            const int back = (kTaps - 1 - j) * dilation;
            if (j >= skip && back <= reach[p] && used(p - back)) now |= 1u << j;
          }
        }
        bits[kTaps - 1] = now;
        const int e = p - halo;  // the token whose last reader is p
        const bool emit = e >= 0 && used(e);
        const int64_t row = (token0 + e) * G;
        A grad_value[N] = {};
#pragma unroll
        for (int g = 0; g < G; ++g) {
          A z[N] = {}, x[kTaps][N] = {};
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (!(now >> j & 1)) continue;
            const A factor = beta[p + halo - (kTaps - 1 - j) * dilation][g];
#pragma unroll
            for (int n = 0; n < N; ++n) {
              x[j][n] = v[j][n] * factor;
              z[n] += taps[g][j][n] * x[j][n];
            }
          }
#pragma unroll
          for (int n = 0; n < N; ++n)
            grad_z[g][kTaps - 1][n] = now ? (s.silu ? silu_slope(z[n]) : A(1)) * grad[g][n] : A(0);
          if (p < tokens) {
#pragma unroll
            for (int j = 0; j < kTaps; ++j)
              if (now >> j & 1)
#pragma unroll
                for (int n = 0; n < N; ++n) S[g][j][n] += grad_z[g][kTaps - 1][n] * x[j][n];
          }
          if (!emit) continue;
          A q[N] = {}, P = 0, Q = 0;
#pragma unroll
          for (int j = 0; j < kTaps; ++j)
            if (bits[kTaps - 1 - j] >> j & 1)
#pragma unroll
              for (int n = 0; n < N; ++n) q[n] += taps[g][j][n] * grad_z[g][kTaps - 1 - j][n];
          const auto dy = load_grad(e, g);
          const A own_alpha = alpha[e + halo][g], own_beta = beta[e + halo][g];
#pragma unroll
          for (int n = 0; n < N; ++n) {
            grad_value[n] += own_alpha * dy[n] + own_beta * q[n];
            P += dy[n] * v[0][n];
            Q += q[n] * v[0][n];
          }
          P = warp_sum(P);
          Q = warp_sum(Q);
          if (thread % kWarp == 0 && slice < scratch.slices) {
            A* pair = scratch.pair(row + g, slice);
            pair[0] = P;
            pair[1] = Q;
          }
        }
        if (emit && active)
          store<kVector>(scratch.grad_value + (token0 + e) * s.dim + d, narrow<A, N>(grad_value), available);
      }
    }
  }
  if (!active) return;
#pragma unroll
  for (int g = 0; g < G; ++g)
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (j >= skip)
        store<kVector>(a.conv_partials + ((part * s.taps + j - skip) * G + g) * s.dim + d, narrow<A, N>(S[g][j]),
                       available);
}

// The same for any shape. Block = (token; kSweepSlices slices); a lane takes the columns 32 apart, everything is
// computed where it is needed.
template <typename H, typename K>
__global__ void __launch_bounds__(kSweepThreads) gate_conv_sweep_any_kernel(const GateConvBackward<H, K> a) {
  using A = accumulate_t<H>;
  const ShortConvShape s = a.shape;
  const Scratch<H, K> scratch(a);
  const int64_t token = blockIdx.x, b = token / s.tokens, t = token % s.tokens, lane = threadIdx.x % kWarp;
  const int64_t slice = int64_t{blockIdx.y} * kSweepSlices + threadIdx.x / kWarp;
  if (slice >= scratch.slices || !counts(s, b, t)) return;  // whole warps
  A grad_value[kSlice / kWarp] = {};
  for (int64_t g = 0; g < s.branches; ++g) {
    const Source<H, K> source{s, a.options, a.value, a.past_value, a.taps, a.stats, a.past_stats, a.conv_eps, b, g};
    const Factors<A> own = source.factors(t);
    A P = 0, Q = 0;
#pragma unroll
    for (int u = 0; u < kSlice / kWarp; ++u) {
      const int64_t d = slice * kSlice + u * kWarp + lane;
      if (d >= s.dim) continue;
      A q = 0;
      for (int64_t j = 0; j < s.taps; ++j) {
        const int64_t ahead = (s.taps - 1 - j) * s.dilation;
        if (!counts(s, b, t + ahead)) continue;
        const int64_t reach = reach_back(s, b, t + ahead, source.limit());
        if (ahead <= reach) q += source.tap(j, d) * source.grad_z(a.grad_out, t + ahead, d, reach);
      }
      const A dy = static_cast<A>(a.grad_out[(token * s.branches + g) * s.dim + d]), v = source.value_at(t, d);
      grad_value[u] += own.alpha * dy + own.beta * q;
      P += dy * v;
      Q += q * v;
    }
    P = warp_sum(P);
    Q = warp_sum(Q);
    if (lane == 0) {
      A* pair = scratch.pair(token * s.branches + g, slice);
      pair[0] = P;
      pair[1] = Q;
    }
  }
#pragma unroll
  for (int u = 0; u < kSlice / kWarp; ++u) {
    const int64_t d = slice * kSlice + u * kWarp + lane;
    if (d < s.dim) scratch.grad_value[token * s.dim + d] = grad_value[u];
  }
}

// S for any shape. Block = (part; branch), a thread a column at a time.
template <typename H, typename K>
__global__ void __launch_bounds__(kSweepThreads) gate_conv_taps_any_kernel(const GateConvBackward<H, K> a) {
  using A = accumulate_t<H>;
  const ShortConvShape s = a.shape;
  const int64_t part = blockIdx.x, blocks = s.batch * ((s.tokens + kConvBlock - 1) / kConvBlock);
  for (int64_t g = blockIdx.y; g < s.branches; g += gridDim.y) {
    A* S = a.conv_partials + (part * s.taps * s.branches + g) * s.dim;
    for (int64_t d = threadIdx.x; d < s.dim; d += kSweepThreads) {
      for (int64_t j = 0; j < s.taps; ++j) S[j * s.branches * s.dim + d] = 0;
      for (int64_t index = blocks * part / a.parts; index < blocks * (part + 1) / a.parts; ++index) {
        const TimeBlock block(s, index);
        const Source<H, K> source{s,       a.options,    a.value,    a.past_value, a.taps,
                                  a.stats, a.past_stats, a.conv_eps, block.b,      g};
        for (int64_t t = block.t0; t < block.t1; ++t) {
          if (!counts(s, block.b, t)) continue;
          const int64_t reach = reach_back(s, block.b, t, source.limit());
          const A grad_z = source.grad_z(a.grad_out, t, d, reach);
          for (int64_t j = 0; j < s.taps; ++j) {
            const int64_t back = (s.taps - 1 - j) * s.dilation;
            if (back <= reach && counts(s, block.b, t - back))
              S[j * s.branches * s.dim + d] += grad_z * (source.value_at(t - back, d) * source.factors(t - back).beta);
          }
        }
      }
    }
  }
}

// ---- Backward, second half: through the gate ----

template <typename A> struct Coefficients {
  Slope<A> slope;
  A grad_alpha;  // 0 where the score passes no gradient
  A pull;        // beta^3 * Q / D: of value in grad_value
};

// By one warp: adds up the slices.
template <typename H, typename K>
__device__ __forceinline__ Coefficients<accumulate_t<H>> coefficients_of(const GateConvBackward<H, K>& a,
                                                                         const Scratch<H, K>& scratch, int64_t token,
                                                                         int64_t g) {
  using A = accumulate_t<H>;
  const int64_t G = a.shape.branches;
  A P = 0, Q = 0;
  for (int64_t i = threadIdx.x % kWarp; i < scratch.slices; i += kWarp) {
    const A* pair = scratch.pair(token * G + g, i);
    P += pair[0];
    Q += pair[1];
  }
  P = warp_sum(P);
  Q = warp_sum(Q);
  const A* stats = a.stats + token * (G * kGateStats + 1);
  const Factors<A> f = factors_of(stats, g, G, a.conv_eps, a.shape.norm, a.options);
  Coefficients<A> c;
  c.slope = slope_of(stats + g * kGateStats, a.shape.dim, a.options);
  c.grad_alpha = c.slope.score == 0 ? A(0) : P + (a.shape.norm ? a.conv_eps * f.rx * f.rx * f.rx : A(1)) * Q;
  c.pull = a.shape.norm ? f.beta * f.beta * f.beta * Q / A(a.shape.dim) : A(0);
  return c;
}

// Block p: the tokens of part p, one after the other; a warp prepares the coefficients of a branch, then thread c goes
// over its N neighbouring columns in every branch. kBranches > 0: that many branches, one group of columns a thread, R
// in registers. kBranches == 0: any number of both, R in the partials.
template <typename H, typename K, int N, bool kVector, int kBranches>
__global__ void __launch_bounds__(kColumnThreads) gate_conv_gate_kernel(const GateConvBackward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr bool kInRegisters = kBranches > 0;
  ENGRAM_DYNAMIC_SHARED(Coefficients<A>, shared);  // [2, G]: tokens take turns
  const ShortConvShape s = a.shape;
  const Scratch<H, K> scratch(a);
  const int64_t part = blockIdx.x, G = kInRegisters ? kBranches : s.branches, D = s.dim, own = int64_t{threadIdx.x} * N;
  const int64_t step = int64_t{blockDim.x} * N;
  A R[kInRegisters ? kBranches : 1][N] = {};
  if (!kInRegisters && a.gate_partials)
    for (int64_t g = 0; g < G; ++g)
      for (int64_t d = own; d < D; d += step)
        store<kVector>(a.gate_partials + (part * G + g) * D + d, zero_pack<A, N>(), D - d);

  int turn = 0;
  const int64_t blocks = s.batch * ((s.tokens + kConvBlock - 1) / kConvBlock);
  for (int64_t index = blocks * part / a.parts; index < blocks * (part + 1) / a.parts; ++index) {
    const TimeBlock block(s, index);
    for (int64_t t = block.t0; t < block.t1; ++t) {
      const int64_t token = block.b * s.tokens + t;
      if (!counts(s, block.b, t)) {
        for (int64_t d = own; d < D; d += step) {
          for (int64_t g = 0; g < G; ++g) {
            const int64_t at = (token * G + g) * D + d;
            store<kVector>(a.grad_hidden + at,
                           a.options.residual ? load<N, kVector>(a.grad_out + at, D - d) : zero_pack<H, N>(), D - d);
            store<kVector>(a.grad_key + at, zero_pack<K, N>(), D - d);
          }
          store<kVector>(a.grad_value + token * D + d, zero_pack<K, N>(), D - d);
        }
        continue;
      }
      Coefficients<A>* coefficients = shared + turn * G;
      for (int64_t g = threadIdx.x / kWarp; g < G; g += blockDim.x / kWarp) {
        const Coefficients<A> c = coefficients_of(a, scratch, token, g);
        if (threadIdx.x % kWarp == 0) coefficients[g] = c;
      }
      __syncthreads();
      turn ^= 1;

      for (int64_t d = own; d < D; d += step) {
        const int64_t available = D - d;
        A pull = 0;
        const auto branch = [&](int64_t g, A(&sum)[N]) {
          const Coefficients<A> c = coefficients[g];
          const int64_t at = (token * G + g) * D + d;
          const auto h = load<N, kVector, Reuse::no>(a.hidden + at, available);
          const auto k = load<N, kVector, Reuse::no>(a.key + at, available);
          const auto dy =
              a.options.residual ? load<N, kVector, Reuse::no>(a.grad_out + at, available) : zero_pack<H, N>();
          A grad_h[N], grad_k[N], w[N];
          if (a.weight) {
            const auto weight = load<N, kVector>(a.weight + g * D + d, available);
#pragma unroll
            for (int i = 0; i < N; ++i) w[i] = weight[i];
          } else {
#pragma unroll
            for (int i = 0; i < N; ++i) w[i] = 1;
          }
#pragma unroll
          for (int i = 0; i < N; ++i)
            sum[i] += row_gradients(c.slope, c.grad_alpha, w[i], A(h[i]), A(k[i]), A(dy[i]), grad_h[i], grad_k[i]);
          store<kVector>(a.grad_hidden + at, narrow<H, N>(grad_h), available);
          store<kVector>(a.grad_key + at, narrow<K, N>(grad_k), available);
          pull += c.pull;
        };
        if constexpr (kInRegisters) {
#pragma unroll
          for (int g = 0; g < kBranches; ++g) branch(g, R[g]);
        } else {
          for (int64_t g = 0; g < G; ++g) {
            A sum[N] = {};
            branch(g, sum);
            if (a.gate_partials)
#pragma unroll
              for (int i = 0; i < N; ++i)
                if (i < available) a.gate_partials[(part * G + g) * D + d + i] += sum[i];
          }
        }
        const auto v = load<N, kVector, Reuse::no>(a.value + token * D + d, available);
        const auto partial = load<N, kVector, Reuse::no>(scratch.grad_value + token * D + d, available);
        A grad_value[N];
#pragma unroll
        for (int i = 0; i < N; ++i) grad_value[i] = partial[i] - pull * v[i];
        store<kVector>(a.grad_value + token * D + d, narrow<K, N>(grad_value), available);
      }
    }
  }
  if constexpr (kInRegisters) {
    if (a.gate_partials && own < D)
#pragma unroll
      for (int g = 0; g < kBranches; ++g)
        store<kVector>(a.gate_partials + (part * kBranches + g) * D + own, narrow<A, N>(R[g]), D - own);
  }
}

}  // namespace

template <typename H, typename K> cudaError_t gate_conv_forward(const GateConvForward<H, K>& a, cudaStream_t stream) {
  const ShortConvShape& s = a.shape;
  constexpr int N = kLaneElements<H>;
  const int64_t tokens = s.batch * s.tokens, rows = tokens * s.branches;
  if (tokens == 0) return cudaSuccess;
  if (rows > 0x7fffffff) return cudaErrorInvalidValue;
  const bool vector = s.dim % N == 0 && aligned(16, 0, {a.hidden, a.key, a.value, a.past_value, a.weight, a.out});
  const dim3 stats_grid = grid_for(tokens * (s.branches + 1), kThreads / kWarp);
  if (vector) ENGRAM_LAUNCH((gate_conv_stats_kernel<H, K, true>), stats_grid, dim3(kThreads), 0, stream, a);
  else ENGRAM_LAUNCH((gate_conv_stats_kernel<H, K, false>), stats_grid, dim3(kThreads), 0, stream, a);
  if (rows == 0 || s.dim == 0) return ENGRAM_LAUNCH_ERROR();

  const int64_t lanes = divide_up(s.dim, N), groups = divide_up(lanes, kThreads);
  if (few_taps(s) && groups <= 65535) {
    dim3 grid = grid_for(s.batch * divide_up(s.tokens, kTile) * s.branches, 1);
    grid.y = static_cast<unsigned>(groups);
    const dim3 block(whole_warps(divide_up(lanes, groups)));
    if (vector && s.past == 0) ENGRAM_LAUNCH((gate_conv_forward_kernel<H, K, true, false>), grid, block, 0, stream, a);
    else if (vector) ENGRAM_LAUNCH((gate_conv_forward_kernel<H, K, true, true>), grid, block, 0, stream, a);
    else if (s.past == 0) ENGRAM_LAUNCH((gate_conv_forward_kernel<H, K, false, false>), grid, block, 0, stream, a);
    else ENGRAM_LAUNCH((gate_conv_forward_kernel<H, K, false, true>), grid, block, 0, stream, a);
  } else {
    ENGRAM_LAUNCH((gate_conv_any_kernel<H, K>), grid_for(rows, 1), dim3(kThreads), 0, stream, a);
  }
  return ENGRAM_LAUNCH_ERROR();
}

template <typename H, typename K> cudaError_t gate_conv_backward(const GateConvBackward<H, K>& a, cudaStream_t stream) {
  const ShortConvShape& s = a.shape;
  const int64_t tokens = s.batch * s.tokens, D = s.dim, G = s.branches;
  if (a.parts == 0 || D == 0) return cudaSuccess;
  const int64_t shared_bytes = 2 * G * static_cast<int64_t>(sizeof(Coefficients<accumulate_t<H>>));
  const int64_t slices = divide_up(D, kSlice), groups = divide_up(slices, kSweepSlices);
  if (tokens > 0x7fffffff || shared_bytes > 48 * 1024 || groups > 65535) return cudaErrorInvalidValue;
  constexpr int N = sizeof(H) == 8 ? 2 : 4;
  const bool vector =
      D % kLaneElements<H> == 0 && aligned(16, 0,
                                           {a.grad_out, a.hidden, a.key, a.value, a.past_value, a.weight, a.grad_hidden,
                                            a.grad_key, a.grad_value, a.gate_partials, a.conv_partials, a.scratch});

  dim3 sweep_grid = grid_for(a.parts, 1);
  sweep_grid.y = static_cast<unsigned>(groups);
  if (vector && few_taps(s) && G == 1) {
    ENGRAM_LAUNCH((gate_conv_sweep_kernel<H, K, 1>), sweep_grid, dim3(kSweepThreads), 0, stream, a);
  } else if (vector && few_taps(s) && G == 4) {
    ENGRAM_LAUNCH((gate_conv_sweep_kernel<H, K, 4>), sweep_grid, dim3(kSweepThreads), 0, stream, a);
  } else {
    dim3 grid = grid_for(tokens, 1), taps_grid = grid_for(a.parts, 1);
    grid.y = static_cast<unsigned>(groups);
    taps_grid.y = static_cast<unsigned>(G < 65535 ? G : 65535);
    if (tokens > 0) ENGRAM_LAUNCH((gate_conv_sweep_any_kernel<H, K>), grid, dim3(kSweepThreads), 0, stream, a);
    if (G > 0) ENGRAM_LAUNCH((gate_conv_taps_any_kernel<H, K>), taps_grid, dim3(kSweepThreads), 0, stream, a);
  }

  const dim3 grid = grid_for(a.parts, 1);
  const int64_t lanes = divide_up(D, N);
  const dim3 block(whole_warps(lanes < kThreads ? lanes : kThreads)), own_block(whole_warps(lanes));
  const size_t bytes = static_cast<size_t>(shared_bytes > 0 ? shared_bytes : 1);
  if (vector && lanes <= kColumnThreads && G == 1)
    ENGRAM_LAUNCH((gate_conv_gate_kernel<H, K, N, true, 1>), grid, own_block, bytes, stream, a);
  else if (vector && lanes <= kColumnThreads && G == 4)
    ENGRAM_LAUNCH((gate_conv_gate_kernel<H, K, N, true, 4>), grid, own_block, bytes, stream, a);
  else if (vector) ENGRAM_LAUNCH((gate_conv_gate_kernel<H, K, N, true, 0>), grid, block, bytes, stream, a);
  else ENGRAM_LAUNCH((gate_conv_gate_kernel<H, K, N, false, 0>), grid, block, bytes, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

#define INSTANTIATE(H, K)                                                                   \
  template cudaError_t gate_conv_forward<H, K>(const GateConvForward<H, K>&, cudaStream_t); \
  template cudaError_t gate_conv_backward<H, K>(const GateConvBackward<H, K>&, cudaStream_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)

}  // namespace engram::cuda
