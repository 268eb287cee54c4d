// One optimizer step on the rows of a table that a batch touches, state and row in one pass:
//
//   g          = sum of the row's slots along the plan (or row r of a dense gradient), negated to maximize
//   w          = table row * (1 - lr * weight_decay)
//   sgd        m = beta1 * m + g, or m = g without `first`;                  w -= lr * m
//   adagrad    s += mean(g^2), one s a row;                                  w -= lr * g / (sqrt(s) + eps)
//   adam       m = beta1 * m + (1 - beta1) * g, or m = g without `first`
//              v = beta2 * v + (1 - beta2) * g^2, or * mean(g^2) with one v a row
//              w -= lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)       no 1 - beta1^step without m
//
// State and arithmetic are in the accumulation type; w is rounded once, to nearest or, for bfloat16, stochastically.
// Rows that nothing touches keep row and state: moments do not decay there.
#pragma once
#include "row_plan.h"

namespace engram {

enum class RowRule { sgd, adagrad, adam };

template <typename T> struct RowUpdate {
  T* table;                   // [R, d]
  accumulate_t<T>* first;     // [R, d], null = the rule works without it
  accumulate_t<T>* second;    // [R, d], or [R] with second_per_row; null for sgd
  const T* grad;              // [slots, d]; without a plan [R, d]
  RowPlan plan;               // keys null: every row, with row r of grad
  const int64_t* step;        // [1], counted from 1; where the table is
  accumulate_t<T>* partials;  // CUDA with a plan: [ceil(slots / kRowSumChunk), 2, d]; else null
  int64_t table_rows, dim;
  RowRule rule;
  bool second_per_row, maximize, stochastic;
  double lr, beta1, beta2, eps, weight_decay;
  uint64_t seed;
};

// The random 16 bits that are added to a float32 before it is cut off to bfloat16: a hash of seed, step, row and
// column, the same on every device. U: uint32_t, or a vector of it.
ENGRAM_HOST_DEVICE inline uint64_t mix_bits(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
ENGRAM_HOST_DEVICE inline uint64_t rounding_key(uint64_t seed, int64_t step, int64_t row) {
  const uint64_t run = mix_bits(seed + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(step));
  return mix_bits(run + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(row + 1));
}
template <typename U> ENGRAM_HOST_DEVICE inline U rounding_bits(uint64_t key, U column) {
  U x = column * 0x9e3779b9u + static_cast<uint32_t>(key);
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu + static_cast<uint32_t>(key >> 32);
  x = (x ^ x >> 16) * 0x7feb352du;
  return x >> 16;
}

namespace cpu {
// The runs that begin in positions [begin, end) of the plan; without a plan, rows [begin, end).
template <typename T> void row_update(const RowUpdate<T>&, int64_t begin, int64_t end);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
template <typename T> cudaError_t row_update(const RowUpdate<T>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
