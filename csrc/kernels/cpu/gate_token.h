// The gate of one token and branch, forward and backward: shared by gate and gate_conv.
// Included once per instruction set by the kernel bodies (no include guard; see foreach_isa.h), after vec.h.
namespace engram::cpu::ENGRAM_ISA {

// sigmoid(signed square root of s)
template <typename A> ENGRAM_INLINE A gate_alpha(A s, const GateOptions<A>& o) {
  const A magnitude = std::sqrt(std::abs(s) < o.clamp ? o.clamp : std::abs(s));  // a NaN score stays NaN
  const A u = s == 0 && !o.copysign ? A(0) : std::copysign(magnitude, s);
  return sigmoid_scalar(u);
}

// stats = s, rstd_h, rstd_k
template <typename H, typename K>
ENGRAM_INLINE void gate_scores(const H* hidden, const K* key, const accumulate_t<H>* weight, int64_t D,
                               const GateOptions<accumulate_t<H>>& o, accumulate_t<H>* stats) {
  using A = accumulate_t<H>;
  vec<A> hh{}, kk{}, hk{};
  for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
    __builtin_prefetch(hidden + D + d);  // the next row: most often a page of its own
    __builtin_prefetch(key + D + d);
    const vec<A> h = lanes.get(hidden + d), k = lanes.get(key + d);
    hh += h * h;
    kk += k * k;
    hk += weight ? h * k * lanes.get(weight + d) : h * k;
  });
  stats[1] = o.norm_hidden ? A(1) / std::sqrt(sum<A>(hh) / A(D) + o.eps) : A(1);
  stats[2] = o.norm_key ? A(1) / std::sqrt(sum<A>(kk) / A(D) + o.eps) : A(1);
  stats[0] = sum<A>(hk) * stats[1] * stats[2] / std::sqrt(A(D));
}

// From the gradient of alpha to those of hidden and key, and (part not null) to R.
template <typename H, typename K>
ENGRAM_INLINE void gate_grads(accumulate_t<H> grad_alpha, const accumulate_t<H>* stats, const H* grad_out,
                              const H* hidden, const K* key, const accumulate_t<H>* weight, int64_t D,
                              const GateOptions<accumulate_t<H>>& o, H* grad_hidden, K* grad_key, accumulate_t<H>* part,
                              bool streaming = false) {
  using A = accumulate_t<H>;
  const A s = stats[0], rstd_h = stats[1], rstd_k = stats[2], alpha = gate_alpha(s, o);
  const A slope = std::abs(s) < o.clamp ? A(0) : A(0.5) / std::sqrt(std::abs(s));
  const A ds = slope == 0 ? A(0) : grad_alpha * alpha * (A(1) - alpha) * slope;
  const A c = ds * rstd_h * rstd_k / std::sqrt(A(D));
  const A pull_h = o.norm_hidden ? ds * s * rstd_h * rstd_h / A(D) : A(0);
  const A pull_k = o.norm_key ? ds * s * rstd_k * rstd_k / A(D) : A(0);
  const bool residual = o.residual;
  for_each_vec<A>(0, D, [&](auto lanes, int64_t d) ENGRAM_INLINE_LAMBDA {
    __builtin_prefetch(hidden + D + d);
    __builtin_prefetch(key + D + d);
    const vec<A> h = lanes.get(hidden + d), k = lanes.get(key + d);
    const vec<A> cw = weight ? c * lanes.get(weight + d) : broadcast(c);
    vec<A> dh = cw * k - pull_h * h;
    if (residual) dh += lanes.get(grad_out + d);
    lanes.put(grad_hidden + d, dh, streaming);
    lanes.put(grad_key + d, cw * h - pull_k * k, streaming);
    if (part) lanes.put(part + d, lanes.get(part + d) + c * h * k);
  });
}

}  // namespace engram::cpu::ENGRAM_ISA
