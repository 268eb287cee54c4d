#include "../decode.h"
#include "gate_conv.cuh"
#include "ngram_hash.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 128;                                                     // of the first launch
constexpr int kRows = 4;                                                          // of W that a warp has in hand
constexpr int kBlockRows = kThreads / kWarp * kRows;                              // of W that a block has in hand
constexpr int kMixThreads = 256;                                                  // of the second launch
constexpr int64_t kMaxSharedBytes = 48 * 1024;                                    // dynamic shared memory
template <typename K> constexpr int kChunk = 4096 / static_cast<int>(sizeof(K));  // elements of memory held at a time

// ---- First launch: what the tokens are, what they remember, key and value ----

// What a position s before token t is to the hash: its id, sent through the map, or false if it hides itself and
// everything older.
__device__ bool look_back(const DecodeStep& step, const NgramHash& hash, int64_t b, int64_t t, int64_t s, int64_t& id,
                          int32_t* bad_id) {
  const int64_t at = t - s;
  if (at >= 0) {
    if (!step.hashed(b, at) || (s > 0 && step.begins_run(b, at + 1))) return false;
    id = step.id(b, at);
  } else {
    const RingMarks& h = step.history;
    const int64_t end = h.position[b], slot = h.slot(b, end + at), last = h.slot(b, end - 1);
    if (end + at < 0 || !h.visible[slot] || h.runs[slot] != h.runs[last] + step.begins_run(b, 0)) return false;
    id = step.ids[slot];
  }
  const bool known = map_id(hash, id, id);
  if (!known) report(bad_id);
  return known;
}

// By one block: the marks of batch row b, and what the second launch reads of its ring.
template <bool kVector, typename K> __device__ void recall(const DecodeProducts<K>& a, int64_t b) {
  using A = accumulate_t<K>;
  constexpr int N = kLaneElements<K>;
  const RingMarks& ring = a.step.conv;
  const int64_t P = ring.reach, D = a.dim, S = a.branches * kGateStats + 1, lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) decode_token_marks(a.step, a.marks, b);
  for (int64_t i = threadIdx.x; i < P; i += kThreads) decode_past_marks(a.step, a.marks, b, i);
  __syncthreads();
  for (int64_t i = threadIdx.x / kWarp; i < P; i += kThreads / kWarp) {
    if (!a.marks.visible[b * (P + a.step.tokens) + i]) continue;
    const int64_t slot = ring.slot(b, ring.position[b] - P + i), to = b * P + i;
    const K* value = a.ring_value + slot * D;
    const A* stats = a.ring_stats + slot * S;
    for (int64_t d = lane * N; d < D; d += kWarp * N)
      store<kVector>(a.past_value + to * D + d, load<N, kVector>(value + d, D - d), D - d);
    for (int64_t k = lane; k < S; k += kWarp) a.past_stats[to * S + k] = stats[k];
  }
}

template <typename K> int64_t shared_bytes(const DecodeProducts<K>& a, int tokens) {
  const int64_t memory = tokens * int64_t{kChunk<K>} * static_cast<int64_t>(sizeof(K));
  return memory + tokens * (a.hash.columns + a.hash.orders) * static_cast<int64_t>(sizeof(int64_t)) +
         tokens * a.hash.orders;
}

