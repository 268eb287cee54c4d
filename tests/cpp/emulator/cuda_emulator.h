// CUDA kernels on a CPU, for tests only: enough of the CUDA C++ device language for g++ to compile the bodies in
// csrc/kernels/cuda as ordinary C++. runtime.cpp runs them, one fibre per CUDA thread, and checks them (README.md).
#pragma once
#ifdef __CUDACC__
#error "cuda_emulator.h is for host compilers; nvcc needs nothing but device.cuh"
#endif
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

// From the CUDA toolkit, host side: __global__ and friends, dim3, uint4, ..., __half, __nv_bfloat16, cudaError_t.
// Headers only: nothing of the toolkit is linked.
#include <vector_functions.h>
#include <vector_types.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__  // would quietly become an ordinary local variable
#define __shared__ static_assert(false, "use ENGRAM_SHARED or ENGRAM_DYNAMIC_SHARED");

// ---- Macros of csrc/kernels/cuda/device.cuh ----

// `T name dims` in shared memory: of exactly this size, filled with NaN bytes at the start of every block.
#define ENGRAM_SHARED(T, name, dims)     \
  typedef T name##_type dims;            \
  static const char name##_identity = 0; \
  name##_type& name =                    \
      *static_cast<name##_type*>(emulator::shared_array(&name##_identity, sizeof(name##_type), alignof(name##_type)))
#define ENGRAM_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(emulator::dynamic_shared())
#define ENGRAM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), emulator::launch(#kernel, (grid), (block), (shared_bytes), (kernel), __VA_ARGS__))
#define ENGRAM_LAUNCH_ERROR() cudaSuccess  // a launch that fails here throws

namespace emulator {

// ---- What a test may set ----

// Which runnable thread continues at a barrier or warp operation, and in which order blocks run.
enum class Order {
  ascending,
  descending,
  random,    // drawn again at every step: threads advance about evenly
  priority,  // drawn once per block, warp by warp: some run far ahead of others. Finds what `random` cannot.
};
struct Options {
  Order order = Order::priority;  // environment: ENGRAM_EMULATOR_ORDER=ascending|descending|random|priority
  uint64_t seed = 0;              // environment: ENGRAM_EMULATOR_SEED
  int tsan_fibres = 2048;         // blocks that lie fewer threads than this apart are checked for races with each other
  size_t stack_bytes = 64 * 1024;
};
Options& options();

struct Statistics {
  uint64_t switches = 0, blocks = 0;
};
Statistics statistics();

// ---- Runtime entry points used below ----

enum class Barrier : int { plain, count, all, any };
enum class WarpOp : int { exchange, ballot, sync, match };

// Throws std::runtime_error when the launch is invalid or a thread breaks a rule of CUDA.
void launch_blocks(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*entry)(void*),
                   void* arguments);
int block_barrier(Barrier kind, int predicate);
// `name` goes into messages; `in` is this lane's operand, `source` the lane (within the warp) that `exchange` reads.
void warp_operation(WarpOp op, const char* name, uint32_t mask, const void* in, size_t bytes, int source, void* out);
void* shared_array(const void* identity, size_t bytes, size_t alignment);
void* dynamic_shared();
void copy_async(void* to, const void* from, size_t bytes, size_t zero_tail);
void commit_async();
void wait_async(int groups_still_in_flight);
void device_fence();
[[noreturn]] void fail(const char* message);

template <class... P, class... A>
void launch(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(P...), A&&... a) {
  struct Call {
    void (*body)(P...);
    std::tuple<std::decay_t<P>...> arguments;
  } call{body, {static_cast<std::decay_t<P>>(std::forward<A>(a))...}};
  const auto entry = [](void* p) { std::apply(static_cast<Call*>(p)->body, static_cast<Call*>(p)->arguments); };
  launch_blocks(kernel, grid, block, shared_bytes, entry, &call);
}

template <class T> T exchange(const char* name, uint32_t mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
  T result;
  warp_operation(WarpOp::exchange, name, mask, &value, sizeof(T), source, &result);
  return result;
}

