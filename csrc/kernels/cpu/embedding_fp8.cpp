#ifndef ENGRAM_ISA
#include "kernels/embedding_fp8.h"

#define ENGRAM_BODY "kernels/cpu/embedding_fp8.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename T, typename Index>
int64_t embedding_fp8(const EmbeddingFp8<T, Index>& a, int64_t begin, int64_t end) {
  return ENGRAM_CALL(embedding_fp8, a, begin, end);
}

#define INSTANTIATE(T)                                                                       \
  template int64_t embedding_fp8<T, int32_t>(const EmbeddingFp8<T, int32_t>&, int64_t, int64_t); \
  template int64_t embedding_fp8<T, int64_t>(const EmbeddingFp8<T, int64_t>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"
#include "kernels/cpu/lookup.h"

namespace engram::cpu::ENGRAM_ISA {

typedef uint8_t u8 __attribute__((vector_size(16)));

// 16 values, of which the first `available` exist. Exponent and mantissa move to their places in a float; what is
// subnormal in e4m3 counts in steps of 2^-9. No float here is subnormal, which would take a hundred cycles.
ENGRAM_INLINE f32 load_e4m3(const uint8_t* p, int64_t available) {
  u8 bytes{};
  std::memcpy(&bytes, p, std::min<int64_t>(available, sizeof bytes));
  const u32 bits = __builtin_convertvector(bytes, u32), magnitude = bits & 0x7fu;
  const f32 normal = reinterpret_cast<f32>((magnitude << 20) + (120u << 23));
  const f32 steps = __builtin_convertvector(reinterpret_cast<i32>(magnitude), f32) * 0x1p-9f;
  f32 v = magnitude < 8u ? steps : normal;
  v = magnitude == 0x7fu ? reinterpret_cast<f32>(magnitude - magnitude + 0x7fc00000u) : v;
  return reinterpret_cast<f32>(reinterpret_cast<u32>(v) | (bits & 0x80u) << 24);
}

// Up to 32 values that share a scale.
template <typename T> ENGRAM_INLINE void scale_block(T* out, const uint8_t* values, float scale, int64_t n) {
  if constexpr (std::is_same_v<T, double>) {  // has room for products that float has not
    float unscaled[kFp8Block];
    scale_block(unscaled, values, 1.0f, n);
    for (int64_t j = 0; j < n; ++j) out[j] = double{unscaled[j]} * double{scale};
  } else {
    for_each_vec<float>(0, n, [&](auto lanes, int64_t j) ENGRAM_INLINE_LAMBDA {
      lanes.put(out + j, load_e4m3(values + j, n - j) * broadcast(scale));
    });
  }
}

template <typename T, typename Index>
ENGRAM_TARGET int64_t embedding_fp8(const EmbeddingFp8<T, Index>& a, int64_t begin, int64_t end) {
  return for_each_slot(
      a, begin, end,
      [&](int64_t row) ENGRAM_INLINE_LAMBDA {
        prefetch(a.values + row * a.width, a.width);
        prefetch(a.scales + row * a.blocks, a.blocks);
      },
      [&](int64_t slot, int64_t row) ENGRAM_INLINE_LAMBDA {
        T* out = a.out + slot * a.width;
        const uint8_t *values = a.values + row * a.width, *scales = a.scales + row * a.blocks;
        int64_t j = 0;
        for (; j + kFp8Block <= a.width; j += kFp8Block)
          scale_block(out + j, values + j, e8m0(scales[j / kFp8Block]), kFp8Block);
        if (j < a.width) scale_block(out + j, values + j, e8m0(scales[j / kFp8Block]), a.width - j);
      },
      [&](int64_t slot) ENGRAM_INLINE_LAMBDA { copy_or_zero<T>(a.out + slot * a.width, nullptr, a.width); });
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