// The first B blocks: a batch row each, see recall. Then a block for kTokens tokens and kBlockRows rows of W, a warp for
// kRows of those; blocks with the same rows of W lie side by side. Every block finds out for itself which rows of the
// table its tokens remember. The weights, which are nearly all there is to read, are asked for one step ahead, and the
// first of them before anything else. A sum is one lane's packs in order, then the lanes in the tree of warp_sum: no
// other token is in it.
template <typename K, int kTokens, bool kVector>
__global__ void __launch_bounds__(kThreads)
    decode_project_kernel(const DecodeProducts<K> a, int32_t* bad_id, int32_t* bad_row, const FastDivisor row_width) {
  using A = accumulate_t<K>;
  constexpr int N = kLaneElements<K>;
  ENGRAM_DYNAMIC_SHARED(K, memory);  // [kTokens, kChunk]
  const DecodeStep& step = a.step;
  const NgramHash& hash = a.hash;
  if (blockIdx.x < step.batch) {
    recall<kVector>(a, blockIdx.x);
    return;
  }
  const int C = static_cast<int>(hash.columns), orders = static_cast<int>(hash.orders);
  const int64_t E = a.width, D = a.dim, GD = a.branches * D;
  int64_t* rows = reinterpret_cast<int64_t*>(memory + kTokens * kChunk<K>);  // [kTokens, C]; -1 = zeros
  int64_t* window = rows + kTokens * C;                                      // [kTokens, N of the hash]
  bool* seen = reinterpret_cast<bool*>(window + kTokens * orders);           // likewise; what hides the rest is not
  const int64_t all = step.batch * step.tokens, tiles = (all + kTokens - 1) / kTokens, block = blockIdx.x - step.batch,
                first = block % tiles * kTokens;
  const int count = static_cast<int>(all - first < kTokens ? all - first : kTokens);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;

  const int64_t w_row = block / tiles * kBlockRows + thread / kWarp * kRows;
  const K* w[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = w_row + r < GD + D ? w_row + r : GD + D - 1;
    w[r] = row < GD ? a.key_proj + row * E : a.value_proj + (row - GD) * E;
  }
  Pack<K, N> next[kRows];
  const auto fetch = [&](int64_t e) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) next[r] = e < E ? load<N, kVector>(w[r] + e, E - e) : zero_pack<K, N>();
  };
  fetch(lane * N);

  const int64_t pad = mapped_pad(hash);
  for (int i = thread; i < count * orders; i += kThreads) {
    const int64_t token = first + i / orders;
    window[i] = pad;
    seen[i] = look_back(step, hash, token / step.tokens, token % step.tokens, i % orders, window[i], bad_id);
  }
  __syncthreads();
  for (int i = thread; i < count * C; i += kThreads) {
    const int n = i / C, c = i % C, order = c / (C / (orders - 1)) + 2;
    const int64_t token = first + n;
    const uint64_t modulus = static_cast<uint64_t>(__ldg(hash.moduli + c)),
                   inverse = modulus ? ~uint64_t{0} / modulus : 0;
    uint64_t mix = 0;
    bool hidden = false;
    for (int s = 0; s < order; ++s) {
      hidden = hidden || !seen[n * orders + s];
      mix ^= static_cast<uint64_t>(hidden ? pad : window[n * orders + s]) *
             static_cast<uint64_t>(__ldg(hash.multipliers + s));
    }
    int64_t row = -1;
    if (step.visible(token / step.tokens, token % step.tokens)) {
      row = __ldg(hash.offsets + c) + floor_mod(mix, modulus, inverse);
      if (row < 0 || row >= a.table_rows) {
        report(bad_row);
        row = -1;
      }
    }
    rows[i] = row;
  }

  A sums[kRows][kTokens] = {};
  for (int64_t chunk = 0; chunk < E; chunk += kChunk<K>) {
    const int length = static_cast<int>(E - chunk < kChunk<K> ? E - chunk : kChunk<K>), packs = (length + N - 1) / N;
    __syncthreads();  // the rows are known, or the chunk before is done with
    for (int i = thread; i < count * packs; i += kThreads) {
      const int n = i / packs, e = (i - n * packs) * N;
      Pack<K, N> pack = zero_pack<K, N>();
      if constexpr (kVector) {
        const uint32_t at = static_cast<uint32_t>(chunk + e), c = row_width.divide(at);
        const int64_t row = rows[n * C + c];
        if (row >= 0) pack = load<N, true>(a.table + row * a.row_width + (at - c * row_width.divisor), N);
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if (e + k >= length) continue;
          const uint32_t at = static_cast<uint32_t>(chunk + e + k), c = row_width.divide(at);
          const int64_t row = rows[n * C + c];
          if (row >= 0) pack.set(k, a.table[row * a.row_width + (at - c * row_width.divisor)]);
        }
      }
      *reinterpret_cast<Pack<K, N>*>(memory + n * kChunk<K> + e) = pack;
    }
    __syncthreads();
    for (int e = lane * N; e < length; e += kWarp * N) {
      Pack<K, N> now[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) now[r] = next[r];
      fetch(chunk + e + kWarp * N);
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        const Pack<K, N> x = *reinterpret_cast<const Pack<K, N>*>(memory + n * kChunk<K> + e);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int k = 0; k < N; ++k) sums[r][n] += now[r][k] * x[k];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = w_row + r;
    if (row >= GD + D) break;
    const K* bias = row < GD ? a.key_bias : a.value_bias;
    const int64_t column = row < GD ? row : row - GD, pitch = row < GD ? GD : D;
    K* out = (row < GD ? a.key : a.value) + first * pitch + column;
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const A sum = warp_sum(sums[r][n]);
      if (lane == 0 && n < count) out[n * pitch] = static_cast<K>(sum + (bias ? static_cast<A>(bias[column]) : A(0)));
    }
  }
}

