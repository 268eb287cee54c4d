#include "conv.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnThreads = 640;  // of kernels whose threads own columns: leaves a thread about 100 registers
constexpr int kBatch = 4;            // rows between two barriers

// ---- Forward ----

// Block = (batch row, tile of kTile tokens, branch); thread c owns N neighbouring columns and their taps. The block
// walks through the tile and the halo before it kBatch rows at a time. While the rows of one batch are squared and
// summed, the batch before is convolved, whose scales are known by then: one barrier a batch, and loads are asked for a
// batch ahead. The rows that the older taps need were read a moment ago and come out of the cache.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kColumnThreads) short_conv_forward_kernel(const ShortConvForward<T> a) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  ENGRAM_SHARED(A, scale, [kMaxHalo + kTile]);  // rstd of position t0 - halo + i, or skipped
  ENGRAM_SHARED(int, reach, [kTile]);
  ENGRAM_SHARED(A, sums, [2][kBatch][kMaxWarps]);
  const ShortConvShape s = a.shape;
  const int halo = (kTaps - 1) * static_cast<int>(s.dilation), dilation = static_cast<int>(s.dilation);
  const int skip = kTaps - static_cast<int>(s.taps), thread = static_cast<int>(threadIdx.x);
  const int64_t tiles = (s.tokens + kTile - 1) / kTile;
  const int64_t g = blockIdx.x % s.branches, tile = blockIdx.x / s.branches % tiles,
                b = blockIdx.x / s.branches / tiles;
  const int64_t t0 = tile * kTile, pitch = s.branches * s.dim, d = int64_t{threadIdx.x} * N, available = s.dim - d;
  const int tokens = static_cast<int>(s.tokens - t0 < kTile ? s.tokens - t0 : kTile), rows = halo + tokens;
  const bool active = available > 0;
  const int64_t origin = ((b * s.tokens + t0 - halo) * s.branches + g) * s.dim + d;  // of row 0 in x and out
  A* rstd = a.rstd + (b * s.tokens + t0) * s.branches + g;

  A taps[kTaps][N];
  load_taps<T>(a.taps, s, g, d, taps);
  for (int i = thread; i < rows; i += static_cast<int>(blockDim.x)) {
    const bool used = counts(s, b, t0 - halo + i);
    scale[i] = used ? A(1) : A(-1);
    if (i >= halo && !(used && s.norm)) rstd[(i - halo) * s.branches] = used ? A(1) : A(0);
  }
  for (int i = thread; i < tokens; i += static_cast<int>(blockDim.x))
    reach[i] = static_cast<int>(reach_back(s, b, t0 + i, halo));
  __syncthreads();

  const auto load_row = [&](int i) { return load<N, kVector>(a.x + origin + i * pitch, available); };
  const auto convolve = [&](int first) {
    if (!active) return;
#pragma unroll
    for (int q = 0; q < kBatch; ++q) {
      const int i = first + q, token = i - halo;
      if (token < 0 || token >= tokens) continue;
      const auto x = load_row(i);
      if (skipped(scale[i])) {
        store<kVector>(a.out + origin + i * pitch, s.residual ? x : zero_pack<T, N>(), available);
        continue;
      }
      A z[N] = {};
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        const int back = (kTaps - 1 - j) * dilation;
        if (j < skip || back > reach[token] || skipped(scale[i - back])) continue;
        const A factor = scale[i - back];
        const auto tap = back == 0 ? x : load_row(i - back);
#pragma unroll
        for (int n = 0; n < N; ++n) z[n] += taps[j][n] * (tap[n] * factor);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const A y = s.silu ? z[n] * sigmoid(z[n]) : z[n];
        z[n] = s.residual ? y + x[n] : y;
      }
      store<kVector>(a.out + origin + i * pitch, narrow<T, N>(z), available);
    }
  };
  const int batches = (rows + kBatch - 1) / kBatch;
  if (!s.norm) {
    for (int m = 0; m < batches; ++m) convolve(m * kBatch);
    return;
  }

  Pack<T, N> next[kBatch];
  const auto load_batch = [&](int m) {
#pragma unroll
    for (int q = 0; q < kBatch; ++q) {
      const int i = m * kBatch + q;
      next[q] = active && i < rows && counts(s, b, t0 - halo + i) ? load_row(i) : zero_pack<T, N>();
    }
  };
  load_batch(0);
  for (int m = 0; m <= batches; ++m) {
    const int turn = m % 2;
    if (m < batches) {
      A squares[kBatch] = {};
#pragma unroll
      for (int q = 0; q < kBatch; ++q)
#pragma unroll
        for (int n = 0; n < N; ++n) squares[q] += next[q][n] * next[q][n];
      put_warp_sums(squares, sums[turn]);
    }
    __syncthreads();
    if (m + 1 < batches) load_batch(m + 1);
    if (m > 0) convolve((m - 1) * kBatch);
    if (m < batches && thread < kWarp) {  // the scales of this batch, in time for the next barrier
#pragma unroll
      for (int q = 0; q < kBatch; ++q) {
        const int i = m * kBatch + q;
        const A total = block_total(sums[turn], q);
        if (thread != q || i >= rows || skipped(scale[i])) continue;
        scale[i] = reciprocal_root(total / A(s.dim) + a.eps);
        if (i >= halo) rstd[(i - halo) * s.branches] = scale[i];
      }
    }
  }
}

