// The row plan as three tensors, for the bindings that make one and those that work along one.
#pragma once
#include "kernels/row_plan.h"
#include "device.h"

namespace engram {

[[noreturn]] inline void bad_row(const char* op, const std::string& row, int64_t table_rows) {
  throw std::out_of_range(std::string(op) + ": rows must be in [0, " + std::to_string(table_rows) +
                          "), the rows of table, got " + row);
}

// rows int [..., C], mask bool [...], both made contiguous. Returns C.
inline int64_t check_rows(const char* op, Tensor& rows, std::optional<int64_t> row_begin, OptionalTensor& mask) {
  if (row_begin && *row_begin < 0) fail(op, "row_begin", "at least 0", std::to_string(*row_begin));
  require_index(op, "rows", rows);
  require(rows.dim() >= 1, op, "rows", "[..., C]", rows);
  mask = checked_mask(op, mask, leading(rows, 1), "the leading dimensions of rows [..., C]", rows);
  rows = as_contiguous(rows);
  return rows.size(rows.dim() - 1);
}

constexpr int64_t kAnyRow = INT64_MAX;

struct PlanTensors {
  Tensor keys, runs, count;

  RowPlan view() const {
    const int64_t slots = keys.numel();
    return {keys.const_data_ptr<int64_t>(), runs.const_data_ptr<int64_t>(), count.const_data_ptr<int64_t>(), slots,
            bits_of(slots)};
  }
};

// A plan that came as arguments of an op, for values of `slots` rows and a table of `num_rows`. What a CPU kernel would
// read or write by it is inside then; CUDA kernels look for themselves, for here one would have to wait for the device.
inline PlanTensors checked_plan(const char* op, const Tensor& keys, const Tensor& runs, const Tensor& count,
                                int64_t slots, int64_t num_rows, const Tensor& like) {
  const std::pair<const char*, const Tensor*> all[] = {{"keys", &keys}, {"runs", &runs}, {"count", &count}};
  for (const auto& [name, tensor] : all) {
    require_device(op, name, *tensor, like);
    require_long(op, name, *tensor);
  }
  require(keys.dim() == 1, op, "keys", "[slots], of a row plan", keys);
  require_sizes(op, "keys", keys, {slots}, "[slots], one key for each row of values");
  require_sizes(op, "runs", runs, {slots + 1}, "[slots + 1], of the same row plan as keys");
  require_sizes(op, "count", count, {1}, "[1], of the same row plan as keys");
  PlanTensors plan{as_contiguous(keys), as_contiguous(runs), as_contiguous(count)};
  if (keys.is_cpu()) {
    const RowPlan view = plan.view();
    const int64_t touched = *view.count;
    const bool counted =
        touched >= 0 && touched <= slots && view.runs[touched] >= touched && view.runs[touched] <= slots;
    const int64_t last = counted && touched > 0 ? view.row(view.runs[touched] - 1) : -1;
    if (!counted || last >= num_rows)
      fail(op, "keys", "a row plan for " + std::to_string(num_rows) + " rows",
           counted ? "one that touches row " + std::to_string(last) : "something else");
  }
  return plan;
}

// How many rows a plan touches. On CUDA this waits for the device.
inline int64_t run_count(const PlanTensors& plan) {
  const Tensor here = plan.count.is_cpu()
                          ? plan.count
                          : torch::stable::to(plan.count, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  return *here.const_data_ptr<int64_t>();
}

}  // namespace engram
