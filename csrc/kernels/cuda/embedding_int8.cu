#include "../embedding_int8.h"
#include "lookup.cuh"

namespace engram::cuda {
namespace {

template <typename T, typename Index> struct Int8 {
  using Args = EmbeddingInt8<T, Index>;
  using Value = int8_t;
  using Out = T;
  using A = accumulate_t<T>;

  static __device__ __forceinline__ float scale(const Args& a, int64_t row, int64_t) { return __ldg(a.scales + row); }

  template <int N>
  static __device__ __forceinline__ void decode(const Pack<int8_t, N>& values, float scale, A (&v)[N]) {
    if constexpr (sizeof(T) == 2) {
      const Int8Scale exact(scale);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int32_t product = values.element(i) * exact.mantissa;
        v[i] = static_cast<float>(product >> 7 | ((product & 127) + 127) >> 7) * exact.power;
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = static_cast<A>(values.element(i)) * static_cast<A>(scale);
    }
  }
};

}  // namespace

template <typename T, typename Index>
cudaError_t embedding_int8(const EmbeddingInt8<T, Index>& a, int32_t* bad, cudaStream_t stream) {
  return scaled_lookup<Int8<T, Index>>(a, bad, stream);
}

#define INSTANTIATE(T)                                                                                       \
  template cudaError_t embedding_int8<T, int32_t>(const EmbeddingInt8<T, int32_t>&, int32_t*, cudaStream_t); \
  template cudaError_t embedding_int8<T, int64_t>(const EmbeddingInt8<T, int64_t>&, int32_t*, cudaStream_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cuda
