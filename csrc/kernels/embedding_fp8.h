// Row lookup in a table of float8 rows with one scale, a power of two, for every 32 neighbouring values:
//
//   out[slot, j] = e4m3(values[row, j]) * 2^(scales[row, j / 32] - 127)      row = rows[slot] - row_begin
//
// rounded once to T. Skipped slots (masked, or another shard's) are zeros, as in embedding.h. e4m3 is sign, 4 bits of
// exponent, 3 of mantissa without infinities: 0x7f and 0xff are NaN, 448 is the largest number. Of the scales 0 is
// 2^-127 and 255 is NaN. A product has four significant bits: float holds it, subnormal or not, or it is past float.
#pragma once
#include <cstring>
#include "row_plan.h"

namespace engram {

constexpr int64_t kFp8Block = 32;  // values that share a scale

template <typename T, typename Index> struct EmbeddingFp8 {
  const uint8_t* values;  // [R, width]
  const uint8_t* scales;  // [R, blocks], blocks = width / 32 rounded up
  const Index* rows;      // [slots]
  const bool* mask;       // [slots / columns], null = none
  T* out;                 // [slots, width], every element written
  int64_t slots, columns, table_rows, width, blocks;
  int64_t row_begin;  // first row held by this table
  bool shard;         // rows outside [row_begin, row_begin + R) belong to somebody else, instead of being an error
};

ENGRAM_HOST_DEVICE inline float e8m0(uint8_t scale) {
  const uint32_t bits = scale == 0 ? 0x00400000u : scale == 255 ? 0x7fc00000u : uint32_t{scale} << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

namespace cpu {
// Slots [begin, end); returns the first slot whose row is outside the table (and is no other shard's), or kNoBadRow.
template <typename T, typename Index> int64_t embedding_fp8(const EmbeddingFp8<T, Index>&, int64_t begin, int64_t end);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
// bad: optional device flag (null = not wanted), set to 1 when a row is outside the table; such a slot reads as zeros.
template <typename T, typename Index>
cudaError_t embedding_fp8(const EmbeddingFp8<T, Index>&, int32_t* bad, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
