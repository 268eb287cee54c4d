"""Gate and short convolution in one: public function, fake kernels, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engram.ops._autograd import differentiable
from engram.ops._fake import accumulate_dtype, same_device
from engram.ops._state import Ring
from engram.ops.short_conv import mask_of_lengths


def gate_conv(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_weight: Tensor | None,
    key_weight: Tensor | None,
    conv_weight: Tensor,
    conv_norm_weight: Tensor | None,
    *,
    eps: float,
    conv_eps: float = 1e-5,
    dilation: int,
    clamp: float = 1e-6,
    zero_rule: str = "sign",
    activation: str | None = "silu",
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    residual: bool = False,
    state: Ring | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """``short_conv(gate(...))`` without the gated value in between: it is a scalar per token and branch times
    ``value``, so the convolution reads ``value`` and those scalars (arXiv:2601.07372, section 2; the released demo).

    Args:
        hidden: ``[B, T, G, D]``, float64, float32, bfloat16 or float16.
        key: ``[B, T, G, D]``, of hidden's dtype, or half beside a float32 hidden.
        value: ``[B, T, D]``, of key's dtype.
        hidden_weight, key_weight: norm weights ``[G, D]`` of the gate, any float dtype; None: already normalised.
        conv_weight: ``[G, D, K]``, any float dtype; tap K - 1 is the current token.
        conv_norm_weight: ``[G, D]``, any float dtype; None: no norm before the convolution.
        eps, conv_eps: added to the mean squares of the gate's and the convolution's norms.
        dilation: distance in tokens between two taps, at least 1.
        clamp, zero_rule: see ``gate``.
        activation: ``"silu"`` or None.
        document_ids: integer ``[B, T]``: no tap reaches across a change of id.
        mask: bool ``[B, T]``; False: the position contributes to no other, its output is zero (``hidden`` bit for bit
            with ``residual``), and no gradient passes.
        residual: add ``hidden`` at the end.
        state: ``EngramState.conv`` of a layer: what earlier calls have appended comes before the first token, and these
            tokens are appended to it, in place; the result is that slice of one call over everything. It keeps value
            and the gate's scalars, and no gradient flows through it.
        lengths: integer ``[B]``: positions from ``lengths[b]`` on count as masked and, with a state, are not appended.

    Returns:
        ``[B, T, G, D]`` in hidden's dtype, rounded once.

    Raises:
        ValueError: a wrong dtype, shape, device or value, or a state of other sizes.
    """
    if lengths is not None:
        mask = mask_of_lengths("gate_conv", hidden.shape[0], hidden.shape[1], lengths, mask, hidden.device)
    past_value = past_stats = None
    if state is not None:
        state.check("gate_conv", hidden, {"value": value[:, :0], "stats": None})
        marks, visible = state.marks(document_ids, hidden), mask
        past, document_ids, mask = state.before(marks.runs, mask)
        past_value, past_stats = past["value"], past["stats"]
    out, stats = _gate_conv(
        hidden, key, value, hidden_weight, key_weight, conv_weight, conv_norm_weight, eps, conv_eps, dilation, clamp,
        zero_rule, activation, document_ids, mask, residual, past_value, past_stats,
    )  # fmt: skip
    if state is not None:
        state.append(marks, visible, lengths, value=value, stats=stats)
    return out


@torch.library.register_fake("engram::gate_conv")
def _(
    hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor | None, key_weight: Tensor | None,
    conv_weight: Tensor, conv_norm_weight: Tensor | None, eps: float, conv_eps: float, dilation: int,
    clamp: float = 1e-6, zero_rule: str = "sign", activation: str | None = "silu", document_ids: Tensor | None = None,
    mask: Tensor | None = None, residual: bool = False, past_value: Tensor | None = None,
    past_stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    same_device(
        "gate_conv", hidden=hidden, key=key, value=value, hidden_weight=hidden_weight, key_weight=key_weight,
        conv_weight=conv_weight, conv_norm_weight=conv_norm_weight, document_ids=document_ids, mask=mask,
        past_value=past_value, past_stats=past_stats,
    )  # fmt: skip
    batch, tokens, branches, _ = hidden.shape
    stats = hidden.new_empty((batch, tokens, 3 * branches + 1), dtype=accumulate_dtype(hidden))
    return hidden.new_empty(hidden.shape), stats


@torch.library.register_fake("engram::gate_conv_backward")
def _(
    grad_out: Tensor, hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor | None,
    key_weight: Tensor | None, conv_weight: Tensor, conv_norm_weight: Tensor | None, stats: Tensor, conv_eps: float,
    dilation: int, clamp: float = 1e-6, zero_rule: str = "sign", activation: str | None = "silu",
    document_ids: Tensor | None = None, mask: Tensor | None = None, residual: bool = False,
    past_value: Tensor | None = None, past_stats: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    same_device("gate_conv_backward", grad_out=grad_out, hidden=hidden, key=key, value=value, stats=stats)
    weights = (hidden_weight, key_weight, conv_weight, conv_norm_weight)
    none = hidden.new_empty((0,), dtype=accumulate_dtype(hidden))
    empty = [none.clone() if weight is None else weight.new_empty(weight.shape) for weight in weights]
    return hidden.new_empty(hidden.shape), key.new_empty(key.shape), value.new_empty(value.shape), *empty


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    (
        *tensors, _eps, conv_eps, dilation, clamp, zero_rule, activation, document_ids, mask, residual, past_value,
        past_stats,
    ) = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(*tensors, stats, document_ids, mask, past_value, past_stats)
    ctx.options = {
        "conv_eps": conv_eps,
        "dilation": dilation,
        "clamp": clamp,
        "zero_rule": zero_rule,
        "activation": activation,
        "residual": residual,
    }


@once_differentiable
def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, stats, document_ids, mask, past_value, past_stats = ctx.saved_tensors
    grads = torch.ops.engram.gate_conv_backward(
        grad_out, *tensors, stats, document_ids=document_ids, mask=mask, past_value=past_value, past_stats=past_stats,
        **ctx.options
    )
    grads = (None if tensor is None else grad for tensor, grad in zip(tensors, grads))
    return *grads, *(None,) * 11


_gate_conv: Callable[..., tuple[Tensor, Tensor]] = differentiable("gate_conv", _backward, _setup_context)
