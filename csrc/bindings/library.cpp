// Table of contents: every operator of the library, once. `*_backward` ops are plain functions; autograd is attached in
// Python (engram/ops/*.py), which is also why no tensor is keyword-only: register_autograd does not take such schemas.
// Meaning, shapes and errors: the docstrings there.
#include "device.h"

STABLE_TORCH_LIBRARY(ENGRAM_LIBRARY, m) {
  m.def(
      "ngram_hash(Tensor token_ids, Tensor multipliers, Tensor moduli, Tensor offsets, int pad_id, "
      "Tensor? token_map=None, Tensor? document_ids=None, Tensor? mask=None, Tensor? history=None) -> Tensor");

  m.def(
      "embedding(Tensor table, Tensor rows, int? row_begin=None, Tensor? mask=None, bool sparse_grad=False, "
      "Tensor? keys=None, Tensor? runs=None, Tensor? count=None) -> Tensor");
  m.def("embedding_backward(Tensor grad_out, Tensor keys, Tensor runs, Tensor count, SymInt num_rows) -> Tensor");

  m.def(
      "embedding_fp8(Tensor values, Tensor scales, Tensor rows, ScalarType dtype, int? row_begin=None, "
      "Tensor? mask=None) -> Tensor");
  m.def(
      "embedding_int8(Tensor values, Tensor scales, Tensor rows, ScalarType dtype, int? row_begin=None, "
      "Tensor? mask=None) -> Tensor");

  m.def(
      "row_plan(Tensor rows, SymInt num_rows, int? row_begin=None, Tensor? mask=None) -> "
      "(Tensor keys, Tensor runs, Tensor count)");
  m.def("row_sum(Tensor values, Tensor keys, Tensor runs, Tensor count) -> (Tensor rows, Tensor sums)");
  m.def(
      "row_update(Tensor(a!) table, Tensor(b!)? first, Tensor(c!)? second, Tensor grad, Tensor? keys, Tensor? runs, "
      "Tensor? count, Tensor step, str rule, float lr, float beta1=0.0, float beta2=0.0, float eps=0.0, "
      "float weight_decay=0.0, bool maximize=False, int? seed=None) -> ()");

  m.def(
      "gate(Tensor hidden, Tensor key, Tensor value, Tensor? hidden_weight, Tensor? key_weight, float eps, "
      "float clamp=1e-6, str zero_rule=\"sign\", Tensor? mask=None, bool residual=False) -> "
      "(Tensor out, Tensor stats)");
  m.def(
      "gate_backward(Tensor grad_out, Tensor hidden, Tensor key, Tensor value, Tensor? hidden_weight, "
      "Tensor? key_weight, Tensor stats, float clamp=1e-6, str zero_rule=\"sign\", Tensor? mask=None, bool residual=False) -> "
      "(Tensor grad_hidden, Tensor grad_key, Tensor grad_value, Tensor grad_hidden_weight, Tensor grad_key_weight)");

  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor? norm_weight, int dilation, float eps=1e-5, "
      "str? activation=\"silu\", bool residual=True, Tensor? document_ids=None, Tensor? mask=None) -> "
      "(Tensor out, Tensor rstd)");
  m.def(
      "short_conv_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor? norm_weight, Tensor rstd, int dilation, "
      "str? activation=\"silu\", bool residual=True, Tensor? document_ids=None, Tensor? mask=None) -> "
      "(Tensor grad_x, Tensor grad_weight, Tensor grad_norm_weight)");

  m.def(
      "gate_conv(Tensor hidden, Tensor key, Tensor value, Tensor? hidden_weight, Tensor? key_weight, "
      "Tensor conv_weight, Tensor? conv_norm_weight, float eps, float conv_eps, int dilation, float clamp=1e-6, str zero_rule=\"sign\", "
      "str? activation=\"silu\", Tensor? document_ids=None, Tensor? mask=None, bool residual=False, "
      "Tensor? past_value=None, Tensor? past_stats=None) -> (Tensor out, Tensor stats)");
  m.def(
      "gate_conv_backward(Tensor grad_out, Tensor hidden, Tensor key, Tensor value, Tensor? hidden_weight, "
      "Tensor? key_weight, Tensor conv_weight, Tensor? conv_norm_weight, Tensor stats, float conv_eps, int dilation, float clamp=1e-6, "
      "str zero_rule=\"sign\", str? activation=\"silu\", Tensor? document_ids=None, Tensor? mask=None, "
      "bool residual=False, Tensor? past_value=None, Tensor? past_stats=None) -> "
      "(Tensor grad_hidden, Tensor grad_key, Tensor grad_value, Tensor grad_hidden_weight, Tensor grad_key_weight, "
      "Tensor grad_conv_weight, Tensor grad_conv_norm_weight)");

  m.def(
      "decode(Tensor hidden, Tensor token_ids, Tensor multipliers, Tensor moduli, Tensor offsets, Tensor table, "
      "Tensor key_proj, Tensor? key_bias, Tensor value_proj, Tensor? value_bias, Tensor? hidden_weight, "
      "Tensor? key_weight, Tensor conv_weight, Tensor? conv_norm_weight, Tensor(a!)[] history, Tensor(b!)[] conv, "
      "int pad_id, int max_rollback, float eps, float conv_eps, int dilation, str zero_rule=\"sign\", "
      "int? eos_id=None, bool mask_blocks_hash=True, bool conv_reset=True, Tensor? token_map=None, "
      "Tensor? document_ids=None, Tensor? mask=None, Tensor? lengths=None, bool residual=False) -> Tensor");
}