template <int kTokens, typename K>
cudaError_t project(const DecodeProducts<K>& a, bool vector, int32_t* bad_id, int32_t* bad_row, cudaStream_t stream) {
  const int64_t tiles = divide_up(a.step.batch * a.step.tokens, kTokens);
  const int64_t blocks = a.step.batch + tiles * divide_up((a.branches + 1) * a.dim, kBlockRows);
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const size_t bytes = static_cast<size_t>(shared_bytes(a, kTokens));
  const FastDivisor row_width(static_cast<uint32_t>(a.row_width < 1 ? 1 : a.row_width));
  if (vector)
    ENGRAM_LAUNCH((decode_project_kernel<K, kTokens, true>), grid_for(blocks, 1), dim3(kThreads), bytes, stream, a,
                  bad_id, bad_row, row_width);
  else
    ENGRAM_LAUNCH((decode_project_kernel<K, kTokens, false>), grid_for(blocks, 1), dim3(kThreads), bytes, stream, a,
                  bad_id, bad_row, row_width);
  return ENGRAM_LAUNCH_ERROR();
}

// ---- Second launch: gate, convolution, state ----

template <int N, bool kVector, typename W>
__device__ __forceinline__ Pack<accumulate_t<W>, N> widened(const void* weight, int64_t at, int64_t available) {
  const auto from = load<N, kVector>(static_cast<const W*>(weight) + at, available);
  Pack<accumulate_t<W>, N> to;
#pragma unroll
  for (int i = 0; i < N; ++i) to.set(i, from[i]);
  return to;
}

// N neighbours of a weight, from element `at` on; ones where there is no weight.
template <typename A, int N, bool kVector>
__device__ __forceinline__ Pack<A, N> weights(const AnyFloat& w, int64_t at, int64_t available) {
  Pack<A, N> to;
  const auto from = [&](const auto& pack) {
#pragma unroll
    for (int i = 0; i < N; ++i) to.set(i, static_cast<A>(pack[i]));
  };
  if (!w.data) {
#pragma unroll
    for (int i = 0; i < N; ++i) to.set(i, A(1));
  } else if (w.type == FloatType::float64) {
    from(widened<N, kVector, double>(w.data, at, available));
  } else if (w.type == FloatType::float32) {
    from(widened<N, kVector, float>(w.data, at, available));
  } else if (w.type == FloatType::float16) {
    from(widened<N, kVector, Half>(w.data, at, available));
  } else {
    from(widened<N, kVector, BFloat16>(w.data, at, available));
  }
  return to;
}

// By one warp, in the order of gate_conv.cu; the result is in every lane.
template <bool kVector, int N, typename K>
__device__ __forceinline__ accumulate_t<K> mean_square(const K* value, int64_t D) {
  accumulate_t<K> sum = 0;
  for (int64_t d = static_cast<int64_t>(threadIdx.x % kWarp) * N; d < D; d += kWarp * N) {
    const auto v = load<N, kVector>(value + d, D - d);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += v[i] * v[i];
  }
  return warp_sum(sum) / accumulate_t<K>(D);
}

// Does a tap reach from t to `back` positions before? By one warp.
__device__ __forceinline__ bool reaches(const ShortConvShape& s, int64_t b, int64_t t, int64_t back) {
  if (!counts(s, b, t - back)) return false;
  const int64_t* run = s.document_ids + position_at(s, b, t);
  bool same = true;
  for (int64_t i = threadIdx.x % kWarp; i < back; i += kWarp) same = same && run[-i - 1] == run[-i];
  return __all_sync(kFullMask, same);
}

