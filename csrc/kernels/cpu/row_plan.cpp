#include "kernels/row_plan.h"

#include <algorithm>
#include <utility>

namespace engram::cpu {

template <typename Index> int64_t row_keys(const RowKeys<Index>& a, int64_t begin, int64_t end) {
  int64_t bad = kNoBadRow;
  for (int64_t slot = begin; slot < end; ++slot) {
    int64_t row = local_row(a, slot);
    if (row < 0) {
      if (bad == kNoBadRow) bad = slot;
      row = a.table_rows;
    }
    a.keys[slot] = row << a.slot_bits | slot;
  }
  return bad;
}

void sort_count(const SortKeys& a, int64_t chunk) {
  int64_t* counts = a.starts + chunk * a.buckets();
  std::fill(counts, counts + a.buckets(), 0);
  const int shift = std::max(a.ordered, a.bits - a.bucket_bits);
  for (int64_t i = a.count * chunk / a.chunks; i < a.count * (chunk + 1) / a.chunks; ++i) ++counts[a.keys[i] >> shift];
}

void sort_offsets(const SortKeys& a) {
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < a.buckets(); ++bucket) {
    for (int64_t chunk = 0; chunk < a.chunks; ++chunk) {
      total += std::exchange(a.starts[chunk * a.buckets() + bucket], total);
    }
  }
}

void sort_scatter(const SortKeys& a, int64_t chunk) {
  int64_t* next = a.starts + chunk * a.buckets();
  const int shift = std::max(a.ordered, a.bits - a.bucket_bits);
  for (int64_t i = a.count * chunk / a.chunks; i < a.count * (chunk + 1) / a.chunks; ++i) {
    a.scratch[next[a.keys[i] >> shift]++] = a.keys[i];
  }
}

// Leaves a bucket sorted in keys; with several of them scratch holds it on entry. After the scatter, the last chunk's
// cursor stands at the end of its bucket, which is where the next bucket begins.
void sort_bucket(const SortKeys& a, int64_t bucket) {
  int64_t begin = 0, count = a.count, *from = a.keys, *to = a.scratch;
  if (a.bucket_bits > 0) {
    const int64_t* ends = a.starts + (a.chunks - 1) * a.buckets();
    begin = bucket ? ends[bucket - 1] : 0;
    count = ends[bucket] - begin;
    std::swap(from, to);
  }
  from += begin;
  to += begin;
  constexpr int kMaxDigit = 12;  // its histogram stays in the first-level cache
  const int high = std::max(a.ordered, a.bits - a.bucket_bits), bits = high - a.ordered;
  const int passes = (bits + kMaxDigit - 1) / kMaxDigit, digit = passes ? (bits + passes - 1) / passes : 0;
  const int64_t last = (int64_t{1} << digit) - 1;
  if (count > 1 && count < 256) {  // below, the passes over a histogram cost more than comparing
    std::sort(from, from + count);
  } else if (count > 1) {
    for (int shift = a.ordered; shift < high; shift += digit) {
      int64_t next[1 << kMaxDigit];
      std::fill(next, next + last + 1, 0);
      for (int64_t i = 0; i < count; ++i) ++next[from[i] >> shift & last];
      int64_t total = 0;
      for (int64_t i = 0; i <= last; ++i) total += std::exchange(next[i], total);
      for (int64_t i = 0; i < count; ++i) to[next[from[i] >> shift & last]++] = from[i];
      std::swap(from, to);
    }
  }
  if (from != a.keys + begin) std::copy(from, from + count, a.keys + begin);
}

namespace {

// f(position) for every run that begins in a chunk of positions; skipped slots begin none.
template <typename F> void for_each_run(const RowRuns& a, int64_t chunk, F&& f) {
  const int64_t begin = chunk * kRunChunk, end = std::min(begin + kRunChunk, a.slots);
  int64_t before = begin ? a.keys[begin - 1] >> a.slot_bits : -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = a.keys[i] >> a.slot_bits;
    if (row >= a.table_rows) return;
    if (row != before) f(i);
    before = row;
  }
}

}  // namespace

void runs_count(const RowRuns& a, int64_t chunk) {
  int64_t count = 0;
  for_each_run(a, chunk, [&](int64_t) { ++count; });
  a.scratch[chunk] = count;
}

void runs_offsets(const RowRuns& a) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < run_chunks(a.slots); ++chunk) total += std::exchange(a.scratch[chunk], total);
  *a.count = total;
  const int64_t skipped = a.table_rows << a.slot_bits;
  a.runs[total] = std::lower_bound(a.keys, a.keys + a.slots, skipped) - a.keys;
}

void runs_write(const RowRuns& a, int64_t chunk) {
  int64_t* to = a.runs + a.scratch[chunk];
  for_each_run(a, chunk, [&](int64_t position) { *to++ = position; });
  const int64_t begin = std::max(chunk * kRunChunk, *a.count + 1), end = std::min((chunk + 1) * kRunChunk, a.slots + 1);
  for (int64_t i = begin; i < end; ++i) a.runs[i] = a.runs[*a.count];
}

template int64_t row_keys<int32_t>(const RowKeys<int32_t>&, int64_t, int64_t);
template int64_t row_keys<int64_t>(const RowKeys<int64_t>&, int64_t, int64_t);

}  // namespace engram::cpu
