#include "../row_plan.h"
#include "reduce.cuh"
#include "row_sort.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// ---- Keys ----

template <typename Index> __global__ void __launch_bounds__(kThreads) row_keys_kernel(const RowKeys<Index> a) {
  for (int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x; slot < a.slots;
       slot += int64_t{gridDim.x} * kThreads) {
    const int64_t row = local_row(a, slot);
    a.keys[slot] = (row < 0 ? a.table_rows : row) << a.slot_bits | slot;
  }
}

// ---- Runs ----

constexpr int kRounds = kRunChunk / kThreads;  // positions of a thread; its warp has kRounds * kWarp in a row
static_assert(kRunChunk % kThreads == 0 && kRounds <= 32);

__device__ __forceinline__ int64_t position_of(int round) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  return blockIdx.x * kRunChunk + (warp * kRounds + round) * kWarp + lane;
}

// Bit i: a run begins at position_of(i). `end`, if it is found here: where the last run ends.
__device__ __forceinline__ unsigned find_runs(const RowRuns& a, int64_t& end) {
  unsigned begins = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64_t position = position_of(round);
    if (position >= a.slots) continue;
    const int64_t row = __ldg(a.keys + position) >> a.slot_bits;
    const int64_t before = position ? __ldg(a.keys + position - 1) >> a.slot_bits : -1;
    if (row < a.table_rows) {
      if (row != before) begins |= 1u << round;
      if (position == a.slots - 1) end = a.slots;
    } else if (before < a.table_rows) {
      end = position;
    }
  }
  return begins;
}

// How many runs begin in each chunk; and runs[slots], which is where the last one ends whatever the number of runs.
__global__ void __launch_bounds__(kThreads) row_runs_count_kernel(const RowRuns a) {
  ENGRAM_SHARED(int, counts, [kWarps]);
  int64_t end = -1;
  const int count = warp_sum(__popc(find_runs(a, end)));
  if (end >= 0) a.runs[a.slots] = end;
  if (threadIdx.x % kWarp == 0) counts[threadIdx.x / kWarp] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += counts[warp];
  a.scratch[blockIdx.x] = total;
}

// Where each chunk writes; one block.
__global__ void __launch_bounds__(kThreads) row_runs_offsets_kernel(const RowRuns a, int64_t chunks) {
  ENGRAM_SHARED(int64_t, totals, [kWarps]);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  int64_t before = 0;
  for (int64_t base = 0; base < chunks; base += kThreads) {
    const int64_t i = base + thread, count = i < chunks ? a.scratch[i] : 0;
    int64_t sum = count;  // of the lanes up to this one
#pragma unroll
    for (int delta = 1; delta < kWarp; delta *= 2) {
      const int64_t other = __shfl_up_sync(kFullMask, sum, delta);
      if (lane >= delta) sum += other;
    }
    if (lane == kWarp - 1) totals[thread / kWarp] = sum;
    __syncthreads();
    int64_t offset = before + sum - count;
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < thread / kWarp) offset += totals[warp];
      before += totals[warp];
    }
    if (i < chunks) a.scratch[i] = offset;
    __syncthreads();
  }
  if (thread == 0) *a.count = before;
}

__global__ void __launch_bounds__(kThreads) row_runs_write_kernel(const RowRuns a) {
  ENGRAM_SHARED(int, counts, [kWarps]);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t end;
  const unsigned begins = find_runs(a, end), lanes_before = (1u << threadIdx.x % kWarp) - 1;
  const int count = warp_sum(__popc(begins));
  if (threadIdx.x % kWarp == 0) counts[warp] = count;
  __syncthreads();
  int64_t* to = a.runs + a.scratch[blockIdx.x];
  for (int before = 0; before < warp; ++before) to += counts[before];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const bool mine = begins >> round & 1;
    const unsigned votes = __ballot_sync(kFullMask, mine);
    if (mine) to[__popc(votes & lanes_before)] = position_of(round);
    to += __popc(votes);
  }
  const int64_t touched = *a.count, last_end = a.runs[a.slots];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64_t i = position_of(round);
    if (i >= touched && i < a.slots) a.runs[i] = last_end;
  }
}

}  // namespace

template <typename Index> cudaError_t row_keys(const RowKeys<Index>& a, cudaStream_t stream) {
  if (a.slots == 0) return cudaSuccess;
  ENGRAM_LAUNCH(row_keys_kernel<Index>, grid_for(a.slots, kThreads), dim3(kThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

size_t row_sort_bytes(int64_t slots, int first_bit, int end_bit) {
  size_t bytes = 0;
  radix_sort(nullptr, bytes, nullptr, nullptr, slots, first_bit, end_bit, nullptr);
  return bytes ? bytes : 1;  // a null scratch would ask once more instead of sorting
}

cudaError_t row_sort(const int64_t* from, int64_t* to, int64_t slots, int first_bit, int end_bit, void* scratch,
                     size_t bytes, cudaStream_t stream) {
  return radix_sort(scratch, bytes, from, to, slots, first_bit, end_bit, stream);
}

cudaError_t row_runs(const RowRuns& a, cudaStream_t stream) {
  if (a.slots == 0) return cudaErrorInvalidValue;
  const int64_t chunks = run_chunks(a.slots);
  const dim3 grid(static_cast<unsigned>(chunks));
  ENGRAM_LAUNCH(row_runs_count_kernel, grid, dim3(kThreads), 0, stream, a);
  ENGRAM_LAUNCH(row_runs_offsets_kernel, dim3(1), dim3(kThreads), 0, stream, a, chunks);
  ENGRAM_LAUNCH(row_runs_write_kernel, grid, dim3(kThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

template cudaError_t row_keys<int32_t>(const RowKeys<int32_t>&, cudaStream_t);
template cudaError_t row_keys<int64_t>(const RowKeys<int64_t>&, cudaStream_t);

}  // namespace engram::cuda
