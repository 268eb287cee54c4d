#include "kernels/decode.h"
#include "device.h"
#include "row_plan.h"

namespace engram {
namespace {

constexpr const char* kOp = "decode";

[[noreturn]] void bad_id(const std::string& id, int64_t vocab) {
  throw std::out_of_range(std::string(kOp) + ": token_ids must be in [0, " + std::to_string(vocab) +
                          "), the ids of token_map, got " + id);
}

// The state is written last: where an id or a row is refused, it stays as it was.
template <typename H, typename K> void launch(const Cpu&, const Decode<H, K>& a, const Tensor&) {
  const ShortConvShape& s = a.mix.shape;
  const int64_t B = s.batch, tokens = B * s.tokens, columns = s.branches * s.dim;
  cpu::decode_marks(a.step, a.marks, 0, B);
  const int64_t id = parallel_first(tokens, grain_for(a.hash.columns * 8),
                                    [&](int64_t begin, int64_t end) { return cpu::ngram_hash(a.hash, begin, end); });
  if (id != kNoBadId) bad_id(std::to_string(a.marks.ids[id]), a.hash.vocab);
  const int64_t row = parallel_first(tokens, grain_for(2 * a.width),
                                     [&](int64_t begin, int64_t end) { return cpu::decode_memory(a, begin, end); });
  if (row != kNoBadRow) bad_row(kOp, std::to_string(a.hash.rows[row]), a.table_rows);
  const int64_t groups = cpu::decode_groups(columns) + cpu::decode_groups(s.dim);
  parallel(groups, grain_for(cpu::kDecodeRows * a.width * tokens), [&](int64_t begin, int64_t end) {
    cpu::decode_project<K>(a, begin, end);
    cpu::decode_weights(a, columns * begin / groups, columns * end / groups);
  });
  const int64_t grain = grain_for(s.branches * s.dim * 4);
  parallel(B, grain, [&](int64_t begin, int64_t end) { cpu::decode_past<K>(a, begin, end); });
  parallel(tokens, grain, [&](int64_t begin, int64_t end) { cpu::gate_conv_stats(a.mix, begin, end); });
  parallel(B * conv_blocks_per_row(s), grain / s.tokens,
           [&](int64_t begin, int64_t end) { cpu::gate_conv_forward(a.mix, begin, end); });
  parallel(B, grain, [&](int64_t begin, int64_t end) { cpu::decode_append(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename H, typename K> void launch(const Cuda& device, const Decode<H, K>& a, const Tensor& like) {
  const DebugFlag id(like), row(like);
  device.check(cuda::decode_project<K>(a, id.pointer(), row.pointer(), device.stream));
  if (id.raised()) bad_id("an id outside", a.hash.vocab);
  if (row.raised()) bad_row(kOp, "a row outside", a.table_rows);
  device.check(cuda::decode_mix(a, device.stream));
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
Tensor projection_weight(const char* argument, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> sizes,
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

// One that is converted as it is read.
OptionalTensor mixing_weight(const char* argument, const OptionalTensor& t, std::initializer_list<int64_t> sizes,
                             const char* letters, const Tensor& like) {
  if (!t) return t;
  require_device(kOp, argument, *t, like);
  require_float(kOp, argument, *t);
  require_sizes(kOp, argument, *t, sizes, letters);
  return as_contiguous(*t);
}
AnyFloat any_float(const OptionalTensor& t) {
  if (!t) return {nullptr, FloatType::float32};
  const ScalarType dtype = t->scalar_type();
  return {t->const_data_ptr(), dtype == ScalarType::Double  ? FloatType::float64
                               : dtype == ScalarType::Float ? FloatType::float32
                               : dtype == ScalarType::Half  ? FloatType::float16
                                                            : FloatType::bfloat16};
}

// f.operator()<H, K>() for the dtypes of hidden and of the table.
template <typename F> void dispatch(const Tensor& hidden, const Tensor& table, F&& f) {
  if (hidden.scalar_type() == table.scalar_type())
    dispatch_float(hidden, [&]<typename T>() { f.template operator()<T, T>(); });
  else if (table.scalar_type() == ScalarType::Half) f.template operator()<float, Half>();
  else f.template operator()<float, BFloat16>();
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
  hidden = as_contiguous(hidden);
  const ScalarType dtype = table.scalar_type();
  const bool half_weights =
      hidden.scalar_type() == ScalarType::Float && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half);
  if (dtype != hidden.scalar_type() && !half_weights)
    fail(kOp, "table",
         std::string(name_of(hidden.scalar_type())) + " like hidden" +
             (hidden.scalar_type() == ScalarType::Float ? " or bfloat16 or float16" : ""),
         name_of(dtype));
  const int64_t E = C * table.size(1);
  key_proj = projection_weight("key_proj", key_proj, dtype, {G * D, E}, "[G * D, C * d]", hidden);
  key_bias = projection_bias("key_bias", key_bias, dtype, G * D, "[G * D]", hidden);
  value_proj = projection_weight("value_proj", value_proj, dtype, {D, E}, "[D, C * d]", hidden);
  value_bias = projection_bias("value_bias", value_bias, dtype, D, "[D]", hidden);

  document_ids = checked_ids(kOp, "document_ids", document_ids, {B, T}, "[B, T]", hidden);
  mask = checked_mask(kOp, mask, {B, T}, "[B, T]", hidden);
  lengths = checked_ids(kOp, "lengths", lengths, {B}, "[B]", hidden);
  hidden_weight = mixing_weight("hidden_weight", hidden_weight, {G, D}, "[G, D]", hidden);
  key_weight = mixing_weight("key_weight", key_weight, {G, D}, "[G, D]", hidden);
  require(conv_weight.dim() == 3 && conv_weight.size(2) >= 1, kOp, "conv_weight", "[G, D, K] with K >= 1", conv_weight);
  const int64_t taps = conv_weight.size(2);
  conv_weight = *mixing_weight("conv_weight", conv_weight, {G, D, taps}, "[G, D, K]", hidden);
  conv_norm_weight = mixing_weight("conv_norm_weight", conv_norm_weight, {G, D}, "[G, D]", hidden);
  if (!(eps >= 0)) fail(kOp, "eps", "at least 0", std::to_string(eps));
  if (!(conv_eps >= 0)) fail(kOp, "conv_eps", "at least 0", std::to_string(conv_eps));
  if (max_rollback < 0) fail(kOp, "max_rollback", "at least 0", std::to_string(max_rollback));
  if (dilation < 1) fail(kOp, "dilation", "at least 1", std::to_string(dilation));
  if (zero_rule != "sign" && zero_rule != "copysign")
    fail(kOp, "zero_rule", "'sign' or 'copysign'", "'" + zero_rule + "'");

  const Device device(hidden);
  const int64_t P = (taps - 1) * dilation, stats = G * kGateStats + 1;
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
  if (B * T == 0) return out;
  const bool on_cpu = std::is_same_v<Device, Cpu>, weighted = hidden_weight || key_weight;
  const int64_t rows = B * T, positions = B * (P + T), cpu_rows = on_cpu ? rows : 0, cpu_columns = on_cpu ? G * D : 0;
  const int64_t wide_bytes = wide == ScalarType::Double ? 8 : 4, bytes = dtype == ScalarType::Double  ? 8
                                                                         : dtype == ScalarType::Float ? 4
                                                                                                      : 2;
  Scratch scratch(hidden, 20 * 64 + 8 * (4 * rows + positions + B * N + cpu_rows * C) + rows + positions +
                              bytes * (rows * (G + 1) * D + B * P * D) +
                              wide_bytes * (cpu_rows * (E + stats) + cpu_columns * (1 + taps) + B * P * stats));
  DecodeMarks marks{scratch.take<int64_t>(rows),        scratch.take<int64_t>(rows),   scratch.take<int64_t>(rows),
                    scratch.take<int64_t>(B * (N - 1)), scratch.take<bool>(rows),      scratch.take<int64_t>(positions),
                    scratch.take<int64_t>(rows),        scratch.take<bool>(positions), scratch.take<int64_t>(B)};
  NgramHash hash{marks.ids,
                 multipliers.const_data_ptr<int64_t>(),
                 moduli.const_data_ptr<int64_t>(),
                 offsets.const_data_ptr<int64_t>(),
                 read<int32_t>(token_map),
                 marks.runs,
                 marks.hashed,
                 marks.history,
                 scratch.take<int64_t>(cpu_rows * C),
                 pad_id,
                 B,
                 T,
                 1,
                 N,
                 C,
                 V};
  if constexpr (std::is_same_v<Device, Cpu>) {
    for (int64_t i = 0; i < C; ++i)
      if (hash.moduli[i] < 1) fail(kOp, "moduli", "positive", std::to_string(hash.moduli[i]));
    if (token_map) hash.pad = hash.token_map[pad_id];
  }
  const ShortConvShape shape{
      B, T, G, D, taps, dilation, conv_norm_weight.has_value(), true, true, marks.conv_runs, marks.visible, P};
  dispatch(hidden, table, [&]<typename H, typename K>() {
    using A = accumulate_t<H>;
    const DecodeProducts<K> products{step,
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
                                     G,
                                     D,
                                     static_cast<K*>(ring_value),
                                     static_cast<A*>(ring_stats),
                                     scratch.take<A>(cpu_rows * E),
                                     scratch.take<K>(rows * G * D),
                                     scratch.take<K>(rows * D),
                                     scratch.take<K>(B * P * D),
                                     scratch.take<A>(B * P * stats)};
    A* weight = scratch.take<A>(cpu_columns);
    A* folded_taps = scratch.take<A>(cpu_columns * taps);
    const GateOptions<A> gate{static_cast<A>(eps),    static_cast<A>(1e-6),    hidden_weight.has_value(),
                              key_weight.has_value(), zero_rule == "copysign", residual};
    const GateConvForward<H, K> mix{hidden.const_data_ptr<H>(),
                                    products.key,
                                    products.value,
                                    weighted ? weight : nullptr,
                                    folded_taps,
                                    out.mutable_data_ptr<H>(),
                                    scratch.take<A>(cpu_rows * stats),
                                    products.past_value,
                                    products.past_stats,
                                    static_cast<A>(conv_eps),
                                    gate,
                                    shape};
    const Decode<H, K> a{products,
                         any_float(hidden_weight),
                         any_float(key_weight),
                         any_float(conv_weight),
                         any_float(conv_norm_weight),
                         weighted ? weight : nullptr,
                         folded_taps,
                         mix};
    launch(device, a, hidden);
  });
  return out;
}

}  // namespace engram

ENGRAM_REGISTER(decode)
