#include "gate.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnThreads = 640;  // of kernels whose threads own columns: leaves a thread about 100 registers

// ---- Forward ----

// One warp a branch of a token; the branches of a token lie side by side in a block, so that its value, and hidden for
// the residual, come out of the cache the second time.
template <typename H, typename K, bool kVector>
__global__ void __launch_bounds__(kThreads) gate_forward_kernel(const GateForward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr int N = kLaneElements<H>, kStep = N * kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t D = a.dim, rows = a.tokens * a.branches, stride = int64_t{gridDim.x} * (kThreads / kWarp);
  const GateOptions<A> o = a.options;
  for (int64_t row = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; row < rows; row += stride) {
    const int64_t token = row / a.branches, g = row - token * a.branches;
    const H* hidden = a.hidden + row * D;
    H* out = a.out + row * D;
    A* stats = a.stats + row * kGateStats;
    if (a.mask && !a.mask[token]) {
      for (int64_t d = lane * N; d < D; d += kStep)
        store<kVector>(out + d, o.residual ? load<N, kVector>(hidden + d, D - d) : zero_pack<H, N>(), D - d);
      if (lane < kGateStats) stats[lane] = 0;
      continue;
    }

    const GateScores<A> r = gate_scores<kVector>(hidden, a.key + row * D, a.weight ? a.weight + g * D : nullptr, D, o);
    if (lane < kGateStats) stats[lane] = lane == 0 ? r.s : lane == 1 ? r.rstd_h : r.rstd_k;
    const A alpha = gate_alpha(r.s, o);

    const K* value = a.value + token * D;
#pragma unroll 4
    for (int64_t d = lane * N; d < D; d += kStep) {
      const auto v = load<N, kVector>(value + d, D - d);
      A y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = alpha * v[i];
      if (o.residual) {
        const auto h = load<N, kVector>(hidden + d, D - d);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] += h[i];
      }
      store<kVector>(out + d, narrow<H, N>(y), D - d);
    }
  }
}

// ---- Backward ----

template <bool kVector, int N, typename H, typename K>
__device__ __forceinline__ void masked_row(const GateBackward<H, K>& a, int64_t token, int64_t d) {
  const int64_t available = a.dim - d;
  for (int64_t g = 0; g < a.branches; ++g) {
    const int64_t at = (token * a.branches + g) * a.dim + d;
    store<kVector>(a.grad_hidden + at,
                   a.options.residual ? load<N, kVector>(a.grad_out + at, available) : zero_pack<H, N>(), available);
    store<kVector>(a.grad_key + at, zero_pack<K, N>(), available);
  }
  store<kVector>(a.grad_value + token * a.dim + d, zero_pack<K, N>(), available);
}

// Block p: the tokens of part p, one after the other; thread c owns N neighbouring columns in every branch, and keeps
// their R in registers all the way. One barrier a token, for the sums P over the columns. Everything a token needs is
// asked for before the barrier.
template <typename H, typename K, int N, int kBranches>
__global__ void __launch_bounds__(kColumnThreads) gate_backward_kernel(const GateBackward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr bool kVector = true;
  ENGRAM_SHARED(A, sums, [2][kBranches][kMaxWarps]);
  ENGRAM_SHARED(Slope<A>, slopes, [2][kBranches]);
  const int64_t part = blockIdx.x, D = a.dim, d = int64_t{threadIdx.x} * N, available = D - d;
  const bool active = available > 0;
  A R[kBranches][N] = {};
  int turn = 0;
  for (int64_t token = a.tokens * part / a.parts; token < a.tokens * (part + 1) / a.parts; ++token) {
    if (a.mask && !a.mask[token]) {
      if (active) masked_row<kVector, N>(a, token, d);
      continue;
    }
    const int64_t row = token * kBranches, at = row * D + d;
    Pack<H, N> grad[kBranches], hidden[kBranches];
    Pack<K, N> key[kBranches];
    A P[kBranches] = {};
    if (active) {
      const auto value = load<N, kVector>(a.value + token * D + d, available);
#pragma unroll
      for (int g = 0; g < kBranches; ++g) grad[g] = load<N, kVector, Reuse::no>(a.grad_out + at + g * D, available);
#pragma unroll
      for (int g = 0; g < kBranches; ++g) {
        hidden[g] = load<N, kVector, Reuse::no>(a.hidden + at + g * D, available);
        key[g] = load<N, kVector, Reuse::no>(a.key + at + g * D, available);
      }
#pragma unroll
      for (int g = 0; g < kBranches; ++g)
#pragma unroll
        for (int i = 0; i < N; ++i) P[g] += grad[g][i] * value[i];
    }
    put_warp_sums(P, sums[turn]);
    if (threadIdx.x < kBranches)
      slopes[turn][threadIdx.x] = slope_of(a.stats + (row + threadIdx.x) * kGateStats, D, a.options);
    __syncthreads();

    A grad_value[N] = {};
#pragma unroll
    for (int g = 0; g < kBranches; ++g) {
      const Slope<A> r = slopes[turn][g];
      const A total = block_total(sums[turn], g), p = r.score == 0 ? A(0) : total;
      if (!active) continue;
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
      for (int i = 0; i < N; ++i) {
        const A dy = grad[g][i];
        grad_value[i] += r.alpha * dy;
        R[g][i] += row_gradients(r, p, w[i], A(hidden[g][i]), A(key[g][i]), a.options.residual ? dy : A(0), grad_h[i],
                                 grad_k[i]);
      }
      store<kVector>(a.grad_hidden + at + g * D, narrow<H, N>(grad_h), available);
      store<kVector>(a.grad_key + at + g * D, narrow<K, N>(grad_k), available);
    }
    if (active) store<kVector>(a.grad_value + token * D + d, narrow<K, N>(grad_value), available);
    turn ^= 1;
  }
  if (a.partials && active) {
#pragma unroll
    for (int g = 0; g < kBranches; ++g)
      store<kVector>(a.partials + (part * kBranches + g) * D + d, narrow<A, N>(R[g]), available);
  }
}

