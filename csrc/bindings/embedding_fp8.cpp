#include "kernels/embedding_fp8.h"
#include "row_plan.h"

namespace engram {
namespace {

constexpr const char* kOp = "embedding_fp8";

template <typename T, typename Index> void launch(const Cpu&, const EmbeddingFp8<T, Index>& a) {
  const int64_t bad = parallel_first(a.slots, grain_for(a.width + 64),
                                     [&](int64_t begin, int64_t end) { return cpu::embedding_fp8(a, begin, end); });
  if (bad != kNoBadRow) bad_row(kOp, std::to_string(a.rows[bad]), a.table_rows);
}

#ifdef ENGRAM_CUDA_BODIES
template <typename T, typename Index>
void launch(const Cuda& device, const EmbeddingFp8<T, Index>& a, const DebugFlag& debug) {
  device.check(cuda::embedding_fp8(a, debug.pointer(), device.stream));
  if (debug.raised()) bad_row(kOp, "a row outside", a.table_rows);
}
#endif

}  // namespace

template <typename Device>
Tensor embedding_fp8(Tensor values, Tensor scales, Tensor rows, ScalarType dtype, std::optional<int64_t> row_begin,
                     OptionalTensor mask) {
  require(values.scalar_type() == ScalarType::Float8_e4m3fn && values.dim() == 2, kOp, "values", "float8_e4m3fn [R, d]",
          values);
  const int64_t R = values.size(0), d = values.size(1), blocks = (d + kFp8Block - 1) / kFp8Block;
  require_device(kOp, "scales", scales, values);
  require(scales.scalar_type() == ScalarType::Float8_e8m0fnu, kOp, "scales", "float8_e8m0fnu", scales);
  require_sizes(kOp, "scales", scales, {R, blocks}, "[R, ceil(d / 32)]");
  require_device(kOp, "rows", rows, values);
  const int64_t columns = check_rows(kOp, rows, row_begin, mask);
  if (!is_float(dtype)) fail(kOp, "dtype", "float64, float32, bfloat16 or float16", name_of(dtype));

  values = as_contiguous(values);
  scales = as_contiguous(scales);
  Sizes sizes = sizes_of(rows);
  sizes.push_back(d);
  const Device device(values);
  Tensor out = empty(values, sizes, dtype);
  dispatch_float(out, [&]<typename T>() {
    dispatch_index(rows, [&]<typename Index>() {
      const EmbeddingFp8<T, Index> a{static_cast<const uint8_t*>(values.const_data_ptr()),
                                     static_cast<const uint8_t*>(scales.const_data_ptr()),
                                     rows.const_data_ptr<Index>(),
                                     read<bool>(mask),
                                     out.mutable_data_ptr<T>(),
                                     rows.numel(),
                                     columns,
                                     R,
                                     d,
                                     blocks,
                                     row_begin.value_or(0),
                                     row_begin.has_value()};
      if constexpr (std::is_same_v<Device, Cpu>) launch(device, a);
#ifdef ENGRAM_CUDA_BODIES
      else launch(device, a, DebugFlag(rows));
#endif
    });
  });
  return out;
}

}  // namespace engram

ENGRAM_REGISTER(embedding_fp8)
