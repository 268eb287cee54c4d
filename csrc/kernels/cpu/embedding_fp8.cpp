#ifndef ENGRAM_ISA
#include "kernels/embedding_fp8.h"

#define ENGRAM_BODY "kernels/cpu/embedding_fp8.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename T, typename Index>
int64_t embedding_fp8(const EmbeddingFp8<T, Index>& a, int64_t begin, int64_t end) {
  return ENGRAM_CALL(embedding_fp8, a, begin, end);
}

#define INSTANTIATE(T)                                                                           \
  template int64_t embedding_fp8<T, int32_t>(const EmbeddingFp8<T, int32_t>&, int64_t, int64_t); \
  template int64_t embedding_fp8<T, int64_t>(const EmbeddingFp8<T, int64_t>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"
#include "kernels/cpu/lookup.h"

namespace engram::cpu::ENGRAM_ISA {

// Exponent and mantissa move to their places in a float; what is subnormal in e4m3 counts in steps of 2^-9. No float
// here is subnormal, which would take a hundred cycles. Selection is by masks, since compilers take comparisons of
// vectors wider than the processor's one element at a time.
ENGRAM_INLINE f32 e4m3(u32 bits) {
  const i32 magnitude = reinterpret_cast<i32>(bits & 0x7fu);
  const i32 normal = (magnitude << 20) + (120 << 23);
  const i32 steps = reinterpret_cast<i32>(__builtin_convertvector(magnitude, f32) * 0x1p-9f);
  const i32 subnormal = (magnitude - 8) >> 31, nan = -((magnitude + 1) >> 7);  // all bits or none
  const i32 v = (((normal ^ steps) & subnormal) ^ normal) | (nan & 0x7fc00000);
  return reinterpret_cast<f32>(reinterpret_cast<u32>(v) | (bits & 0x80u) << 24);
}

#if defined(ENGRAM_HAS_AVX512)
typedef uint16_t w16 __attribute__((vector_size(64)));

// Under these scales every number of e4m3 is a normal one of bfloat16, or zero.
constexpr uint8_t kLeastNormal = 10, kMostNormal = 246;
constexpr w16 kSteps = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // 0 to 7 times 2^-9, bfloat16
constexpr w16 kNotZero = {0, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff};

// A block under such a scale in bfloat16, 32 values at a time: the scale is added to the exponents.
ENGRAM_INLINE w16 bfloat16_block(const uint8_t* values, uint8_t scale) {
  const w16 bits = reinterpret_cast<w16>(
      _mm512_maskz_cvtepu8_epi16(0xffffffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values))));
  const w16 magnitude = bits & 0x7f;
  const uint16_t power = static_cast<uint16_t>((scale - 127) << 7), bias = static_cast<uint16_t>(power + (120 << 7));
  const w16 steps = __builtin_shuffle(kSteps + (kNotZero & power), bits);  // by bits modulo 32
  w16 v = magnitude < 8 ? steps : (magnitude << 4) + bias;
  v = magnitude == 0x7f ? magnitude - magnitude + 0x7fc0 : v;
  return v | (bits & 0x80) << 8;
}
ENGRAM_INLINE void store_block(BFloat16* p, w16 v) { std::memcpy(static_cast<void*>(p), &v, sizeof v); }
ENGRAM_INLINE void store_block(float* p, w16 v) {
  BFloat16 halves[kFp8Block];
  store_block(halves, v);
  for (int i = 0; i < kFp8Block; i += 16) store(p + i, load(halves + i));
}
#endif

// Up to 32 values that share a scale.
template <typename T> ENGRAM_INLINE void scale_block(T* out, const uint8_t* values, uint8_t scale, int64_t n) {
#if defined(ENGRAM_HAS_AVX512)
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, float>) {
    if (n == kFp8Block && scale >= kLeastNormal && scale <= kMostNormal)
      return store_block(out, bfloat16_block(values, scale));
  }
#endif
  const float factor = e8m0(scale);
  if constexpr (std::is_same_v<T, double>) {  // has room for products that float has not
    float unscaled[kFp8Block];
    scale_block(unscaled, values, 127, n);
    for (int64_t j = 0; j < n; ++j) out[j] = double{unscaled[j]} * double{factor};
  } else {
    for_each_vec<float>(0, n, [&](auto lanes, int64_t j) ENGRAM_INLINE_LAMBDA {
      lanes.put(out + j, e4m3(load_bytes(lanes, values + j)) * broadcast(factor));
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
          scale_block(out + j, values + j, scales[j / kFp8Block], kFp8Block);
        if (j < a.width) scale_block(out + j, values + j, scales[j / kFp8Block], a.width - j);
      },
      [&](int64_t slot) ENGRAM_INLINE_LAMBDA { copy_or_zero<T>(a.out + slot * a.width, nullptr, a.width); });
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
