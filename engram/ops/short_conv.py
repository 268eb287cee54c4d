"""Short causal convolution: public function, fake kernels, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engram.ops._autograd import differentiable
from engram.ops._fake import accumulate_dtype, same_device
from engram.ops._state import Ring


def short_conv(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    *,
    dilation: int,
    eps: float = 1e-5,
    activation: str | None = "silu",
    residual: bool = True,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    state: Ring | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Dilated causal depthwise convolution of the RMS-normalised input (arXiv:2601.07372, equation 5; the released
    demo).

    ``out[t] = x[t] + silu(sum_j weight[..., j] * n[t - (K - 1 - j) * dilation])``, ``n = rms(x) * norm_weight`` per
    branch, with sums in float32 (float64 for float64) and one rounding at the end.

    Args:
        x: ``[B, T, G, D]``, float64, float32, bfloat16 or float16.
        weight: ``[G, D, K]``, any float dtype; tap K - 1 is the current token.
        norm_weight: ``[G, D]``, any float dtype; None: no norm.
        dilation: distance in tokens between two taps, at least 1.
        eps: added to the mean square under the root.
        activation: ``"silu"`` or None.
        residual: add ``x``.
        document_ids: integer ``[B, T]``: no tap reaches across a change of id.
        mask: bool ``[B, T]``; False: the position contributes to no other, its own output is zero (``x`` bit for bit
            with ``residual``).
        state: `ops.Ring` of x: what earlier calls have appended comes before the first token, and these tokens are appended
            to it, in place; the result is that slice of one call over everything. No gradient flows through it.
        lengths: integer ``[B]``: positions from ``lengths[b]`` on count as masked and, with a state, are not appended.

    Returns:
        ``[B, T, G, D]`` in x's dtype.

    Raises:
        ValueError: a wrong dtype, shape, device or value, or a state of other sizes.
    """
    if lengths is not None:
        mask = mask_of_lengths("short_conv", x.shape[0], x.shape[1], lengths, mask, x.device)
    everything, before = x, 0
    if state is not None:
        state.check("short_conv", x, {"x": x[:, :0]})
        marks, visible = state.marks(document_ids, x), mask
        past, document_ids, mask = state.before(marks.runs, mask)
        everything, before = torch.cat([past["x"], x], 1), past["x"].shape[1]
    out = _short_conv(everything, weight, norm_weight, dilation, eps, activation, residual, document_ids, mask)[0]
    if state is None:
        return out
    state.append(marks, visible, lengths, x=x)
    return out[:, before:].contiguous()


def mask_of_lengths(
    op: str, batch: int, tokens: int, lengths: Tensor, mask: Tensor | None, device: torch.device
) -> Tensor:
    """``mask`` (or all True), False from ``lengths[b]`` on; bool ``[batch, tokens]``."""
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"{op}: lengths must be integer [B] = [{batch}], got {lengths.dtype} {list(lengths.shape)}")
    within = torch.arange(tokens, device=device) < lengths[:, None]
    return within if mask is None else within & mask


@torch.library.register_fake("engram::short_conv")
def _(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, dilation: int, eps: float = 1e-5,
    activation: str | None = "silu", residual: bool = True, document_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    same_device("short_conv", x=x, weight=weight, norm_weight=norm_weight, document_ids=document_ids, mask=mask)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x))


@torch.library.register_fake("engram::short_conv_backward")
def _(
    grad_out: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None, rstd: Tensor, dilation: int,
    activation: str | None = "silu", residual: bool = True, document_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    same_device("short_conv_backward", grad_out=grad_out, x=x, weight=weight, norm_weight=norm_weight, rstd=rstd)
    if norm_weight is None:
        grad_norm_weight = x.new_empty((0,), dtype=accumulate_dtype(x))
    else:
        grad_norm_weight = norm_weight.new_empty(norm_weight.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), grad_norm_weight


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, dilation, _eps, activation, residual, document_ids, mask = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(*tensors, rstd, document_ids, mask)
    ctx.options = {"dilation": dilation, "activation": activation, "residual": residual}


@once_differentiable
def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, rstd, document_ids, mask = ctx.saved_tensors
    grads = torch.ops.engram.short_conv_backward(
        grad_out, *tensors, rstd, document_ids=document_ids, mask=mask, **ctx.options
    )
    grads = (None if tensor is None else grad for tensor, grad in zip(tensors, grads))
    return *grads, None, None, None, None, None, None


_short_conv: Callable[..., tuple[Tensor, Tensor]] = differentiable("short_conv", _backward, _setup_context)