// A block a branch of a token. First two warps a tap find the stats of the position that it reads, from key and value
// where it is a token of this step; then each thread goes over its columns. The state is moved on by the blocks that
// have what goes into it, each its own part; nothing that is written here is read here.
template <typename H, typename K, bool kVector>
__global__ void __launch_bounds__(kMixThreads, 1) decode_mix_kernel(const Decode<H, K> a) {
  using A = accumulate_t<H>;
  constexpr int N = kLaneElements<H>;
  ENGRAM_DYNAMIC_SHARED(A, stats);  // [taps, 4]: those of the branch, then the mean square of the value
  const GateConvForward<H, K>& mix = a.mix;
  const ShortConvShape& s = mix.shape;
  const GateOptions<A>& o = mix.options;
  A* beta = stats + s.taps * (kGateStats + 1);  // [taps], or skipped
  const int64_t G = s.branches, D = s.dim, S = G * kGateStats + 1, branches = G < 1 ? 1 : G;
  const int64_t g = blockIdx.x % branches, token = blockIdx.x / branches, b = token / s.tokens, t = token % s.tokens;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const bool visible = counts(s, b, t);
  const int64_t row = (token * G + g) * D;

  for (int64_t task = thread / kWarp; task < 2 * s.taps; task += kMixThreads / kWarp) {
    const int64_t j = task / 2, at = t - (s.taps - 1 - j) * s.dilation;
    const bool used = visible && g < G && reaches(s, b, t, t - at);
    A* to = stats + j * (kGateStats + 1);
    if (task % 2 == 1) {
      A mean = 0;
      if (used)
        mean = at < 0 ? mix.past_stats[((b + 1) * s.past + at + 1) * S - 1]
                      : mean_square<kVector, N>(mix.value + (b * s.tokens + at) * D, D);
      if (lane == 0) to[kGateStats] = mean;
      if (lane == 0) beta[j] = used ? A(0) : A(-1);
    } else if (!used) {
      if (lane < kGateStats) to[lane] = 0;
    } else if (at < 0) {
      if (lane < kGateStats) to[lane] = mix.past_stats[((b + 1) * s.past + at) * S + g * kGateStats + lane];
    } else {
      const int64_t other = row + (at - t) * G * D;
      const auto weight = [&](int64_t d) {
        auto w = weights<A, N, kVector>(a.hidden_weight, g * D + d, D - d);
        const auto k = weights<A, N, kVector>(a.key_weight, g * D + d, D - d);
#pragma unroll
        for (int i = 0; i < N; ++i) w.set(i, w[i] * k[i]);
        return w;
      };
      const GateScores<A> r = gate_scores<kVector>(mix.hidden + other, mix.key + other,
                                                   a.hidden_weight.data || a.key_weight.data, weight, D, o);
      if (lane < kGateStats) to[lane] = lane == 0 ? r.s : lane == 1 ? r.rstd_h : r.rstd_k;
    }
  }
  __syncthreads();
  const A* own = stats + (s.taps - 1) * (kGateStats + 1);
  const A alpha = gate_alpha(own[0], o);
  for (int64_t j = thread; j < s.taps; j += kMixThreads) {
    // factors_of reads the stats of branch 0 of 1.
    if (!skipped(beta[j])) beta[j] = factors_of(stats + j * (kGateStats + 1), 0, 1, mix.conv_eps, s.norm, o).beta;
  }
  __syncthreads();

  const int64_t length = a.step.length(b), kept = first_kept(a.step.conv, length);
  const int64_t slot = t >= kept && t < length ? a.step.conv.slot(b, a.marks.begin[b] + t) : -1;
  for (int64_t d = thread * N; d < D; d += kMixThreads * N) {
    const int64_t available = D - d;
    const auto v = load<N, kVector>(mix.value + token * D + d, available);
    if (g == 0 && slot >= 0) store<kVector>(a.ring_value + slot * D + d, v, available);
    if (g >= G) continue;
    const auto passed_on = o.residual ? load<N, kVector>(mix.hidden + row + d, available) : zero_pack<H, N>();
    if (!visible) {
      store<kVector>(mix.out + row + d, passed_on, available);
      continue;
    }
    const auto norm = weights<A, N, kVector>(a.conv_norm_weight, g * D + d, available);
    A z[N] = {};
    const auto add = [&](int64_t j, const auto& tap_weight) {
      if (skipped(beta[j])) return;
      const int64_t back = (s.taps - 1 - j) * s.dilation;
      const auto tap =
          back == 0 ? v : load<N, kVector>(row_at(s, mix.value, mix.past_value, b, t - back, D) + d, available);
#pragma unroll
      for (int n = 0; n < N; ++n) z[n] += tap_weight(n) * norm[n] * (tap[n] * beta[j]);
    };
    if (s.taps == kTaps) {
      const auto taps = weights<A, N * kTaps, kVector>(a.conv_weight, (g * D + d) * kTaps, available * kTaps);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) add(j, [&](int n) { return taps[n * kTaps + j]; });
    } else {
      for (int64_t j = 0; j < s.taps; ++j)
        add(j,
            [&](int n) { return weights<A, 1, false>(a.conv_weight, (g * D + d + n) * s.taps + j, n < available)[0]; });
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      z[n] = alpha * v[n] + (s.silu ? z[n] * sigmoid(z[n]) : z[n]);  // to the bit as in gate_conv.cu
      if (o.residual) z[n] += passed_on[n];
    }
    store<kVector>(mix.out + row + d, narrow<H, N>(z), available);
  }

  if (slot >= 0) {
    A* to = a.ring_stats + slot * S;
    if (g < G && thread < kGateStats) to[g * kGateStats + thread] = own[thread];
    if (g == 0 && thread == kGateStats) to[S - 1] = own[kGateStats];
  }
  if (g == 0 && t == 0 && lane == 0 && thread < 2 * kWarp) {
    const int64_t T = s.tokens, begin = b * T;
    if (thread == 0) {
      const RingMarks& h = a.step.history;
      for (int64_t i = first_kept(h, length); i < length; ++i)
        a.step.ids[h.slot(b, h.position[b] + i)] = a.marks.ids[begin + i];
      append_marks(h, b, length, a.marks.runs + begin, a.marks.documents + begin, a.marks.hashed + begin);
    } else {
      const int64_t positions = b * (s.past + T) + s.past;
      append_marks(a.step.conv, b, length, a.marks.conv_runs + positions, a.marks.conv_documents + begin,
                   a.marks.visible + positions);
    }
  }
}

}  // namespace

