// One step of decoding: ngram_hash, embedding, both projections and gate_conv for a few tokens of every sequence, and the
// state moved on by them.
//
//   marks       which run of a document each token belongs to, and what it may see of the state (decode_marks below)
//   rows        as in ngram_hash.h; history and runs from the marks
//   memory      [E] = the rows of `table` one after another, zeros at masked tokens
//   key, value  = memory W^T + bias, summed in the accumulation type, rounded once
//   out         as in gate_conv.h; the positions before the first token come from the ring of the convolution
//   state       the first lengths[b] tokens of row b are appended to both rings (append_marks below)
#pragma once
#include "gate_conv.h"
#include "ngram_hash.h"

namespace engram {

// A Ring of engram/ops/_state.py; of batch row b, position p lies in slot b * slots + p % slots.
struct RingMarks {
  int64_t *position, *room;   // [B]: tokens appended, and how many of them can be taken back
  bool* visible;              // [B, slots]
  int64_t *runs, *documents;  // [B, slots]
  int64_t slots, reach, max_rollback;

  ENGRAM_HOST_DEVICE int64_t slot(int64_t b, int64_t p) const { return b * slots + (p % slots + slots) % slots; }
};

struct DecodeStep {
  const int64_t* token_ids;     // [B, T]
  const int64_t* document_ids;  // [B, T], null = the tokens go on with the document before them
  const bool* mask;             // [B, T], null = every position is a token
  const int64_t* lengths;       // [B], null = T
  RingMarks history, conv;      // reach N - 1 and P = (K - 1) * dilation
  int64_t* ids;                 // [B, slots] of history
  int64_t batch, tokens, dilation, pad_id, eos_id;
  bool ends;              // an eos_id that the hash sees ends its document
  bool mask_blocks_hash;  // the mask hides tokens from the hash, too
  bool conv_reset;        // taps stay within a document

  ENGRAM_HOST_DEVICE int64_t length(int64_t b) const {
    if (!lengths) return tokens;
    return lengths[b] < 0 ? 0 : lengths[b] < tokens ? lengths[b] : tokens;
  }
  ENGRAM_HOST_DEVICE bool visible(int64_t b, int64_t t) const {
    return t < length(b) && (!mask || mask[b * tokens + t]);
  }
  ENGRAM_HOST_DEVICE bool hashed(int64_t b, int64_t t) const { return !mask_blocks_hash || visible(b, t); }
  // As the hash and its history see it; what may not be read is pad_id.
  ENGRAM_HOST_DEVICE int64_t id(int64_t b, int64_t t) const {
    return t < length(b) && hashed(b, t) ? token_ids[b * tokens + t] : pad_id;
  }
  // Does a run of the history begin with token t?
  ENGRAM_HOST_DEVICE bool begins_run(int64_t b, int64_t t) const {
    const int64_t *document = document_ids ? document_ids + b * tokens + t : nullptr, end = history.position[b];
    if (t > 0) return (ends && hashed(b, t - 1) && id(b, t - 1) == eos_id) || (document && document[0] != document[-1]);
    if (end == 0) return false;
    const int64_t last = history.slot(b, end - 1);
    return (ends && history.visible[last] && ids[last] == eos_id) || (document && *document != history.documents[last]);
  }
};

// What the tokens are to the kernels, every element written.
struct DecodeMarks {
  int64_t *ids, *runs, *documents;  // [B, T]
  int64_t* history;                 // CPU: [B, N - 1]; -1 = none
  bool* hashed;                     // [B, T]: the mask of the hash
  int64_t* conv_runs;               // [B, P + T]
  int64_t* conv_documents;          // [B, T]
  bool* visible;   // [B, P + T]: the mask of the convolution, False also where no tap of the step reads
  int64_t* begin;  // [B]: position of the convolution before the step
};

ENGRAM_HOST_DEVICE inline void decode_token_marks(const DecodeStep& s, const DecodeMarks& m, int64_t b) {
  const int64_t T = s.tokens, P = s.conv.reach;
  const RingMarks &h = s.history, &c = s.conv;
  const int64_t end = h.position[b], last = h.slot(b, end - 1);
  const int64_t conv_end = c.position[b], conv_last = c.slot(b, conv_end - 1);
  const bool marked = s.conv_reset && (s.document_ids || s.ends);
  int64_t run = h.runs[last], document = h.documents[last], conv_run = c.runs[conv_last],
          conv_document = c.documents[conv_last];
  m.begin[b] = conv_end;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t i = b * T + t, at = b * (P + T) + P + t;
    m.visible[at] = s.visible(b, t);
    m.hashed[i] = s.hashed(b, t);
    m.ids[i] = s.id(b, t);
    if (s.document_ids) document = s.document_ids[i];
    m.documents[i] = document;
    m.runs[i] = run += s.begins_run(b, t);
    const int64_t before = conv_document;
    if (marked) conv_document = run;
    m.conv_documents[i] = conv_document;
    m.conv_runs[at] = conv_run += conv_document != before && conv_end + t > 0;
  }
}