// Any number of taps, any dilation, any number of columns: first rstd, one warp a row ...
template <typename T> __global__ void __launch_bounds__(kThreads) short_conv_rstd_kernel(const ShortConvForward<T> a) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  const ShortConvShape s = a.shape;
  const int64_t lane = threadIdx.x % kWarp, rows = s.batch * s.tokens * s.branches;
  for (int64_t row = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; row < rows;
       row += int64_t{gridDim.x} * (kThreads / kWarp)) {
    const bool used = !s.mask || s.mask[row / s.branches];
    A sum = 0;
    if (used && s.norm)
      for (int64_t d = lane * N; d < s.dim; d += kWarp * N)
        for (int64_t n = d; n < d + N && n < s.dim; ++n)
          sum += static_cast<A>(a.x[row * s.dim + n]) * static_cast<A>(a.x[row * s.dim + n]);
    sum = warp_sum(sum);
    if (lane == 0) a.rstd[row] = !used ? A(0) : s.norm ? reciprocal_root(sum / A(s.dim) + a.eps) : A(1);
  }
}

// The convolution of one element; x_column points to it in position 0 of its batch row.
template <typename T, typename A>
__device__ __forceinline__ A convolve_any(const ShortConvShape& s, const T* x_column, const A* taps_column,
                                          const A* rstd_column, int64_t b, int64_t t, int64_t reach) {
  A z = 0;
  for (int64_t j = 0; j < s.taps; ++j) {
    const int64_t back = (s.taps - 1 - j) * s.dilation, p = t - back;
    if (back > reach || !counts(s, b, p)) continue;
    z += taps_column[j * s.branches * s.dim] *
         (static_cast<A>(x_column[p * s.branches * s.dim]) * rstd_column[p * s.branches]);
  }
  return z;
}

// ... then a block a row of x, each thread a column at a time.
template <typename T> __global__ void __launch_bounds__(kThreads) short_conv_any_kernel(const ShortConvForward<T> a) {
  using A = accumulate_t<T>;
  ENGRAM_SHARED(int64_t, reach, [1]);
  const ShortConvShape s = a.shape;
  const int64_t g = blockIdx.x % s.branches, t = blockIdx.x / s.branches % s.tokens,
                b = blockIdx.x / s.branches / s.tokens;
  const bool used = counts(s, b, t);
  if (threadIdx.x == 0) reach[0] = used ? reach_back(s, b, t, (s.taps - 1) * s.dilation) : 0;
  __syncthreads();
  const int64_t row = (b * s.tokens + t) * s.branches + g, column = (b * s.tokens * s.branches + g) * s.dim;
  for (int64_t d = threadIdx.x; d < s.dim; d += kThreads) {
    const T x = a.x[row * s.dim + d];
    T y = s.residual ? x : T(0.0f);
    if (used) {
      const A z = convolve_any(s, a.x + column + d, a.taps + g * s.dim + d, a.rstd + b * s.tokens * s.branches + g, b,
                               t, reach[0]);
      const A activated = s.silu ? z * sigmoid(z) : z;
      y = static_cast<T>(s.residual ? activated + static_cast<A>(x) : activated);
    }
    a.out[row * s.dim + d] = y;
  }
}

