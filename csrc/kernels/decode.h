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
};

// What the tokens are to the kernels, every element written.
struct DecodeMarks {
  int64_t *ids, *runs, *documents;  // [B, T]; ids that may not be read are pad_id
  int64_t* history;                 // [B, N - 1]; -1 = none
  bool* hashed;                     // [B, T]: the mask of the hash
  int64_t* conv_runs;               // [B, P + T]
  int64_t* conv_documents;          // [B, T]
  bool* visible;  // [B, P + T]: the mask of the convolution, False also where no tap of the step reads
};

ENGRAM_HOST_DEVICE inline void decode_marks(const DecodeStep& s, const DecodeMarks& m, int64_t b) {
  const int64_t T = s.tokens, P = s.conv.reach, length = s.length(b);
  if (T == 0) return;
  int64_t *ids = m.ids + b * T, *runs = m.runs + b * T, *documents = m.documents + b * T;
  bool *hashed = m.hashed + b * T, *visible = m.visible + b * (P + T);

  const RingMarks& h = s.history;
  const int64_t end = h.position[b], last = h.slot(b, end - 1);
  int64_t run = h.runs[last], document = h.documents[last];
  bool starts = s.ends && end > 0 && h.visible[last] && s.ids[last] == s.eos_id;
  for (int64_t t = 0; t < T; ++t) {
    visible[P + t] = t < length && (!s.mask || s.mask[b * T + t]);
    hashed[t] = visible[P + t] || !s.mask_blocks_hash;
    ids[t] = t < length && hashed[t] ? s.token_ids[b * T + t] : s.pad_id;
    documents[t] = s.document_ids ? s.document_ids[b * T + t] : document;
    if (starts || (documents[t] != document && end + t > 0)) ++run;
    runs[t] = run;
    document = documents[t];
    starts = s.ends && hashed[t] && ids[t] == s.eos_id;
  }
  for (int64_t i = 0; i < h.reach; ++i) {
    const int64_t p = end - h.reach + i, slot = h.slot(b, p);
    m.history[b * h.reach + i] = p >= 0 && h.visible[slot] && h.runs[slot] == runs[0] ? s.ids[slot] : -1;
  }

  const RingMarks& c = s.conv;
  const bool marked = s.conv_reset && (s.document_ids || s.ends);
  const int64_t conv_end = c.position[b], conv_last = c.slot(b, conv_end - 1);
  int64_t *conv_runs = m.conv_runs + b * (P + T), *conv_documents = m.conv_documents + b * T;
  run = c.runs[conv_last];
  document = c.documents[conv_last];
  for (int64_t t = 0; t < T; ++t) {
    conv_documents[t] = marked ? runs[t] : document;
    if (conv_documents[t] != document && conv_end + t > 0) ++run;
    conv_runs[P + t] = run;
    document = conv_documents[t];
  }
  for (int64_t i = 0; i < P; ++i) {
    const int64_t p = conv_end - P + i, slot = c.slot(b, p);
    conv_runs[i] = c.runs[slot];
    visible[i] = p >= 0 && c.visible[slot] && i % s.dilation < T;  // P is a multiple of the dilation
  }
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

template <typename H, typename K> struct Decode {
  using A = accumulate_t<H>;
  DecodeStep step;
  DecodeMarks marks;
  NgramHash hash;                        // of one layer, over the marks
  const K* table;                        // [R, d]
  const K *key_proj, *key_bias;          // [G * D, E], [G * D] or null
  const K *value_proj, *value_bias;      // [D, E], [D] or null
  int64_t table_rows, row_width, width;  // R, d, E = C * d
  K* ring_value;                         // [B, slots, D] of the convolution
  A* ring_stats;                         // [B, slots, 3 G + 1]
  // Written on the way:
  A* memory;                  // [B, T, E]
  K *key, *value;             // [B, T, G, D], [B, T, D]
  K* past_value;              // CPU: [B, P, D], only the visible positions
  A* past_stats;              // CPU: [B, P, 3 G + 1], likewise
  GateConvForward<H, K> mix;  // over key, value and past
};

namespace cpu {
void decode_marks(const DecodeStep&, const DecodeMarks&, int64_t begin, int64_t end);  // batch rows
// memory of the tokens [begin, end). Returns the first of the flattened rows [B * T * C] that is outside the table.
template <typename H, typename K> int64_t decode_memory(const Decode<H, K>&, int64_t begin, int64_t end);
// key and value of the groups [begin, end) of kDecodeRows rows of W; those of key_proj come first, then value_proj's.
constexpr int64_t kDecodeRows = 4;
inline int64_t decode_groups(int64_t rows) { return (rows + kDecodeRows - 1) / kDecodeRows; }
template <typename H, typename K> void decode_project(const Decode<H, K>&, int64_t begin, int64_t end);
template <typename H, typename K> void decode_past(const Decode<H, K>&, int64_t begin, int64_t end);    // batch rows
template <typename H, typename K> void decode_append(const Decode<H, K>&, int64_t begin, int64_t end);  // batch rows
}  // namespace cpu

}  // namespace engram
