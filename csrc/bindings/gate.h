// What the bindings of gate and gate_conv share: their arguments checked and ready for the kernels, and the weights'
// gradients.
#pragma once
#include "device.h"
#include "kernels/gate.h"

namespace engram {

template <typename A> void multiply(const Cpu&, const A* a, const A* b, A* out, int64_t count) {
  parallel(count, grain_for(1), [&](int64_t begin, int64_t end) { cpu::multiply(a, b, out, begin, end); });
}
template <typename A> void launch(const Cpu&, const GateWeights<A>& a) {
  parallel(a.count, grain_for(a.parts), [&](int64_t begin, int64_t end) { cpu::gate_weights(a, begin, end); });
}
#ifdef ENGRAM_CUDA_BODIES
template <typename A> void multiply(const Cuda& device, const A* a, const A* b, A* out, int64_t count) {
  device.check(cuda::multiply(a, b, out, count, device.stream));
}
template <typename A> void launch(const Cuda& device, const GateWeights<A>& a) {
  device.check(cuda::gate_weights(a, device.stream));
}
#endif

// The arguments that forward and backward share, checked and ready for the kernels.
struct Gate {
  Tensor hidden, key, value;
  OptionalTensor hidden_weight, key_weight, weight, mask;
  int64_t tokens, branches, dim;
  bool copysign;

  template <typename Device>
  Gate(const char* op, const Device& device, Tensor hidden_, Tensor key_, Tensor value_, OptionalTensor hidden_weight_,
       OptionalTensor key_weight_, const std::string& zero_rule, OptionalTensor mask_)
      : hidden(hidden_), key(key_), value(value_) {
    require_float(op, "hidden", hidden);
    require_float(op, "key", key);
    require(hidden.dim() >= 2, op, "hidden", "[..., G, D]", hidden);
    require_device(op, "key", key, hidden);
    require_device(op, "value", value, hidden);
    require_sizes(op, "key", key, sizes_of(hidden), "the shape of hidden [..., G, D]");
    const bool half_projection = hidden.scalar_type() == ScalarType::Float &&
                                 (key.scalar_type() == ScalarType::BFloat16 || key.scalar_type() == ScalarType::Half);
    if (key.scalar_type() != hidden.scalar_type() && !half_projection)
      fail(op, "key",
           std::string(name_of(hidden.scalar_type())) + " like hidden" +
               (hidden.scalar_type() == ScalarType::Float ? " or bfloat16 or float16" : ""),
           name_of(key.scalar_type()));
    if (value.scalar_type() != key.scalar_type())
      fail(op, "value", std::string(name_of(key.scalar_type())) + " like key", name_of(value.scalar_type()));
    branches = hidden.size(hidden.dim() - 2);
    dim = hidden.size(hidden.dim() - 1);
    const Sizes token_sizes = leading(hidden, 2);
    tokens = product(token_sizes);
    Sizes value_sizes = token_sizes;
    value_sizes.push_back(dim);
    require_sizes(op, "value", value, value_sizes, "[..., D]");
    hidden_weight = checked_weight(op, "hidden_weight", hidden_weight_, {branches, dim}, "[G, D]", hidden);
    key_weight = checked_weight(op, "key_weight", key_weight_, {branches, dim}, "[G, D]", hidden);
    mask = checked_mask(op, mask_, token_sizes, "the leading dimensions of hidden [..., G, D]", hidden);
    if (zero_rule != "sign" && zero_rule != "copysign")
      fail(op, "zero_rule", "'sign' or 'copysign'", "'" + zero_rule + "'");
    copysign = zero_rule == "copysign";
    hidden = as_contiguous(hidden);
    key = as_contiguous(key);
    value = as_contiguous(value);
    weight = hidden_weight ? hidden_weight : key_weight;
    if (hidden_weight && key_weight) {
      weight = empty(*hidden_weight, {branches, dim});
      const auto fold = [&]<typename A>() {
        multiply(device, read<A>(hidden_weight), read<A>(key_weight), write<A>(weight), branches * dim);
      };
      if (accumulate_dtype(hidden) == ScalarType::Double) fold.template operator()<double>();
      else fold.template operator()<float>();
    }
  }

  template <typename A> GateOptions<A> options(double eps, double clamp, bool residual) const {
    return {static_cast<A>(eps),
            static_cast<A>(clamp),
            hidden_weight.has_value(),
            key_weight.has_value(),
            copysign,
            residual};
  }
};

// f.operator()<H, K>() for the dtypes of hidden and of key and value.
template <typename F> void dispatch_gate(const Gate& g, F&& f) {
  if (g.hidden.scalar_type() == ScalarType::Float && g.key.scalar_type() == ScalarType::Half)
    f.template operator()<float, Half>();
  else if (g.hidden.scalar_type() == ScalarType::Float && g.key.scalar_type() == ScalarType::BFloat16)
    f.template operator()<float, BFloat16>();
  else dispatch_float(g.hidden, [&]<typename T>() { f.template operator()<T, T>(); });
}

inline void check_gate_numbers(const char* op, double eps, double clamp) {
  if (!(eps >= 0)) fail(op, "eps", "at least 0", std::to_string(eps));
  if (!(clamp > 0)) fail(op, "clamp", "above 0", std::to_string(clamp));
}

// The gradients of hidden_weight and key_weight, in the weights' own dtypes; empty [0] for a weight that is None.
struct GateWeightGrads {
  OptionalTensor partials, hidden_weight, key_weight;
  int64_t parts;

  GateWeightGrads(const Gate& g, int64_t parts) : parts(parts) {
    const ScalarType dtype = accumulate_dtype(g.hidden);
    if (g.weight) partials = empty(g.hidden, {parts, g.branches, g.dim}, dtype);
    if (g.hidden_weight) hidden_weight = empty(g.hidden, {g.branches, g.dim}, dtype);
    if (g.key_weight) key_weight = empty(g.hidden, {g.branches, g.dim}, dtype);
  }
  template <typename A, typename Device> void fold(const Device& device, const Gate& g) {
    if (!partials) return;
    launch(device, GateWeights<A>{read<A>(partials), read<A>(g.hidden_weight), read<A>(g.key_weight),
                                  write<A>(hidden_weight), write<A>(key_weight), parts, g.branches * g.dim});
  }
  static Tensor finish(const Gate& g, const OptionalTensor& grad, const OptionalTensor& weight) {
    return grad ? cast(*grad, weight->scalar_type()) : empty(g.hidden, {0}, accumulate_dtype(g.hidden));
  }
};

}  // namespace engram