// ---- Backward ----

// Block = (part, branch); thread c owns N neighbouring columns, their taps and their S. A block of tokens is swept once
// for every residue r modulo the dilation: steps s = t0 + r, + dilation, ... need one new row of x and of grad_out
// each, for the last kTaps rows of x and values of a = silu'(z) * grad_out stay in registers. Step s finishes the
// gradient of token s - halo, but for the sum over its columns: that takes a barrier, shared by kBatch steps.
template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads) short_conv_backward_kernel(const ShortConvBackward<T> a) {
  using A = accumulate_t<T>;
  constexpr bool kVector = true;
  ENGRAM_SHARED(A, scale, [kConvBlock + 2 * kMaxHalo]);  // of position t0 - halo + i, or skipped
  ENGRAM_SHARED(int, reach, [kConvBlock + kMaxHalo]);    // of position t0 + i
  ENGRAM_SHARED(A, sums, [2][kBatch][kMaxWarps]);
  const ShortConvShape s = a.shape;
  const int dilation = static_cast<int>(s.dilation), halo = (kTaps - 1) * dilation,
            skip = kTaps - static_cast<int>(s.taps);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int64_t part = blockIdx.x / s.branches, g = blockIdx.x % s.branches, pitch = s.branches * s.dim;
  const int64_t d = int64_t{threadIdx.x} * N, available = s.dim - d;
  const bool active = available > 0;
  const A inverse_dim = A(1) / A(s.dim);

  A taps[kTaps][N], S[kTaps][N] = {};
  load_taps<T>(a.taps, s, g, d, taps);
  int turn = 0;
  const int64_t blocks = s.batch * ((s.tokens + kConvBlock - 1) / kConvBlock);
  for (int64_t index = blocks * part / a.parts; index < blocks * (part + 1) / a.parts; ++index) {
    const TimeBlock block(s, index);
    const int tokens = static_cast<int>(block.t1 - block.t0);
    __syncthreads();  // the block before is done with scale and reach
    for (int i = thread; i < tokens + 2 * halo; i += threads) {
      const int64_t t = block.t0 - halo + i;
      scale[i] = !counts(s, block.b, t) ? A(-1) : s.norm ? a.rstd[(block.b * s.tokens + t) * s.branches + g] : A(1);
    }
    for (int i = thread; i < tokens + halo; i += threads)
      reach[i] = block.t0 + i < s.tokens ? static_cast<int>(reach_back(s, block.b, block.t0 + i, halo)) : 0;
    __syncthreads();

    // From here on positions are counted from t0.
    const int64_t origin = ((block.b * s.tokens + block.t0) * s.branches + g) * s.dim + d;
    const auto scale_at = [&](int p) { return scale[p + halo]; };
    const auto load_x = [&](int p) {
      return active && !skipped(scale_at(p)) ? load<N, kVector>(a.x + origin + p * pitch, available)
                                             : zero_pack<T, N>();
    };
    const auto load_grad = [&](int p) {
      return active && !skipped(scale_at(p)) ? load<N, kVector>(a.grad_out + origin + p * pitch, available)
                                             : zero_pack<T, N>();
    };
    for (int r = 0; r < dilation && r < tokens; ++r) {
      Pack<T, N> x[kTaps];        // at s - halo, ..., s - dilation, s
      A grad_z[kTaps][N] = {};    // a, at the same positions
      unsigned used[kTaps] = {};  // bit j: tap j counts there
#pragma unroll
      for (int j = 1; j < kTaps; ++j) x[j] = load_x(r - (kTaps - j) * dilation);
      const int steps = (tokens - r + dilation - 1) / dilation + kTaps - 1;
      for (int first = 0; first < steps; first += kBatch) {
        Pack<T, N> new_x[kBatch], new_grad[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int p = r + (first + u) * dilation;
          const bool inside = p < tokens + halo;
          new_x[u] = inside ? load_x(p) : zero_pack<T, N>();
          new_grad[u] = inside ? load_grad(p) : zero_pack<T, N>();
        }
        A q[kBatch][N], dot[kBatch] = {};
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int p = r + (first + u) * dilation;
#pragma unroll
          for (int j = 0; j + 1 < kTaps; ++j) {
            x[j] = x[j + 1];
            used[j] = used[j + 1];
#pragma unroll
            for (int n = 0; n < N; ++n) grad_z[j][n] = grad_z[j + 1][n];
          }
          x[kTaps - 1] = new_x[u];

          // a of position p, and its share of S where p is one of the block's own.
          unsigned bits = 0;
          A z[N] = {};
          if (p < tokens + halo && !skipped(scale_at(p))) {
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
              const int back = (kTaps - 1 - j) * dilation;
              if (j < skip || back > reach[p] || skipped(scale_at(p - back))) continue;
              bits |= 1u << j;
              const A factor = scale_at(p - back);
#pragma unroll
              for (int n = 0; n < N; ++n) z[n] += taps[j][n] * (x[j][n] * factor);
            }
          }
          used[kTaps - 1] = bits;
#pragma unroll
          for (int n = 0; n < N; ++n)
            grad_z[kTaps - 1][n] = bits ? (s.silu ? silu_slope(z[n]) : A(1)) * new_grad[u][n] : A(0);
          if (p < tokens) {
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
              if (!(bits >> j & 1)) continue;
              const A factor = scale_at(p - (kTaps - 1 - j) * dilation);
#pragma unroll
              for (int n = 0; n < N; ++n) S[j][n] += grad_z[kTaps - 1][n] * (x[j][n] * factor);
            }
          }

          // q of the oldest position: its own tap is the last one, the newest position reads it with its first.
#pragma unroll
          for (int n = 0; n < N; ++n) q[u][n] = 0;
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (!(used[kTaps - 1 - j] >> j & 1)) continue;
#pragma unroll
            for (int n = 0; n < N; ++n) q[u][n] += taps[j][n] * grad_z[kTaps - 1 - j][n];
          }
          if (s.norm && p >= halo && p < tokens + halo && !skipped(scale_at(p - halo))) {
            const A factor = scale_at(p - halo);
#pragma unroll
            for (int n = 0; n < N; ++n) dot[u] += q[u][n] * (x[0][n] * factor);
          }
        }

        if (s.norm) {
          put_warp_sums(dot, sums[turn]);
          __syncthreads();
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const int p = r + (first + u - (kTaps - 1)) * dilation;
          const A total = s.norm ? block_total(sums[turn], u) : A(0);
          if (!active || p < 0 || p >= tokens) continue;
          const int64_t at = origin + p * pitch;
          const auto passed_on = s.residual ? load<N, kVector>(a.grad_out + at, available) : zero_pack<T, N>();
          if (skipped(scale_at(p))) {
            store<kVector>(a.grad_x + at, passed_on, available);
            continue;
          }
          A grad[N];
          if (s.norm) {
            const auto row = load<N, kVector>(a.x + at, available);
            const A rstd = scale_at(p), pull = total * inverse_dim * rstd;
#pragma unroll
            for (int n = 0; n < N; ++n) grad[n] = rstd * (q[u][n] - row[n] * pull);
          } else {
#pragma unroll
            for (int n = 0; n < N; ++n) grad[n] = q[u][n];
          }
          if (s.residual)
#pragma unroll
            for (int n = 0; n < N; ++n) grad[n] += passed_on[n];
          store<kVector>(a.grad_x + at, narrow<T, N>(grad), available);
        }
        turn ^= 1;
      }
    }
  }
  if (!active) return;
