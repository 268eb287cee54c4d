#include "../row_update.h"
#include "row_chunks.cuh"

#include <cmath>

namespace engram::cuda {
namespace {

constexpr int kSlotsInFlight = 2;  // gradient, row and state of each: few are enough to keep the memory busy

// What a step has in common for all rows.
template <typename A> struct StepFactors {
  A keep, lr, beta1, beta2, eps, sign, first_weight, second_weight, first_correction, second_correction;
  int64_t step;

  template <typename T> explicit StepFactors(const RowUpdate<T>& a) {
    const bool adam = a.rule == RowRule::adam;
    keep = static_cast<A>(1 - a.lr * a.weight_decay);
    lr = static_cast<A>(a.lr);
    beta1 = static_cast<A>(a.beta1);
    beta2 = static_cast<A>(adam ? a.beta2 : 1);
    eps = static_cast<A>(a.eps);
    sign = static_cast<A>(a.maximize ? -1 : 1);
    first_weight = static_cast<A>(adam ? 1 - a.beta1 : 1);
    second_weight = static_cast<A>(adam ? 1 - a.beta2 : 1);
    first_correction = second_correction = A(1);
    step = 0;
  }
};

// The rest of it, which only the device knows; by a whole block.
template <typename T>
__device__ __forceinline__ void read_step(const RowUpdate<T>& a, StepFactors<accumulate_t<T>>& f) {
  using A = accumulate_t<T>;
  ENGRAM_SHARED(A, corrections, [2]);
  f.step = __ldg(a.step);
  if (threadIdx.x < 2) {
    const double beta = threadIdx.x == 0 ? a.beta1 : a.beta2;
    const bool corrects = a.rule == RowRule::adam && (threadIdx.x == 1 || a.first);
    corrections[threadIdx.x] = corrects ? static_cast<A>(1 / (1 - pow(beta, static_cast<double>(f.step)))) : A(1);
  }
  __syncthreads();
  f.first_correction = corrections[0];
  f.second_correction = corrections[1];
}

// What a lane holds of a row and its state before the step.
template <typename T> struct OldPack {
  Pack<T, kLaneElements<T>> w;
  Pack<accumulate_t<T>, kLaneElements<T>> m, v;
};
template <bool kVector, typename T>
__device__ __forceinline__ OldPack<T> load_old(const RowUpdate<T>& a, int64_t row, int64_t column, int64_t available) {
  constexpr int N = kLaneElements<T>;
  const int64_t at = row * a.dim + column;
  OldPack<T> old;
  old.w = load<N, kVector, Reuse::no>(a.table + at, available);
  if (a.first) old.m = load<N, kVector, Reuse::no>(a.first + at, available);
  if (a.second && !a.second_per_row) old.v = load<N, kVector, Reuse::no>(a.second + at, available);
  return old;
}

__device__ __forceinline__ float round_stochastically(float w, uint64_t key, int64_t column) {
  uint32_t bits;
  memcpy(&bits, &w, sizeof bits);
  bits = (bits + rounding_bits(key, static_cast<uint32_t>(column))) & 0xffff0000u;
  float rounded;
  memcpy(&rounded, &bits, sizeof rounded);
  return w == w ? rounded : w;
}

// `g` has its sign; `scale` is lr, over the root of a per-row state if there is one.
template <bool kVector, typename T>
__device__ __forceinline__ void update_pack(const RowUpdate<T>& a, const StepFactors<accumulate_t<T>>& f, int64_t row,
                                            int64_t column, int64_t available,
                                            const accumulate_t<T> (&g)[kLaneElements<T>], const OldPack<T>& old,
                                            accumulate_t<T> scale) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  const int64_t at = row * a.dim + column;
  A change[N], w[N];
#pragma unroll
  for (int i = 0; i < N; ++i) change[i] = g[i];
  if (a.first) {
#pragma unroll
    for (int i = 0; i < N; ++i) change[i] = f.beta1 * old.m[i] + f.first_weight * g[i];
    store<kVector>(a.first + at, narrow<A, N>(change), available);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) change[i] *= f.first_correction * scale;
  if (a.second && !a.second_per_row) {
    A v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = f.beta2 * old.v[i] + f.second_weight * g[i] * g[i];
      change[i] /= std::sqrt(v[i] * f.second_correction) + f.eps;
    }
    store<kVector>(a.second + at, narrow<A, N>(v), available);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = old.w[i] * f.keep - change[i];
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (a.stochastic) {
      const uint64_t key = rounding_key(a.seed, f.step, row);
#pragma unroll
      for (int i = 0; i < N; ++i) w[i] = round_stochastically(w[i], key, column + i);
    }
  }
  store<kVector>(a.table + at, narrow<T, N>(w), available);
}

