// What the kernels share that look rows up: where a slot's row is, and the lookup of rows that are scaled on the way.
#pragma once
#include "../row_plan.h"
#include "launch.cuh"

namespace engram::cuda {

// The row of the table that a slot reads, or -1 for zeros.
template <typename Args> __device__ __forceinline__ int64_t row_of(const Args& a, int64_t slot, int32_t* bad) {
  const int64_t row = local_row(a, slot);
  if (bad && row < 0) atomicExch(bad, 1);
  return row < a.table_rows ? row : -1;
}

constexpr int kScaledThreads = 256;
constexpr int kChunksInFlight = 4;  // independent loads of a thread before its first store

// A format of rows says what a chunk of neighbouring values is worth:
//
//   struct Format {
//     using Args, Value, Out;                             what comes in and goes out; Args are those of the op
//     static float scale(const Args&, row, column)        of the chunk that begins at column
//     static void decode(const Pack<Value, N>&, float scale, accumulate_t<Out> (&)[N])    before the rounding to Out
//   };
//
// A block writes `slots_per_block` rows. First one thread a slot finds its row; then the rows are written as one stream
// of chunks of 16 bytes, so that loads and stores of a warp are contiguous whatever the width of a row. A slot without
// a row has zeros under a scale of zero.
template <typename Format, bool kVector>
__global__ void __launch_bounds__(kScaledThreads)
    scaled_lookup_kernel(const typename Format::Args a, int32_t* bad, int slots_per_block,
                         const FastDivisor chunks_per_row) {
  using Out = typename Format::Out;
  using Value = typename Format::Value;
  constexpr int N = kLaneElements<Out>;
  ENGRAM_SHARED(int64_t, source, [kScaledThreads]);  // row of a slot, -1 = zeros
  const int64_t first = int64_t{blockIdx.x} * slots_per_block;
  const int count = static_cast<int>(a.slots - first < slots_per_block ? a.slots - first : slots_per_block);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count) source[thread] = row_of(a, first + thread, bad);
  __syncthreads();

  const int chunks = count * static_cast<int>(chunks_per_row.divisor);
  for (int begin = thread; begin < chunks; begin += kScaledThreads * kChunksInFlight) {
    Pack<Value, N> values[kChunksInFlight];
    float scales[kChunksInFlight];
    int64_t slots[kChunksInFlight], columns[kChunksInFlight];
#pragma unroll
    for (int u = 0; u < kChunksInFlight; ++u) {
      const int i = begin + u * kScaledThreads;
      values[u] = zero_pack<Value, N>();
      scales[u] = 0.0f;
      if (i < chunks) {
        const int slot = static_cast<int>(chunks_per_row.divide(static_cast<uint32_t>(i)));
        slots[u] = first + slot;
        columns[u] = int64_t{i - slot * static_cast<int>(chunks_per_row.divisor)} * N;
        const int64_t row = source[slot];
        if (row >= 0) {
          values[u] = load<N, kVector>(a.values + row * a.width + columns[u], a.width - columns[u]);
          scales[u] = Format::scale(a, row, columns[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kChunksInFlight; ++u) {
      if (begin + u * kScaledThreads < chunks) {
        accumulate_t<Out> v[N];
        Format::decode(values[u], scales[u], v);
        store<kVector>(a.out + slots[u] * a.width + columns[u], narrow<Out>(v), a.width - columns[u]);
      }
    }
  }
}

template <typename Format>
cudaError_t scaled_lookup(const typename Format::Args& a, int32_t* bad, cudaStream_t stream) {
  if (a.slots == 0 || a.width == 0) return cudaSuccess;
  constexpr int64_t N = kLaneElements<typename Format::Out>;
  const int64_t chunks = divide_up(a.width, N);
  if (chunks > 1 << 30) return cudaErrorInvalidValue;
  const int64_t fit = kScaledThreads * kChunksInFlight * 2 / chunks;
  const int slots_per_block = static_cast<int>(fit < 1 ? 1 : fit < kScaledThreads ? fit : kScaledThreads);
  const bool vector = aligned(N, a.width, {a.values}) && aligned(16, 16, {a.out});  // width % N == 0 aligns every row
  const dim3 grid = grid_for(a.slots, slots_per_block);
  const FastDivisor divisor(static_cast<uint32_t>(chunks));
  if (vector)
    ENGRAM_LAUNCH((scaled_lookup_kernel<Format, true>), grid, dim3(kScaledThreads), 0, stream, a, bad, slots_per_block,
                  divisor);
  else
    ENGRAM_LAUNCH((scaled_lookup_kernel<Format, false>), grid, dim3(kScaledThreads), 0, stream, a, bad, slots_per_block,
                  divisor);
  return ENGRAM_LAUNCH_ERROR();
}

}  // namespace engram::cuda