#pragma unroll
  for (int j = 0; j < kTaps; ++j)
    if (j >= skip)
      store<kVector>(a.partials + ((part * s.taps + j - skip) * s.branches + g) * s.dim + d, narrow<A, N>(S[j]),
                     available);
}

// The same for any number of taps, any dilation, any number of columns: each thread a column at a time, everything
// recomputed where it is needed, S in the partials. Shared: how far back each of the positions reaches that read a
// token.
template <typename T>
__global__ void __launch_bounds__(kThreads) short_conv_backward_any_kernel(const ShortConvBackward<T> a) {
  using A = accumulate_t<T>;
  ENGRAM_DYNAMIC_SHARED(int64_t, reach);  // [2, K]: of position t + j * dilation; two tokens take turns
  ENGRAM_SHARED(A, sums, [2][1][kMaxWarps]);
  const ShortConvShape s = a.shape;
  const int64_t part = blockIdx.x / s.branches, g = blockIdx.x % s.branches, pitch = s.branches * s.dim, K = s.taps;
  A* S = a.partials + (part * K * s.branches + g) * s.dim;
  for (int64_t j = 0; j < K; ++j)
    for (int64_t d = threadIdx.x; d < s.dim; d += kThreads) S[j * pitch + d] = 0;

  int turn = 0;
  const int64_t blocks = s.batch * ((s.tokens + kConvBlock - 1) / kConvBlock);
  for (int64_t index = blocks * part / a.parts; index < blocks * (part + 1) / a.parts; ++index) {
    const TimeBlock block(s, index);
    const int64_t b = block.b, origin = (b * s.tokens * s.branches + g) * s.dim;
    const A* rstd = a.rstd + b * s.tokens * s.branches + g;
    for (int64_t t = block.t0; t < block.t1; ++t) {
      const int64_t row = origin + t * pitch;
      if (!counts(s, b, t)) {
        for (int64_t d = threadIdx.x; d < s.dim; d += kThreads)
          a.grad_x[row + d] = s.residual ? a.grad_out[row + d] : T(0.0f);
        continue;
      }
      int64_t* own_reach = reach + turn * K;
      for (int64_t j = threadIdx.x; j < K; j += kThreads)
        own_reach[j] = t + j * s.dilation < s.tokens ? reach_back(s, b, t + j * s.dilation, (K - 1) * s.dilation) : 0;
      __syncthreads();

      const auto grad_z = [&](int64_t p, int64_t d, int64_t back) {
        A slope = 1;
        if (s.silu) slope = silu_slope(convolve_any(s, a.x + origin + d, a.taps + g * s.dim + d, rstd, b, p, back));
        return slope * static_cast<A>(a.grad_out[origin + p * pitch + d]);
      };
      const auto q_of = [&](int64_t d) {
        A q = 0;
        for (int64_t j = 0; j < K; ++j) {
          const int64_t ahead = (K - 1 - j) * s.dilation;
          if (!counts(s, b, t + ahead) || ahead > own_reach[K - 1 - j]) continue;
          q += a.taps[j * pitch + g * s.dim + d] * grad_z(t + ahead, d, own_reach[K - 1 - j]);
        }
        return q;
      };
      const A scale = s.norm ? rstd[t * s.branches] : A(1);
      A dot[1] = {};
      for (int64_t d = threadIdx.x; d < s.dim; d += kThreads) {
        if (s.norm) dot[0] += q_of(d) * (static_cast<A>(a.x[row + d]) * scale);
        const A own = grad_z(t, d, own_reach[0]);
        for (int64_t j = 0; j < K; ++j) {
          const int64_t back = (K - 1 - j) * s.dilation;
          if (back > own_reach[0] || !counts(s, b, t - back)) continue;
          S[j * pitch + d] += own * (static_cast<A>(a.x[row - back * pitch + d]) * rstd[(t - back) * s.branches]);
        }
      }
      put_warp_sums(dot, sums[turn]);
      __syncthreads();
      const A pull = s.norm ? block_total(sums[turn], 0) / A(s.dim) * scale : A(0);
      for (int64_t d = threadIdx.x; d < s.dim; d += kThreads) {
        A grad = scale * (q_of(d) - static_cast<A>(a.x[row + d]) * pull);
        if (s.residual) grad += static_cast<A>(a.grad_out[row + d]);
        a.grad_x[row + d] = static_cast<T>(grad);
      }
      turn ^= 1;  // here: a token without barriers, a masked one, takes no turn
    }
  }
}

