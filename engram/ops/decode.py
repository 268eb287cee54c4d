"""One step of decoding in one call: public function and fake kernel."""

import torch
from torch import Tensor

from engram.ops._fake import same_device


def decode(
    hidden: Tensor,
    token_ids: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    table: Tensor,
    key_proj: Tensor,
    key_bias: Tensor | None,
    value_proj: Tensor,
    value_bias: Tensor | None,
    hidden_weight: Tensor | None,
    key_weight: Tensor | None,
    conv_weight: Tensor,
    conv_norm_weight: Tensor | None,
    history: list[Tensor],
    conv: list[Tensor],
    *,
    pad_id: int,
    max_rollback: int,
    eps: float,
    conv_eps: float,
    dilation: int,
    zero_rule: str = "sign",
    eos_id: int | None = None,
    mask_blocks_hash: bool = True,
    conv_reset: bool = True,
    token_map: Tensor | None = None,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """What ``nn.Engram`` with a state does for the next few tokens of every sequence: ``ngram_hash``, ``embedding``, the
    key and the value projection, ``gate_conv``, and the state moved on, in one call and without gradients.

    The weights of both projections are read once for all tokens, each product of a row and a token being summed in the
    same order however many there are; everything else has the bits of the ops it stands for. On CUDA these are two kernels,
    which can be captured in a graph.

    Args:
        hidden: ``[B, T, G, D]``, float64, float32, bfloat16 or float16.
        token_ids: int32 or int64 ``[B, T]``, raw ids.
        multipliers: int64 ``[1, N]``; moduli, offsets: int64 ``[1, C]``. See ``ngram_hash``.
        table: ``[R, d]``, of hidden's dtype, or half beside a float32 hidden.
        key_proj, key_bias: ``[G * D, E]`` with E = C * d, and ``[G * D]`` or None, of the table's dtype.
        value_proj, value_bias: ``[D, E]``, and ``[D]`` or None, of the table's dtype.
        hidden_weight, key_weight, conv_weight, conv_norm_weight, eps, conv_eps, dilation, zero_rule: see ``gate_conv``.
        history: the tensors of ``EngramState.history``, of reach N - 1, in their order; written in place.
        conv: those of ``EngramState.conv``, of reach (K - 1) * dilation; written in place.
        pad_id: raw id that stands for whatever the hash may not see.
        max_rollback: of the state.
        eos_id: this id ends its document; None: no id does.
        mask_blocks_hash: False: masked ids are hashed like any other.
        conv_reset: False: the convolution reaches across documents.
        token_map: int32 ``[V]``; see ``ngram_hash``.
        document_ids: integer ``[B, T]``; None: the tokens go on with the document before them.
        mask: bool ``[B, T]``; False = not a token: nothing else sees it, its output is zero.
        lengths: integer ``[B]``: positions from ``lengths[b]`` on count as masked, their ids are never read, and they are
            not appended to the state.
        residual: add ``hidden`` at the end.

    Returns:
        ``[B, T, G, D]`` in hidden's dtype, rounded once. The state is unchanged where an error is raised.

    Raises:
        IndexError: an id outside ``token_map`` that the hash sees, or a row outside the table (on CUDA the id counts as
            masked for the hash and the row as zeros, unless ENGRAM_DEBUG=1).
        ValueError: a wrong dtype, shape, device or value, or a state of other sizes.
    """
    # By position: of a step of one token, finding thirty names in the schema would be a good part.
    out: Tensor = torch.ops.engram.decode.default(
        hidden, token_ids, multipliers, moduli, offsets, table, key_proj, key_bias, value_proj, value_bias, hidden_weight,
        key_weight, conv_weight, conv_norm_weight, history, conv, pad_id, max_rollback, eps, conv_eps, dilation, zero_rule,
        eos_id, mask_blocks_hash, conv_reset, token_map, document_ids, mask, lengths, residual,
    )  # fmt: skip
    return out


@torch.library.register_fake("engram::decode")
def _(
    hidden: Tensor, token_ids: Tensor, multipliers: Tensor, moduli: Tensor, offsets: Tensor, table: Tensor,
    key_proj: Tensor, key_bias: Tensor | None, value_proj: Tensor, value_bias: Tensor | None,
    hidden_weight: Tensor | None, key_weight: Tensor | None, conv_weight: Tensor, conv_norm_weight: Tensor | None,
    history: list[Tensor], conv: list[Tensor], pad_id: int, max_rollback: int, eps: float, conv_eps: float,
    dilation: int, zero_rule: str = "sign", eos_id: int | None = None, mask_blocks_hash: bool = True,
    conv_reset: bool = True, token_map: Tensor | None = None, document_ids: Tensor | None = None,
    mask: Tensor | None = None, lengths: Tensor | None = None, residual: bool = False,
) -> Tensor:  # fmt: skip
    same_device(
        "decode", hidden=hidden, token_ids=token_ids, multipliers=multipliers, moduli=moduli, offsets=offsets,
        table=table, key_proj=key_proj, key_bias=key_bias, value_proj=value_proj, value_bias=value_bias,
        hidden_weight=hidden_weight, key_weight=key_weight, conv_weight=conv_weight, conv_norm_weight=conv_norm_weight,
        history=history[0], conv=conv[0], token_map=token_map, document_ids=document_ids, mask=mask, lengths=lengths,
    )  # fmt: skip
    return hidden.new_empty(hidden.shape)
