#include "kernels/embedding.h"
#include "row_sum.h"

namespace engram {
namespace {

template <typename Index> void launch(const Cpu&, const char* op, const EmbeddingForward<Index>& a) {
  const int64_t bad = parallel_first(a.slots, grain_for(a.row_bytes / 4 + 64),
                                     [&](int64_t begin, int64_t end) { return cpu::embedding_forward(a, begin, end); });
  if (bad != kNoBadRow) bad_row(op, std::to_string(a.rows[bad]), a.table_rows);
}

#ifdef ENGRAM_CUDA_BODIES
template <typename Index>
void launch(const Cuda& device, const char* op, const EmbeddingForward<Index>& a, const DebugFlag& debug) {
  device.check(cuda::embedding_forward(a, debug.pointer(), device.stream));
  if (debug.raised()) bad_row(op, "a row outside", a.table_rows);
}
#endif

}  // namespace

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
  Sizes sizes = sizes_of(rows);
  sizes.push_back(table.size(1));
  const Device device(table);
  Tensor out = empty(table, sizes);
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
    if constexpr (std::is_same_v<Device, Cpu>) launch(device, op, a);
#ifdef ENGRAM_CUDA_BODIES
    else launch(device, op, a, DebugFlag(rows));
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
