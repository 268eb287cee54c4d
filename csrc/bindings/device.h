// Where a binding runs its kernels: the one place that knows threads, streams and how an op is registered.
//
// A binding is a template over Device and calls launch(device, args); each op file has one launch() for Cpu and one for
// Cuda. In a build with ENGRAM_EMULATED the Cuda side is compiled for the CPU (tests/cpp/emulator) and registered, on
// CPU tensors, as torch.ops.engram_emulated.
#pragma once
#include "checks.h"
#include "profile.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(ENGRAM_WITH_CUDA)
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#endif
#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
#define ENGRAM_CUDA_BODIES
#endif

namespace engram {

// kMaxParts: into how many parts work is cut at most when partial sums are folded in order. Few keep the partial sums
// small, a GPU needs many to fill.
struct Cpu {
  static constexpr int64_t kMaxParts = 64;
  explicit Cpu(const Tensor&) {}
};

// f(begin, end) over [0, count); no result may depend on how the range is cut.
template <typename F> void parallel(int64_t count, int64_t grain, const F& f) {
  if (count > 0) torch::stable::parallel_for(0, count, std::max<int64_t>(grain, 1), f);
}

// The smallest of the positions f(begin, end) reports, -1 = none: an exception may not leave a parallel region.
template <typename F> int64_t parallel_first(int64_t count, int64_t grain, const F& f) {
  std::atomic<int64_t> first{-1};
  parallel(count, grain, [&](int64_t begin, int64_t end) {
    const int64_t found = f(begin, end);
    int64_t seen = first.load();
    while (found >= 0 && (seen < 0 || found < seen) && !first.compare_exchange_weak(seen, found)) {
    }
  });
  return first;
}

// Items per task when one item costs about `work` element operations: enough to outweigh waking a thread.
inline int64_t grain_for(int64_t work) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(work, 1)); }

#if defined(ENGRAM_CUDA_BODIES)
struct Cuda {
  static constexpr int64_t kMaxParts = 512;
#if defined(ENGRAM_EMULATED)
  cudaStream_t stream = nullptr;
  explicit Cuda(const Tensor&) {}
  void check(cudaError_t error) const {
    if (error) throw std::runtime_error("engram: emulated CUDA error " + std::to_string(error));
  }
#else
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
  explicit Cuda(const Tensor& t) : guard(t.get_device_index()) {
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
  void check(cudaError_t error) const {
    if (error != cudaSuccess) throw std::runtime_error(std::string("engram: CUDA error: ") + cudaGetErrorString(error));
  }
#endif
};

// ENGRAM_DEBUG=1 makes ids out of range an error on CUDA too, at the price of waiting for the device.
inline bool debug_ids() {
  const char* value = std::getenv("ENGRAM_DEBUG");
  return value && std::strcmp(value, "0") != 0 && *value;
}
struct DebugFlag {
  OptionalTensor flag;
  explicit DebugFlag(const Tensor& like) {
    if (debug_ids()) flag = torch::stable::new_zeros(like, {1}, ScalarType::Int);
  }
  int32_t* pointer() const { return write<int32_t>(flag); }
  bool raised() const {
    return flag && *torch::stable::to(*flag, torch::stable::Device(torch::headeronly::DeviceType::CPU))
                        .const_data_ptr<int32_t>();
  }
};
#endif

// Registered for CUDA tensors where there are no CUDA kernels.
inline void no_cuda_kernels(StableIValue*, uint64_t, uint64_t) {
  throw std::runtime_error(
      "engram was built without CUDA kernels, so it has no op for CUDA tensors: reinstall it with a CUDA build of "
      "torch and a CUDA toolkit (ENGRAM_CUDA=1 pip install ... says what is missing), or move the tensors to the CPU");
}

}  // namespace engram

// At the bottom of an op file, at global scope: ENGRAM_REGISTER(op) registers engram::op<Device>.
#if defined(ENGRAM_EMULATED)
#define ENGRAM_LIBRARY engram_emulated
#define ENGRAM_REGISTER(op)                                                   \
  STABLE_TORCH_LIBRARY_IMPL(engram_emulated, CPU, m) {                        \
    m.impl(#op, TORCH_BOX((engram::traced<#op, &engram::op<engram::Cuda>>))); \
  }
#elif defined(ENGRAM_WITH_CUDA)
#define ENGRAM_LIBRARY engram
#define ENGRAM_REGISTER(op)                                                                       \
  STABLE_TORCH_LIBRARY_IMPL(engram, CPU, m) { m.impl(#op, TORCH_BOX(&engram::op<engram::Cpu>)); } \
  STABLE_TORCH_LIBRARY_IMPL(engram, CUDA, m) {                                                    \
    m.impl(#op, TORCH_BOX((engram::traced<#op, &engram::op<engram::Cuda>>)));                     \
  }
#else
#define ENGRAM_LIBRARY engram
#define ENGRAM_REGISTER(op)                                                                       \
  STABLE_TORCH_LIBRARY_IMPL(engram, CPU, m) { m.impl(#op, TORCH_BOX(&engram::op<engram::Cpu>)); } \
  STABLE_TORCH_LIBRARY_IMPL(engram, CUDA, m) { m.impl(#op, &engram::no_cuda_kernels); }
#endif
