#include "row_sum.h"

namespace engram {

template <typename Device> std::tuple<Tensor, Tensor> row_sum(Tensor values, Tensor keys, Tensor runs, Tensor count) {
  constexpr const char* op = "row_sum";
  require_float(op, "values", values);
  require(values.dim() >= 2, op, "values", "[..., C, d]", values);
  const int64_t dim = values.size(values.dim() - 1);
  const PlanTensors plan = checked_plan(op, keys, runs, count, product(leading(values, 1)), kAnyRow, values);
  values = as_contiguous(values);
  const Device device(values);
  const int64_t touched = run_count(plan);
  Tensor rows = empty(keys, {touched}), sums = empty(values, {touched, dim});
  sum_rows(device, values, plan, sums, &rows);
  return {rows, sums};
}

}  // namespace engram

ENGRAM_REGISTER(row_sum)
