#include "kernels/gate_conv.h"
#include "gate.h"
#include "short_conv.h"

namespace engram {
namespace {

template <typename H, typename K> void launch(const Cpu&, const GateConvForward<H, K>& a) {
  const ShortConvShape& s = a.shape;
  parallel(s.batch * s.tokens, grain_for(s.branches * s.dim * 4),
           [&](int64_t begin, int64_t end) { cpu::gate_conv_stats(a, begin, end); });
  parallel(s.batch * conv_blocks_per_row(s), 1,
           [&](int64_t begin, int64_t end) { cpu::gate_conv_forward(a, begin, end); });
}
template <typename H, typename K> void launch(const Cpu&, const GateConvBackward<H, K>& a) {
  parallel(a.parts, 1, [&](int64_t begin, int64_t end) { cpu::gate_conv_backward(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename H, typename K> void launch(const Cuda& device, const GateConvForward<H, K>& a) {
  device.check(cuda::gate_conv_forward(a, device.stream));
}
template <typename H, typename K> void launch(const Cuda& device, const GateConvBackward<H, K>& a) {
  device.check(cuda::gate_conv_backward(a, device.stream));
}
#endif

constexpr std::array<const char*, 3> kNames{"hidden", "conv_weight", "conv_norm_weight"};

// What a state keeps of the positions before the first token: value [B, P, D] and stats [B, P, 3 G + 1], or neither.
struct Past {
  OptionalTensor value, stats;
  int64_t size = 0;

  Past(const char* op, OptionalTensor value_, OptionalTensor stats_, const Tensor& hidden, const Tensor& key) {
    if (value_.has_value() != stats_.has_value())
      fail(op, "past_value", "given together with past_stats", value_ ? "past_value alone" : "past_stats alone");
    if (!value_) return;
    require(hidden.dim() == 4, op, "hidden", "[B, T, G, D]", hidden);
    require_device(op, "past_value", *value_, hidden);
    require(value_->scalar_type() == key.scalar_type(), op, "past_value", "of the dtype of value", *value_);
    require(value_->dim() == 3 && value_->size(0) == hidden.size(0) && value_->size(2) == hidden.size(3), op,
            "past_value", "[B, P, D]", *value_);
    size = value_->size(1);
    require_device(op, "past_stats", *stats_, hidden);
    require(stats_->scalar_type() == accumulate_dtype(hidden), op, "past_stats", "of the accumulation dtype", *stats_);
    require_sizes(op, "past_stats", *stats_, {hidden.size(0), size, hidden.size(2) * kGateStats + 1},
                  "[B, P, 3 * G + 1]");
    value = as_contiguous(*value_);
    stats = as_contiguous(*stats_);
  }
  // Of a mask [B, P + T] the part of the tokens, which is the gate's.
  OptionalTensor own(const OptionalTensor& mask) const {
    if (!mask || size == 0 || mask->dim() != 2) return mask;
    Tensor all = *mask;
    return torch::stable::narrow(all, 1, size, all.size(1) - size);
  }
};

Sizes stats_sizes(const Tensor& hidden) { return {hidden.size(0), hidden.size(1), hidden.size(2) * kGateStats + 1}; }

}  // namespace

template <typename Device>
std::tuple<Tensor, Tensor> gate_conv(Tensor hidden, Tensor key, Tensor value, OptionalTensor hidden_weight,
                                     OptionalTensor key_weight, Tensor conv_weight, OptionalTensor conv_norm_weight,
                                     double eps, double conv_eps, int64_t dilation, double clamp, std::string zero_rule,
                                     std::optional<std::string> activation, OptionalTensor document_ids,
                                     OptionalTensor mask, bool residual, OptionalTensor past_value,
                                     OptionalTensor past_stats) {
  constexpr const char* op = "gate_conv";
  check_gate_numbers(op, eps, clamp);
  if (!(conv_eps >= 0)) fail(op, "conv_eps", "at least 0", std::to_string(conv_eps));
  const Device device(hidden);
  const Past past(op, past_value, past_stats, hidden, key);
  const ShortConv c(op, device, kNames, hidden, conv_weight, conv_norm_weight, dilation, activation, true, document_ids,
                    mask, past.size);
  const Gate g(op, device, hidden, key, value, hidden_weight, key_weight, zero_rule, past.own(mask));
  Tensor out = empty(g.hidden, sizes_of(g.hidden)),
         stats = empty(g.hidden, stats_sizes(g.hidden), accumulate_dtype(g.hidden));
  dispatch_gate(g, [&]<typename H, typename K>() {
    using A = accumulate_t<H>;
    launch(device,
           GateConvForward<H, K>{g.hidden.const_data_ptr<H>(), g.key.const_data_ptr<K>(), g.value.const_data_ptr<K>(),
                                 read<A>(g.weight), c.taps.const_data_ptr<A>(), out.mutable_data_ptr<H>(),
                                 stats.mutable_data_ptr<A>(), read<K>(past.value), read<A>(past.stats),
                                 static_cast<A>(conv_eps), g.options<A>(eps, clamp, residual), c.shape});
  });
  return {out, stats};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gate_conv_backward(
    Tensor grad_out, Tensor hidden, Tensor key, Tensor value, OptionalTensor hidden_weight, OptionalTensor key_weight,
    Tensor conv_weight, OptionalTensor conv_norm_weight, Tensor stats, double conv_eps, int64_t dilation, double clamp,
    std::string zero_rule, std::optional<std::string> activation, OptionalTensor document_ids, OptionalTensor mask,
    bool residual, OptionalTensor past_value, OptionalTensor past_stats) {
  constexpr const char* op = "gate_conv_backward";
  check_gate_numbers(op, 0, clamp);
  const Device device(hidden);
  const Past past(op, past_value, past_stats, hidden, key);
  const ShortConv c(op, device, kNames, hidden, conv_weight, conv_norm_weight, dilation, activation, true, document_ids,
                    mask, past.size);
  const Gate g(op, device, hidden, key, value, hidden_weight, key_weight, zero_rule, past.own(mask));
  require_device(op, "grad_out", grad_out, hidden);
  require(grad_out.scalar_type() == hidden.scalar_type(), op, "grad_out", "of the dtype of hidden", grad_out);
  require_sizes(op, "grad_out", grad_out, sizes_of(hidden), "the shape of hidden [B, T, G, D]");
  require_device(op, "stats", stats, hidden);
  require(stats.scalar_type() == accumulate_dtype(hidden), op, "stats", "of the accumulation dtype", stats);
  require_sizes(op, "stats", stats, stats_sizes(hidden), "[B, T, 3 * G + 1]");
  grad_out = as_contiguous(grad_out);
  stats = as_contiguous(stats);
  Tensor grad_hidden = empty(g.hidden, sizes_of(g.hidden)), grad_key = empty(g.key, sizes_of(g.key));
  Tensor grad_value = empty(g.value, sizes_of(g.value));
  const int64_t parts = conv_parts<Device>(c.shape);
  GateWeightGrads gate_grads(g, parts);
  ShortConvWeightGrads conv_grads(c, parts);
  dispatch_gate(g, [&]<typename H, typename K>() {
    using A = accumulate_t<H>;
    OptionalTensor scratch;
    if constexpr (!std::is_same_v<Device, Cpu>)
      scratch = empty(g.hidden, {gate_conv_scratch(c.shape)}, accumulate_dtype(g.hidden));
    launch(device,
           GateConvBackward<H, K>{grad_out.const_data_ptr<H>(), g.hidden.const_data_ptr<H>(), g.key.const_data_ptr<K>(),
                                  g.value.const_data_ptr<K>(), read<A>(g.weight), c.taps.const_data_ptr<A>(),
                                  stats.const_data_ptr<A>(), read<K>(past.value), read<A>(past.stats),
                                  grad_hidden.mutable_data_ptr<H>(), grad_key.mutable_data_ptr<K>(),
                                  grad_value.mutable_data_ptr<K>(), write<A>(gate_grads.partials),
                                  conv_grads.partials.mutable_data_ptr<A>(), write<A>(scratch), parts,
                                  static_cast<A>(conv_eps), g.options<A>(0, clamp, residual), c.shape});
    gate_grads.fold<A>(device, g);
    conv_grads.unfold<A>(device, c);
  });
  return {grad_hidden,
          grad_key,
          grad_value,
          gate_grads.finish(g, gate_grads.hidden_weight, hidden_weight),
          gate_grads.finish(g, gate_grads.key_weight, key_weight),
          cast(conv_grads.weight, conv_weight.scalar_type()),
          conv_grads.finish_norm(conv_norm_weight)};
}

}  // namespace engram

ENGRAM_REGISTER(gate_conv)
ENGRAM_REGISTER(gate_conv_backward)
