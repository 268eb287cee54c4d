#include "../embedding.h"
#include "reduce.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256;

// ---- Forward ----

constexpr int kWordsInFlight = 4;  // independent loads of a thread before its first store

// The row of the table that a slot reads, or -1 for zeros. `columns` divides slots into tokens.
template <typename Args> __device__ __forceinline__ int64_t row_of(const Args& a, int64_t slot, int32_t* bad) {
  if (a.mask && !a.mask[slot / a.columns]) return -1;
  const int64_t row = static_cast<int64_t>(a.rows[slot]) - a.row_begin;
  if (row >= 0 && row < a.table_rows) return row;
  if (bad && !a.shard) atomicExch(bad, 1);
  return -1;
}

// A block copies `slots_per_block` rows. First one thread a slot finds where its row begins; then the rows are copied
// as one stream of words, so that writes are contiguous whatever the width of a row.
template <int WORD, typename Index>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(const EmbeddingForward<Index> a, int32_t* bad, int slots_per_block,
                             const FastDivisor words_per_row) {
  using Word = typename WordOf<WORD>::type;
  ENGRAM_SHARED(int64_t, source, [kThreads]);  // byte offset of a slot's row in the table, -1 = zeros
  const int64_t first = int64_t{blockIdx.x} * slots_per_block;
  const int count = static_cast<int>(a.slots - first < slots_per_block ? a.slots - first : slots_per_block);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count) {
    const int64_t row = row_of(a, first + thread, bad);
    source[thread] = row < 0 ? -1 : row * a.row_bytes;
  }
  __syncthreads();

  const int words = count * static_cast<int>(a.row_bytes / WORD);
  Word* out = reinterpret_cast<Word*>(a.out + first * a.row_bytes);
  for (int begin = thread; begin < words; begin += kThreads * kWordsInFlight) {
    Word value[kWordsInFlight];
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u) {
      const int i = begin + u * kThreads;
      value[u] = Word{};
      if (i < words) {
        const int slot = static_cast<int>(words_per_row.divide(static_cast<uint32_t>(i)));
        const int64_t offset = int64_t{i - slot * static_cast<int>(words_per_row.divisor)} * WORD;
        if (source[slot] >= 0) value[u] = __ldg(reinterpret_cast<const Word*>(a.table + source[slot] + offset));
      }
    }
#pragma unroll
    for (int u = 0; u < kWordsInFlight; ++u)
      if (begin + u * kThreads < words) out[begin + u * kThreads] = value[u];
  }
}

template <int WORD, typename Index>
cudaError_t forward(const EmbeddingForward<Index>& a, int32_t* bad, cudaStream_t stream) {
  const int64_t words = a.row_bytes / WORD;
  if (words > 1 << 30) return cudaErrorInvalidValue;
  const int64_t fit = kThreads * kWordsInFlight * 2 / (words < 1 ? 1 : words);
  const int slots_per_block = static_cast<int>(fit < 1 ? 1 : fit < kThreads ? fit : kThreads);
  ENGRAM_LAUNCH((embedding_forward_kernel<WORD, Index>), grid_for(a.slots, slots_per_block), dim3(kThreads), 0, stream,
                a, bad, slots_per_block, FastDivisor(static_cast<uint32_t>(words < 1 ? 1 : words)));
  return ENGRAM_LAUNCH_ERROR();
}

// ---- Backward ----

template <typename Index>
__global__ void __launch_bounds__(kThreads) embedding_keys_kernel(const EmbeddingKeys<Index> a) {
  for (int64_t slot = int64_t{blockIdx.x} * kThreads + threadIdx.x; slot < a.slots;
       slot += int64_t{gridDim.x} * kThreads) {
    const int64_t row = row_of(a, slot, nullptr);
    a.keys[slot] = (row < 0 ? a.table_rows : row) << a.slot_bits | slot;
  }
}

constexpr int kReduceThreads = 128;
constexpr int kRowsInFlight = 8;

template <typename T> __device__ __forceinline__ int64_t row_at(const EmbeddingBackward<T>& a, int64_t position) {
  return a.keys[position] >> a.slot_bits;
}

