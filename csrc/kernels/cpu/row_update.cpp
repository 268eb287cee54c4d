#ifndef ENGRAM_ISA
#include "kernels/row_update.h"

#define ENGRAM_BODY "kernels/cpu/row_update.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename T> void row_update(const RowUpdate<T>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(row_update, a, begin, end);
}

#define INSTANTIATE(T) template void row_update<T>(const RowUpdate<T>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"

namespace engram::cpu::ENGRAM_ISA {

// What a step has in common for all rows.
template <typename A> struct StepFactors {
  A keep, lr, beta1, beta2, eps, first_weight, second_weight, first_correction, second_correction;

  template <typename T> explicit StepFactors(const RowUpdate<T>& a) {
    const bool adam = a.rule == RowRule::adam;
    const double step = static_cast<double>(*a.step);
    keep = static_cast<A>(1 - a.lr * a.weight_decay);
    lr = static_cast<A>(a.lr);
    beta1 = static_cast<A>(a.beta1);
    beta2 = static_cast<A>(adam ? a.beta2 : 1);
    eps = static_cast<A>(a.eps);
    first_weight = static_cast<A>(adam ? 1 - a.beta1 : 1);
    second_weight = static_cast<A>(adam ? 1 - a.beta2 : 1);
    first_correction = static_cast<A>(adam && a.first ? 1 / (1 - std::pow(a.beta1, step)) : 1);
    second_correction = static_cast<A>(adam ? 1 / (1 - std::pow(a.beta2, step)) : 1);
  }
};

// bfloat16: cut off after random bits were added, so that the mean of the results is the exact value.
ENGRAM_INLINE f32 round_stochastically(f32 v, uint64_t key, int64_t column) {
  u32 columns;
  for (int i = 0; i < 16; ++i) columns[i] = static_cast<uint32_t>(column) + i;
  const u32 bits = reinterpret_cast<u32>(v), rounded = (bits + rounding_bits(key, columns)) & 0xffff0000u;
  return v == v ? reinterpret_cast<f32>(rounded) : v;
}

// One row. `g` is its gradient in the accumulation type, `mean_square` the mean of g^2 where a per-row state wants it.
template <typename T>
ENGRAM_INLINE void update_row(const RowUpdate<T>& a, const StepFactors<accumulate_t<T> >& f, int64_t row,
                              const accumulate_t<T>* g, accumulate_t<T> squares) {
  using A = accumulate_t<T>;
  T* w_row = a.table + row * a.dim;
  A* m_row = a.first ? a.first + row * a.dim : nullptr;
  A* v_row = a.second && !a.second_per_row ? a.second + row * a.dim : nullptr;
  A scale = f.lr;
  if (a.second && a.second_per_row) {
    const A v = f.beta2 * a.second[row] + f.second_weight * (squares / static_cast<A>(a.dim));
    a.second[row] = v;
    scale = f.lr / (std::sqrt(v * f.second_correction) + f.eps);
  }
  [[maybe_unused]] const uint64_t key = a.stochastic ? rounding_key(a.seed, *a.step, row) : 0;
  for_each_vec<A>(0, a.dim, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
    const vec<A> gradient = lanes.get(g + d);
    vec<A> change = gradient;
    if (m_row) {
      change = f.beta1 * lanes.get(m_row + d) + f.first_weight * gradient;
      lanes.put(m_row + d, change);
    }
    change *= f.first_correction * scale;
    if (v_row) {
      const vec<A> v = f.beta2 * lanes.get(v_row + d) + f.second_weight * gradient * gradient;
      lanes.put(v_row + d, v);
      change /= root(v * f.second_correction) + f.eps;
    }
    vec<A> w = lanes.get(w_row + d) * f.keep - change;
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (a.stochastic) w = round_stochastically(w, key, d);
    }
    lanes.put(w_row + d, w);
  });
}

template <typename T> ENGRAM_TARGET void row_update(const RowUpdate<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const StepFactors<A> factors(a);
  const RowPlan& plan = a.plan;
  const A sign = a.maximize ? A(-1) : A(1);
  const bool wants_squares = a.second && a.second_per_row;
  std::vector<A> buffer(a.dim);
  A* g = buffer.data();
  const auto gather = [&](auto slot_at, int64_t first, int64_t last) ENGRAM_INLINE_LAMBDA {
    vec<A> squares{};
    for_each_vec<A>(0, a.dim, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      vec<A> total = lanes.get(a.grad + slot_at(first) * a.dim + d);
      for (int64_t i = first + 1; i < last; ++i) total += lanes.get(a.grad + slot_at(i) * a.dim + d);
      total *= sign;
      lanes.put(g + d, total);
      squares += total * total;
    });
    return wants_squares ? sum<A>(squares) : A(0);
  };
  if (!plan.keys) {
    for (int64_t row = begin; row < end; ++row)
      update_row(a, factors, row, g, gather([](int64_t i) { return i; }, row, row + 1));
    return;
  }

  // Rows and state lie anywhere in the table: ask for them well before their turn.
  constexpr int64_t kAhead = 16;
  const auto fetch = [](const void* from, int64_t bytes) {
    for (int64_t b = 0; b < std::min<int64_t>(bytes, 512); b += 64)
      __builtin_prefetch(static_cast<const char*>(from) + b, 1);
  };
  const int64_t* runs_end = plan.runs + *plan.count;
  const int64_t* run = std::lower_bound(plan.runs, runs_end, begin);
  for (; run < runs_end && *run < end; ++run) {
    if (run + kAhead < runs_end) {
      const int64_t ahead = plan.row(run[kAhead]), at = ahead * a.dim;
      fetch(a.table + at, a.dim * sizeof(T));
      if (a.first) fetch(a.first + at, a.dim * sizeof(A));
      if (a.second)
        fetch(a.second_per_row ? a.second + ahead : a.second + at, a.second_per_row ? 1 : a.dim * sizeof(A));
      fetch(a.grad + plan.slot(run[kAhead]) * a.dim, a.dim * sizeof(T));
    }
    const A squares = gather([&](int64_t i) { return plan.slot(i); }, run[0], run[1]);
    update_row(a, factors, plan.row(run[0]), g, squares);
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
