// The one header through which kernels see CUDA. Under nvcc it is plain CUDA. Any other compiler gets the emulator of
// tests/cpp/emulator, which runs the same bodies on a CPU; so kernels use these macros instead of `__shared__` and
// `<<<>>>`, full masks with the *_sync intrinsics, and no inline PTX without a twin for the emulator.
#pragma once
#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define ENGRAM_SHARED(T, name, dims) __shared__ T name dims
#define ENGRAM_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char engram_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(engram_dynamic_shared)
#define ENGRAM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (kernel)<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define ENGRAM_LAUNCH_ERROR() cudaGetLastError()

#else

#include "cuda_emulator.h"

#endif
