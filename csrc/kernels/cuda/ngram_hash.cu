#include "ngram_hash.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;                      // positions of a block
constexpr int64_t kMaxWindowBytes = 48 * 1024;  // dynamic shared memory

// window[s * tile + i] = w[t][s] of the block's position i.
__device__ void fill_window(const NgramHash& a, int64_t position, int64_t pad, int i, int tile, int64_t* window,
                            int32_t* bad) {
  const int64_t b = position / a.tokens, t = position - b * a.tokens, past = a.orders - 1;
  bool blocked = false;
  for (int64_t s = 0; s < a.orders; ++s) {
    int64_t value = pad;
    if (!blocked) {
      if (s <= t) {
        const int64_t at = position - s;
        blocked = (a.mask && !a.mask[at]) || (s > 0 && a.document_ids && a.document_ids[at] != a.document_ids[at + 1]);
        if (!blocked && !map_id(a, a.token_ids[at], value)) {
          blocked = true;
          report(bad);
        }
      } else {
        const int64_t id = a.history ? a.history[b * past + past + t - s] : -1;
        blocked = id < 0 || !map_id(a, id, value);
      }
      if (blocked) value = pad;
    }
    window[s * tile + i] = value;
  }
  if (bad && t == 0 && a.history) {  // all of the history, also where a masked token hides it
    int64_t unused;
    for (int64_t s = past - 1; s >= 0 && a.history[b * past + s] >= 0; --s)
      if (!map_id(a, a.history[b * past + s], unused)) report(bad);
  }
}

// Block (x, l): tile x of the flattened positions, layer l. First one thread a position walks back and leaves its
// window in shared memory; then one thread a column, and threads side by side write neighbouring columns. The inverse
// of a modulus is computed once a thread and column.
__global__ void __launch_bounds__(kThreads) ngram_hash_kernel(const NgramHash a, int32_t* bad, int tile) {
  ENGRAM_DYNAMIC_SHARED(int64_t, window);  // [N, tile]
  const int64_t positions = a.batch * a.tokens, first = int64_t{blockIdx.x} * tile;
  const int count = static_cast<int>(positions - first < tile ? positions - first : tile);
  const int64_t pad = mapped_pad(a);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
    fill_window(a, first + i, pad, i, tile, window, bad);
  __syncthreads();

  const int64_t C = a.columns, heads = C / (a.orders - 1);
  const int width = static_cast<int>(C < kThreads ? C : kThreads);  // columns side by side
  const int at_once = kThreads / width;                             // positions side by side
  const int step = static_cast<int>(threadIdx.x) / width;
  if (step >= at_once) return;
  for (int64_t l = blockIdx.y; l < a.layers; l += gridDim.y) {
    const int64_t* multipliers = a.multipliers + l * a.orders;
    for (int64_t c = static_cast<int>(threadIdx.x) % width; c < C; c += width) {
      const uint64_t modulus = static_cast<uint64_t>(__ldg(a.moduli + l * C + c)),
                     inverse = modulus ? ~uint64_t{0} / modulus : 0;
      const int64_t offset = __ldg(a.offsets + l * C + c), order = c / heads + 2;
      int64_t* out = a.rows + (l * positions + first) * C + c;
      for (int i = step; i < count; i += at_once) {
        uint64_t mix = 0;
        for (int64_t s = 0; s < order; ++s)
          mix ^= static_cast<uint64_t>(window[s * tile + i]) * static_cast<uint64_t>(__ldg(multipliers + s));
        out[i * C] = offset + floor_mod(mix, modulus, inverse);
      }
    }
  }
}

}  // namespace

cudaError_t ngram_hash(const NgramHash& a, int32_t* bad, cudaStream_t stream) {
  const int64_t positions = a.batch * a.tokens;
  if (positions == 0 || a.layers == 0 || a.columns == 0) return cudaSuccess;
  const int64_t bytes = a.orders * static_cast<int64_t>(sizeof(int64_t));
  if (bytes > kMaxWindowBytes) return cudaErrorInvalidValue;
  const int64_t tile = kMaxWindowBytes / bytes < kTile ? kMaxWindowBytes / bytes : kTile;
  dim3 grid = grid_for(positions, tile);
  grid.y = static_cast<unsigned>(a.layers < 65535 ? a.layers : 65535);
  ENGRAM_LAUNCH(ngram_hash_kernel, grid, dim3(kThreads), static_cast<size_t>(tile * bytes), stream, a, bad,
                static_cast<int>(tile));
  return ENGRAM_LAUNCH_ERROR();
}

}  // namespace engram::cuda