// The same for any number of branches and columns: R lives in the partials, owned by the thread all the same.
template <typename H, typename K, bool kVector>
__global__ void __launch_bounds__(kThreads) gate_backward_any_kernel(const GateBackward<H, K> a) {
  using A = accumulate_t<H>;
  constexpr int N = kLaneElements<H>;
  constexpr int64_t kStep = int64_t{kThreads} * N;
  ENGRAM_SHARED(A, sums, [2][1][kMaxWarps]);
  ENGRAM_SHARED(Slope<A>, slope, [2]);
  const int64_t part = blockIdx.x, D = a.dim, G = a.branches, own = int64_t{threadIdx.x} * N;
  if (a.partials)
    for (int64_t g = 0; g < G; ++g)
      for (int64_t d = own; d < D; d += kStep)
        store<kVector>(a.partials + (part * G + g) * D + d, zero_pack<A, N>(), D - d);
  int turn = 0;
  for (int64_t token = a.tokens * part / a.parts; token < a.tokens * (part + 1) / a.parts; ++token) {
    if (a.mask && !a.mask[token]) {
      for (int64_t d = own; d < D; d += kStep) masked_row<kVector, N>(a, token, d);
      continue;
    }
    const K* value = a.value + token * D;
    for (int64_t g = 0; g < G; ++g, turn ^= 1) {
      const int64_t row = token * G + g;
      A P[1] = {};
      for (int64_t d = own; d < D; d += kStep) {
        const auto dy = load<N, kVector>(a.grad_out + row * D + d, D - d);
        const auto v = load<N, kVector>(value + d, D - d);
#pragma unroll
        for (int i = 0; i < N; ++i) P[0] += dy[i] * v[i];
      }
      put_warp_sums(P, sums[turn]);
      if (threadIdx.x == 0) slope[turn] = slope_of(a.stats + row * kGateStats, D, a.options);
      __syncthreads();
      const Slope<A> r = slope[turn];
      const A total = block_total(sums[turn], 0), p = r.score == 0 ? A(0) : total;
      for (int64_t d = own; d < D; d += kStep) {
        const auto h = load<N, kVector>(a.hidden + row * D + d, D - d);
        const auto k = load<N, kVector>(a.key + row * D + d, D - d);
        const auto dy = load<N, kVector>(a.grad_out + row * D + d, D - d);
        A grad_h[N], grad_k[N], R[N], w[N];
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] = a.weight && d + i < D ? a.weight[g * D + d + i] : A(1);
#pragma unroll
        for (int i = 0; i < N; ++i)
          R[i] =
              row_gradients(r, p, w[i], A(h[i]), A(k[i]), a.options.residual ? A(dy[i]) : A(0), grad_h[i], grad_k[i]);
        store<kVector>(a.grad_hidden + row * D + d, narrow<H, N>(grad_h), D - d);
        store<kVector>(a.grad_key + row * D + d, narrow<K, N>(grad_k), D - d);
        if (a.partials)
#pragma unroll
          for (int i = 0; i < N; ++i)
            if (d + i < D) a.partials[(part * G + g) * D + d + i] += R[i];
      }
    }
    for (int64_t d = own; d < D; d += kStep) {
      A grad_value[N] = {};
      for (int64_t g = 0; g < G; ++g) {
        const int64_t row = token * G + g;
        const A alpha = gate_alpha(a.stats[row * kGateStats], a.options);
        const auto dy = load<N, kVector>(a.grad_out + row * D + d, D - d);
#pragma unroll
        for (int i = 0; i < N; ++i) grad_value[i] += alpha * dy[i];
      }
      store<kVector>(a.grad_value + token * D + d, narrow<K, N>(grad_value), D - d);
    }
  }
}

