#ifndef ENGRAM_ISA
#include "kernels/row_sum.h"

#define ENGRAM_BODY "kernels/cpu/row_sum.cpp"
#include "kernels/cpu/foreach_isa.h"

namespace engram::cpu {

template <typename T> void row_sum(const RowSum<T>& a, int64_t begin, int64_t end) {
  ENGRAM_CALL(row_sum, a, begin, end);
}

#define INSTANTIATE(T) template void row_sum<T>(const RowSum<T>&, int64_t, int64_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cpu

#else
#include "kernels/cpu/vec.h"

namespace engram::cpu::ENGRAM_ISA {

// A row, bit for bit: lines inline, for calling memcpy costs as much as a short row.
ENGRAM_INLINE void copy_row(void* to, const void* from, int64_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  for (; bytes >= 64; bytes -= 64, out += 64, in += 64)
    store(reinterpret_cast<float*>(out), load(reinterpret_cast<const float*>(in)));
  if (bytes > 0) std::memcpy(out, in, bytes);
}

template <typename T> ENGRAM_TARGET void row_sum(const RowSum<T>& a, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  constexpr int64_t kAhead = 16;  // slots whose values are asked for before they are needed
  const RowPlan& plan = a.plan;
  const int64_t *runs_end = plan.runs + *plan.count, valid = *runs_end;
  const int64_t bytes = std::min<int64_t>(a.dim * static_cast<int64_t>(sizeof(T)), 512);
  const int64_t* run = std::lower_bound(plan.runs, runs_end, begin);
  for (; run < runs_end && *run < end; ++run) {
    const int64_t first = run[0], last = run[1];
    const T* one = a.values + plan.slot(first) * a.dim;
    if (first + kAhead < valid) {
      const char* p = reinterpret_cast<const char*>(a.values + plan.slot(first + kAhead) * a.dim);
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b);
    }
    T* sums = a.sums + (a.rows ? run - plan.runs : plan.row(first)) * a.dim;
    if (a.rows) a.rows[run - plan.runs] = plan.row(first);
    if (last == first + 1) {
      copy_row(sums, one, a.dim * sizeof(T));
      continue;
    }
    // Column by column of vectors, so that the sum stays in a register however long the run is.
    for_each_vec<A>(0, a.dim, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
      vec<A> total = lanes.get(one + d);
      for (int64_t i = first + 1; i < last; ++i) total += lanes.get(a.values + plan.slot(i) * a.dim + d);
      lanes.put(sums + d, total);
    });
  }
}

}  // namespace engram::cpu::ENGRAM_ISA
#endif
