#include "kernels/ngram_hash.h"
#include "device.h"

namespace engram {
namespace {

constexpr const char* kOp = "ngram_hash";

[[noreturn]] void bad_id(const char* argument, const std::string& id, int64_t vocab) {
  throw std::out_of_range(std::string(kOp) + ": " + argument + " must be in [0, " + std::to_string(vocab) +
                          "), the ids of token_map, got " + id);
}

void launch(const Cpu&, const NgramHash& a) {
  const int64_t history = cpu::ngram_hash_bad_history(a);
  if (a.tokens > 0 && history != kNoBadId) bad_id("history", std::to_string(a.history[history]), a.vocab);
  const int64_t bad = parallel_first(a.batch * a.tokens, grain_for(a.layers * a.columns * 8),
                                     [&](int64_t begin, int64_t end) { return cpu::ngram_hash(a, begin, end); });
  if (bad != kNoBadId) bad_id("token_ids", std::to_string(a.token_ids[bad]), a.vocab);
}

#ifdef ENGRAM_CUDA_BODIES
void launch(const Cuda& device, const NgramHash& a, const DebugFlag& debug) {
  device.check(cuda::ngram_hash(a, debug.pointer(), device.stream));
  if (debug.raised()) bad_id("token_ids and history", "an id outside", a.vocab);
}
#endif

}  // namespace

template <typename Device>
Tensor ngram_hash(Tensor token_ids, Tensor multipliers, Tensor moduli, Tensor offsets, int64_t pad_id,
                  OptionalTensor token_map, OptionalTensor document_ids, OptionalTensor mask, OptionalTensor history) {
  require_index(kOp, "token_ids", token_ids);
  require(token_ids.dim() == 2, kOp, "token_ids", "[B, T]", token_ids);
  const int64_t B = token_ids.size(0), T = token_ids.size(1);
  require_long(kOp, "multipliers", multipliers);
  require(multipliers.dim() == 2 && multipliers.size(1) >= 2, kOp, "multipliers", "[L, N] with N >= 2", multipliers);
  const int64_t L = multipliers.size(0), N = multipliers.size(1);
  require_long(kOp, "moduli", moduli);
  require(moduli.dim() == 2 && moduli.size(0) == L && moduli.size(1) % (N - 1) == 0, kOp, "moduli",
          "[L, C] with the L of multipliers and C a multiple of N - 1", moduli);
  const int64_t C = moduli.size(1);
  require_long(kOp, "offsets", offsets);
  require_sizes(kOp, "offsets", offsets, {L, C}, "[L, C]");
  for (const auto& [argument, t] : {std::pair{"multipliers", multipliers}, {"moduli", moduli}, {"offsets", offsets}})
    require_device(kOp, argument, t, token_ids);
  if (token_map) {
    require_device(kOp, "token_map", *token_map, token_ids);
    require(token_map->dim() == 1 && token_map->scalar_type() == ScalarType::Int, kOp, "token_map", "int32 [V]",
            *token_map);
    token_map = as_contiguous(*token_map);
  }
  document_ids = checked_ids(kOp, "document_ids", document_ids, {B, T}, "[B, T]", token_ids);
  mask = checked_mask(kOp, mask, {B, T}, "[B, T]", token_ids);
  history = checked_ids(kOp, "history", history, {B, N - 1}, "[B, N - 1]", token_ids);
  const int64_t V = token_map ? token_map->size(0) : 0;
  if (token_map && (pad_id < 0 || pad_id >= V))
    fail(kOp, "pad_id", "in [0, " + std::to_string(V) + "), the ids of token_map", std::to_string(pad_id));

  const Device device(token_ids);
  token_ids = cast(token_ids, ScalarType::Long);
  multipliers = as_contiguous(multipliers);
  moduli = as_contiguous(moduli);
  offsets = as_contiguous(offsets);
  Tensor rows = empty(token_ids, {L, B, T, C}, ScalarType::Long);
  NgramHash a{token_ids.const_data_ptr<int64_t>(),
              multipliers.const_data_ptr<int64_t>(),
              moduli.const_data_ptr<int64_t>(),
              offsets.const_data_ptr<int64_t>(),
              read<int32_t>(token_map),
              read<int64_t>(document_ids),
              read<bool>(mask),
              read<int64_t>(history),
              rows.mutable_data_ptr<int64_t>(),
              pad_id,
              B,
              T,
              L,
              N,
              C,
              V};
  if constexpr (std::is_same_v<Device, Cpu>) {
    for (int64_t i = 0; i < L * C; ++i)
      if (a.moduli[i] < 1) fail(kOp, "moduli", "positive", std::to_string(a.moduli[i]));
    if (token_map) a.pad = a.token_map[pad_id];
    launch(device, a);
  }
#ifdef ENGRAM_CUDA_BODIES
  else {
    launch(device, a, DebugFlag(token_ids));
  }
#endif
  return rows;
}

}  // namespace engram

ENGRAM_REGISTER(ngram_hash)
