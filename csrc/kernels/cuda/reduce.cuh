// Sums over a warp and over a block, always added in the same order.
#pragma once
#include "launch.cuh"

namespace engram::cuda {

constexpr int kMaxWarps = 32;

// The sum over the lanes of a warp, in every lane.
template <typename A> __device__ __forceinline__ A warp_sum(A v) {
#pragma unroll
  for (int bits = kWarp / 2; bits > 0; bits /= 2) v += __shfl_xor_sync(kFullMask, v, bits);
  return v;
}

// Block sums in two halves, so that one barrier serves several values and whatever else the caller has to share:
//   put_warp_sums(v, scratch);  __syncthreads();  total = block_total(scratch, i);
// A scratch may be written again only after another barrier; callers that loop alternate between two.
template <int N, typename A>
__device__ __forceinline__ void put_warp_sums(const A (&v)[N], A (&scratch)[N][kMaxWarps]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A sum = warp_sum(v[i]);
    if (threadIdx.x % kWarp == 0) scratch[i][threadIdx.x / kWarp] = sum;
  }
}
template <int N, typename A> __device__ __forceinline__ A block_total(const A (&scratch)[N][kMaxWarps], int i) {
  const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  return warp_sum(lane < warps ? scratch[i][lane] : A(0));
}

// Folds partials [parts, pitch] over the parts, a block for kWarp neighbouring columns below `count`: row r of the
// block adds the parts r, r + kFoldRows, ..., then the rows are added in order. The total is valid in the threads of
// row 0.
constexpr int kFoldRows = 8, kFoldThreads = kFoldRows * kWarp;
template <typename A>
__device__ __forceinline__ A fold_parts(const A* partials, int64_t parts, int64_t pitch, int64_t column, int64_t count,
                                        A (&scratch)[kFoldRows][kWarp]) {
  const unsigned row = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  A sum = 0;
  if (column < count) {
#pragma unroll 4
    for (int64_t p = row; p < parts; p += kFoldRows) sum += partials[p * pitch + column];
  }
  scratch[row][lane] = sum;
  __syncthreads();
  if (row == 0)
    for (int r = 1; r < kFoldRows; ++r) sum += scratch[r][lane];
  __syncthreads();
  return sum;
}

}  // namespace engram::cuda
