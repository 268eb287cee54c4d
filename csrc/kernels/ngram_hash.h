// Multi-head n-gram hash: row ids of every layer in one pass over the tokens.
//
//   c[t]    = token_map[token_ids[t]]                       (the id itself without a map)
//   w[t][s] = c[t - s] if position t - s is visible from t, else c_pad        s = 0 .. N-1
//   mix_1   = w[0] * m[0];   mix_n = mix_(n-1) ^ (w[n-1] * m[n-1])            int64, wraps modulo 2^64
//   rows[l][t][(n-2) * H + h] = offsets[l][..] + floormod(mix_n, moduli[l][..])   n = 2 .. N
//
// Visibility is latching: walking back from t, the first masked position, change of document id, blocked history
// entry (negative) or start of the sequence hides itself and everything older; a masked t sees nothing, not even
// itself. History belongs to the document of token_ids[:, 0].
#pragma once
#include "scalar.h"

namespace engram {

struct NgramHash {
  const int64_t* token_ids;     // [B, T]
  const int64_t* multipliers;   // [L, N]
  const int64_t* moduli;        // [L, C], every one >= 1
  const int64_t* offsets;       // [L, C]
  const int32_t* token_map;     // [V], null = no map: any int64 is hashed
  const int64_t* document_ids;  // [B, T], null = one document a row
  const bool* mask;             // [B, T], null = every position is a token
  const int64_t* history;       // [B, N-1], oldest first, null = none
  int64_t* rows;                // [L, B, T, C], every element written
  int64_t pad;  // CPU: c_pad, already sent through the map; CUDA: the raw pad_id (its map is on the device)
  int64_t batch, tokens, layers, orders, columns, vocab;  // B, T, L, N, C = (N-1) * H, V
};

// An id that a map does not hold counts as masked; where it stands is reported.
constexpr int64_t kNoBadId = -1;

namespace cpu {
// Hashes positions [begin, end) of the flattened [B * T]. Returns the first position whose id is outside the map.
int64_t ngram_hash(const NgramHash&, int64_t begin, int64_t end);
// The first entry of the flattened history that is outside the map; entries hidden by a negative one are not read.
int64_t ngram_hash_bad_history(const NgramHash&);
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
namespace cuda {
// bad: optional device counter (null = not wanted), set to 1 when an id is outside the map.
cudaError_t ngram_hash(const NgramHash&, int32_t* bad, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
