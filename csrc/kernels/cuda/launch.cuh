// Grids and vector access, shared by the kernels.
#pragma once
#include "../scalar.h"
#include "device.cuh"

#include <cstring>
#include <initializer_list>

namespace engram::cuda {

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for `count` items, `per_block` each, in a kernel that strides over its grid. One block for nothing at all.
inline dim3 grid_for(int64_t count, int64_t per_block) {
  const int64_t blocks = divide_up(count, per_block), limit = 0x7fffffff;
  return dim3(static_cast<unsigned>(blocks < 1 ? 1 : blocks < limit ? blocks : limit));
}

// A whole number of warps for `lanes` lanes.
inline unsigned whole_warps(int64_t lanes) {
  return static_cast<unsigned>(divide_up(lanes < 1 ? 1 : lanes, kWarp) * kWarp);
}

// May every row of `row_bytes` at these addresses be accessed in words of `word_bytes`?
inline bool aligned(int64_t word_bytes, int64_t row_bytes, std::initializer_list<const void*> pointers) {
  uintptr_t bits = static_cast<uintptr_t>(row_bytes);
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % static_cast<uintptr_t>(word_bytes) == 0;
}

// n / d for 0 <= n < 2^31 by a multiplication (Granlund and Montgomery); d >= 1 is known on the host.
struct FastDivisor {
  uint32_t divisor, multiplier, shift;
  explicit FastDivisor(uint32_t d) : divisor(d), multiplier(0), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

template <int BYTES> struct WordOf;
template <> struct WordOf<1> {
  using type = unsigned char;
};
template <> struct WordOf<2> {
  using type = unsigned short;
};
template <> struct WordOf<4> {
  using type = unsigned int;
};
template <> struct WordOf<8> {
  using type = uint2;
};
template <> struct WordOf<16> {
  using type = uint4;
};

// N neighbouring elements as they lie in memory.
template <typename T, int N> struct Pack {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  using Word = typename WordOf<kWordBytes>::type;
  Word words[kBytes / kWordBytes];

  __device__ __forceinline__ T element(int i) const {
    T value;
    memcpy(static_cast<void*>(&value), reinterpret_cast<const char*>(words) + i * sizeof(T), sizeof(T));
    return value;
  }
  __device__ __forceinline__ accumulate_t<T> operator[](int i) const {
    return static_cast<accumulate_t<T>>(element(i));
  }
  __device__ __forceinline__ void set(int i, T value) {
    memcpy(reinterpret_cast<char*>(words) + i * sizeof(T), static_cast<const void*>(&value), sizeof(T));
  }
};

// Elements a lane handles at once: 16 bytes of T. They do not depend on alignment, so neither does the order of a sum.
template <typename T> constexpr int kLaneElements = 16 / static_cast<int>(sizeof(T));

enum class Reuse { no, yes };  // will these bytes be read again soon?

// Loads N elements at p, in whole words if kVector, of which only the first `available` exist; the others are zero.
template <int N, bool kVector, Reuse kReuse = Reuse::yes, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* p, int64_t available) {
  Pack<T, N> pack;
  if constexpr (kVector) {
    using Word = typename Pack<T, N>::Word;
    const Word* words = reinterpret_cast<const Word*>(p);
#pragma unroll
    for (int i = 0; i < Pack<T, N>::kBytes / Pack<T, N>::kWordBytes; ++i)
      pack.words[i] = kReuse == Reuse::yes ? __ldg(words + i) : __ldcs(words + i);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.set(i, i < available ? p[i] : T(0.0f));
  }
  return pack;
}

template <bool kVector, typename T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& pack, int64_t available) {
  if constexpr (kVector) {
    using Word = typename Pack<T, N>::Word;
    Word* words = reinterpret_cast<Word*>(p);
#pragma unroll
    for (int i = 0; i < Pack<T, N>::kBytes / Pack<T, N>::kWordBytes; ++i) words[i] = pack.words[i];
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < available) p[i] = pack.element(i);
  }
}

template <typename T, int N> __device__ __forceinline__ Pack<T, N> zero_pack() {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.set(i, T(0.0f));
  return pack;
}

// Rounds N sums to T.
template <typename T, int N> __device__ __forceinline__ Pack<T, N> narrow(const accumulate_t<T> (&v)[N]) {
  Pack<T, N> pack;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {  // one instruction a pair
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      char* to = reinterpret_cast<char*>(pack.words) + i * sizeof(T);
      if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[i], v[i + 1]);
        memcpy(to, static_cast<const void*>(&pair), sizeof pair);
      } else {
        const __half2 pair = __floats2half2_rn(v[i], v[i + 1]);
        memcpy(to, static_cast<const void*>(&pair), sizeof pair);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.set(i, static_cast<T>(v[i]));
  }
  return pack;
}

__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float reciprocal(float x) { return __fdividef(1.0f, x); }
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }
__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return rsqrt(x); }

template <typename A> __device__ __forceinline__ A sigmoid(A x) { return reciprocal(A(1) + exp_of(-x)); }

}  // namespace engram::cuda
