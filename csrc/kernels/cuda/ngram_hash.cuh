// Arithmetic and map of the hash, shared by ngram_hash and decode.
#pragma once
#include "../ngram_hash.h"
#include "launch.cuh"

namespace engram::cuda {

// x mod p for 0 <= x < 2^63 with inverse = floor((2^64 - 1) / p): the estimated quotient is at most one too small.
// A modulus of 0 breaks the contract, but must not stop the device; it reads as no modulus.
__device__ __forceinline__ uint64_t remainder_of(uint64_t x, uint64_t p, uint64_t inverse) {
  const uint64_t r = x - __umul64hi(x, inverse) * p;
  return r >= p ? r - p : r;
}

// floormod of a two's complement number: for a negative m, ~m = -m - 1 counts down from p - 1.
__device__ __forceinline__ int64_t floor_mod(uint64_t m, uint64_t p, uint64_t inverse) {
  const bool negative = m >> 63;
  const uint64_t r = remainder_of(negative ? ~m : m, p, inverse);
  return static_cast<int64_t>(negative ? p - 1 - r : r);
}

// The id as the hash sees it, or false when the map does not hold it.
__device__ __forceinline__ bool map_id(const NgramHash& a, int64_t id, int64_t& mapped) {
  if (!a.token_map) {
    mapped = id;
    return true;
  }
  if (id < 0 || id >= a.vocab) return false;
  mapped = __ldg(a.token_map + id);
  return true;
}

__device__ __forceinline__ void report(int32_t* bad) {
  if (bad) atomicExch(bad, 1);
}

__device__ __forceinline__ int64_t mapped_pad(const NgramHash& a) {
  int64_t pad = 0;
  return map_id(a, a.pad, pad) ? pad : 0;
}

}  // namespace engram::cuda
