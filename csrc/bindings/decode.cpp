#include "kernels/decode.h"
#include "gate.h"
#include "row_plan.h"
#include "short_conv.h"

namespace engram {
namespace {

constexpr const char* kOp = "decode";

[[noreturn]] void bad_id(const std::string& id, int64_t vocab) {
  throw std::out_of_range(std::string(kOp) + ": token_ids must be in [0, " + std::to_string(vocab) +
                          "), the ids of token_map, got " + id);
}

// The state is written last: where an id or a row is refused, it stays as it was.
template <typename H, typename K> void launch(const Cpu&, const Decode<H, K>& a) {
  const ShortConvShape& s = a.mix.shape;
  const int64_t B = s.batch, tokens = B * s.tokens;
  if (tokens == 0) return;
  cpu::decode_marks(a.step, a.marks, 0, B);
  const int64_t id = parallel_first(tokens, grain_for(a.hash.columns * 8),
                                    [&](int64_t begin, int64_t end) { return cpu::ngram_hash(a.hash, begin, end); });
  if (id != kNoBadId) bad_id(std::to_string(a.marks.ids[id]), a.hash.vocab);
  const int64_t row = parallel_first(tokens, grain_for(2 * a.width),
                                     [&](int64_t begin, int64_t end) { return cpu::decode_memory(a, begin, end); });
  if (row != kNoBadRow) bad_row(kOp, std::to_string(a.hash.rows[row]), a.table_rows);
  parallel(cpu::decode_groups(s.branches * s.dim) + cpu::decode_groups(s.dim),
           grain_for(cpu::kDecodeRows * a.width * tokens),
           [&](int64_t begin, int64_t end) { cpu::decode_project(a, begin, end); });
  const int64_t grain = grain_for(s.branches * s.dim * 4);
  parallel(B, grain, [&](int64_t begin, int64_t end) { cpu::decode_past(a, begin, end); });
  parallel(tokens, grain, [&](int64_t begin, int64_t end) { cpu::gate_conv_stats(a.mix, begin, end); });
  parallel(B * conv_blocks_per_row(s), grain / s.tokens,
           [&](int64_t begin, int64_t end) { cpu::gate_conv_forward(a.mix, begin, end); });
  parallel(B, grain, [&](int64_t begin, int64_t end) { cpu::decode_append(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename H, typename K> void launch(const Cuda&, const Decode<H, K>&) {
  throw std::runtime_error("engram: decode has no CUDA kernels yet; nn.Engram decodes on CUDA with the other ops");
}
#endif

// A tensor of the state, which is written in place: no copy may stand in for it.
void* in_place(const char* argument, const char* name, const Tensor& t, ScalarType dtype,
               std::initializer_list<int64_t> sizes, const Tensor& like) {
  const auto own = t.sizes();
  if (t.scalar_type() != dtype || !std::equal(own.begin(), own.end(), sizes.begin(), sizes.end()) || !t.is_contiguous())
    fail(kOp, argument,
         std::string("a state whose ") + name + " is contiguous " + name_of(dtype) + " " + list(Sizes(sizes)),
         describe(t));
  require_device(kOp, argument, t, like);
  return t.mutable_data_ptr();
}

// The tensors of a ring in the order of engram/ops/_state.py; what follows the marks is the payload.
RingMarks ring_of(const char* argument, const std::vector<Tensor>& ring, size_t payload, int64_t batch, int64_t reach,
                  int64_t max_rollback, const Tensor& like) {
  if (ring.size() != 5 + payload)
    fail(kOp, argument, "the " + std::to_string(5 + payload) + " tensors of a ring", std::to_string(ring.size()));
  const int64_t slots = std::max<int64_t>(1, reach + max_rollback);
  const auto integers = [&](const char* name, size_t i, std::initializer_list<int64_t> sizes) {
    return static_cast<int64_t*>(in_place(argument, name, ring[i], ScalarType::Long, sizes, like));
  };
  return {integers("position", 0, {batch}),
          integers("room", 1, {batch}),
          static_cast<bool*>(in_place(argument, "visible", ring[2], ScalarType::Bool, {batch, slots}, like)),
          integers("runs", 3, {batch, slots}),
          integers("documents", 4, {batch, slots}),
          slots,
          reach,
          max_rollback};
}

// All scratch of a step out of one tensor.
class Scratch {
  int64_t next = 0;
  Tensor bytes;

 public:
  Scratch(const Tensor& like, int64_t size) : bytes(empty(like, {size}, ScalarType::Byte)) {}
  static int64_t room(int64_t count, int64_t size) { return (count * size + 63) / 64 * 64; }
  template <typename T> T* take(int64_t count) {
    const int64_t at = std::exchange(next, next + room(count, sizeof(T)));
    return reinterpret_cast<T*>(static_cast<char*>(bytes.mutable_data_ptr()) + at);
  }
};

// A weight that is read as it lies in memory.
Tensor projection_weight(const char* argument, const Tensor& t, ScalarType dtype, const Sizes& sizes,
                         const char* letters, const Tensor& like) {
  require_device(kOp, argument, t, like);
  if (t.scalar_type() != dtype) fail(kOp, argument, std::string(name_of(dtype)) + " like table", describe(t));
  require_sizes(kOp, argument, t, sizes, letters);
  return as_contiguous(t);
}
OptionalTensor projection_bias(const char* argument, const OptionalTensor& t, ScalarType dtype, int64_t size,
                               const char* letters, const Tensor& like) {
  return t ? OptionalTensor(projection_weight(argument, *t, dtype, {size}, letters, like)) : t;
}

}  // namespace

template <typename Device>
Tensor decode(Tensor hidden, Tensor token_ids, Tensor multipliers, Tensor moduli, Tensor offsets, Tensor table,
              Tensor key_proj, OptionalTensor key_bias, Tensor value_proj, OptionalTensor value_bias,
              OptionalTensor hidden_weight, OptionalTensor key_weight, Tensor conv_weight,
              OptionalTensor conv_norm_weight, std::vector<Tensor> history, std::vector<Tensor> conv, int64_t pad_id,
              int64_t max_rollback, double eps, double conv_eps, int64_t dilation, std::string zero_rule,
              std::optional<int64_t> eos_id, bool mask_blocks_hash, bool conv_reset, OptionalTensor token_map,
              OptionalTensor document_ids, OptionalTensor mask, OptionalTensor lengths, bool residual) {
  require_float(kOp, "hidden", hidden);
  require(hidden.dim() == 4, kOp, "hidden", "[B, T, G, D]", hidden);
  const int64_t B = hidden.size(0), T = hidden.size(1), G = hidden.size(2), D = hidden.size(3);
  require_index(kOp, "token_ids", token_ids);
  require_device(kOp, "token_ids", token_ids, hidden);
  require_sizes(kOp, "token_ids", token_ids, {B, T}, "[B, T]");
  token_ids = cast(token_ids, ScalarType::Long);

  require_long(kOp, "multipliers", multipliers);
  require(multipliers.dim() == 2 && multipliers.size(0) == 1 && multipliers.size(1) >= 2, kOp, "multipliers",
          "[1, N] with N >= 2", multipliers);
  const int64_t N = multipliers.size(1);
  require_long(kOp, "moduli", moduli);
  require(moduli.dim() == 2 && moduli.size(0) == 1 && moduli.size(1) % (N - 1) == 0, kOp, "moduli",
          "[1, C], C a multiple of N - 1", moduli);
  const int64_t C = moduli.size(1);
  require_long(kOp, "offsets", offsets);
  require_sizes(kOp, "offsets", offsets, {1, C}, "[1, C]");
  for (const auto& [argument, t] :
       {std::pair{"multipliers", &multipliers}, {"moduli", &moduli}, {"offsets", &offsets}}) {
    require_device(kOp, argument, *t, hidden);
    *t = as_contiguous(*t);
  }
  if (token_map) {
    require_device(kOp, "token_map", *token_map, hidden);
    require(token_map->dim() == 1 && token_map->scalar_type() == ScalarType::Int, kOp, "token_map", "int32 [V]",
            *token_map);
    token_map = as_contiguous(*token_map);
  }
  const int64_t V = token_map ? token_map->size(0) : 0;
  if (token_map && (pad_id < 0 || pad_id >= V))
    fail(kOp, "pad_id", "in [0, " + std::to_string(V) + "), the ids of token_map", std::to_string(pad_id));

  require_float(kOp, "table", table);
  require(table.dim() == 2, kOp, "table", "[R, d]", table);
  require_device(kOp, "table", table, hidden);
  table = as_contiguous(table);
  const ScalarType dtype = table.scalar_type();
  const int64_t E = C * table.size(1);
  key_proj = projection_weight("key_proj", key_proj, dtype, {G * D, E}, "[G * D, C * d]", hidden);
  key_bias = projection_bias("key_bias", key_bias, dtype, G * D, "[G * D]", hidden);
  value_proj = projection_weight("value_proj", value_proj, dtype, {D, E}, "[D, C * d]", hidden);
  value_bias = projection_bias("value_bias", value_bias, dtype, D, "[D]", hidden);

  document_ids = checked_ids(kOp, "document_ids", document_ids, {B, T}, "[B, T]", hidden);
  mask = checked_mask(kOp, mask, {B, T}, "[B, T]", hidden);
  lengths = checked_ids(kOp, "lengths", lengths, {B}, "[B]", hidden);
  check_gate_numbers(kOp, eps, 1);
  if (!(conv_eps >= 0)) fail(kOp, "conv_eps", "at least 0", std::to_string(conv_eps));
  if (max_rollback < 0) fail(kOp, "max_rollback", "at least 0", std::to_string(max_rollback));

  const Device device(hidden);
  const Tensor key = empty(hidden, {B, T, G, D}, dtype), value = empty(hidden, {B, T, D}, dtype);
  const Gate g(kOp, device, hidden, key, value, hidden_weight, key_weight, zero_rule, {});
  require(conv_weight.dim() == 3 && conv_weight.size(2) >= 1, kOp, "conv_weight", "[G, D, K] with K >= 1", conv_weight);
  if (dilation < 1) fail(kOp, "dilation", "at least 1", std::to_string(dilation));
  const int64_t P = (conv_weight.size(2) - 1) * dilation, stats = G * kGateStats + 1;
  const ShortConv c(kOp, device, {"hidden", "conv_weight", "conv_norm_weight"}, hidden, conv_weight, conv_norm_weight,
                    dilation, "silu", true, {}, {}, P);

  const ScalarType wide = accumulate_dtype(hidden);
  DecodeStep step{token_ids.const_data_ptr<int64_t>(),
                  read<int64_t>(document_ids),
                  read<bool>(mask),
                  read<int64_t>(lengths),
                  ring_of("history", history, 1, B, N - 1, max_rollback, hidden),
                  ring_of("conv", conv, 2, B, P, max_rollback, hidden),
                  nullptr,
                  B,
                  T,
                  dilation,
                  pad_id,
                  eos_id.value_or(0),
                  eos_id.has_value(),
                  mask_blocks_hash,
                  conv_reset};
  step.ids =
      static_cast<int64_t*>(in_place("history", "ids", history[5], ScalarType::Long, {B, step.history.slots}, hidden));
  void* ring_value = in_place("conv", "value", conv[5], dtype, {B, step.conv.slots, D}, hidden);
  void* ring_stats = in_place("conv", "stats", conv[6], wide, {B, step.conv.slots, stats}, hidden);

  const Tensor out = empty(hidden, {B, T, G, D});
  const int64_t rows = B * T, positions = B * (P + T);
  Scratch scratch(hidden, 16 * 64 + 8 * (rows * (5 + C) + positions + B * (N - 1)) + rows + positions +
                              8 * (rows * (E + stats) + B * P * (D + stats)));
  DecodeMarks marks{scratch.take<int64_t>(rows),        scratch.take<int64_t>(rows),  scratch.take<int64_t>(rows),
                    scratch.take<int64_t>(B * (N - 1)), scratch.take<bool>(rows),     scratch.take<int64_t>(positions),
                    scratch.take<int64_t>(rows),        scratch.take<bool>(positions)};
  NgramHash hash{marks.ids,
                 multipliers.const_data_ptr<int64_t>(),
                 moduli.const_data_ptr<int64_t>(),
                 offsets.const_data_ptr<int64_t>(),
                 read<int32_t>(token_map),
                 marks.runs,
                 marks.hashed,
                 marks.history,
                 scratch.take<int64_t>(rows * C),
                 pad_id,
                 B,
                 T,
                 1,
                 N,
                 C,
                 V};
  ShortConvShape shape = c.shape;
  shape.document_ids = marks.conv_runs;
  shape.mask = marks.visible;
  if constexpr (std::is_same_v<Device, Cpu>) {
    for (int64_t i = 0; i < C; ++i)
      if (hash.moduli[i] < 1) fail(kOp, "moduli", "positive", std::to_string(hash.moduli[i]));
    if (token_map) hash.pad = hash.token_map[pad_id];
  }
  dispatch_gate(g, [&]<typename H, typename K>() {
    using A = accumulate_t<H>;
    A* memory = scratch.take<A>(rows * E);
    K* past_value = scratch.take<K>(B * P * D);
    A* past_stats = scratch.take<A>(B * P * stats);
    const GateConvForward<H, K> mix{g.hidden.const_data_ptr<H>(),
                                    key.const_data_ptr<K>(),
                                    value.const_data_ptr<K>(),
                                    read<A>(g.weight),
                                    c.taps.const_data_ptr<A>(),
                                    out.mutable_data_ptr<H>(),
                                    scratch.take<A>(rows * stats),
                                    past_value,
                                    past_stats,
                                    static_cast<A>(conv_eps),
                                    g.options<A>(eps, 1e-6, residual),
                                    shape};
    const Decode<H, K> a{step,
                         marks,
                         hash,
                         table.const_data_ptr<K>(),
                         key_proj.const_data_ptr<K>(),
                         read<K>(key_bias),
                         value_proj.const_data_ptr<K>(),
                         read<K>(value_bias),
                         table.size(0),
                         table.size(1),
                         E,
                         static_cast<K*>(ring_value),
                         static_cast<A*>(ring_stats),
                         memory,
                         key.mutable_data_ptr<K>(),
                         value.mutable_data_ptr<K>(),
                         past_value,
                         past_stats,
                         mix};
    launch(device, a);
  });
  return out;
}

}  // namespace engram

ENGRAM_REGISTER(decode)