template <class T, class F> T read_modify_write(T* address, F update) {
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static_assert(sizeof(T) == sizeof(Word));
  Word* word = reinterpret_cast<Word*>(address);
  Word before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
  T old;
  do {
    std::memcpy(&old, &before, sizeof(T));
    const T updated = update(old);
    std::memcpy(&after, &updated, sizeof(T));
  } while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

template <class T> const T* aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) fail("misaligned address");
  return p;
}
template <class T> T* aligned(T* p) { return const_cast<T*>(aligned(const_cast<const T*>(p))); }

}  // namespace emulator

// ---- The device language ----

extern uint3 threadIdx, blockIdx;  // plain globals: one OS thread runs everything
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

inline void __syncthreads() { emulator::block_barrier(emulator::Barrier::plain, 0); }
inline int __syncthreads_count(int p) { return emulator::block_barrier(emulator::Barrier::count, p); }
inline int __syncthreads_and(int p) { return emulator::block_barrier(emulator::Barrier::all, p); }
inline int __syncthreads_or(int p) { return emulator::block_barrier(emulator::Barrier::any, p); }
inline void __syncwarp(uint32_t mask = 0xffffffffu) {
  emulator::warp_operation(emulator::WarpOp::sync, "__syncwarp", mask, nullptr, 0, 0, nullptr);
}

namespace emulator {
inline int lane() {
  return static_cast<int>((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}
inline int segment_begin(int width) { return lane() & ~(width - 1); }
}  // namespace emulator

template <class T> T __shfl_sync(uint32_t mask, T v, int source, int width = 32) {
  return emulator::exchange("__shfl_sync", mask, v, emulator::segment_begin(width) + (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(uint32_t mask, T v, int bits, int width = 32) {
  const int from = emulator::lane() ^ bits;
  const bool inside = from < emulator::segment_begin(width) + width;
  return emulator::exchange("__shfl_xor_sync", mask, v, inside ? from : emulator::lane());
}
template <class T> T __shfl_down_sync(uint32_t mask, T v, unsigned delta, int width = 32) {
  const int from = emulator::lane() + static_cast<int>(delta);
  const bool inside = from < emulator::segment_begin(width) + width;
  return emulator::exchange("__shfl_down_sync", mask, v, inside ? from : emulator::lane());
}
template <class T> T __shfl_up_sync(uint32_t mask, T v, unsigned delta, int width = 32) {
  const int from = emulator::lane() - static_cast<int>(delta);
  const bool inside = from >= emulator::segment_begin(width);
  return emulator::exchange("__shfl_up_sync", mask, v, inside ? from : emulator::lane());
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const uint32_t in = predicate != 0;
  uint32_t result;
  emulator::warp_operation(emulator::WarpOp::ballot, "__ballot_sync", mask, &in, sizeof in, 0, &result);
  return result;
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T> uint32_t __match_any_sync(uint32_t mask, T v) {
  uint64_t in = 0;
  uint32_t result;
  std::memcpy(&in, &v, sizeof(T));
  emulator::warp_operation(emulator::WarpOp::match, "__match_any_sync", mask, &in, sizeof in, 0, &result);
  return result;
}

template <class T> T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return static_cast<T>(old + v); });
}
template <class T> T atomicMax(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return std::max(old, v); });
}
template <class T> T atomicMin(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T old) { return std::min(old, v); });
}
template <class T> T atomicExch(T* p, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [v](T) { return v; });
}
template <class T> T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return emulator::read_modify_write(p, [=](T old) { return old == expected ? v : old; });
}
inline void __threadfence() { emulator::device_fence(); }
inline void __threadfence_block() {}

// Cache hints change nothing here, but these loads and stores demand the alignment that the hardware demands.
template <class T> T __ldg(const T* p) { return *emulator::aligned(p); }
template <class T> T __ldcs(const T* p) { return *emulator::aligned(p); }
template <class T> T __ldcg(const T* p) { return *emulator::aligned(p); }
template <class T> void __stcs(T* p, std::type_identity_t<T> v) { *emulator::aligned(p) = v; }
template <class T> void __stcg(T* p, std::type_identity_t<T> v) { *emulator::aligned(p) = v; }

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zero_tail = 0) {
  emulator::copy_async(to, from, bytes, zero_tail);
}
inline void __pipeline_commit() { emulator::commit_async(); }
inline void __pipeline_wait_prior(int groups) { emulator::wait_async(groups); }
inline void __trap() { emulator::fail("__trap()"); }

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<uint32_t>(x)) : 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
using std::max;
using std::min;
