// Row lookup: all heads' tables live in one [R, d] matrix, rows are global row ids.
//
//   forward    out[slot, :]      = table[rows[slot] - row_begin, :]              slot = token * C + column
//   backward   grad_table[r, :]  = sum over slots with rows[slot] - row_begin == r of grad_out[slot, :]
//
// A slot is skipped (zeros, no gradient) when its token is masked or, for a shard, when another shard owns its row.
// The backward is a row sum (row_sum.h) along the row plan (row_plan.h).
#pragma once
#include "row_plan.h"
#include "row_sum.h"

namespace engram {

template <typename Index> struct EmbeddingForward {
  const char* table;  // [R] rows of row_bytes
  const Index* rows;  // [slots]
  const bool* mask;   // [slots / columns], null = none
  char* out;          // [slots] rows of row_bytes, every byte written
  int64_t slots, columns, table_rows, row_bytes;
  int64_t row_begin;  // first row held by this table
  bool shard;         // rows outside [row_begin, row_begin + R) belong to somebody else, instead of being an error
};

namespace cpu {
// Slots [begin, end); returns the first slot whose row is outside the table (and is no other shard's), or kNoBadRow.
template <typename Index> int64_t embedding_forward(const EmbeddingForward<Index>&, int64_t begin, int64_t end);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
// bad: optional device flag (null = not wanted), set to 1 when a row is outside the table; such a slot reads as zeros.
template <typename Index> cudaError_t embedding_forward(const EmbeddingForward<Index>&, int32_t* bad, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
