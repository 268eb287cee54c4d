#include "row_plan.h"

namespace engram {
namespace {

constexpr const char* kOp = "row_plan";

// Below, waking threads for a pass over the keys costs more than the pass.
constexpr int64_t kManySlots = 65536;

void sort_keys(Tensor& keys, int bits, int slot_bits) {
  const int64_t slots = keys.numel();
  int64_t* data = keys.mutable_data_ptr<int64_t>();
  // A coalesced sparse gradient comes sorted.
  const int64_t descends = parallel_first(slots - 1, kManySlots, [&](int64_t begin, int64_t end) {
    const int64_t* at = std::is_sorted_until(data + begin, data + end + 1);
    return at == data + end + 1 ? int64_t{-1} : at - data;
  });
  if (descends < 0) return;
  const bool many = slots >= kManySlots;
  const int64_t chunks = std::min<int64_t>(64, slots / 16384 + 1);
  cpu::SortKeys sort{data, nullptr, nullptr, slots, chunks, bits, slot_bits, many ? 6 : 0};
  Tensor scratch = empty(keys, {slots}), starts = empty(keys, {chunks, sort.buckets()});
  sort.scratch = scratch.mutable_data_ptr<int64_t>();
  sort.starts = starts.mutable_data_ptr<int64_t>();
  if (many) {
    parallel(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) cpu::sort_count(sort, i);
    });
    cpu::sort_offsets(sort);
    parallel(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) cpu::sort_scatter(sort, i);
    });
  }
  parallel(sort.buckets(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::sort_bucket(sort, i);
  });
}

template <typename Index> void launch(const Cpu&, const RowKeys<Index>& a, Tensor& keys) {
  const int64_t bad =
      parallel_first(a.slots, kManySlots / 4, [&](int64_t begin, int64_t end) { return cpu::row_keys(a, begin, end); });
  if (bad != kNoBadRow) bad_row(kOp, std::to_string(a.rows[bad]), a.table_rows);
  sort_keys(keys, bits_of(a.table_rows) + a.slot_bits, a.slot_bits);
}

void launch(const Cpu&, const RowRuns& a) {
  const int64_t chunks = run_chunks(a.slots);
  parallel(chunks, kManySlots / kRunChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::runs_count(a, i);
  });
  cpu::runs_offsets(a);
  parallel(chunks, kManySlots / kRunChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::runs_write(a, i);
  });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename Index> void launch(const Cuda& device, const RowKeys<Index>& a, Tensor& keys) {
  const int end_bit = a.slot_bits + bits_of(a.table_rows);
  const size_t bytes = cuda::row_sort_bytes(a.slots, a.slot_bits, end_bit);
  Tensor sorted = empty(keys, {a.slots}), scratch = empty(keys, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  device.check(cuda::row_keys(a, device.stream));
  device.check(cuda::row_sort(keys.const_data_ptr<int64_t>(), sorted.mutable_data_ptr<int64_t>(), a.slots, a.slot_bits,
                              end_bit, scratch.mutable_data_ptr(), bytes, device.stream));
  keys = sorted;
}
void launch(const Cuda& device, const RowRuns& a) { device.check(cuda::row_runs(a, device.stream)); }
#endif

}  // namespace

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> row_plan(Tensor rows, int64_t num_rows, std::optional<int64_t> row_begin,
                                            OptionalTensor mask) {
  const int64_t columns = check_rows(kOp, rows, row_begin, mask);
  if (num_rows < 0) fail(kOp, "num_rows", "at least 0", std::to_string(num_rows));
  const int64_t slots = rows.numel();
  const int slot_bits = bits_of(slots);
  if (bits_of(num_rows) + slot_bits > 62)
    fail(kOp, "num_rows", "small enough that row and slot numbers fit in 62 bits together", std::to_string(num_rows));
  const Device device(rows);
  Tensor keys = empty(rows, {slots}, ScalarType::Long);
  if (slots == 0) return {keys, torch::stable::new_zeros(keys, {1}), torch::stable::new_zeros(keys, {1})};
  dispatch_index(rows, [&]<typename Index>() {
    const RowKeys<Index> a{rows.const_data_ptr<Index>(),
                           read<bool>(mask),
                           keys.mutable_data_ptr<int64_t>(),
                           slots,
                           columns,
                           num_rows,
                           row_begin.value_or(0),
                           row_begin.has_value(),
                           slot_bits};
    launch(device, a, keys);
  });
  Tensor runs = empty(keys, {slots + 1}), count = empty(keys, {1}), scratch = empty(keys, {run_chunks(slots)});
  launch(device,
         RowRuns{keys.const_data_ptr<int64_t>(), runs.mutable_data_ptr<int64_t>(), count.mutable_data_ptr<int64_t>(),
                 scratch.mutable_data_ptr<int64_t>(), slots, num_rows, slot_bits});
  return {keys, runs, count};
}

}  // namespace engram

ENGRAM_REGISTER(row_plan)