// Of the i-th of the P positions that taps reach before the first token; P is a multiple of the dilation.
ENGRAM_HOST_DEVICE inline void decode_past_marks(const DecodeStep& s, const DecodeMarks& m, int64_t b, int64_t i) {
  const RingMarks& c = s.conv;
  const int64_t p = c.position[b] - c.reach + i, slot = c.slot(b, p), at = b * (c.reach + s.tokens) + i;
  m.conv_runs[at] = c.runs[slot];
  m.visible[at] = p >= 0 && c.visible[slot] && i % s.dilation < s.tokens;
}

// The first of the appended tokens that the ring still holds afterwards.
ENGRAM_HOST_DEVICE inline int64_t first_kept(const RingMarks& r, int64_t length) {
  return length > r.slots ? length - r.slots : 0;
}

// Appends all but the payload, which goes to the same slots first: the last thing of a step, it moves the position.
ENGRAM_HOST_DEVICE inline void append_marks(const RingMarks& r, int64_t b, int64_t length, const int64_t* runs,
                                            const int64_t* documents, const bool* visible) {
  for (int64_t t = first_kept(r, length); t < length; ++t) {
    const int64_t slot = r.slot(b, r.position[b] + t);
    r.runs[slot] = runs[t];
    r.documents[slot] = documents[t];
    r.visible[slot] = visible[t];
  }
  r.position[b] += length;
  const int64_t room = r.room[b] + length;
  r.room[b] = room < r.max_rollback ? room : r.max_rollback;
}

// A weight of any float dtype as it lies in memory.
enum class FloatType { float64, float32, float16, bfloat16 };
struct AnyFloat {
  const void* data;  // null = ones
  FloatType type;
};

template <typename K> struct DecodeProducts {
  using A = accumulate_t<K>;
  DecodeStep step;
  DecodeMarks marks;
  NgramHash hash;                        // of one layer; CPU: over the marks
  const K* table;                        // [R, d]
  const K *key_proj, *key_bias;          // [G * D, E], [G * D] or null
  const K *value_proj, *value_bias;      // [D, E], [D] or null
  int64_t table_rows, row_width, width;  // R, d, E = C * d
  int64_t branches, dim;                 // G, D
  K* ring_value;                         // [B, slots, D] of the convolution
  A* ring_stats;                         // [B, slots, 3 G + 1]
  // Written on the way:
  A* memory;       // CPU: [B, T, E]
  K *key, *value;  // [B, T, G, D], [B, T, D]
  K* past_value;   // [B, P, D], only the visible positions
  A* past_stats;   // [B, P, 3 G + 1], likewise
};

template <typename H, typename K> struct Decode : DecodeProducts<K> {
  AnyFloat hidden_weight, key_weight;      // [G, D]
  AnyFloat conv_weight, conv_norm_weight;  // [G, D, K], [G, D]
  accumulate_t<H>*weight, *taps;           // CPU: mix.weight and mix.taps, written on the way
  GateConvForward<H, K> mix;               // over key, value and past; CUDA: without weight, taps and stats
};

namespace cpu {
void decode_marks(const DecodeStep&, const DecodeMarks&, int64_t begin, int64_t end);  // batch rows
// memory of the tokens [begin, end). Returns the first of the flattened rows [B * T * C] that is outside the table.
template <typename K> int64_t decode_memory(const DecodeProducts<K>&, int64_t begin, int64_t end);
// key and value of the groups [begin, end) of kDecodeRows rows of W; those of key_proj come first, then value_proj's.
constexpr int64_t kDecodeRows = 4;
inline int64_t decode_groups(int64_t rows) { return (rows + kDecodeRows - 1) / kDecodeRows; }
template <typename K> void decode_project(const DecodeProducts<K>&, int64_t begin, int64_t end);
template <typename K> void decode_past(const DecodeProducts<K>&, int64_t begin, int64_t end);  // batch rows
template <typename H, typename K>
void decode_weights(const Decode<H, K>&, int64_t begin, int64_t end);  // columns of [G * D]
template <typename H, typename K> void decode_append(const Decode<H, K>&, int64_t begin, int64_t end);  // batch rows
}  // namespace cpu

#if defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)
// One launch each. The first writes all but out and the state, of which the second reads nothing.
namespace cuda {
// bad_id, bad_row: optional device flags (null = not wanted), set to 1 when an id is outside the map or a row outside
// the table.
template <typename K>
cudaError_t decode_project(const DecodeProducts<K>&, int32_t* bad_id, int32_t* bad_row, cudaStream_t);
template <typename H, typename K> cudaError_t decode_mix(const Decode<H, K>&, cudaStream_t);
}  // namespace cuda
#endif

}  // namespace engram