// Sums the runs of equal rows inside chunks of kEmbeddingChunk sorted slots. `lanes` neighbouring threads own a chunk,
// each of them N columns; block y takes the y-th group of columns. A run inside its chunk is finished here; one that
// came in from the chunk before goes to partials[chunk][0], one that goes on into the next to partials[chunk][1].
template <typename T, bool kVector>
__global__ void __launch_bounds__(kReduceThreads) embedding_chunks_kernel(const EmbeddingBackward<T> a, int lanes) {
  using A = accumulate_t<T>;
  constexpr int N = kLaneElements<T>;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t chunk = int64_t{blockIdx.x} * (kReduceThreads / lanes) + threadIdx.x / lanes;
  const int64_t begin = chunk * kEmbeddingChunk, column = (int64_t{blockIdx.y} * lanes + lane) * N;
  const int64_t available = a.dim - column;
  if (begin >= a.slots || available <= 0) return;
  const int64_t end = begin + kEmbeddingChunk < a.slots ? begin + kEmbeddingChunk : a.slots;
  const int64_t slot_mask = (int64_t{1} << a.slot_bits) - 1;

  int64_t row = row_at(a, begin);
  bool came_in = begin > 0 && row_at(a, begin - 1) == row;
  A sum[N] = {};
  const auto finish = [&](bool goes_on) {
    if (came_in || goes_on) {
      A* to = a.partials + (chunk * 2 + (came_in ? 0 : 1)) * a.dim + column;
      store<kVector>(to, narrow<A, N>(sum), available);
    } else {
      store<kVector>(a.grad_table + row * a.dim + column, narrow<T, N>(sum), available);
    }
  };

  for (int64_t at = begin; at < end; at += kRowsInFlight) {
    int64_t key[kRowsInFlight];
    Pack<T, N> grad[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u)
      key[u] = at + u < end ? __ldg(a.keys + at + u) : a.table_rows << a.slot_bits;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u)
      if (key[u] >> a.slot_bits < a.table_rows)
        grad[u] = load<N, kVector, Reuse::no>(a.grad_out + (key[u] & slot_mask) * a.dim + column, available);
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      if (at + u >= end) break;
      const int64_t next = key[u] >> a.slot_bits;
      if (next != row) {
        finish(false);
        row = next;
        came_in = false;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = 0;
      }
      if (row >= a.table_rows) return;  // skipped slots: nothing but them follows
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += grad[u][i];
    }
  }
  finish(end < a.slots && row_at(a, end) == row);
}

constexpr int kFoldWarps = kThreads / kWarp;

// Finishes the runs that cross from one chunk into the next: partials[first][1], then partials[k][0] of the chunks that
// follow, always in the same order. Warp w of a block looks after the run that begins in one chunk; runs over more than
// 32 further chunks are left to the whole block.
template <typename T>
__global__ void __launch_bounds__(kThreads) embedding_fold_kernel(const EmbeddingBackward<T> a, int64_t chunks) {
  using A = accumulate_t<T>;
  ENGRAM_SHARED(int64_t, long_run, [kFoldWarps]);  // number of further chunks, 0 = nothing left to do
  ENGRAM_SHARED(A, scratch, [kThreads]);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t block_first = int64_t{blockIdx.x} * kFoldWarps, first = block_first + warp;

  int64_t row = -1, following = 0;
  if (first + 1 < chunks) {
    const int64_t begin = first * kEmbeddingChunk, next = begin + kEmbeddingChunk;
    row = row_at(a, next - 1);
    const bool came_in = first > 0 && row_at(a, begin) == row && row_at(a, begin - 1) == row;
    if (row < a.table_rows && !came_in) {
      const auto continues = [&](int64_t chunk) { return chunk < chunks && row_at(a, chunk * kEmbeddingChunk) == row; };
      const unsigned votes = __ballot_sync(kFullMask, continues(first + 1 + lane));
      following = votes == kFullMask ? kWarp : __ffs(static_cast<int>(~votes)) - 1;
      if (following == kWarp) {
        int64_t low = first + kWarp, high = chunks;  // `low` continues the run, `high` does not
        while (high - low > 1) {
          const int64_t middle = low + (high - low) / 2;
          if (continues(middle)) low = middle;
          else high = middle;
        }
        following = low - first;
      }
    }
  }
  const A* start = a.partials + (first * 2 + 1) * a.dim;
  const bool is_long = following > kWarp;
  if (lane == 0) long_run[warp] = is_long ? following : 0;
  if (following > 0 && !is_long) {
    for (int64_t c = lane; c < a.dim; c += kWarp) {
      A sum = start[c];
#pragma unroll 4
      for (int64_t k = 1; k <= following; ++k) sum += a.partials[(first + k) * 2 * a.dim + c];
      a.grad_table[row * a.dim + c] = static_cast<T>(sum);
    }
  }
  __syncthreads();

  const int width = static_cast<int>(a.dim < kThreads ? a.dim : kThreads), parts = kThreads / width;
  const int part = static_cast<int>(threadIdx.x) / width;
  for (int w = 0; w < kFoldWarps; ++w) {
    const int64_t further = long_run[w], from = block_first + w;
    if (further == 0) continue;
    const int64_t to = row_at(a, (from + 1) * kEmbeddingChunk);
    for (int64_t base = 0; base < a.dim; base += width) {
      const int64_t c = base + static_cast<int>(threadIdx.x) % width;
      const bool mine = part < parts && c < a.dim;
      A sum = 0;
      if (mine) {
#pragma unroll 8
        for (int64_t k = 1 + part; k <= further; k += parts) sum += a.partials[(from + k) * 2 * a.dim + c];
      }
      scratch[threadIdx.x] = sum;
      __syncthreads();
      if (mine && part == 0) {
        A total = a.partials[(from * 2 + 1) * a.dim + c];
        for (int p = 0; p < parts; ++p) total += scratch[p * width + static_cast<int>(threadIdx.x)];
        a.grad_table[to * a.dim + c] = static_cast<T>(total);
      }
      // No barrier: a block has one long run at most, and where it needs a second round, each thread reads its own sum.
    }
  }
}

}  // namespace

