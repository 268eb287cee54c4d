#include "short_conv.h"

namespace engram {
namespace {

template <typename T> void launch(const Cpu&, const ShortConvForward<T>& a) {
  parallel(a.shape.batch * conv_blocks_per_row(a.shape), 1,
           [&](int64_t begin, int64_t end) { cpu::short_conv_forward(a, begin, end); });
}
template <typename T> void launch(const Cpu&, const ShortConvBackward<T>& a) {
  parallel(a.parts, 1, [&](int64_t begin, int64_t end) { cpu::short_conv_backward(a, begin, end); });
}

#ifdef ENGRAM_CUDA_BODIES
template <typename T> void launch(const Cuda& device, const ShortConvForward<T>& a) {
  device.check(cuda::short_conv_forward(a, device.stream));
}
template <typename T> void launch(const Cuda& device, const ShortConvBackward<T>& a) {
  device.check(cuda::short_conv_backward(a, device.stream));
}
#endif

constexpr std::array<const char*, 3> kNames{"x", "weight", "norm_weight"};

}  // namespace

template <typename Device>
std::tuple<Tensor, Tensor> short_conv(Tensor x, Tensor weight, OptionalTensor norm_weight, int64_t dilation, double eps,
                                      std::optional<std::string> activation, bool residual, OptionalTensor document_ids,
                                      OptionalTensor mask) {
  constexpr const char* op = "short_conv";
  if (!(eps >= 0)) fail(op, "eps", "at least 0", std::to_string(eps));
  const Device device(x);
  const ShortConv c(op, device, kNames, x, weight, norm_weight, dilation, activation, residual, document_ids, mask);
  x = as_contiguous(x);
  Tensor out = empty(x, sizes_of(x)), rstd = empty(x, leading(x, 1), accumulate_dtype(x));
  dispatch_float(x, [&]<typename T>() {
    using A = accumulate_t<T>;
    launch(device, ShortConvForward<T>{x.const_data_ptr<T>(), c.taps.const_data_ptr<A>(), out.mutable_data_ptr<T>(),
                                       rstd.mutable_data_ptr<A>(), static_cast<A>(eps), c.shape});
  });
  return {out, rstd};
}

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> short_conv_backward(Tensor grad_out, Tensor x, Tensor weight,
                                                       OptionalTensor norm_weight, Tensor rstd, int64_t dilation,
                                                       std::optional<std::string> activation, bool residual,
                                                       OptionalTensor document_ids, OptionalTensor mask) {
  constexpr const char* op = "short_conv_backward";
  const Device device(x);
  const ShortConv c(op, device, kNames, x, weight, norm_weight, dilation, activation, residual, document_ids, mask);
  require_device(op, "grad_out", grad_out, x);
  require(grad_out.scalar_type() == x.scalar_type(), op, "grad_out", "of the dtype of x", grad_out);
  require_sizes(op, "grad_out", grad_out, sizes_of(x), "[B, T, G, D]");
  require_device(op, "rstd", rstd, x);
  require(rstd.scalar_type() == accumulate_dtype(x), op, "rstd", "of the accumulation dtype", rstd);
  require_sizes(op, "rstd", rstd, leading(x, 1), "[B, T, G]");
  x = as_contiguous(x);
  grad_out = as_contiguous(grad_out);
  rstd = as_contiguous(rstd);
  Tensor grad_x = empty(x, sizes_of(x));
  ShortConvWeightGrads grads(c, conv_parts<Device>(c.shape));
  dispatch_float(x, [&]<typename T>() {
    using A = accumulate_t<T>;
    launch(device, ShortConvBackward<T>{grad_out.const_data_ptr<T>(), x.const_data_ptr<T>(), c.taps.const_data_ptr<A>(),
                                        rstd.const_data_ptr<A>(), grad_x.mutable_data_ptr<T>(),
                                        grads.partials.mutable_data_ptr<A>(), grads.parts, c.shape});
    grads.unfold<A>(device, c);
  });
  return {grad_x, cast(grads.weight, weight.scalar_type()), grads.finish_norm(norm_weight)};
}

}  // namespace engram

ENGRAM_REGISTER(short_conv)
ENGRAM_REGISTER(short_conv_backward)
