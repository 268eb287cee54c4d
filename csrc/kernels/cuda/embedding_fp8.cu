#include "../embedding_fp8.h"
#include "lookup.cuh"

#include <limits>

namespace engram::cuda {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A chunk never leaves its block of 32 values.
template <typename T, typename Index> struct Fp8 {
  using Args = EmbeddingFp8<T, Index>;
  using Value = uint8_t;
  using Out = T;
  using A = accumulate_t<T>;

  static __device__ __forceinline__ float scale(const Args& a, int64_t row, int64_t column) {
    return e8m0(__ldg(a.scales + row * a.blocks + column / kFp8Block));
  }

  // Two bytes at a time become two halves, 2^-8 of what they should be: halves have one bit of exponent more, with
  // a bias that is greater by 8, and are subnormal where e4m3 is. NaN has become 480 / 256.
  template <int N>
  static __device__ __forceinline__ void decode(const Pack<uint8_t, N>& values, float scale, A (&v)[N]) {
    static_assert(N % 2 == 0 && kFp8Block % N == 0);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t pair = uint32_t{values.element(i)} << 8 | uint32_t{values.element(i + 1)} << 24;
      const uint32_t bits = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1;
      __half2 halves;
      memcpy(static_cast<void*>(&halves), &bits, sizeof bits);
      const float2 both = __half22float2(halves);
      v[i] = static_cast<A>(fabsf(both.x) == 1.875f ? kNan : both.x * 256.0f) * scale;
      v[i + 1] = static_cast<A>(fabsf(both.y) == 1.875f ? kNan : both.y * 256.0f) * scale;
    }
  }
};

}  // namespace

template <typename T, typename Index>
cudaError_t embedding_fp8(const EmbeddingFp8<T, Index>& a, int32_t* bad, cudaStream_t stream) {
  return scaled_lookup<Fp8<T, Index>>(a, bad, stream);
}

#define INSTANTIATE(T)                                                                                     \
  template cudaError_t embedding_fp8<T, int32_t>(const EmbeddingFp8<T, int32_t>&, int32_t*, cudaStream_t); \
  template cudaError_t embedding_fp8<T, int64_t>(const EmbeddingFp8<T, int64_t>&, int32_t*, cudaStream_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cuda