// The new per-row state from the old one and the row's sum of g^2.
template <typename T>
__device__ __forceinline__ accumulate_t<T> next_state(const RowUpdate<T>& a, const StepFactors<accumulate_t<T>>& f,
                                                      accumulate_t<T> old, accumulate_t<T> squares) {
  return f.beta2 * old + f.second_weight * (squares / static_cast<accumulate_t<T>>(a.dim));
}
template <typename A> __device__ __forceinline__ A scale_by(const StepFactors<A>& f, A state) {
  return f.lr / (std::sqrt(state * f.second_correction) + f.eps);
}

// One row of any width by a team; gradient(column, available, g) is asked twice where the mean of g^2 is wanted. All
// threads of the team's warps come here together; idle ones are not `used`.
template <bool kVector, typename T, typename Team, typename Gradient>
__device__ __forceinline__ void update_row(const RowUpdate<T>& a, const StepFactors<accumulate_t<T>>& f, int64_t row,
                                           bool used, const Team& team, const Gradient& gradient) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  const int64_t stride = int64_t{team.size()} * N, first = int64_t{team.rank()} * N, end = used ? a.dim : 0;
  A scale = f.lr;
  if (a.second_per_row) {
    const A old = used ? a.second[row] : A(0);
    A squares = 0;
    for (int64_t column = first; column < end; column += stride) {
      A g[N];
      gradient(column, a.dim - column, g);
#pragma unroll
      for (int i = 0; i < N; ++i) squares += g[i] * g[i];
    }
    const A state = next_state(a, f, old, team.sum(squares));
    if (used && team.rank() == 0) a.second[row] = state;
    scale = scale_by(f, state);
  }
  for (int64_t column = first; column < end; column += stride) {
    A g[N];
    gradient(column, a.dim - column, g);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] *= f.sign;
    update_pack<kVector>(a, f, row, column, a.dim - column, g, load_old<kVector>(a, row, column, a.dim - column),
                         scale);
  }
}

// ---- Along a plan ----

// Rows that the lanes of a chunk hold at once: summed and updated in the same registers.
template <typename T, bool kVector> struct UpdateSum {
  using A = accumulate_t<T>;
  struct Fetched {
    OldPack<T> old;
    A state;
  };
  const RowUpdate<T>& a;
  const StepFactors<A>& f;
  LaneTeam team;

  __device__ __forceinline__ Fetched fetch(int64_t row, int64_t column, int64_t available) const {
    Fetched fetched;
    if (available > 0) fetched.old = load_old<kVector>(a, row, column, available);
    if (a.second_per_row) fetched.state = a.second[row];
    return fetched;
  }
  __device__ __forceinline__ void finish(bool complete, int64_t row, int64_t, int64_t column, int64_t available,
                                         const A (&sum)[kLaneElements<T>], const Fetched& fetched) const {
    if (!__any_sync(kFullMask, complete)) return;
    A scale = f.lr, g[kLaneElements<T>], squares = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements<T>; ++i) {
      g[i] = f.sign * sum[i];
      squares += g[i] * g[i];
    }
    if (a.second_per_row) {
      const A state = next_state(a, f, complete ? fetched.state : A(0), team.sum(squares));
      if (complete && column == 0) a.second[row] = state;
      scale = scale_by(f, state);
    }
    if (complete && available > 0) update_pack<kVector>(a, f, row, column, available, g, fetched.old, scale);
  }
};

template <typename T, bool kVector>
__global__ void __launch_bounds__(kChunkThreads)
    row_update_chunks_kernel(const RowUpdate<T> a, StepFactors<accumulate_t<T>> f, int lanes) {
  read_step(a, f);
  sum_chunk<kSlotsInFlight, kVector>(a.grad, a.plan, a.dim, a.table_rows, a.partials, lanes, false,
                                     UpdateSum<T, kVector>{a, f, LaneTeam{lanes}});
}

// Wider rows: a warp a chunk, run by run.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kChunkThreads)
    row_update_wide_kernel(const RowUpdate<T> a, StepFactors<accumulate_t<T>> f) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  static_assert(kRowSumChunk == kWarp);
  read_step(a, f);
  const LaneTeam team{kWarp};
  const int64_t chunk = int64_t{blockIdx.x} * (kChunkThreads / kWarp) + threadIdx.x / kWarp, begin = chunk * kWarp;
  const PlanSize size(a.plan);
  if (begin >= size.slots) return;
  bool came_in = begin > 0 && row_at(a.plan, size, begin - 1) == row_at(a.plan, size, begin);
  const int64_t mine = begin + team.rank();
  unsigned closes = __ballot_sync(kFullMask, row_at(a.plan, size, mine) != row_at(a.plan, size, mine + 1));
  const int64_t end = begin + kWarp < size.slots ? begin + kWarp : size.slots;
  for (int64_t from = begin; from < end;) {
    const bool goes_on = closes == 0;
    const int64_t to = goes_on ? end : begin + __ffs(static_cast<int>(closes)), row = row_at(a.plan, size, from);
    const auto gradient = [&](int64_t column, int64_t available, A(&sum)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = 0;
#pragma unroll 4
      for (int64_t at = from; at < to; ++at) {
        const auto value = load<N, kVector>(a.grad + a.plan.slot(at) * a.dim + column, available);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += value[i];
      }
    };
    if (is_inside(row, a.table_rows)) {
      if (came_in || goes_on) {
        for (int64_t column = int64_t{team.rank()} * N; column < a.dim; column += kWarp * N) {
          A sum[N];
          gradient(column, a.dim - column, sum);
          store<kVector>(a.partials + (chunk * 2 + (came_in ? 0 : 1)) * a.dim + column, narrow<A, N>(sum),
                         a.dim - column);
        }
      } else {
        update_row<kVector>(a, f, row, true, team, gradient);
      }
    }
    came_in = false;
    closes &= closes - 1;
    from = to;
  }
}

