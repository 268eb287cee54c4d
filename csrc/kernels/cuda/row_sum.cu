#include "../row_sum.h"
#include "row_chunks.cuh"

namespace engram::cuda {
namespace {

constexpr int kSlotsInFlight = 8;

template <typename T, bool kVector> struct PutSum {
  using A = accumulate_t<T>;
  struct Fetched {};
  const RowSum<T>& a;

  __device__ __forceinline__ Fetched fetch(int64_t, int64_t, int64_t) const { return {}; }
  __device__ __forceinline__ void finish(bool complete, int64_t row, int64_t run, int64_t column, int64_t available,
                                         const A (&sum)[kLaneElements<T>], const Fetched&) const {
    if (!complete) return;
    if (a.rows && column == 0) a.rows[run] = row;
    if (available > 0)
      store<kVector>(a.sums + (a.rows ? run : row) * a.dim + column, narrow<T, kLaneElements<T>>(sum), available);
  }
};

template <typename T, bool kVector>
__global__ void __launch_bounds__(kChunkThreads) row_sum_chunks_kernel(const RowSum<T> a, int lanes) {
  sum_chunk<kSlotsInFlight, kVector>(a.values, a.plan, a.dim, a.table_rows, a.partials, lanes, a.rows != nullptr,
                                     PutSum<T, kVector>{a});
}

template <typename T> __global__ void __launch_bounds__(kFoldRunThreads) row_sum_fold_kernel(const RowSum<T> a) {
  using A = accumulate_t<T>;
  fold_runs(a.plan, a.dim, a.table_rows, a.partials, [&](int64_t row, int64_t position, const A* sums, auto team) {
    const int64_t to = a.rows ? run_at(a.plan, PlanSize(a.plan), position) : row;
    if (a.rows && team.rank() == 0) a.rows[to] = row;
    for (int64_t c = team.rank(); c < a.dim; c += team.size()) a.sums[to * a.dim + c] = static_cast<T>(sums[c]);
  });
}

}  // namespace

template <typename T> cudaError_t row_sum(const RowSum<T>& a, cudaStream_t stream) {
  if (a.plan.slots == 0) return cudaSuccess;
  const int64_t packs = divide_up(a.dim, kLaneElements<T>), chunks = row_chunks(a.plan);
  const int lanes = lanes_for(packs);
  const int64_t columns = divide_up(packs < 1 ? 1 : packs, lanes);
  if (columns > 65535) return cudaErrorInvalidValue;
  dim3 grid = grid_for(chunks, kChunkThreads / lanes);
  grid.y = static_cast<unsigned>(columns);
  const bool vector = aligned(16, a.dim * static_cast<int64_t>(sizeof(T)), {a.values, a.sums, a.partials});
  if (vector) ENGRAM_LAUNCH((row_sum_chunks_kernel<T, true>), grid, dim3(kChunkThreads), 0, stream, a, lanes);
  else ENGRAM_LAUNCH((row_sum_chunks_kernel<T, false>), grid, dim3(kChunkThreads), 0, stream, a, lanes);
  if (chunks > 1)
    ENGRAM_LAUNCH(row_sum_fold_kernel<T>, grid_for(chunks, kFoldRunWarps), dim3(kFoldRunThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

#define INSTANTIATE(T) template cudaError_t row_sum<T>(const RowSum<T>&, cudaStream_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cuda
