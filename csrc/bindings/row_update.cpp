#include "kernels/row_update.h"
#include "row_sum.h"

#include <cmath>

namespace engram {
namespace {

constexpr const char* kOp = "row_update";

RowRule rule_of(const std::string& rule) {
  if (rule == "sgd") return RowRule::sgd;
  if (rule == "adagrad") return RowRule::adagrad;
  if (rule == "adam") return RowRule::adam;
  fail(kOp, "rule", "\"sgd\", \"adagrad\" or \"adam\"", '"' + rule + '"');
}

template <typename T> void launch(const Cpu&, const RowUpdate<T>& a) {
  parallel(a.plan.keys ? a.plan.slots : a.table_rows, grain_for(4 * a.dim + 32),
           [&](int64_t begin, int64_t end) { cpu::row_update(a, begin, end); });
}
#ifdef ENGRAM_CUDA_BODIES
template <typename T> void launch(const Cuda& device, const RowUpdate<T>& a) {
  device.check(cuda::row_update(a, device.stream));
}
#endif

void require_range(const char* argument, double value, bool ok, const char* expected) {
  if (!ok) fail(kOp, argument, expected, std::to_string(value));
}

// Written in place, so it has to be what it is: no copy may stand in for it.
void require_in_place(const char* argument, const Tensor& t, ScalarType dtype, const Tensor& table) {
  require_device(kOp, argument, t, table);
  if (t.scalar_type() != dtype) fail(kOp, argument, name_of(dtype), describe(t));
  require(t.is_contiguous(), kOp, argument, "contiguous", t);
}

}  // namespace

template <typename Device>
void row_update(Tensor table, OptionalTensor first, OptionalTensor second, Tensor grad, OptionalTensor keys,
                OptionalTensor runs, OptionalTensor count, Tensor step, std::string rule_name, double lr, double beta1,
                double beta2, double eps, double weight_decay, bool maximize, std::optional<int64_t> seed) {
  require_float(kOp, "table", table);
  require(table.dim() == 2, kOp, "table", "[R, d]", table);
  require_in_place("table", table, table.scalar_type(), table);
  const int64_t rows = table.size(0), dim = table.size(1);
  const RowRule rule = rule_of(rule_name);
  if (first) {
    if (rule == RowRule::adagrad) fail(kOp, "first", "None for adagrad", describe(*first));
    require_in_place("first", *first, accumulate_dtype(table), table);
    require_sizes(kOp, "first", *first, {rows, dim}, "[R, d]");
  }
  if (second.has_value() != (rule != RowRule::sgd))
    fail(kOp, "second", second ? "None for sgd" : "given for " + rule_name, second ? describe(*second) : "None");
  if (second) {
    require_in_place("second", *second, accumulate_dtype(table), table);
    if (rule == RowRule::adagrad || second->dim() == 1) require_sizes(kOp, "second", *second, {rows}, "[R]");
    else require_sizes(kOp, "second", *second, {rows, dim}, "[R] or [R, d]");
  }
  require_device(kOp, "grad", grad, table);
  if (grad.scalar_type() != table.scalar_type())
    fail(kOp, "grad", std::string(name_of(table.scalar_type())) + " like table", describe(grad));
  require(grad.dim() >= 2 && grad.size(grad.dim() - 1) == dim, kOp, "grad", "[..., C, d], d being that of table", grad);
  require_device(kOp, "step", step, table);
  require_long(kOp, "step", step);
  require(step.numel() == 1, kOp, "step", "of one element", step);
  require_range("lr", lr, lr >= 0 && std::isfinite(lr), "at least 0 and finite");
  require_range("beta1", beta1, beta1 >= 0 && beta1 < 1, "in [0, 1)");
  require_range("beta2", beta2, beta2 >= 0 && beta2 < 1, "in [0, 1)");
  require_range("eps", eps, eps >= 0, "at least 0");
  require_range("weight_decay", weight_decay, weight_decay >= 0 && std::isfinite(weight_decay),
                "at least 0 and finite");
  if (seed && table.scalar_type() != ScalarType::BFloat16)
    fail(kOp, "seed", "None unless table is bfloat16", "a table of " + describe(table));
  if (keys.has_value() != runs.has_value() || keys.has_value() != count.has_value())
    fail(kOp, "keys", "given together with runs and count", keys ? "keys alone" : "no keys");
  std::optional<PlanTensors> plan;
  if (keys) plan = checked_plan(kOp, *keys, *runs, *count, product(leading(grad, 1)), rows, table);
  else require_sizes(kOp, "grad", grad, {rows, dim}, "[R, d], without a row plan");
  grad = as_contiguous(grad);
  if (rows == 0 || dim == 0 || grad.numel() == 0) return;
  const Device device(table);
  dispatch_float(table, [&]<typename T>() {
    using A = accumulate_t<T>;
    const OptionalTensor partials = plan ? chunk_partials<Device>(grad, plan->keys.numel(), dim) : OptionalTensor();
    launch(device,
           RowUpdate<T>{table.mutable_data_ptr<T>(), write<A>(first), write<A>(second), grad.const_data_ptr<T>(),
                        plan ? plan->view() : RowPlan{}, step.const_data_ptr<int64_t>(), write<A>(partials), rows, dim,
                        rule, second && second->dim() == 1, maximize, seed.has_value(), lr, beta1, beta2, eps,
                        weight_decay, static_cast<uint64_t>(seed.value_or(0))});
  });
}

}  // namespace engram

ENGRAM_REGISTER(row_update)
