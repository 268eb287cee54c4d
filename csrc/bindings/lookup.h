// What the bindings of the lookups share.
#pragma once
#include "row_plan.h"

namespace engram {

// [..., C, d] for rows [..., C].
inline Tensor empty_rows(const Tensor& like, const Tensor& rows, int64_t d, ScalarType dtype) {
  Sizes sizes = sizes_of(rows);
  sizes.push_back(d);
  return empty(like, sizes, dtype);
}

// Runs kernel(begin, end), which returns the first slot with a bad row, over all slots; `cost` is that of one slot.
template <typename Args, typename Kernel>
void look_up(const Cpu&, const char* op, const Args& a, int64_t cost, Kernel&& kernel) {
  const int64_t bad = parallel_first(a.slots, grain_for(cost), kernel);
  if (bad != kNoBadRow) bad_row(op, std::to_string(a.rows[bad]), a.table_rows);
}

#ifdef ENGRAM_CUDA_BODIES
// Launches kernel(flag, stream), which raises the flag for a bad row where one is given (ENGRAM_DEBUG).
template <typename Args, typename Kernel>
void look_up(const Cuda& device, const char* op, const Args& a, const Tensor& rows, Kernel&& kernel) {
  const DebugFlag debug(rows);
  device.check(kernel(debug.pointer(), device.stream));
  if (debug.raised()) bad_row(op, "a row outside", a.table_rows);
}
#endif

}  // namespace engram
