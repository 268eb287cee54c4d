// Walking a row plan in chunks of kRowSumChunk sorted slots, shared by row_sum and row_update: what a chunk holds of a
// run is added in order; runs that cross from one chunk into the next are folded in the order of the chunks. So the
// order of every sum depends on the plan only, and a row that many slots touch is spread over many chunks.
//
// Counts, runs and rows of a plan that belongs to something else are kept inside, but lead to no particular result.
#pragma once
#include "../row_sum.h"
#include "reduce.cuh"

namespace engram::cuda {

constexpr int kChunkThreads = 128, kFoldRunThreads = 256, kFoldRunWarps = kFoldRunThreads / kWarp;

struct PlanSize {
  int64_t runs, slots;  // slots that are not skipped
  __device__ __forceinline__ explicit PlanSize(const RowPlan& plan) {
    const int64_t count = __ldg(plan.count);
    runs = count < 0 ? 0 : count < plan.slots ? count : plan.slots;
    const int64_t end = runs == 0 ? 0 : __ldg(plan.runs + runs);
    slots = end < 0 ? 0 : end < plan.slots ? end : plan.slots;
  }
};

// The row at a position; none behind the last.
__device__ __forceinline__ int64_t row_at(const RowPlan& plan, const PlanSize& size, int64_t position) {
  return position < size.slots ? __ldg(plan.keys + position) >> plan.slot_bits : -1;
}
__device__ __forceinline__ bool is_inside(int64_t row, int64_t table_rows) {
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(table_rows);
}

// The run that position < size.slots lies in. No run is empty, which bounds the search from both sides.
__device__ inline int64_t run_at(const RowPlan& plan, const PlanSize& size, int64_t position) {
  int64_t low = size.runs - (size.slots - position), high = position + 1;  // runs[low] <= position < runs[high]
  if (low < 0) low = 0;
  if (high > size.runs) high = size.runs;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (__ldg(plan.runs + middle) <= position) low = middle;
    else high = middle;
  }
  return low;
}

// Sums a chunk by `lanes` neighbouring threads, kLaneElements columns each; block y takes the y-th group of columns.
// `numbered` counts the runs. A whole warp stays together, slot by slot, so that visit may shuffle:
//
//   visit.fetch(row, column, available)    only in lanes of a run that is complete within its chunk, ahead of its end
//   visit.finish(complete, row, run, column, available, sum, fetched)    in all lanes, at every slot
//
// A run that came in from the chunk before goes to partials[chunk][0], one that goes on into the next to [1].
template <int U, bool kVector, typename T, typename Visitor>
__device__ __forceinline__ void sum_chunk(const T* values, const RowPlan& plan, int64_t dim, int64_t table_rows,
                                          accumulate_t<T>* partials, int lanes, bool numbered, const Visitor& visit) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t chunk = int64_t{blockIdx.x} * (kChunkThreads / lanes) + threadIdx.x / lanes;
  const int64_t column = (int64_t{blockIdx.y} * lanes + lane) * N, available = dim - column;
  const PlanSize size(plan);
  const int64_t begin = chunk * kRowSumChunk, end = begin + kRowSumChunk;
  const bool used = begin < size.slots;
  if (!__any_sync(kFullMask, used)) return;
  int64_t run = used && numbered ? run_at(plan, size, begin) : 0;
  bool came_in = used && begin > 0 && row_at(plan, size, begin - 1) == row_at(plan, size, begin);
  A sum[N] = {};

  for (int64_t at = begin; __any_sync(kFullMask, used && at < end); at += U) {
    int64_t key[U + 1];
    bool complete[U];
    Pack<T, N> value[U];
    typename Visitor::Fetched fetched[U];
#pragma unroll
    for (int u = 0; u <= U; ++u) key[u] = at + u < size.slots ? __ldg(plan.keys + at + u) : -1;
    const auto row_of = [&](int u) { return key[u] >> plan.slot_bits; };
    const auto closes = [&](int u) { return row_of(u) != row_of(u + 1); };
    bool open = came_in;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool inside = is_inside(row_of(u), table_rows);
      complete[u] = inside && closes(u) && !open;
      open = open && !closes(u);
      const int64_t slot = key[u] & ((int64_t{1} << plan.slot_bits) - 1);
      if (inside && available > 0) value[u] = load<N, kVector, Reuse::no>(values + slot * dim + column, available);
      if (complete[u]) fetched[u] = visit.fetch(row_of(u), column, available);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (is_inside(row_of(u), table_rows) && available > 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += value[u][i];
        if (!complete[u] && (closes(u) || at + u + 1 == end)) {
          A* to = partials + (chunk * 2 + (came_in ? 0 : 1)) * dim + column;
          store<kVector>(to, narrow<A, N>(sum), available);
        }
      }
      visit.finish(complete[u] && (!numbered || run < size.runs), row_of(u), run, column, available, sum, fetched[u]);
      if (closes(u)) {
        ++run;
        came_in = false;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = 0;
      }
    }
  }
}

