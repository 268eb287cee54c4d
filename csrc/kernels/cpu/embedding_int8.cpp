#ifndef ENGRAM_ISA
#include "kernels/embedding_int8.h"

#define ENGRAM_BODY "kernels/cpu/embedding_int8.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename T, typename Index>
int64_t embedding_int8(const EmbeddingInt8<T, Index>& a, int64_t begin, int64_t end) {
  return ENGRAM_CALL(embedding_int8, a, begin, end);
}

#define INSTANTIATE(T)                                                                             \
  template int64_t embedding_int8<T, int32_t>(const EmbeddingInt8<T, int32_t>&, int64_t, int64_t); \
  template int64_t embedding_int8<T, int64_t>(const EmbeddingInt8<T, int64_t>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"
#include "kernels/cpu/lookup.h"

namespace engram::cpu::ENGRAM_ISA {

template <typename Lanes> ENGRAM_INLINE i32 load_int8(Lanes lanes, const int8_t* p) {
  return reinterpret_cast<i32>(load_bytes(lanes, reinterpret_cast<const uint8_t*>(p)) << 24) >> 24;
}

template <typename T> ENGRAM_INLINE void scale_row(T* out, const int8_t* values, float scale, int64_t n) {
  if constexpr (std::is_same_v<T, double>) {
    for (int64_t j = 0; j < n; ++j) out[j] = double{scale} * values[j];
  } else if constexpr (std::is_same_v<T, float>) {
    for_each_vec<float>(0, n, [&](auto lanes, int64_t j) ENGRAM_INLINE_LAMBDA {
      lanes.put(out + j, __builtin_convertvector(load_int8(lanes, values + j), f32) * broadcast(scale));
    });
  } else {
    const Int8Scale exact(scale);
    for_each_vec<float>(0, n, [&](auto lanes, int64_t j) ENGRAM_INLINE_LAMBDA {
      const i32 product = load_int8(lanes, values + j) * exact.mantissa;
      const i32 odd = product >> 7 | ((product & 127) + 127) >> 7;
      lanes.put(out + j, __builtin_convertvector(odd, f32) * broadcast(exact.power));
    });
  }
}

template <typename T, typename Index>
ENGRAM_TARGET int64_t embedding_int8(const EmbeddingInt8<T, Index>& a, int64_t begin, int64_t end) {
  return for_each_slot(
      a, begin, end,
      [&](int64_t row) ENGRAM_INLINE_LAMBDA {
        prefetch(a.values + row * a.width, a.width);
        prefetch(a.scales + row, sizeof(float));
      },
      [&](int64_t slot, int64_t row)
          ENGRAM_INLINE_LAMBDA { scale_row(a.out + slot * a.width, a.values + row * a.width, a.scales[row], a.width); },
      [&](int64_t slot) ENGRAM_INLINE_LAMBDA { copy_or_zero<T>(a.out + slot * a.width, nullptr, a.width); });
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
