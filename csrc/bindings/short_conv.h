// What the bindings of short_conv and gate_conv share: their arguments checked and ready for the kernels, and the
// weights' gradients.
#pragma once
#include "device.h"
#include "kernels/short_conv.h"

namespace engram {

template <typename F> void with_accumulate(const Tensor& like, F&& f) {
  if (accumulate_dtype(like) == ScalarType::Double) f.template operator()<double>();
  else f.template operator()<float>();
}

template <typename A> void fold(const Cpu&, const ShortConvWeights<A>& a) {
  parallel(a.count, grain_for(a.kernel), [&](int64_t begin, int64_t end) { cpu::short_conv_fold(a, begin, end); });
}
template <typename A> void unfold(const Cpu&, const ShortConvWeights<A>& a) {
  parallel(a.count, grain_for(a.kernel * a.parts),
           [&](int64_t begin, int64_t end) { cpu::short_conv_unfold(a, begin, end); });
}
#ifdef ENGRAM_CUDA_BODIES
template <typename A> void fold(const Cuda& device, const ShortConvWeights<A>& a) {
  device.check(cuda::short_conv_fold(a, device.stream));
}
template <typename A> void unfold(const Cuda& device, const ShortConvWeights<A>& a) {
  device.check(cuda::short_conv_unfold(a, device.stream));
}
#endif

// The arguments that forward and backward share, checked and ready for the kernels.
struct ShortConv {
  Tensor weight, taps;
  OptionalTensor norm_weight, document_ids, mask;
  ShortConvShape shape;

  // x: the tensor [B, T, G, D] that the convolution runs along; names: of x, weight and norm_weight in the op's
  // signature.
  template <typename Device>
  ShortConv(const char* op, const Device& device, const std::array<const char*, 3>& names, const Tensor& x,
            Tensor weight_, OptionalTensor norm_weight_, int64_t dilation, const std::optional<std::string>& activation,
            bool residual, OptionalTensor document_ids_, OptionalTensor mask_, int64_t past = 0)
      : weight(weight_), taps(x) {
    require_float(op, names[0], x);
    require(x.dim() == 4, op, names[0], "[B, T, G, D]", x);
    const int64_t B = x.size(0), T = x.size(1), G = x.size(2), D = x.size(3);
    require(weight.dim() == 3 && weight.size(2) >= 1, op, names[1], "[G, D, K] with K >= 1", weight);
    const int64_t K = weight.size(2);
    weight = *checked_weight(op, names[1], weight, {G, D, K}, "[G, D, K]", x);
    norm_weight = checked_weight(op, names[2], norm_weight_, {G, D}, "[G, D]", x);
    if (dilation < 1) fail(op, "dilation", "at least 1", std::to_string(dilation));
    if (activation && *activation != "silu") fail(op, "activation", "'silu' or None", "'" + *activation + "'");
    document_ids = checked_ids(op, "document_ids", document_ids_, {B, past + T}, past ? "[B, P + T]" : "[B, T]", x);
    mask = checked_mask(op, mask_, {B, past + T}, past ? "[B, P + T]" : "[B, T]", x);
    // A dilation past the sequence reaches nothing; capped, positions cannot overflow.
    shape = {B,
             T,
             G,
             D,
             K,
             std::min(dilation, past + T + 1),
             norm_weight.has_value(),
             activation.has_value(),
             residual,
             read<int64_t>(document_ids),
             read<bool>(mask),
             past};
    taps = empty(weight, {K, G, D});
    with_accumulate(x, [&]<typename A>() {
      fold(device, ShortConvWeights<A>{weight.const_data_ptr<A>(), read<A>(norm_weight), taps.mutable_data_ptr<A>(),
                                       nullptr, nullptr, nullptr, 0, K, G * D});
    });
  }
};

// The gradients of weight and norm_weight, in the weights' own dtypes; empty [0] for a norm_weight that is None.
struct ShortConvWeightGrads {
  Tensor partials, weight;
  OptionalTensor norm_weight;
  int64_t parts;

  ShortConvWeightGrads(const ShortConv& c, int64_t parts)
      : partials(empty(c.taps, {parts, c.shape.taps, c.shape.branches, c.shape.dim})),
        weight(empty(c.taps, {c.shape.branches, c.shape.dim, c.shape.taps})),
        parts(parts) {
    if (c.norm_weight) norm_weight = empty(c.taps, {c.shape.branches, c.shape.dim});
  }
  template <typename A, typename Device> void unfold(const Device& device, const ShortConv& c) {
    engram::unfold(
        device, ShortConvWeights<A>{c.weight.const_data_ptr<A>(), read<A>(c.norm_weight), nullptr,
                                    partials.const_data_ptr<A>(), weight.mutable_data_ptr<A>(), write<A>(norm_weight),
                                    parts, c.shape.taps, c.shape.branches * c.shape.dim});
  }
  Tensor finish_norm(const OptionalTensor& original) const {
    return norm_weight ? cast(*norm_weight, original->scalar_type()) : empty(partials, {0});
  }
};

// One part per block of time, as long as their partial sums stay small.
template <typename Device> int64_t conv_parts(const ShortConvShape& s) {
  return std::clamp<int64_t>(s.batch * conv_blocks_per_row(s), 1, Device::kMaxParts);
}

}  // namespace engram
