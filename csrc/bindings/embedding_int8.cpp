#include "kernels/embedding_int8.h"
#include "lookup.h"

namespace engram {

template <typename Device>
Tensor embedding_int8(Tensor values, Tensor scales, Tensor rows, ScalarType dtype, std::optional<int64_t> row_begin,
                      OptionalTensor mask) {
  constexpr const char* op = "embedding_int8";
  require(values.scalar_type() == ScalarType::Char && values.dim() == 2, op, "values", "int8 [R, d]", values);
  const int64_t R = values.size(0), d = values.size(1);
  require_device(op, "scales", scales, values);
  require(scales.scalar_type() == ScalarType::Float, op, "scales", "float32", scales);
  require_sizes(op, "scales", scales, {R}, "[R]");
  require_device(op, "rows", rows, values);
  const int64_t columns = check_rows(op, rows, row_begin, mask);
  if (!is_float(dtype)) fail(op, "dtype", "float64, float32, bfloat16 or float16", name_of(dtype));

  values = as_contiguous(values);
  scales = as_contiguous(scales);
  const Device device(values);
  Tensor out = empty_rows(values, rows, d, dtype);
  dispatch_float(out, [&]<typename T>() {
    dispatch_index(rows, [&]<typename Index>() {
      const EmbeddingInt8<T, Index> a{values.const_data_ptr<int8_t>(),
                                      scales.const_data_ptr<float>(),
                                      rows.const_data_ptr<Index>(),
                                      read<bool>(mask),
                                      out.mutable_data_ptr<T>(),
                                      rows.numel(),
                                      columns,
                                      R,
                                      d,
                                      row_begin.value_or(0),
                                      row_begin.has_value()};
      if constexpr (std::is_same_v<Device, Cpu>)
        look_up(device, op, a, d + 64, [&](int64_t i, int64_t end) { return cpu::embedding_int8(a, i, end); });
#ifdef ENGRAM_CUDA_BODIES
      else look_up(device, op, a, rows, [&](auto flag, auto stream) { return cuda::embedding_int8(a, flag, stream); });
#endif
    });
  });
  return out;
}

}  // namespace engram

ENGRAM_REGISTER(embedding_int8)
