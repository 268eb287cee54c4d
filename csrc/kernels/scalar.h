// The scalar vocabulary shared by CPU and CUDA kernels. Header-only: links against nothing.
#pragma once
#include <cstdint>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
#include <cuda_runtime_api.h>
#endif

// Before a function that both CPU and CUDA kernels call.
#if defined(__CUDACC__)
#define ENGRAM_HOST_DEVICE __host__ __device__
#else
#define ENGRAM_HOST_DEVICE
#endif

namespace engram {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

// Type in which sums are kept: double stays double (gradcheck), everything else sums in float.
template <typename T> struct Accumulate {
  using type = float;
};
template <> struct Accumulate<double> {
  using type = double;
};
template <typename T> using accumulate_t = typename Accumulate<T>::type;

}  // namespace engram

// Bottom lines of the kernel files: the only dtypes the library compiles.
#define ENGRAM_FOR_EACH_FLOAT(M) M(double) M(float) M(engram::Half) M(engram::BFloat16)
// (dtype of hidden, dtype of key and value): equal, or a float32 residual stream beside half projections.
#define ENGRAM_FOR_EACH_GATE_TYPES(M) \
  M(double, double)                   \
  M(float, float)                     \
  M(engram::Half, engram::Half) M(engram::BFloat16, engram::BFloat16) M(float, engram::Half) M(float, engram::BFloat16)
