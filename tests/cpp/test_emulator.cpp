// The emulator's own test. Every case is a small kernel that comes sound and with one planted bug:
//
//   test_emulator CASE sound     must run clean, in every order of blocks and threads, under every sanitizer
//   test_emulator CASE planted   must be caught: by a wrong result or a broken rule of CUDA ("caught: ..." and exit
//                                status 1), or by the sanitizer of the build, which ends the process with a report
//
// CMakeLists.txt says which build has to catch which bug.
#include "kernels/cuda/device.cuh"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace {

// Of exactly n elements, so that ASan watches the end, filled with NaN bytes.
template <class T> struct Buffer {
  T* data;
  explicit Buffer(size_t n) : data(static_cast<T*>(std::malloc(n * sizeof(T)))) {
    std::memset(static_cast<void*>(data), 0xff, n * sizeof(T));
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  T& operator[](size_t i) { return data[i]; }
};

struct Numbers : Buffer<float> {
  explicit Numbers(size_t n) : Buffer(n) {
    for (size_t i = 0; i < n; ++i) data[i] = static_cast<float>(i % 7) - 3;
  }
};

void expect(float got, float wanted, const char* what) {
  if (got == wanted) return;
  throw std::runtime_error(std::string(what) + ": got " + std::to_string(got) + ", expected " + std::to_string(wanted));
}

// ---- Barriers ----

template <bool kPlanted>
__global__ void reverse(const float* x, float* out) {  // written by one thread, read by another
  ENGRAM_SHARED(float, tile, [64]);
  tile[threadIdx.x] = x[threadIdx.x];
  if (!kPlanted) __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];
}
template <bool kPlanted> void missing_barrier_write_read() {
  Numbers x(64);
  Buffer<float> out(64);
  ENGRAM_LAUNCH(reverse<kPlanted>, dim3(1), dim3(64), 0, nullptr, x.data, out.data);
  for (int i = 0; i < 64; ++i) expect(out[i], x[63 - i], "reversed");
}

template <bool kPlanted>
__global__ void column_sums(const float* x, float* out, int rows) {  // the same scratch row after row
  ENGRAM_SHARED(float, tile, [64]);
  for (int r = 0; r < rows; ++r) {
    tile[threadIdx.x] = x[r * 64 + threadIdx.x];
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      float sum = 0;
      for (int i = 0; i < 32; ++i) sum += tile[(threadIdx.x + 32 + i) % 64];  // of the other warp's half
      out[r * 2 + threadIdx.x / 32] = sum;
    }
    if (!kPlanted) __syncthreads();
  }
}
template <bool kPlanted> void missing_barrier_read_write() {
  Numbers x(8 * 64);
  Buffer<float> out(16);
  ENGRAM_LAUNCH(column_sums<kPlanted>, dim3(1), dim3(64), 0, nullptr, x.data, out.data, 8);
  for (int i = 0; i < 16; ++i) {
    float sum = 0;
    for (int c = 0; c < 32; ++c) sum += x[i / 2 * 64 + (1 - i % 2) * 32 + c];
    expect(out[i], sum, "sum");
  }
}

template <bool kPlanted> __global__ void half_a_block(float* out, int n) {
  if (static_cast<int>(threadIdx.x) < n || !kPlanted) __syncthreads();
  out[threadIdx.x] = 1;
}
template <bool kPlanted> void divergent_barrier() {
  Buffer<float> out(64);
  ENGRAM_LAUNCH(half_a_block<kPlanted>, dim3(1), dim3(64), 0, nullptr, out.data, 40);
}

// ---- Memory ----

template <bool kPlanted> __global__ void copy(const float* x, float* out, int n) {
  for (int i = threadIdx.x; kPlanted ? i <= n : i < n; i += 32) out[i] = x[i];
}
template <bool kPlanted> void out_of_bounds() {
  Numbers x(100);
  Buffer<float> out(101);
  ENGRAM_LAUNCH(copy<kPlanted>, dim3(1), dim3(32), 0, nullptr, x.data, out.data, 100);
}