// Threads of one grid that work on one row together. sum() lies between what they read before and write after it.
struct LaneTeam {
  int lanes;  // a power of two up to a warp
  __device__ __forceinline__ int rank() const { return static_cast<int>(threadIdx.x) % lanes; }
  __device__ __forceinline__ int size() const { return lanes; }
  template <typename A> __device__ __forceinline__ A sum(A v) const {
    for (int bits = lanes / 2; bits > 0; bits /= 2) v += __shfl_xor_sync(kFullMask, v, bits);
    __syncwarp();
    return v;
  }
};
template <typename A> struct BlockTeam {
  A (&scratch)[1][kMaxWarps];
  __device__ __forceinline__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ A sum(A v) const {
    put_warp_sums({v}, scratch);
    __syncthreads();
    const A total = block_total(scratch, 0);
    __syncthreads();
    return total;
  }
};

// Finishes the runs that cross chunks, into partials[first chunk][1]:
//
//   finish(row, position, sums, team)    the sums of the run around position are at sums[0 .. dim), for all of the team
//
// Warp w of a block looks after the run that begins in one chunk; runs over more than 32 further chunks are left to the
// whole block.
template <typename A, typename Finish>
__device__ __forceinline__ void fold_runs(const RowPlan& plan, int64_t dim, int64_t table_rows, A* partials,
                                          const Finish& finish) {
  ENGRAM_SHARED(int64_t, long_run, [kFoldRunWarps]);  // number of further chunks, 0 = nothing left to do
  ENGRAM_SHARED(A, scratch, [kFoldRunThreads]);
  ENGRAM_SHARED(A, team_scratch, [1][kMaxWarps]);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t block_first = int64_t{blockIdx.x} * kFoldRunWarps, first = block_first + warp;
  const PlanSize size(plan);
  const int64_t chunks = (size.slots + kRowSumChunk - 1) / kRowSumChunk;

  int64_t following = 0;
  const int64_t begin = first * kRowSumChunk, next = begin + kRowSumChunk, row = row_at(plan, size, next - 1);
  const bool came_in = begin > 0 && row_at(plan, size, begin) == row && row_at(plan, size, begin - 1) == row;
  if (first + 1 < chunks && is_inside(row, table_rows) && !came_in) {
    const auto continues = [&](int64_t chunk) { return row_at(plan, size, chunk * kRowSumChunk) == row; };
    const unsigned votes = __ballot_sync(kFullMask, continues(first + 1 + lane));
    following = votes == kFullMask ? kWarp : __ffs(static_cast<int>(~votes)) - 1;
    if (following == kWarp) {
      int64_t low = first + kWarp, high = chunks;  // `low` continues the run, `high` does not
      while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (continues(middle)) low = middle;
        else high = middle;
      }
      following = low - first;
    }
  }
  const bool is_long = following > kWarp;
  if (lane == 0) long_run[warp] = is_long ? following : 0;
  if (following > 0 && !is_long) {
    A* sums = partials + (first * 2 + 1) * dim;
    for (int64_t c = lane; c < dim; c += kWarp) {
      A sum = sums[c];
#pragma unroll 4
      for (int64_t k = 1; k <= following; ++k) sum += partials[(first + k) * 2 * dim + c];
      sums[c] = sum;
    }
    __syncwarp();
    finish(row, next - 1, sums, LaneTeam{kWarp});
  }
  __syncthreads();

  const int width = static_cast<int>(dim < 1 ? 1 : dim < kFoldRunThreads ? dim : kFoldRunThreads);
  const int parts = kFoldRunThreads / width, part = static_cast<int>(threadIdx.x) / width;
  for (int w = 0; w < kFoldRunWarps; ++w) {
    const int64_t further = long_run[w], from = block_first + w;
    if (further == 0) continue;
    A* sums = partials + (from * 2 + 1) * dim;
    for (int64_t base = 0; base < dim; base += width) {
      const int64_t c = base + static_cast<int>(threadIdx.x) % width;
      const bool mine = part < parts && c < dim;
      A sum = 0;
      if (mine) {
#pragma unroll 8
        for (int64_t k = 1 + part; k <= further; k += parts) sum += partials[(from + k) * 2 * dim + c];
      }
      scratch[threadIdx.x] = sum;
      __syncthreads();
      if (mine && part == 0) {
        A total = sums[c];
        for (int p = 0; p < parts; ++p) total += scratch[p * width + static_cast<int>(threadIdx.x)];
        sums[c] = total;
      }
      __syncthreads();
    }
    const int64_t position = (from + 1) * kRowSumChunk - 1;
    finish(row_at(plan, size, position), position, sums, BlockTeam<A>{team_scratch});
  }
}

inline int64_t row_chunks(const RowPlan& plan) { return divide_up(plan.slots, kRowSumChunk); }

// Lanes that own a chunk, for rows of `packs` packs.
inline int lanes_for(int64_t packs) {
  int lanes = 1;
  while (lanes < packs && lanes < kWarp) lanes *= 2;
  return lanes;
}

}  // namespace engram::cuda
