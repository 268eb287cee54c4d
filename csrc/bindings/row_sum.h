// Launching a row sum, for row_sum and the dense gradient of embedding.
#pragma once
#include "kernels/row_sum.h"
#include "row_plan.h"

namespace engram {

template <typename T> void launch(const Cpu&, const RowSum<T>& a) {
  parallel(a.plan.slots, grain_for(a.dim + 16), [&](int64_t begin, int64_t end) { cpu::row_sum(a, begin, end); });
}
#ifdef ENGRAM_CUDA_BODIES
template <typename T> void launch(const Cuda& device, const RowSum<T>& a) {
  device.check(cuda::row_sum(a, device.stream));
}
#endif

// What CUDA keeps of the runs that cross from one chunk of slots into the next.
template <typename Device>
OptionalTensor chunk_partials([[maybe_unused]] const Tensor& values, int64_t slots, int64_t dim) {
#ifdef ENGRAM_CUDA_BODIES
  if constexpr (std::is_same_v<Device, Cuda>)
    return empty(values, {(slots + cuda::kRowSumChunk - 1) / cuda::kRowSumChunk, 2, dim}, accumulate_dtype(values));
#endif
  return {};
}

// Sums of `values` [slots..., d] into `sums`: [count, d] beside the rows themselves, or scattered over [R, d].
template <typename Device>
void sum_rows(const Device& device, const Tensor& values, const PlanTensors& plan, Tensor& sums, Tensor* rows) {
  const int64_t dim = sums.size(1);
  if (plan.keys.numel() == 0) return;
  const OptionalTensor partials = chunk_partials<Device>(values, plan.keys.numel(), dim);
  dispatch_float(values, [&]<typename T>() {
    launch(device,
           RowSum<T>{values.const_data_ptr<T>(), plan.view(), rows ? rows->mutable_data_ptr<int64_t>() : nullptr,
                     sums.mutable_data_ptr<T>(), write<accumulate_t<T>>(partials), rows ? kAnyRow : sums.size(0), dim});
  });
}

}  // namespace engram