template <typename Index>
cudaError_t embedding_forward(const EmbeddingForward<Index>& a, int32_t* bad, cudaStream_t stream) {
  if (a.slots == 0) return cudaSuccess;
  const auto fits = [&](int64_t word) { return aligned(word, a.row_bytes, {a.table, a.out}); };
  if (fits(16)) return forward<16>(a, bad, stream);
  if (fits(8)) return forward<8>(a, bad, stream);
  if (fits(4)) return forward<4>(a, bad, stream);
  return forward<2>(a, bad, stream);  // the narrowest dtype has two bytes
}

template <typename Index> cudaError_t embedding_keys(const EmbeddingKeys<Index>& a, cudaStream_t stream) {
  if (a.slots == 0) return cudaSuccess;
  ENGRAM_LAUNCH(embedding_keys_kernel<Index>, grid_for(a.slots, kThreads), dim3(kThreads), 0, stream, a);
  return ENGRAM_LAUNCH_ERROR();
}

template <typename T> cudaError_t embedding_backward(const EmbeddingBackward<T>& a, cudaStream_t stream) {
  if (a.slots == 0 || a.dim == 0) return cudaSuccess;
  constexpr int N = kLaneElements<T>;
  const int64_t packs = divide_up(a.dim, N), chunks = divide_up(a.slots, kEmbeddingChunk);
  int lanes = 1;
  while (lanes < packs && lanes < kWarp) lanes *= 2;
  dim3 grid = grid_for(chunks, kReduceThreads / lanes);
  if (divide_up(packs, lanes) > 65535) return cudaErrorInvalidValue;
  grid.y = static_cast<unsigned>(divide_up(packs, lanes));
  const bool vector = aligned(16, a.dim * static_cast<int64_t>(sizeof(T)), {a.grad_out, a.grad_table, a.partials});
  if (vector) ENGRAM_LAUNCH((embedding_chunks_kernel<T, true>), grid, dim3(kReduceThreads), 0, stream, a, lanes);
  else ENGRAM_LAUNCH((embedding_chunks_kernel<T, false>), grid, dim3(kReduceThreads), 0, stream, a, lanes);
  if (chunks > 1)
    ENGRAM_LAUNCH(embedding_fold_kernel<T>, grid_for(chunks, kFoldWarps), dim3(kThreads), 0, stream, a, chunks);
  return ENGRAM_LAUNCH_ERROR();
}

#define INSTANTIATE(Index)                                                                               \
  template cudaError_t embedding_forward<Index>(const EmbeddingForward<Index>&, int32_t*, cudaStream_t); \
  template cudaError_t embedding_keys<Index>(const EmbeddingKeys<Index>&, cudaStream_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE
#define INSTANTIATE(T) template cudaError_t embedding_backward<T>(const EmbeddingBackward<T>&, cudaStream_t);
    ENGRAM_FOR_EACH_FLOAT(INSTANTIATE)

}  // namespace engram::cuda