template <bool kPlanted> __global__ void dynamic_overrun(float* out) {
  ENGRAM_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x + (kPlanted ? 1 : 0)] = 1;
  out[threadIdx.x] = tile[threadIdx.x];
}
template <bool kPlanted> void shared_out_of_bounds() {
  Buffer<float> out(32);
  ENGRAM_LAUNCH(dynamic_overrun<kPlanted>, dim3(1), dim3(32), 32 * sizeof(float), nullptr, out.data);
}

template <bool kPlanted> void unwritten_output() {  // the grid is a block short
  Numbers x(96);
  Buffer<float> out(96);
  for (int block = 0; block < (kPlanted ? 2 : 3); ++block)
    ENGRAM_LAUNCH(copy<false>, dim3(1), dim3(32), 0, nullptr, x.data + block * 32, out.data + block * 32, 32);
  for (int i = 0; i < 96; ++i) expect(out[i], x[i], "copy");
}

template <bool kPlanted> __global__ void partly_filled(float* out) {
  ENGRAM_SHARED(float, tile, [32]);
  if (threadIdx.x < (kPlanted ? 31 : 32)) tile[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[31 - threadIdx.x];
}
template <bool kPlanted> void uninitialised_shared() {
  Buffer<float> out(32);
  ENGRAM_LAUNCH(partly_filled<kPlanted>, dim3(1), dim3(32), 0, nullptr, out.data);
  for (int i = 0; i < 32; ++i) expect(out[i], 1, "shared");
}

__global__ void first_of_four(const float* x, float* out) {
  out[threadIdx.x] = __ldg(reinterpret_cast<const float4*>(x)).x;
}
template <bool kPlanted> void misaligned_vector() {
  Numbers x(16);
  Buffer<float> out(32);
  ENGRAM_LAUNCH(first_of_four, dim3(1), dim3(32), 0, nullptr, x.data + (kPlanted ? 1 : 4), out.data);
}

template <bool kPlanted> __global__ void through_a_pipeline(const float* x, float* out) {
  ENGRAM_SHARED(float, tile, [128]);
  __pipeline_memcpy_async(tile + threadIdx.x * 4, x + threadIdx.x * 4, 16);
  __pipeline_commit();
  if (!kPlanted) __pipeline_wait_prior(0);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = tile[threadIdx.x * 4 + i];
  if (kPlanted) __pipeline_wait_prior(0);
}
template <bool kPlanted> void missing_pipeline_wait() {
  Numbers x(128);
  Buffer<float> out(128);
  ENGRAM_LAUNCH(through_a_pipeline<kPlanted>, dim3(1), dim3(32), 0, nullptr, x.data, out.data);
  for (int i = 0; i < 128; ++i) expect(out[i], x[i], "copy");
}

// ---- Between blocks ----

template <bool kPlanted> __global__ void total(const float* x, float* out) {
  if (kPlanted) *out += x[blockIdx.x];
  else atomicAdd(out, x[blockIdx.x]);
}
template <bool kPlanted> void add_without_atomic() {
  Numbers x(8);
  Buffer<float> out(1);
  out[0] = 0;
  ENGRAM_LAUNCH(total<kPlanted>, dim3(8), dim3(1), 0, nullptr, x.data, out.data);
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += x[i];
  expect(out[0], sum, "sum");
}

template <bool kPlanted> __global__ void last_block_adds(const float* x, float* part, int* ticket, float* out) {
  ENGRAM_SHARED(int, last, [1]);
  if (threadIdx.x == 0) {
    part[blockIdx.x] = x[blockIdx.x];
    if (!kPlanted) __threadfence();
    last[0] = atomicAdd(ticket, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last[0] || threadIdx.x != 0) return;
  __threadfence();
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += part[i];
  *out = sum;
}
template <bool kPlanted> void missing_fence() {
  Numbers x(8);
  Buffer<float> part(8), out(1);
  int ticket = 0;
  ENGRAM_LAUNCH(last_block_adds<kPlanted>, dim3(8), dim3(32), 0, nullptr, x.data, part.data, &ticket, out.data);
}

// ---- Warps ----

template <bool kPlanted> __global__ void reverse_warp(const float* x, float* out) {
  ENGRAM_SHARED(float, tile, [32]);
  tile[threadIdx.x] = x[threadIdx.x];
  const float one = __shfl_sync(0xffffffffu, 1.0f, 0);  // meets, but orders no memory
  if (!kPlanted) __syncwarp();
  out[threadIdx.x] = tile[31 - threadIdx.x] * one;
}
template <bool kPlanted> void missing_syncwarp() {
  Numbers x(32);
  Buffer<float> out(32);
  ENGRAM_LAUNCH(reverse_warp<kPlanted>, dim3(1), dim3(32), 0, nullptr, x.data, out.data);
}

template <bool kPlanted> __global__ void half_a_warp(float* out) {
  float v = 0;
  if (threadIdx.x < 16) v = __shfl_xor_sync(kPlanted ? 0xffffffffu : 0x0000ffffu, 1.0f, 1);
  out[threadIdx.x] = v;
}
template <bool kPlanted> void shuffle_without_the_rest() {
  Buffer<float> out(32);
  ENGRAM_LAUNCH(half_a_warp<kPlanted>, dim3(1), dim3(32), 0, nullptr, out.data);
}

template <bool kPlanted> __global__ void two_shuffles(float* out) {
  const bool odd = threadIdx.x % 2;
  out[threadIdx.x] = odd && kPlanted ? __shfl_down_sync(0xffffffffu, 1.0f, 1) : __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
template <bool kPlanted> void different_shuffles_meet() {
  Buffer<float> out(32);
  ENGRAM_LAUNCH(two_shuffles<kPlanted>, dim3(1), dim3(32), 0, nullptr, out.data);
}

template <bool kPlanted> __global__ void lanes_of_a_mask(float* out) {
  out[threadIdx.x] =
      __shfl_sync(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u, float(threadIdx.x), kPlanted ? 0 : threadIdx.x);
}
template <bool kPlanted> void shuffle_from_outside_the_mask() {
  Buffer<float> out(32);
  ENGRAM_LAUNCH(lanes_of_a_mask<kPlanted>, dim3(1), dim3(32), 0, nullptr, out.data);
  for (int i = 0; i < 32; ++i)
    if (!(out[i] >= 0)) throw std::runtime_error("a lane read NaN");
}

// ---- Launches ----

template <bool kPlanted> void too_much_shared_memory() {
  Buffer<float> out(32);
  ENGRAM_LAUNCH(dynamic_overrun<false>, dim3(1), dim3(32), (kPlanted ? 100 : 48) * 1024, nullptr, out.data);
}

struct Case {
  const char* name;
  void (*sound)();
  void (*planted)();
};
#define CASE(name) {#name, name<false>, name<true>}
const Case kCases[] = {
    CASE(missing_barrier_write_read),
    CASE(missing_barrier_read_write),
    CASE(divergent_barrier),
    CASE(out_of_bounds),
    CASE(shared_out_of_bounds),
    CASE(unwritten_output),
    CASE(uninitialised_shared),
    CASE(misaligned_vector),
    CASE(missing_pipeline_wait),
    CASE(add_without_atomic),
    CASE(missing_fence),
    CASE(missing_syncwarp),
    CASE(shuffle_without_the_rest),
    CASE(different_shuffles_meet),
    CASE(shuffle_from_outside_the_mask),
    CASE(too_much_shared_memory),
};

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count == 3 ? arguments[1] : "", kind = count == 3 ? arguments[2] : "";
  for (const Case& c : kCases) {
    if (name != c.name || (kind != "sound" && kind != "planted")) continue;
    for (int order = 0; order < 4; ++order) {
      for (uint64_t seed = 0; seed < 5; ++seed) {
        emulator::options().order = static_cast<emulator::Order>(order);
        emulator::options().seed = seed;
        try {
          (kind == "sound" ? c.sound : c.planted)();
        } catch (const std::exception& e) {
          std::printf("caught: %s\n", e.what());
          return 1;
        }
      }
    }
    std::printf("clean\n");
    return 0;
  }
  std::printf("usage: test_emulator CASE sound|planted, CASE one of\n");
  for (const Case& c : kCases) std::printf("  %s\n", c.name);
  return 2;
}