// ---- Weights ----

template <typename A> __global__ void __launch_bounds__(kThreads) short_conv_fold_kernel(const ShortConvWeights<A> a) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.count; i += int64_t{gridDim.x} * kThreads) {
    const A norm = a.norm_weight ? a.norm_weight[i] : A(1);
    for (int64_t j = 0; j < a.kernel; ++j) a.taps[j * a.count + i] = a.weight[i * a.kernel + j] * norm;
  }
}

template <typename A>
__global__ void __launch_bounds__(kFoldThreads) short_conv_unfold_kernel(const ShortConvWeights<A> a) {
  ENGRAM_SHARED(A, scratch, [kFoldRows][kWarp]);
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x % kWarp;
  const bool mine = threadIdx.x < kWarp && column < a.count;
  A grad_norm = 0;
  for (int64_t j = 0; j < a.kernel; ++j) {
    const A S = fold_parts(a.partials + j * a.count, a.parts, a.kernel * a.count, column, a.count, scratch);
    if (!mine) continue;
    a.grad_weight[column * a.kernel + j] = a.norm_weight ? a.norm_weight[column] * S : S;
    grad_norm += a.weight[column * a.kernel + j] * S;
  }
  if (mine && a.grad_norm_weight) a.grad_norm_weight[column] = grad_norm;
}

}  // namespace