template <int N, int kBranches, typename H, typename K> bool fits(const GateBackward<H, K>& a) {
  return a.branches == kBranches && a.dim % N == 0 && a.dim / N <= kColumnThreads;
}
template <int N, int kBranches, typename H, typename K>
void launch_columns(const GateBackward<H, K>& a, cudaStream_t stream) {
  ENGRAM_LAUNCH((gate_backward_kernel<H, K, N, kBranches>), grid_for(a.parts, 1), dim3(whole_warps(a.dim / N)), 0,
                stream, a);
}

// ---- Weights ----

template <typename A>
__global__ void __launch_bounds__(kThreads) multiply_kernel(const A* a, const A* b, A* out, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    out[i] = a[i] * b[i];
}

template <typename A> __global__ void __launch_bounds__(kFoldThreads) gate_weights_kernel(const GateWeights<A> a) {
  ENGRAM_SHARED(A, scratch, [kFoldRows][kWarp]);
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x % kWarp;
  const A total = fold_parts(a.partials, a.parts, a.count, column, a.count, scratch);
  if (threadIdx.x >= kWarp || column >= a.count) return;
  if (a.grad_hidden_weight) a.grad_hidden_weight[column] = a.key_weight ? a.key_weight[column] * total : total;
  if (a.grad_key_weight) a.grad_key_weight[column] = a.hidden_weight ? a.hidden_weight[column] * total : total;
}

}  // namespace

template <typename A> cudaError_t multiply(const A* a, const A* b, A* out, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  ENGRAM_LAUNCH(multiply_kernel<A>, grid_for(count, kThreads), dim3(kThreads), 0, stream, a, b, out, count);
  return ENGRAM_LAUNCH_ERROR();
}

template <typename H, typename K> cudaError_t gate_forward(const GateForward<H, K>& a, cudaStream_t stream) {
  if (a.tokens == 0 || a.branches == 0) return cudaSuccess;
  const dim3 grid = grid_for(a.tokens * a.branches, kThreads / kWarp);
  const bool vector = a.dim % kLaneElements<H> == 0 && aligned(16, 0, {a.hidden, a.key, a.value, a.weight, a.out});
  if (vector) ENGRAM_LAUNCH((gate_forward_kernel<H, K, true>), grid, dim3(kThreads), 0, stream, a);
  else ENGRAM_LAUNCH((gate_forward_kernel<H, K, false>), grid, dim3(kThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

template <typename H, typename K> cudaError_t gate_backward(const GateBackward<H, K>& a, cudaStream_t stream) {
  if (a.parts == 0 || a.dim == 0) return cudaSuccess;
  // Few columns a thread are better, there are then more warps; many are what a large D needs.
  constexpr int kFew = sizeof(H) == 8 ? 2 : 4, kMany = kLaneElements<H>;
  const bool vector = a.dim % kMany == 0 && aligned(16, 0,
                                                    {a.grad_out, a.hidden, a.key, a.value, a.weight, a.grad_hidden,
                                                     a.grad_key, a.grad_value, a.partials});
  if (vector && fits<kFew, 1>(a)) launch_columns<kFew, 1>(a, stream);
  else if (vector && fits<kFew, 4>(a)) launch_columns<kFew, 4>(a, stream);
  else if (vector && fits<kMany, 1>(a)) launch_columns<kMany, 1>(a, stream);
  else if (vector && fits<kMany, 4>(a)) launch_columns<kMany, 4>(a, stream);
  else if (vector)
    ENGRAM_LAUNCH((gate_backward_any_kernel<H, K, true>), grid_for(a.parts, 1), dim3(kThreads), 0, stream, a);
  else ENGRAM_LAUNCH((gate_backward_any_kernel<H, K, false>), grid_for(a.parts, 1), dim3(kThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

template <typename A> cudaError_t gate_weights(const GateWeights<A>& a, cudaStream_t stream) {
  if (a.count == 0) return cudaSuccess;
  ENGRAM_LAUNCH(gate_weights_kernel<A>, grid_for(a.count, kWarp), dim3(kFoldThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

#define INSTANTIATE(H, K)                                                          \
  template cudaError_t gate_forward<H, K>(const GateForward<H, K>&, cudaStream_t); \
  template cudaError_t gate_backward<H, K>(const GateBackward<H, K>&, cudaStream_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(A)                                                             \
  template cudaError_t multiply<A>(const A*, const A*, A*, int64_t, cudaStream_t); \
  template cudaError_t gate_weights<A>(const GateWeights<A>&, cudaStream_t);
INSTANTIATE(float) INSTANTIATE(double)

}  // namespace engram::cuda
