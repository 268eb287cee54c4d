// Row lookup: all heads' tables live in one [R, d] matrix, rows are global row ids.
//
//   forward    out[slot, :]      = table[rows[slot] - row_begin, :]              slot = token * C + column
//   backward   grad_table[r, :]  = sum over slots with rows[slot] - row_begin == r of grad_out[slot, :]
//
// A slot is skipped (zeros, no gradient) when its token is masked or, for a shard, when another shard owns its row.
// The backward is deterministic and free of atomics: slots are sorted by (row, slot), each row is summed by one owner
// in slot order, in the accumulation type, and rounded once.
#pragma once
#include "scalar.h"

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

// One sortable int64 a slot: (row << slot_bits) | slot. Skipped slots carry row = table_rows and so sort behind all
// others.
template <typename Index> struct EmbeddingKeys {
  const Index* rows;
  const bool* mask;
  int64_t* keys;  // [slots]
  int64_t slots, columns, table_rows, row_begin;
  bool shard;
  int slot_bits;  // slots <= 2^slot_bits, and (table_rows << slot_bits) + slots < 2^63
};

template <typename T> struct EmbeddingBackward {
  const T* grad_out;          // [slots, d]
  const int64_t* keys;        // [slots], ascending
  T* grad_table;              // [R, d], zero on entry
  accumulate_t<T>* partials;  // CUDA: [ceil(slots / chunk), 2, d]; CPU: null
  int64_t slots, table_rows, dim;
  int slot_bits;
};

constexpr int64_t kNoBadRow = -1;

namespace cpu {
// Slots [begin, end); returns the first slot whose row is outside the table (and is no other shard's), or kNoBadRow.
template <typename Index> int64_t embedding_forward(const EmbeddingForward<Index>&, int64_t begin, int64_t end);
template <typename Index> int64_t embedding_keys(const EmbeddingKeys<Index>&, int64_t begin, int64_t end);

// Ascending sort in three passes, parallel over chunks and then over buckets. The order is unique (keys are distinct),
// so it depends neither on the number of chunks nor on threads.
struct SortKeys {
  int64_t* keys;     // [count], sorted in place
  int64_t* scratch;  // [count]
  int64_t* starts;   // [chunks, kSortBuckets], scratch; afterwards starts[bucket] = end of the bucket
  int64_t count, chunks;
  int bits;  // keys < 2^bits
};
constexpr int kSortBucketBits = 6;
constexpr int64_t kSortBuckets = int64_t{1} << kSortBucketBits;
void sort_count(const SortKeys&, int64_t chunk);
void sort_offsets(const SortKeys&);
void sort_scatter(const SortKeys&, int64_t chunk);
void sort_bucket(const SortKeys&, int64_t bucket);

// Sums the runs of equal rows that begin in positions [begin, end) of the sorted keys.
template <typename T> void embedding_backward(const EmbeddingBackward<T>&, int64_t begin, int64_t end);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
constexpr int64_t kEmbeddingChunk = 32;  // sorted slots a lane group sums before it hands on a partial row
// bad: optional device flag (null = not wanted), set to 1 when a row is outside the table; such a slot reads as zeros.
template <typename Index> cudaError_t embedding_forward(const EmbeddingForward<Index>&, int32_t* bad, cudaStream_t);
template <typename Index> cudaError_t embedding_keys(const EmbeddingKeys<Index>&, cudaStream_t);
template <typename T> cudaError_t embedding_backward(const EmbeddingBackward<T>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
