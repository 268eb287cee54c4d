#include "gate.h"

namespace engram {
namespace {

template <typename H, typename K> void launch(const Cpu&, const GateForward<H, K>& a) {
  parallel(a.tokens, grain_for(a.branches * a.dim * 4),
           [&](int64_t begin, int64_t end) { cpu::gate_forward(a, begin, end); });
}
template <typename H, typename K> void launch(const Cpu&, const GateBackward<H, K>& a) {
  parallel(a.parts, 1, [&](int64_t begin, int64_t end) { cpu::gate_backward(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename H, typename K> void launch(const Cuda& device, const GateForward<H, K>& a) {
  device.check(cuda::gate_forward(a, device.stream));
}
template <typename H, typename K> void launch(const Cuda& device, const GateBackward<H, K>& a) {
  device.check(cuda::gate_backward(a, device.stream));
}
#endif

}  // namespace

template <typename Device>
std::tuple<Tensor, Tensor> gate(Tensor hidden, Tensor key, Tensor value, OptionalTensor hidden_weight,
                                OptionalTensor key_weight, double eps, double clamp, std::string zero_rule,
                                OptionalTensor mask, bool residual) {
  check_gate_numbers("gate", eps, clamp);
  const Device device(hidden);
  const Gate g("gate", device, hidden, key, value, hidden_weight, key_weight, zero_rule, mask);
  Tensor out = empty(g.hidden, sizes_of(g.hidden));
  Sizes sizes = leading(g.hidden, 1);
  sizes.push_back(kGateStats);
  Tensor stats = empty(g.hidden, sizes, accumulate_dtype(g.hidden));
  dispatch_gate(g, [&]<typename H, typename K>() {
    using A = accumulate_t<H>;
    launch(device, GateForward<H, K>{g.hidden.const_data_ptr<H>(), g.key.const_data_ptr<K>(),
                                     g.value.const_data_ptr<K>(), read<A>(g.weight), read<bool>(g.mask),
                                     out.mutable_data_ptr<H>(), stats.mutable_data_ptr<A>(), g.tokens, g.branches,
                                     g.dim, g.options<A>(eps, clamp, residual)});
  });
  return {out, stats};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gate_backward(Tensor grad_out, Tensor hidden, Tensor key,
                                                                 Tensor value, OptionalTensor hidden_weight,
                                                                 OptionalTensor key_weight, Tensor stats, double clamp,
                                                                 std::string zero_rule, OptionalTensor mask,
                                                                 bool residual) {
  constexpr const char* op = "gate_backward";
  check_gate_numbers(op, 0, clamp);
  const Device device(hidden);
  const Gate g(op, device, hidden, key, value, hidden_weight, key_weight, zero_rule, mask);
  require(grad_out.scalar_type() == hidden.scalar_type(), op, "grad_out", "of the dtype of hidden", grad_out);
  require_device(op, "grad_out", grad_out, hidden);
  require_sizes(op, "grad_out", grad_out, sizes_of(hidden), "the shape of hidden [..., G, D]");
  Sizes stats_sizes = leading(hidden, 1);
  stats_sizes.push_back(kGateStats);
  require_device(op, "stats", stats, hidden);
  require(stats.scalar_type() == accumulate_dtype(hidden), op, "stats", "of the accumulation dtype", stats);
  require_sizes(op, "stats", stats, stats_sizes, "[..., G, 3]");
  grad_out = as_contiguous(grad_out);
  stats = as_contiguous(stats);

  Tensor grad_hidden = empty(g.hidden, sizes_of(g.hidden)), grad_key = empty(g.key, sizes_of(g.key));
  Tensor grad_value = empty(g.value, sizes_of(g.value));
  GateWeightGrads weights(g, std::clamp<int64_t>(g.tokens / 16, 1, Device::kMaxParts));
  dispatch_gate(g, [&]<typename H, typename K>() {
    using A = accumulate_t<H>;
    launch(device,
           GateBackward<H, K>{grad_out.const_data_ptr<H>(), g.hidden.const_data_ptr<H>(), g.key.const_data_ptr<K>(),
                              g.value.const_data_ptr<K>(), read<A>(g.weight), stats.const_data_ptr<A>(),
                              read<bool>(g.mask), grad_hidden.mutable_data_ptr<H>(), grad_key.mutable_data_ptr<K>(),
                              grad_value.mutable_data_ptr<K>(), write<A>(weights.partials), g.tokens, g.branches, g.dim,
                              weights.parts, g.options<A>(0, clamp, residual)});
    weights.fold<A>(device, g);
  });
  return {grad_hidden, grad_key, grad_value, weights.finish(g, weights.hidden_weight, hidden_weight),
          weights.finish(g, weights.key_weight, key_weight)};
}

}  // namespace engram

ENGRAM_REGISTER(gate)
ENGRAM_REGISTER(gate_backward)
