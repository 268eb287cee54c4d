#ifndef ENGRAM_ISA
#include "kernels/embedding.h"

namespace engram::cpu {
namespace {

// The row of a slot within this table; table_rows = skip it; -1 = an error.
template <typename Args> int64_t local_row(const Args& a, int64_t slot) {
  if (a.mask && !a.mask[slot / a.columns]) return a.table_rows;
  const int64_t row = a.rows[slot];  // row_begin >= 0: the difference below cannot overflow
  if (row >= a.row_begin && row - a.row_begin < a.table_rows) return row - a.row_begin;
  return a.shard ? a.table_rows : -1;
}

}  // namespace
}  // namespace engram::cpu

#define ENGRAM_BODY "kernels/cpu/embedding.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename Index> int64_t embedding_forward(const EmbeddingForward<Index>& a, int64_t begin, int64_t end) {
  return ENGRAM_CALL(embedding_forward, a, begin, end);
}

template <typename Index> int64_t embedding_keys(const EmbeddingKeys<Index>& a, int64_t begin, int64_t end) {
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
  int64_t* counts = a.starts + chunk * kSortBuckets;
  std::fill(counts, counts + kSortBuckets, 0);
  const int shift = std::max(0, a.bits - kSortBucketBits);
  for (int64_t i = a.count * chunk / a.chunks; i < a.count * (chunk + 1) / a.chunks; ++i) ++counts[a.keys[i] >> shift];
}

void sort_offsets(const SortKeys& a) {
  int64_t total = 0;
  for (int64_t bucket = 0; bucket < kSortBuckets; ++bucket) {
    for (int64_t chunk = 0; chunk < a.chunks; ++chunk) {
      total += std::exchange(a.starts[chunk * kSortBuckets + bucket], total);
    }
  }
}

void sort_scatter(const SortKeys& a, int64_t chunk) {
  int64_t* next = a.starts + chunk * kSortBuckets;
  const int shift = std::max(0, a.bits - kSortBucketBits);
  for (int64_t i = a.count * chunk / a.chunks; i < a.count * (chunk + 1) / a.chunks; ++i) {
    a.scratch[next[a.keys[i] >> shift]++] = a.keys[i];
  }
}

// Leaves bucket `bucket` sorted in keys; scratch holds it on entry. After the scatter, the last chunk's cursor stands
// at the end of its bucket, which is where the next bucket begins.
void sort_bucket(const SortKeys& a, int64_t bucket) {
  const int64_t* ends = a.starts + (a.chunks - 1) * kSortBuckets;
  const int64_t begin = bucket ? ends[bucket - 1] : 0, count = ends[bucket] - begin;
  int64_t *from = a.scratch + begin, *to = a.keys + begin;
  constexpr int kDigit = 8;
  const int bits = std::max(0, a.bits - kSortBucketBits);
  if (count > 1 && count < 256) {  // below, the passes over a histogram cost more than comparing
    std::sort(from, from + count);
  } else if (count > 1) {
    for (int shift = 0; shift < bits; shift += kDigit) {
      int64_t next[1 << kDigit] = {};
      for (int64_t i = 0; i < count; ++i) ++next[from[i] >> shift & ((1 << kDigit) - 1)];
      int64_t total = 0;
      for (int64_t& n : next) total += std::exchange(n, total);
      for (int64_t i = 0; i < count; ++i) to[next[from[i] >> shift & ((1 << kDigit) - 1)]++] = from[i];
      std::swap(from, to);
    }
  }
  if (from != a.keys + begin) std::copy(from, from + count, a.keys + begin);
}

template <typename T> void embedding_backward(const EmbeddingBackward<T>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(embedding_backward, a, begin, end);
}

#define INSTANTIATE(Index)                                                                     \
  template int64_t embedding_forward<Index>(const EmbeddingForward<Index>&, int64_t, int64_t); \
  template int64_t embedding_keys<Index>(const EmbeddingKeys<Index>&, int64_t, int64_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE
#define INSTANTIATE(T) template void embedding_backward<T>(const EmbeddingBackward<T>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"

namespace engram::cpu::ENGRAM_ISA {

// Far enough ahead for a row to arrive from memory, near enough to stay in the first-level cache until it is used.
constexpr int64_t kPrefetchSlots = 16;

// One row of Lines * 64 bytes, a length that the compiler knows (0: any).
template <int Lines> ENGRAM_INLINE void copy_row(char* to, const char* from, int64_t bytes) {
  if constexpr (Lines > 0) {
    for (int i = 0; i < Lines; ++i)
      store(reinterpret_cast<float*>(to) + 16 * i, load(reinterpret_cast<const float*>(from) + 16 * i));
  } else {
    std::memcpy(to, from, bytes);
  }
}

template <int Lines, typename Index>
ENGRAM_TARGET int64_t embedding_rows(const EmbeddingForward<Index>& a, int64_t begin, int64_t end) {
  int64_t bad = kNoBadRow;
  const int64_t bytes = Lines > 0 ? Lines * 64 : a.row_bytes;
  for (int64_t slot = begin; slot < end; ++slot) {
    if (slot + kPrefetchSlots < end) {
      const int64_t ahead = local_row(a, slot + kPrefetchSlots);
      if (ahead >= 0 && ahead < a.table_rows) {
        const char* p = a.table + ahead * bytes;
        for (int64_t b = 0; b < std::min<int64_t>(bytes, 512); b += 64) __builtin_prefetch(p + b);
      }
    }
    const int64_t row = local_row(a, slot);
    char* out = a.out + slot * bytes;
    if (row >= 0 && row < a.table_rows) {
      copy_row<Lines>(out, a.table + row * bytes, bytes);
    } else {
      std::memset(out, 0, bytes);
      if (row < 0 && bad == kNoBadRow) bad = slot;
    }
  }
  return bad;
}

template <typename Index>
ENGRAM_TARGET int64_t embedding_forward(const EmbeddingForward<Index>& a, int64_t begin, int64_t end) {
  switch (a.row_bytes) {
    case 64:
      return embedding_rows<1>(a, begin, end);
    case 128:
      return embedding_rows<2>(a, begin, end);
    case 256:
      return embedding_rows<4>(a, begin, end);
    case 512:
      return embedding_rows<8>(a, begin, end);
    default:
      return embedding_rows<0>(a, begin, end);
  }
}

template <typename T> void embedding_backward(const EmbeddingBackward<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const int64_t slot_mask = (int64_t{1} << a.slot_bits) - 1;
  const auto row_at = [&](int64_t i) { return a.keys[i] >> a.slot_bits; };
  const auto grad_at = [&](int64_t i) { return a.grad_out + (a.keys[i] & slot_mask) * a.dim; };
  int64_t i = begin;
  while (i > 0 && i < end && row_at(i) == row_at(i - 1)) ++i;  // this run began earlier: it has its owner there
  while (i < end && row_at(i) < a.table_rows) {
    const int64_t row = row_at(i), first = i;
    while (i < a.slots && row_at(i) == row) ++i;
    T* grad_row = a.grad_table + row * a.dim;
    // Column by column of vectors, so that the sum stays in a register however long the run is.
    for_each_vec<A>(0, a.dim, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      vec<A> total = lanes.get(grad_at(first) + d);
      for (int64_t j = first + 1; j < i; ++j) total += lanes.get(grad_at(j) + d);
      lanes.put(grad_row + d, total);
    });
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
