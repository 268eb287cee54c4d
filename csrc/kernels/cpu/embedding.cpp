#ifndef ENGRAM_ISA
#include "kernels/embedding.h"

#define ENGRAM_BODY "kernels/cpu/embedding.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename Index> int64_t embedding_forward(const EmbeddingForward<Index>& a, int64_t begin, int64_t end) {
  return ENGRAM_CALL(embedding_forward, a, begin, end);
}

template int64_t embedding_forward<int32_t>(const EmbeddingForward<int32_t>&, int64_t, int64_t);
template int64_t embedding_forward<int64_t>(const EmbeddingForward<int64_t>&, int64_t, int64_t);

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

}  // namespace engram::cpu::ENGRAM_ISA
#endif
