#include "kernels/embedding.h"
#include "device.h"

namespace engram {
namespace {

int bits_of(int64_t n) {  // values 0 .. n need this many bits
  int bits = 0;
  while (n >> bits) ++bits;
  return bits;
}

[[noreturn]] void bad_row(const char* op, const std::string& row, int64_t table_rows) {
  throw std::out_of_range(std::string(op) + ": rows must be in [0, " + std::to_string(table_rows) +
                          "), the rows of table, got " + row);
}

template <typename Index> void launch(const Cpu&, const char* op, const EmbeddingForward<Index>& a) {
  const int64_t bad = parallel_first(a.slots, grain_for(a.row_bytes / 4 + 64),
                                     [&](int64_t begin, int64_t end) { return cpu::embedding_forward(a, begin, end); });
  if (bad != kNoBadRow) bad_row(op, std::to_string(a.rows[bad]), a.table_rows);
}

// Fills and sorts a.keys.
template <typename Index> Tensor sorted_keys(const Cpu&, const char* op, const EmbeddingKeys<Index>& a, Tensor keys) {
  const int64_t bad = parallel_first(a.slots, grain_for(8),
                                     [&](int64_t begin, int64_t end) { return cpu::embedding_keys(a, begin, end); });
  if (bad != kNoBadRow) bad_row(op, std::to_string(a.rows[bad]), a.table_rows);
  const int64_t chunks = std::min<int64_t>(64, a.slots / 4096 + 1);
  Tensor scratch = empty(keys, {a.slots}), starts = empty(keys, {chunks, cpu::kSortBuckets});
  const cpu::SortKeys sort{a.keys, scratch.mutable_data_ptr<int64_t>(), starts.mutable_data_ptr<int64_t>(), a.slots,
                           chunks, bits_of(a.table_rows) + a.slot_bits};
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::sort_count(sort, i);
  });
  cpu::sort_offsets(sort);
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::sort_scatter(sort, i);
  });
  parallel(cpu::kSortBuckets, a.slots < 4096 ? cpu::kSortBuckets : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::sort_bucket(sort, i);
  });
  return keys;
}

template <typename T> void launch(const Cpu&, const EmbeddingBackward<T>& a) {
  parallel(a.slots, grain_for(a.dim + 16), [&](int64_t begin, int64_t end) { cpu::embedding_backward(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename Index>
void launch(const Cuda& device, const char* op, const EmbeddingForward<Index>& a, const DebugFlag& debug) {
  device.check(cuda::embedding_forward(a, debug.pointer(), device.stream));
  if (debug.raised()) bad_row(op, "a row outside", a.table_rows);
}
// Keys are distinct, so any ascending sort gives the one order that there is.
template <typename Index>
Tensor sorted_keys(const Cuda& device, const char*, const EmbeddingKeys<Index>& a, Tensor keys) {
  device.check(cuda::embedding_keys(a, device.stream));
  std::array<StableIValue, 3> stack{torch::stable::detail::from(keys), torch::stable::detail::from(int64_t{-1}),
                                    torch::stable::detail::from(false)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "", stack.data(), TORCH_ABI_VERSION));
  Tensor order = torch::stable::detail::to<Tensor>(stack[1]);  // owned, so that it is freed
  return torch::stable::detail::to<Tensor>(stack[0]);
}
template <typename T> void launch(const Cuda& device, const EmbeddingBackward<T>& a) {
  device.check(cuda::embedding_backward(a, device.stream));
}
#endif

// What forward and backward share: rows int [..., C], mask bool [...]. Returns C.
int64_t check_rows(const char* op, Tensor& rows, std::optional<int64_t> row_begin, OptionalTensor& mask) {
  if (row_begin && *row_begin < 0) fail(op, "row_begin", "at least 0", std::to_string(*row_begin));
  require_index(op, "rows", rows);
  require(rows.dim() >= 1, op, "rows", "[..., C]", rows);
  mask = checked_mask(op, mask, leading(rows, 1), "the leading dimensions of rows [..., C]", rows);
  rows = as_contiguous(rows);
  return rows.size(rows.dim() - 1);
}

}  // namespace

template <typename Device>
Tensor embedding(Tensor table, Tensor rows, std::optional<int64_t> row_begin, OptionalTensor mask) {
  constexpr const char* op = "embedding";
  require_float(op, "table", table);
  require(table.dim() == 2, op, "table", "[R, d]", table);
  require_device(op, "rows", rows, table);
  const int64_t columns = check_rows(op, rows, row_begin, mask);
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
Tensor embedding_backward(Tensor grad_out, Tensor rows, int64_t num_rows, std::optional<int64_t> row_begin,
                          OptionalTensor mask) {
  constexpr const char* op = "embedding_backward";
  require_float(op, "grad_out", grad_out);
  require_device(op, "rows", rows, grad_out);
  const int64_t columns = check_rows(op, rows, row_begin, mask);
  require(grad_out.dim() == rows.dim() + 1 && leading(grad_out, 1) == sizes_of(rows), op, "grad_out",
          "[..., C, d], rows being [..., C]", grad_out);
  if (num_rows < 0) fail(op, "num_rows", "at least 0", std::to_string(num_rows));
  const int64_t slots = rows.numel(), dim = grad_out.size(grad_out.dim() - 1);
  const int slot_bits = bits_of(slots);
  if (bits_of(num_rows) + slot_bits > 62)
    fail(op, "num_rows", "small enough that row and slot numbers fit in 62 bits together", std::to_string(num_rows));
  grad_out = as_contiguous(grad_out);
  const Device device(grad_out);
  Tensor grad_table = torch::stable::new_zeros(grad_out, {num_rows, dim});
  if (slots == 0 || dim == 0) return grad_table;
  Tensor keys = empty(rows, {slots}, ScalarType::Long);
  dispatch_index(rows, [&]<typename Index>() {
    const EmbeddingKeys<Index> a{rows.const_data_ptr<Index>(),
                                 read<bool>(mask),
                                 keys.mutable_data_ptr<int64_t>(),
                                 slots,
                                 columns,
                                 num_rows,
                                 row_begin.value_or(0),
                                 row_begin.has_value(),
                                 slot_bits};
    keys = sorted_keys(device, op, a, keys);
  });
  dispatch_float(grad_out, [&]<typename T>() {
    OptionalTensor partials;
#ifdef ENGRAM_CUDA_BODIES
    if constexpr (std::is_same_v<Device, Cuda>)
      partials = empty(grad_out, {(slots + cuda::kEmbeddingChunk - 1) / cuda::kEmbeddingChunk, 2, dim},
                       accumulate_dtype(grad_out));
#endif
    launch(device, EmbeddingBackward<T>{grad_out.const_data_ptr<T>(), keys.const_data_ptr<int64_t>(),
                                        grad_table.mutable_data_ptr<T>(), write<accumulate_t<T>>(partials), slots,
                                        num_rows, dim, slot_bits});
  });
  return grad_table;
}

}  // namespace engram

ENGRAM_REGISTER(embedding)
ENGRAM_REGISTER(embedding_backward)
