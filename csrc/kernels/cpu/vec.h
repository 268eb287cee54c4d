// Vectors of one width on every instruction set: 16 floats or 8 doubles, so sums are taken in the same order
// everywhere. Included once per instruction set by the kernel bodies (no include guard; see foreach_isa.h). GCC vector
// extensions do the arithmetic; intrinsics appear only where the compiler has no good way of its own (half conversions,
// reciprocal).

#undef ENGRAM_INLINE
#undef ENGRAM_INLINE_LAMBDA
#define ENGRAM_INLINE ENGRAM_TARGET __attribute__((always_inline)) inline
#define ENGRAM_INLINE_LAMBDA ENGRAM_TARGET __attribute__((always_inline))  // lambdas do not inherit the target pragma

namespace engram::cpu::ENGRAM_ISA {

typedef float f32 __attribute__((vector_size(64)));
typedef double f64 __attribute__((vector_size(64)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef uint32_t u32 __attribute__((vector_size(64)));
typedef uint16_t u16 __attribute__((vector_size(32)));

template <typename A> struct VecOf;
template <> struct VecOf<float> {
  using type = f32;
};
template <> struct VecOf<double> {
  using type = f64;
};
template <typename A> using vec = typename VecOf<A>::type;
template <typename A> constexpr int64_t kLanes = 64 / sizeof(A);
constexpr u32 kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// ------------------------------------------------------------------------------------------------ load and store

ENGRAM_INLINE f64 load(const double* p) {
  f64 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
ENGRAM_INLINE f32 load(const float* p) {
  f32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
ENGRAM_INLINE f32 load(const BFloat16* p) {
#if defined(ENGRAM_HAS_AVX512)
  // One permutation puts each number into the upper half of its lane, zeros into the lower.
  const __m512i half = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i upper = reinterpret_cast<__m512i>(kLane << 16);
  return reinterpret_cast<f32>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, half));
#else
  u16 h;
  std::memcpy(&h, p, sizeof h);
  return reinterpret_cast<f32>(__builtin_convertvector(h, u32) << 16);
#endif
}
ENGRAM_INLINE f32 load(const Half* p) {
  f32 v;
#if defined(ENGRAM_HAS_AVX512)
  v = reinterpret_cast<f32>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(ENGRAM_HAS_F16C)
  for (int i = 0; i < 2; ++i) {
    const __m256 half = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
    std::memcpy(reinterpret_cast<char*>(&v) + 32 * i, &half, sizeof half);
  }
#else
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(p[i]);
#endif
  return v;
}

ENGRAM_INLINE void store(double* p, f64 v) { std::memcpy(p, &v, sizeof v); }
ENGRAM_INLINE void store(float* p, f32 v) { std::memcpy(p, &v, sizeof v); }
ENGRAM_INLINE void store(BFloat16* p, f32 v) {  // round to nearest even; NaN stays NaN
  const u32 bits = reinterpret_cast<u32>(v);
  const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(ENGRAM_HAS_AVX512)
  const __mmask32 number = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(v), reinterpret_cast<__m512>(v), _CMP_ORD_Q);
  const __m512i upper = reinterpret_cast<__m512i>(4u * kLane + 1u + ((4u * kLane + 3u) << 16));
  const __m512i h =
      _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(0x7fc0), number, upper, reinterpret_cast<__m512i>(rounded));
  std::memcpy(p, &h, 32);
#else
  // By a mask: compilers take a comparison of vectors wider than the processor's one element at a time.
  const u32 nan = reinterpret_cast<u32>((0x7f800000 - reinterpret_cast<i32>(bits & 0x7fffffffu)) >> 31);
  const u16 h = __builtin_convertvector(((rounded >> 16) & ~nan) | (nan & 0x7fc0u), u16);
  std::memcpy(p, &h, sizeof h);
#endif
}
ENGRAM_INLINE void store(Half* p, f32 v) {
#if defined(ENGRAM_HAS_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(ENGRAM_HAS_F16C)
  for (int i = 0; i < 2; ++i) {
    __m256 half;
    std::memcpy(&half, reinterpret_cast<const char*>(&v) + 32 * i, sizeof half);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, _mm256_cvtps_ph(half, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  for (int i = 0; i < 16; ++i) p[i] = static_cast<Half>(v[i]);
#endif
}

// The last, partial vector of a row: lanes from n on read as zero and are not written.
template <typename T> ENGRAM_INLINE vec<accumulate_t<T>> load(const T* p, int64_t n) {
  T lanes[kLanes<accumulate_t<T>>] = {};
  std::memcpy(static_cast<void*>(lanes), p, n * sizeof(T));
  return load(lanes);
}
template <typename T> ENGRAM_INLINE void store(T* p, vec<accumulate_t<T>> v, int64_t n) {
  T lanes[kLanes<accumulate_t<T>>];
  store(lanes, v);
  std::memcpy(static_cast<void*>(p), lanes, n * sizeof(T));
}

template <typename A> ENGRAM_INLINE vec<A> broadcast(A x) { return x - vec<A>{}; }

// Past the caches: for outputs too large to be read back from them, which saves fetching the lines first. p on 64
// bytes.
ENGRAM_INLINE void stream(float* p, f32 v) {
#if defined(ENGRAM_HAS_AVX512)
  _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#elif defined(ENGRAM_HAS_F16C)
  for (int i = 0; i < 2; ++i) {
    __m256 half;
    std::memcpy(&half, reinterpret_cast<const char*>(&v) + 32 * i, sizeof half);
    _mm256_stream_ps(p + 8 * i, half);
  }
#else
  store(p, v);
#endif
}
// Whether to stream the rows of an output: float, rows on 64 bytes, and larger than a cache would keep for the next
// reader. Half types write half a line at a time, which is slower that way.
template <typename T> ENGRAM_INLINE bool streams(const T* out, int64_t dim, int64_t elements) {
  return std::is_same_v<T, float> && reinterpret_cast<uintptr_t>(out) % 64 == 0 && dim % 16 == 0 &&
         elements >= (int64_t{1} << 21);
}
ENGRAM_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();  // streamed stores are not ordered with the ones that tell other threads that the work is done
#endif
}

// One vector-sized step along a row: Full steps load and store whole vectors, the last step of an odd width only n
// lanes.
struct Full {
  template <typename T> ENGRAM_INLINE auto get(const T* p) const { return load(p); }
  template <typename T> ENGRAM_INLINE void put(T* p, vec<accumulate_t<T>> v) const { store(p, v); }
  template <typename T> ENGRAM_INLINE void put(T* p, vec<accumulate_t<T>> v, [[maybe_unused]] bool streaming) const {
    if constexpr (std::is_same_v<T, float>) {
      if (streaming) return stream(p, v);
    }
    store(p, v);
  }
};
struct Tail {
  int64_t n;
  template <typename T> ENGRAM_INLINE auto get(const T* p) const { return load(p, n); }
  template <typename T> ENGRAM_INLINE void put(T* p, vec<accumulate_t<T>> v, bool = false) const { store(p, v, n); }
};

// step(lanes, d) for every vector of [begin, end).
template <typename A, typename Step> ENGRAM_INLINE void for_each_vec(int64_t begin, int64_t end, Step&& step) {
  int64_t d = begin;
  for (; d + kLanes<A> <= end; d += kLanes<A>) step(Full{}, d);
  if (d < end) step(Tail{end - d}, d);
}

// ------------------------------------------------------------------------------------------------ arithmetic

// The one reduction tree of the library: lane i sums the elements d with d % lanes == i in order of d, then halves
// fold.
template <typename A> ENGRAM_INLINE A sum(vec<A> v) {
  A lanes[kLanes<A>];
  std::memcpy(lanes, &v, sizeof v);
  for (int64_t half = kLanes<A> / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Square roots, correctly rounded.
ENGRAM_INLINE f32 root(f32 x) {
#if defined(ENGRAM_HAS_AVX512)
  return reinterpret_cast<f32>(_mm512_maskz_sqrt_ps(0xffff, reinterpret_cast<__m512>(x)));
#elif defined(ENGRAM_HAS_F16C)
  __m256 halves[2];
  std::memcpy(halves, &x, sizeof x);
  for (__m256& half : halves) half = _mm256_sqrt_ps(half);
  std::memcpy(&x, halves, sizeof x);
  return x;
#else
  for (int i = 0; i < 16; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
ENGRAM_INLINE f64 root(f64 x) {
#if defined(ENGRAM_HAS_AVX512)
  return reinterpret_cast<f64>(_mm512_maskz_sqrt_pd(0xff, reinterpret_cast<__m512d>(x)));
#else
  for (int i = 0; i < 8; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// sigmoid(x) = 1 / (1 + 2^y), y = -x log2(e) split into integer and fraction; the polynomial is 2^f on [-1/2, 1/2].
// Beyond y = 126 the result would be below the smallest normal number. A NaN stays one.
ENGRAM_INLINE f32 exp2_fraction(f32 f) {
  f32 p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  return p * f + 1.0f;
}
ENGRAM_INLINE f32 sigmoid(f32 x) {
  f32 y = x * -1.44269504088896341f;
#if defined(ENGRAM_HAS_AVX512)
  const __m512 clamped =
      _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(126.0f), reinterpret_cast<__m512>(y));  // the second if one is NaN
  const __m512 f = _mm512_maskz_reduce_ps(0xffff, clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 power =
      _mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(exp2_fraction(reinterpret_cast<f32>(f))), clamped - f);
  const __m512 d = power + 1.0f, r = _mm512_maskz_rcp14_ps(0xffff, d);
  return reinterpret_cast<f32>(r * (2.0f - d * r));  // one Newton step: 14 bits to 28
#else
  y = y > 126.0f ? broadcast(126.0f) : y;
  y = y < -126.0f ? broadcast(-126.0f) : y;
  const f32 shifted = y + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low mantissa bits
  const f32 f = y - (shifted - 12582912.0f);
  const i32 exponent = reinterpret_cast<i32>(shifted) << 23;
  const f32 power = reinterpret_cast<f32>(reinterpret_cast<i32>(exp2_fraction(f)) + exponent);
  return x == x ? 1.0f / (1.0f + power) : x;
#endif
}
ENGRAM_INLINE f64 sigmoid(f64 x) {
  for (int i = 0; i < 8; ++i) x[i] = 1.0 / (1.0 + std::exp(-x[i]));
  return x;
}
// What a result that is only rounded to T needs of it. For bfloat16 a relative error of 1.4e-4 is a fourteenth of the
// rounding: 2^f on [0, 1) to 7.5e-5, and the reciprocal as the instruction gives it.
template <typename T> ENGRAM_INLINE vec<accumulate_t<T>> sigmoid_for(vec<accumulate_t<T>> x) {
#if defined(ENGRAM_HAS_AVX512)
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __m512 y =
        _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(126.0f), reinterpret_cast<__m512>(x * -1.44269504088896341f));
    const f32 f = reinterpret_cast<f32>(_mm512_maskz_reduce_ps(0xffff, y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    const f32 p = ((f * 7.8024523e-2f + 2.2606716e-1f) * f + 6.9583354e-1f) * f + 9.9992522e-1f;
    const __m512 power = _mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(p), y);  // by 2^floor(y)
    return reinterpret_cast<f32>(_mm512_maskz_rcp14_ps(0xffff, power + 1.0f));
  }
#endif
  return sigmoid(x);
}
template <typename A> ENGRAM_INLINE A sigmoid_scalar(A x) { return A(1) / (A(1) + std::exp(-x)); }

// Sum of squares of a row.
template <typename T> ENGRAM_INLINE accumulate_t<T> sum_squares(const T* x, int64_t n) {
  using A = accumulate_t<T>;
  vec<A> acc{};
  for_each_vec<A>(0, n, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
    const vec<A> v = lanes.get(x + d);
    acc += v * v;
  });
  return sum<A>(acc);
}

// A masked token: out (or a gradient) is `from` bit for bit, or zero without one.
template <typename T> ENGRAM_INLINE void copy_or_zero(T* to, const T* from, int64_t n) {
  if (from) std::memcpy(static_cast<void*>(to), from, n * sizeof(T));
  else std::memset(static_cast<void*>(to), 0, n * sizeof(T));
}

}  // namespace engram::cpu::ENGRAM_ISA
