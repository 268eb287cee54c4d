// Row lookup in a table of int8 rows with one float scale a row:
//
//   out[slot, j] = values[row, j] * scales[row]      row = rows[slot] - row_begin
//
// rounded once to T. Skipped slots (masked, or another shard's) are zeros, as in embedding.h.
#pragma once
#include <cstring>
#include "row_plan.h"

namespace engram {

template <typename T, typename Index> struct EmbeddingInt8 {
  const int8_t* values;  // [R, width]
  const float* scales;   // [R]
  const Index* rows;     // [slots]
  const bool* mask;      // [slots / columns], null = none
  T* out;                // [slots, width], every element written
  int64_t slots, columns, table_rows, width;
  int64_t row_begin;  // first row held by this table
  bool shard;         // rows outside [row_begin, row_begin + R) belong to somebody else, instead of being an error
};

// scale = mantissa / 128 * power, for half outputs: value * scale has up to 31 bits, and rounding them to float on the
// way to a half type would be one rounding too many. So
//
//   product = value * mantissa           exact in 32 bits
//   odd     = product / 128, rounded to an odd number unless it is a whole one
//   out     = T(float(odd) * power)
//
// The last bit of odd remembers that there was more, far below what a half type keeps (odd has 17 bits or is a multiple
// of 2^-142), so the last line rounds as the exact product would be. Zero, inf and NaN: odd = value, power = scale.
struct Int8Scale {
  int32_t mantissa;  // below 2^24
  float power;       // with the sign of scale

  ENGRAM_HOST_DEVICE explicit Int8Scale(float scale) : mantissa(128), power(scale) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    const int32_t exponent = bits >> 23 & 0xff;
    if (exponent == 255 || scale == 0) return;
    mantissa = static_cast<int32_t>((bits & 0x7fffff) | (exponent ? 0x800000 : 0));
    const int32_t of_power = (exponent ? exponent : 1) - 150 + 7;  // 2^of_power is subnormal below -126
    bits = (bits & 0x80000000u) |
           (of_power < -126 ? uint32_t{1} << (of_power + 149) : static_cast<uint32_t>(of_power + 127) << 23);
    memcpy(&power, &bits, sizeof power);
  }
};

namespace cpu {
// Slots [begin, end); returns the first slot whose row is outside the table (and is no other shard's), or kNoBadRow.
template <typename T, typename Index>
int64_t embedding_int8(const EmbeddingInt8<T, Index>&, int64_t begin, int64_t end);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
// bad: optional device flag (null = not wanted), set to 1 when a row is outside the table; such a slot reads as zeros.
template <typename T, typename Index>
cudaError_t embedding_int8(const EmbeddingInt8<T, Index>&, int32_t* bad, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
