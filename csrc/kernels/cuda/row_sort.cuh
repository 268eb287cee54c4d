// The device's sort: CUB's, and for the emulator the same passes as plain code. Of the kernels, row_plan alone uses it.
#pragma once
#include "device.cuh"

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define CUB_WRAPPED_NAMESPACE engram_cub  // apart from the copy that torch is built with
#include <cub/device/device_radix_sort.cuh>
#else
#include <vector>
#endif

namespace engram::cuda {

// Stable ascending sort by bits [first_bit, end_bit). As with CUB, a null scratch only asks for its size.
inline cudaError_t radix_sort(void* scratch, size_t& bytes, const int64_t* from, int64_t* to, int64_t count,
                              int first_bit, int end_bit, cudaStream_t stream) {
#ifdef __CUDACC__
  return engram_cub::cub::DeviceRadixSort::SortKeys(scratch, bytes, from, to, count, first_bit, end_bit, stream);
#else
  (void)stream;
  const size_t needed = static_cast<size_t>(count) * sizeof(int64_t);
  if (!scratch) {
    bytes = needed;
    return cudaSuccess;
  }
  if (bytes < needed) return cudaErrorInvalidValue;
  int64_t *now = to, *next = static_cast<int64_t*>(scratch);
  std::copy(from, from + count, now);
  constexpr int kDigit = 8;
  for (int bit = first_bit; bit < end_bit; bit += kDigit) {
    const int64_t digits = int64_t{1} << std::min(kDigit, end_bit - bit);
    std::vector<int64_t> starts(digits + 1);
    for (int64_t i = 0; i < count; ++i) ++starts[(now[i] >> bit & (digits - 1)) + 1];
    for (int64_t d = 0; d < digits; ++d) starts[d + 1] += starts[d];
    for (int64_t i = 0; i < count; ++i) next[starts[now[i] >> bit & (digits - 1)]++] = now[i];
    std::swap(now, next);
  }
  if (now != to) std::copy(now, now + count, to);
  return cudaSuccess;
#endif
}

}  // namespace engram::cuda
