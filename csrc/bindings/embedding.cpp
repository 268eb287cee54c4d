#include "kernels/embedding.h"
#include "lookup.h"
#include "row_sum.h"

namespace engram {

// sparse_grad and the plan decide how the gradient is computed (engram/ops/embedding.py); the forward has no use for
// them.
template <typename Device>
Tensor embedding(Tensor table, Tensor rows, std::optional<int64_t> row_begin, OptionalTensor mask, bool,
                 OptionalTensor keys, OptionalTensor runs, OptionalTensor count) {
  constexpr const char* op = "embedding";
  require_float(op, "table", table);
  require(table.dim() == 2, op, "table", "[R, d]", table);
  require_device(op, "rows", rows, table);
  const int64_t columns = check_rows(op, rows, row_begin, mask);
  if (keys && runs && count) checked_plan(op, *keys, *runs, *count, rows.numel(), table.size(0), table);
  table = as_contiguous(table);
  const Device device(table);
  Tensor out = empty_rows(table, rows, table.size(1), table.scalar_type());
  dispatch_index(rows, [&]<typename Index>() {
    const EmbeddingForward<Index> a{static_cast<const char*>(table.const_data_ptr()),
                                    rows.const_data_ptr<Index>(),
                                    read<bool>(mask),
                                    static_cast<char*>(out.mutable_data_ptr()),
                                    rows.numel(),
                                    columns,
                                    table.size(0),
                                    table.size(1) * static_cast<int64_t>(table.element_size()),
                                    row_begin.value_or(0),
                                    row_begin.has_value()};
    if constexpr (std::is_same_v<Device, Cpu>)
      look_up(device, op, a, a.row_bytes / 4 + 64,
              [&](int64_t begin, int64_t end) { return cpu::embedding_forward(a, begin, end); });
#ifdef ENGRAM_CUDA_BODIES
    else look_up(device, op, a, rows, [&](auto flag, auto stream) { return cuda::embedding_forward(a, flag, stream); });
#endif
  });
  return out;
}

template <typename Device>
Tensor embedding_backward(Tensor grad_out, Tensor keys, Tensor runs, Tensor count, int64_t num_rows) {
  constexpr const char* op = "embedding_backward";
  require_float(op, "grad_out", grad_out);
  require(grad_out.dim() >= 2, op, "grad_out", "[..., C, d]", grad_out);
  if (num_rows < 0) fail(op, "num_rows", "at least 0", std::to_string(num_rows));
  const PlanTensors plan = checked_plan(op, keys, runs, count, product(leading(grad_out, 1)), num_rows, grad_out);
  grad_out = as_contiguous(grad_out);
  const Device device(grad_out);
  Tensor grad_table = torch::stable::new_zeros(grad_out, {num_rows, grad_out.size(grad_out.dim() - 1)});
  if (grad_table.numel() > 0) sum_rows(device, grad_out, plan, grad_table, nullptr);
  return grad_table;
}

}  // namespace engram

ENGRAM_REGISTER(embedding)
ENGRAM_REGISTER(embedding_backward)
