// Sums the values of all slots that touch the same row, along a row plan:
//
//   compact    sums[i, :]   = sum over the slots of run i of values[slot, :],  rows[i] = the run's row
//   scatter    sums[row, :] = the same, into a matrix of all rows
//
// Each row has one owner, which adds its slots in order, in the accumulation type, and rounds once. (CUDA: in fixed
// chunks of slots, folded in order.)
#pragma once
#include "row_plan.h"

namespace engram {

template <typename T> struct RowSum {
  const T* values;  // [slots, d]
  RowPlan plan;
  int64_t* rows;              // [count], written; null = scatter
  T* sums;                    // [count, d], or [R, d] of which the touched rows are written
  accumulate_t<T>* partials;  // CUDA: [ceil(slots / kRowSumChunk), 2, d]; CPU: null
  int64_t table_rows;         // CUDA: rows from here on, which only another table's plan has, are left out
  int64_t dim;
};

namespace cpu {
// The runs that begin in positions [begin, end) of the sorted keys.
template <typename T> void row_sum(const RowSum<T>&, int64_t begin, int64_t end);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
constexpr int64_t kRowSumChunk = 32;  // sorted slots a lane group sums before it hands on a partial row
template <typename T> cudaError_t row_sum(const RowSum<T>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
