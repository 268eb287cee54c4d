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
#include "kernels/cpu/lookup.h"

namespace engram::cpu::ENGRAM_ISA {

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
  const int64_t bytes = Lines > 0 ? Lines * 64 : a.row_bytes;
  return for_each_slot(
      a, begin, end, [&](int64_t row) ENGRAM_INLINE_LAMBDA { prefetch(a.table + row * bytes, bytes); },
      [&](int64_t slot, int64_t row)
          ENGRAM_INLINE_LAMBDA { copy_row<Lines>(a.out + slot * bytes, a.table + row * bytes, bytes); },
      [&](int64_t slot) ENGRAM_INLINE_LAMBDA { std::memset(a.out + slot * bytes, 0, bytes); });
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