template <typename K>
cudaError_t decode_project(const DecodeProducts<K>& a, int32_t* bad_id, int32_t* bad_row, cudaStream_t stream) {
  const int64_t tokens = a.step.batch * a.step.tokens, D = a.dim;
  if (tokens == 0) return cudaSuccess;
  if (a.width > 0x7fffffff || shared_bytes(a, 1) > kMaxSharedBytes) return cudaErrorInvalidValue;
  constexpr int N = kLaneElements<K>;
  const bool vector = a.row_width % N == 0 && D % N == 0 &&
                      aligned(16, 0, {a.table, a.key_proj, a.value_proj, a.ring_value, a.past_value});
  if (tokens > 4 && shared_bytes(a, 8) <= kMaxSharedBytes) return project<8>(a, vector, bad_id, bad_row, stream);
  if (tokens > 1 && shared_bytes(a, 4) <= kMaxSharedBytes) return project<4>(a, vector, bad_id, bad_row, stream);
  return project<1>(a, vector, bad_id, bad_row, stream);
}

template <typename H, typename K> cudaError_t decode_mix(const Decode<H, K>& a, cudaStream_t stream) {
  const GateConvForward<H, K>& mix = a.mix;
  const ShortConvShape& s = mix.shape;
  const int64_t blocks = s.batch * s.tokens * (s.branches < 1 ? 1 : s.branches);
  if (blocks == 0) return cudaSuccess;
  const int64_t bytes = s.taps * (kGateStats + 2) * static_cast<int64_t>(sizeof(accumulate_t<H>));
  if (blocks > 0x7fffffff || bytes > kMaxSharedBytes) return cudaErrorInvalidValue;
  const bool vector = s.dim % kLaneElements<H> == 0 &&
                      aligned(16, 0,
                              {mix.hidden, mix.key, mix.value, mix.past_value, mix.out, a.ring_value,
                               a.hidden_weight.data, a.key_weight.data, a.conv_weight.data, a.conv_norm_weight.data});
  if (vector)
    ENGRAM_LAUNCH((decode_mix_kernel<H, K, true>), grid_for(blocks, 1), dim3(kMixThreads), static_cast<size_t>(bytes),
                  stream, a);
  else
    ENGRAM_LAUNCH((decode_mix_kernel<H, K, false>), grid_for(blocks, 1), dim3(kMixThreads), static_cast<size_t>(bytes),
                  stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

#define INSTANTIATE(K) \
  template cudaError_t decode_project<K>(const DecodeProducts<K>&, int32_t*, int32_t*, cudaStream_t);
ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)
#undef INSTANTIATE
#define INSTANTIATE(H, K) template cudaError_t decode_mix<H, K>(const Decode<H, K>&, cudaStream_t);
ENGRAM_FOR_EACH_GATE_TYPES(INSTANTIATE)

}  // namespace engram::cuda
