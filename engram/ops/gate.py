"""Context gate: public function, fake kernels, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engram.ops._autograd import differentiable
from engram.ops._fake import accumulate_dtype, same_device


def gate(
    hidden: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_weight: Tensor | None,
    key_weight: Tensor | None,
    *,
    eps: float,
    clamp: float = 1e-6,
    zero_rule: str = "sign",
    mask: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """How much of the shared value each residual branch takes in (arXiv:2601.07372, section 2; the released demo).

    ``s = <rms(hidden) * hidden_weight, rms(key) * key_weight> / sqrt(D)``, ``u = sign(s) * sqrt(max(|s|, clamp))``,
    ``out = sigmoid(u) * value`` (``+ hidden`` with ``residual``), per token and branch, with sums in float32 (float64
    for float64) and one rounding at the end.

    Args:
        hidden: ``[..., G, D]``, float64, float32, bfloat16 or float16.
        key: ``[..., G, D]``, of hidden's dtype, or half beside a float32 hidden.
        value: ``[..., D]``, of key's dtype.
        hidden_weight, key_weight: norm weights ``[G, D]``, any float dtype; None: that input is already normalised.
        eps: added to the mean square under the root.
        clamp: lower bound of ``|s|`` under the root. Below it no gradient passes.
        zero_rule: at ``s == 0`` the gate is exactly 1/2 with ``"sign"``, or sigmoid of ``+-sqrt(clamp)`` by the sign
            bit of s with ``"copysign"`` (TileKernels, DeepSeek-V4.1).
        mask: bool ``[...]``; False: out is zero (``hidden`` bit for bit with ``residual``) and no gradient passes,
            whatever stands there.
        residual: add ``hidden``.

    Returns:
        ``[..., G, D]`` in hidden's dtype.

    Raises:
        ValueError: a wrong dtype, shape, device or value.
    """
    return _gate(hidden, key, value, hidden_weight, key_weight, eps, clamp, zero_rule, mask, residual)[0]


@torch.library.register_fake("engram::gate")
def _(
    hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor | None, key_weight: Tensor | None, eps: float,
    clamp: float = 1e-6, zero_rule: str = "sign", mask: Tensor | None = None, residual: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    same_device(
        "gate", hidden=hidden, key=key, value=value, hidden_weight=hidden_weight, key_weight=key_weight, mask=mask
    )
    stats = hidden.new_empty((*hidden.shape[:-1], 3), dtype=accumulate_dtype(hidden))
    return hidden.new_empty(hidden.shape), stats


@torch.library.register_fake("engram::gate_backward")
def _(
    grad_out: Tensor, hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor | None,
    key_weight: Tensor | None, stats: Tensor, clamp: float = 1e-6, zero_rule: str = "sign", mask: Tensor | None = None,
    residual: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    same_device("gate_backward", grad_out=grad_out, hidden=hidden, key=key, value=value, stats=stats, mask=mask)

    def weight_grad(weight: Tensor | None) -> Tensor:
        if weight is None:
            return hidden.new_empty((0,), dtype=accumulate_dtype(hidden))
        return weight.new_empty(weight.shape)

    return (
        hidden.new_empty(hidden.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        weight_grad(hidden_weight),
        weight_grad(key_weight),
    )


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _eps, clamp, zero_rule, mask, residual = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(*tensors, stats, mask)
    ctx.options = {"clamp": clamp, "zero_rule": zero_rule, "residual": residual}


@once_differentiable
def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, stats, mask = ctx.saved_tensors
    grads = torch.ops.engram.gate_backward(grad_out, *tensors, stats, mask=mask, **ctx.options)
    return *(None if tensor is None else grad for tensor, grad in zip(tensors, grads)), None, None, None, None, None


_gate: Callable[..., tuple[Tensor, Tensor]] = differentiable("gate", _backward, _setup_context)