template <typename T, bool kVector>
__global__ void __launch_bounds__(kFoldRunThreads)
    row_update_fold_kernel(const RowUpdate<T> a, StepFactors<accumulate_t<T>> f) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  read_step(a, f);
  fold_runs(a.plan, a.dim, a.table_rows, a.partials, [&](int64_t row, int64_t, const A* sums, const auto& team) {
    update_row<kVector>(a, f, row, true, team, [&](int64_t column, int64_t available, A(&g)[N]) {
      const auto sum = load<N, kVector, Reuse::no>(sums + column, available);
#pragma unroll
      for (int i = 0; i < N; ++i) g[i] = sum[i];
    });
  });
}

// ---- Every row ----

// More blocks than fit on a device at once; what each of them works out first then serves many rows.
constexpr int64_t kMaxRowBlocks = 8192;

template <typename T, bool kVector>
__global__ void __launch_bounds__(kChunkThreads)
    row_update_rows_kernel(const RowUpdate<T> a, StepFactors<accumulate_t<T>> f, int lanes) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  read_step(a, f);
  const int64_t groups = kChunkThreads / lanes;
  for (int64_t first = blockIdx.x * groups; first < a.table_rows; first += gridDim.x * groups) {
    const int64_t row = first + threadIdx.x / lanes;
    const auto gradient = [&](int64_t column, int64_t available, A(&g)[N]) {
      const auto value = load<N, kVector>(a.grad + row * a.dim + column, available);
#pragma unroll
      for (int i = 0; i < N; ++i) g[i] = value[i];
    };
    update_row<kVector>(a, f, row, row < a.table_rows, LaneTeam{lanes}, gradient);
  }
}

template <typename T, bool kVector> cudaError_t update(const RowUpdate<T>& a, cudaStream_t stream) {
  const StepFactors<accumulate_t<T>> f(a);
  const int64_t packs = divide_up(a.dim, kLaneElements<T>);
  const int lanes = lanes_for(packs), groups = kChunkThreads / lanes;
  const dim3 block(kChunkThreads);
  if (!a.plan.keys) {
    const int64_t blocks = divide_up(a.table_rows, groups);
    const dim3 grid(static_cast<unsigned>(blocks < kMaxRowBlocks ? blocks : kMaxRowBlocks));
    ENGRAM_LAUNCH((row_update_rows_kernel<T, kVector>), grid, block, 0, stream, a, f, lanes);
    return ENGRAM_LAUNCH_ERROR();
  }
  const int64_t chunks = row_chunks(a.plan);
  const dim3 grid = grid_for(chunks, groups);
  if (packs <= kWarp) ENGRAM_LAUNCH((row_update_chunks_kernel<T, kVector>), grid, block, 0, stream, a, f, lanes);
  else ENGRAM_LAUNCH((row_update_wide_kernel<T, kVector>), grid, block, 0, stream, a, f);
  if (chunks > 1)
    ENGRAM_LAUNCH((row_update_fold_kernel<T, kVector>), grid_for(chunks, kFoldRunWarps), dim3(kFoldRunThreads), 0,
                  stream, a, f);
  return ENGRAM_LAUNCH_ERROR();
}

}  // namespace

template <typename T> cudaError_t row_update(const RowUpdate<T>& a, cudaStream_t stream) {
  if (a.dim == 0 || a.table_rows == 0 || (a.plan.keys && a.plan.slots == 0)) return cudaSuccess;
  const void* second = a.second_per_row ? nullptr : a.second;
  const bool vector =
      aligned(16, a.dim * static_cast<int64_t>(sizeof(T)), {a.table, a.first, second, a.grad, a.partials});
  return vector ? update<T, true>(a, stream) : update<T, false>(a, stream);
}

#define INSTANTIATE(T) template cudaError_t row_update<T>(const RowUpdate<T>&, cudaStream_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cuda
