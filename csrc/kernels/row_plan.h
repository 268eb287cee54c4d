// Which slots touch which rows of a table, put in order once: what lookup gradients and row updates work from.
//
//   keys    the slots sorted by (row, slot); a slot that is skipped (its token is masked, or for a shard its row is
//           another shard's) sorts behind all others
//   runs    position in keys where each touched row begins, and from [count] on where the last one ends: run i is
//           keys[runs[i] .. runs[i + 1])
//   count   how many rows are touched
//
// The order is unique, so whatever is summed along it has the same bits for any number of threads or blocks.
#pragma once
#include "scalar.h"

namespace engram {

// The finished plan. A key is (row << slot_bits) | slot.
struct RowPlan {
  const int64_t* keys;   // [slots]
  const int64_t* runs;   // [slots + 1]; from runs[count] on the number of slots that are not skipped
  const int64_t* count;  // [1]
  int64_t slots;
  int slot_bits;  // slots <= 2^slot_bits

  ENGRAM_HOST_DEVICE int64_t row(int64_t position) const { return keys[position] >> slot_bits; }
  ENGRAM_HOST_DEVICE int64_t slot(int64_t position) const { return keys[position] & ((int64_t{1} << slot_bits) - 1); }
};

// values 0 .. n need this many bits
constexpr int bits_of(int64_t n) {
  int bits = 0;
  while (n >> bits) ++bits;
  return bits;
}

// One key a slot, in the order of the slots. A skipped slot has row = table_rows.
template <typename Index> struct RowKeys {
  const Index* rows;  // [slots]
  const bool* mask;   // [slots / columns], null = none
  int64_t* keys;      // [slots]
  int64_t slots, columns, table_rows;
  int64_t row_begin;  // first row held by this table
  bool shard;         // rows outside [row_begin, row_begin + R) belong to somebody else, instead of being an error
  int slot_bits;      // (table_rows << slot_bits) + slots < 2^63
};

// Finds the runs in sorted keys.
struct RowRuns {
  const int64_t* keys;  // [slots], ascending
  int64_t* runs;        // [slots + 1]
  int64_t* count;       // [1]
  int64_t* scratch;     // [run_chunks(slots)]
  int64_t slots, table_rows;
  int slot_bits;
};
constexpr int64_t kRunChunk = 4096;
constexpr int64_t run_chunks(int64_t slots) { return slots / kRunChunk + 1; }  // of the slots + 1 entries of runs

constexpr int64_t kNoBadRow = -1;

// The row of a slot within this table; table_rows = skip it; -1 = an error.
template <typename Args> ENGRAM_HOST_DEVICE int64_t local_row(const Args& a, int64_t slot) {
  if (a.mask && !a.mask[slot / a.columns]) return a.table_rows;
  const int64_t row = a.rows[slot];  // row_begin >= 0: the difference below cannot overflow
  if (row >= a.row_begin && row - a.row_begin < a.table_rows) return row - a.row_begin;
  return a.shard ? a.table_rows : -1;
}

namespace cpu {
// Slots [begin, end); returns the first slot whose row is outside the table (and is no other shard's), or kNoBadRow.
template <typename Index> int64_t row_keys(const RowKeys<Index>&, int64_t begin, int64_t end);

// Ascending sort: into buckets by the highest bits, in passes parallel over chunks, then bucket by bucket. The order is
// unique (keys are distinct), so it depends neither on the number of buckets nor of chunks nor on threads.
struct SortKeys {
  int64_t* keys;     // [count], sorted in place
  int64_t* scratch;  // [count]
  int64_t* starts;   // [chunks, buckets()], scratch; afterwards the last row has the ends of the buckets
  int64_t count, chunks;
  int bits;         // keys < 2^bits
  int ordered;      // keys that differ in these low bits only are in order already, and are left that way
  int bucket_bits;  // 0: a single bucket, for which sort_bucket is all there is to call

  int64_t buckets() const { return int64_t{1} << bucket_bits; }
};
void sort_count(const SortKeys&, int64_t chunk);
void sort_offsets(const SortKeys&);
void sort_scatter(const SortKeys&, int64_t chunk);
void sort_bucket(const SortKeys&, int64_t bucket);

// Runs in three passes: how many begin in each chunk (to scratch), where each chunk writes, the positions.
void runs_count(const RowRuns&, int64_t chunk);
void runs_offsets(const RowRuns&);
void runs_write(const RowRuns&, int64_t chunk);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
template <typename Index> cudaError_t row_keys(const RowKeys<Index>&, cudaStream_t);
// Stable ascending sort by bits [first_bit, end_bit) from `from` to `to`, in `bytes` = row_sort_bytes(...) of device
// memory. Keys come in the order of their slots: with first_bit = slot_bits that sorts them in full.
size_t row_sort_bytes(int64_t slots, int first_bit, int end_bit);
cudaError_t row_sort(const int64_t* from, int64_t* to, int64_t slots, int first_bit, int end_bit, void* scratch,
                     size_t bytes, cudaStream_t);
cudaError_t row_runs(const RowRuns&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