template <typename A> cudaError_t short_conv_fold(const ShortConvWeights<A>& a, cudaStream_t stream) {
  if (a.count == 0) return cudaSuccess;
  ENGRAM_LAUNCH(short_conv_fold_kernel<A>, grid_for(a.count, kThreads), dim3(kThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

template <typename A> cudaError_t short_conv_unfold(const ShortConvWeights<A>& a, cudaStream_t stream) {
  if (a.count == 0) return cudaSuccess;
  ENGRAM_LAUNCH(short_conv_unfold_kernel<A>, grid_for(a.count, kWarp), dim3(kFoldThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

template <typename T> cudaError_t short_conv_forward(const ShortConvForward<T>& a, cudaStream_t stream) {
  const ShortConvShape& s = a.shape;
  constexpr int N = kLaneElements<T>;
  const int64_t rows = s.batch * s.tokens * s.branches, packs = divide_up(s.dim, N);
  if (rows == 0) return cudaSuccess;
  if (rows > 0x7fffffff) return cudaErrorInvalidValue;
  if (few_taps(s) && packs <= kColumnThreads) {
    const dim3 grid = grid_for(s.batch * divide_up(s.tokens, kTile) * s.branches, 1), block(whole_warps(packs));
    if (s.dim % N == 0 && aligned(16, 0, {a.x, a.out}))
      ENGRAM_LAUNCH((short_conv_forward_kernel<T, true>), grid, block, 0, stream, a);
    else ENGRAM_LAUNCH((short_conv_forward_kernel<T, false>), grid, block, 0, stream, a);
  } else {
    ENGRAM_LAUNCH(short_conv_rstd_kernel<T>, grid_for(rows, kThreads / kWarp), dim3(kThreads), 0, stream, a);
    ENGRAM_LAUNCH(short_conv_any_kernel<T>, grid_for(rows, 1), dim3(kThreads), 0, stream, a);
  }
  return ENGRAM_LAUNCH_ERROR();
}

template <typename T> cudaError_t short_conv_backward(const ShortConvBackward<T>& a, cudaStream_t stream) {
  const ShortConvShape& s = a.shape;
  // A thread owns few columns, to leave registers for what it keeps of them.
  constexpr int N = sizeof(T) == 8 ? 2 : 4;
  if (a.parts * s.branches == 0 || s.dim == 0) return cudaSuccess;
  const dim3 grid = grid_for(a.parts * s.branches, 1);
  const bool vector = s.dim % N == 0 && aligned(16, 0, {a.x, a.grad_out, a.grad_x, a.partials});
  if (few_taps(s) && vector && s.dim / N <= kColumnThreads) {
    ENGRAM_LAUNCH((short_conv_backward_kernel<T, N>), grid, dim3(whole_warps(s.dim / N)), 0, stream, a);
  } else {
    const int64_t shared_bytes = 2 * s.taps * static_cast<int64_t>(sizeof(int64_t));
    if (shared_bytes > 40 * 1024) return cudaErrorInvalidValue;
    ENGRAM_LAUNCH(short_conv_backward_any_kernel<T>, grid, dim3(kThreads), static_cast<size_t>(shared_bytes), stream,
                  a);
  }
  return ENGRAM_LAUNCH_ERROR();
}

#define INSTANTIATE(T)                                                                  \
  template cudaError_t short_conv_forward<T>(const ShortConvForward<T>&, cudaStream_t); \
  template cudaError_t short_conv_backward<T>(const ShortConvBackward<T>&, cudaStream_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(A)                                                               \
  template cudaError_t short_conv_fold<A>(const ShortConvWeights<A>&, cudaStream_t); \
  template cudaError_t short_conv_unfold<A>(const ShortConvWeights<A>&, cudaStream_t);
INSTANTIATE(float) INSTANTIATE(double)

}  // namespace engram::cuda
