#include "../embedding.h"
#include "lookup.cuh"

namespace engram::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWordsInFlight = 4;  // independent loads of a thread before its first store

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

#define INSTANTIATE(Index) \
  template cudaError_t embedding_forward<Index>(const EmbeddingForward<Index>&, int32_t*, cudaStream_t);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)

}  // namespace engram::cuda
