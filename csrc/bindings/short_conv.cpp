#include "kernels/short_conv.h"
#include "device.h"

namespace engram {
namespace {

template <typename T> void launch(const Cpu&, const ShortConvForward<T>& a) {
  parallel(a.shape.batch * short_conv_blocks_per_row(a.shape), 1,
           [&](int64_t begin, int64_t end) { cpu::short_conv_forward(a, begin, end); });
}
template <typename T> void launch(const Cpu&, const ShortConvBackward<T>& a) {
  parallel(a.parts, 1, [&](int64_t begin, int64_t end) { cpu::short_conv_backward(a, begin, end); });
}
template <typename A> void fold(const Cpu&, const ShortConvWeights<A>& a) {
  parallel(a.count, grain_for(a.kernel), [&](int64_t begin, int64_t end) { cpu::short_conv_fold(a, begin, end); });
}
template <typename A> void unfold(const Cpu&, const ShortConvWeights<A>& a) {
  parallel(a.count, grain_for(a.kernel * a.parts), [&](int64_t begin, int64_t end) { cpu::short_conv_unfold(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename T> void launch(const Cuda& device, const ShortConvForward<T>& a) {
  device.check(cuda::short_conv_forward(a, device.stream));
}
template <typename T> void launch(const Cuda& device, const ShortConvBackward<T>& a) {
  device.check(cuda::short_conv_backward(a, device.stream));
}
template <typename A> void fold(const Cuda& device, const ShortConvWeights<A>& a) { device.check(cuda::short_conv_fold(a, device.stream)); }
template <typename A> void unfold(const Cuda& device, const ShortConvWeights<A>& a) { device.check(cuda::short_conv_unfold(a, device.stream)); }
#endif

// The arguments that forward and backward share, checked and ready for the kernels.
struct ShortConv {
  Tensor x, weight, taps;
  OptionalTensor norm_weight, document_ids, mask;
  ShortConvShape shape;

  template <typename Device>
  ShortConv(const char* op, const Device& device, Tensor x_, Tensor weight_, OptionalTensor norm_weight_, int64_t dilation,
            const std::optional<std::string>& activation, bool residual, OptionalTensor document_ids_, OptionalTensor mask_)
      : x(x_), weight(weight_), taps(x_) {
    require_float(op, "x", x);
    require(x.dim() == 4, op, "x", "[B, T, G, D]", x);
    const int64_t B = x.size(0), T = x.size(1), G = x.size(2), D = x.size(3);
    require(weight.dim() == 3 && weight.size(2) >= 1, op, "weight", "[G, D, K] with K >= 1", weight);
    const int64_t K = weight.size(2);
    weight = *checked_weight(op, "weight", weight, {G, D, K}, "[G, D, K]", x);
    norm_weight = checked_weight(op, "norm_weight", norm_weight_, {G, D}, "[G, D]", x);
    if (dilation < 1) fail(op, "dilation", "at least 1", std::to_string(dilation));
    if (activation && *activation != "silu") fail(op, "activation", "'silu' or None", "'" + *activation + "'");
    document_ids = checked_ids(op, "document_ids", document_ids_, {B, T}, "[B, T]", x);
    mask = checked_mask(op, mask_, {B, T}, "[B, T]", x);
    x = as_contiguous(x);
    // A dilation past the sequence reaches nothing; capped, positions cannot overflow.
    shape = {B, T, G, D, K, std::min(dilation, T + 1), norm_weight.has_value(), activation.has_value(), residual,
             read<int64_t>(document_ids), read<bool>(mask)};
    taps = empty(weight, {K, G, D});
    with_accumulate([&]<typename A>() {
      fold(device, ShortConvWeights<A>{weight.const_data_ptr<A>(), read<A>(norm_weight), taps.mutable_data_ptr<A>(), nullptr, nullptr,
                                       nullptr, 0, K, G * D});
    });
  }

  template <typename F> void with_accumulate(F&& f) const {
    if (accumulate_dtype(x) == ScalarType::Double) f.template operator()<double>();
    else f.template operator()<float>();
  }
};

}  // namespace

template <typename Device>
std::tuple<Tensor, Tensor> short_conv(Tensor x, Tensor weight, OptionalTensor norm_weight, int64_t dilation, double eps,
                                      std::optional<std::string> activation, bool residual, OptionalTensor document_ids,
                                      OptionalTensor mask) {
  constexpr const char* op = "short_conv";
  if (!(eps >= 0)) fail(op, "eps", "at least 0", std::to_string(eps));
  const Device device(x);
  const ShortConv c(op, device, x, weight, norm_weight, dilation, activation, residual, document_ids, mask);
  Tensor out = empty(c.x, sizes_of(c.x)), rstd = empty(c.x, leading(c.x, 1), accumulate_dtype(c.x));
  dispatch_float(c.x, [&]<typename T>() {
    using A = accumulate_t<T>;
    launch(device, ShortConvForward<T>{c.x.const_data_ptr<T>(), c.taps.const_data_ptr<A>(), out.mutable_data_ptr<T>(),
                                       rstd.mutable_data_ptr<A>(), static_cast<A>(eps), c.shape});
  });
  return {out, rstd};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> short_conv_backward(Tensor grad_out, Tensor x, Tensor weight, OptionalTensor norm_weight, Tensor rstd,
                                                       int64_t dilation, std::optional<std::string> activation, bool residual,
                                                       OptionalTensor document_ids, OptionalTensor mask) {
  constexpr const char* op = "short_conv_backward";
  const Device device(x);
  const ShortConv c(op, device, x, weight, norm_weight, dilation, activation, residual, document_ids, mask);
  require_device(op, "grad_out", grad_out, x);
  require(grad_out.scalar_type() == x.scalar_type(), op, "grad_out", "of the dtype of x", grad_out);
  require_sizes(op, "grad_out", grad_out, sizes_of(x), "[B, T, G, D]");
  require_device(op, "rstd", rstd, x);
  require(rstd.scalar_type() == accumulate_dtype(x), op, "rstd", "of the accumulation dtype", rstd);
  require_sizes(op, "rstd", rstd, leading(x, 1), "[B, T, G]");
  grad_out = as_contiguous(grad_out);
  rstd = as_contiguous(rstd);

  const ShortConvShape& s = c.shape;
  const ScalarType dtype = accumulate_dtype(x);
  const int64_t parts = std::clamp<int64_t>(s.batch * short_conv_blocks_per_row(s), 1, 64);
  Tensor grad_x = empty(c.x, sizes_of(c.x)), partials = empty(c.x, {parts, s.taps, s.branches, s.dim}, dtype);
  Tensor grad_weight = empty(c.weight, sizes_of(c.weight));
  OptionalTensor grad_norm_weight;
  if (norm_weight) grad_norm_weight = empty(c.x, {s.branches, s.dim}, dtype);
  dispatch_float(c.x, [&]<typename T>() {
    using A = accumulate_t<T>;
    launch(device, ShortConvBackward<T>{grad_out.const_data_ptr<T>(), c.x.const_data_ptr<T>(), c.taps.const_data_ptr<A>(),
                                        rstd.const_data_ptr<A>(), grad_x.mutable_data_ptr<T>(), partials.mutable_data_ptr<A>(), parts, s});
    unfold(device, ShortConvWeights<A>{c.weight.const_data_ptr<A>(), read<A>(c.norm_weight), nullptr, partials.const_data_ptr<A>(),
                                       grad_weight.mutable_data_ptr<A>(), write<A>(grad_norm_weight), parts, s.taps,
                                       s.branches * s.dim});
  });
  return {grad_x, cast(grad_weight, weight.scalar_type()),
          grad_norm_weight ? cast(*grad_norm_weight, norm_weight->scalar_type()) : empty(c.x, {0}, dtype)};
}

}  // namespace engram

ENGRAM_REGISTER(short_conv)
ENGRAM_REGISTER(short_conv_backward)
