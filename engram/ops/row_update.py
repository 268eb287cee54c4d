"""One optimizer step on the touched rows of a table: public function, fake kernel."""

import torch
from torch import Tensor

from engram.ops._fake import same_device


def row_update(
    table: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    grad: Tensor,
    keys: Tensor | None,
    runs: Tensor | None,
    count: Tensor | None,
    step: Tensor,
    *,
    rule: str,
    lr: float,
    beta1: float = 0.0,
    beta2: float = 0.0,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
    seed: int | None = None,
) -> None:
    """Update a table and the state of an optimizer in place, in one pass over the rows that a plan touches.

    With g the gradient of a row, summed over its slots in float32 (float64 for float64) and never rounded, negated to
    `maximize`; first the row is multiplied by ``1 - lr * weight_decay``, then:

    - ``"sgd"``: ``m = beta1 m + g`` with `first`, else ``m = g``; ``w -= lr m``.
    - ``"adagrad"``: ``s += mean(g^2)``; ``w -= lr g / (sqrt(s) + eps)``.
    - ``"adam"``: ``m = beta1 m + (1 - beta1) g`` with `first`, else ``m = g``; ``v = beta2 v + (1 - beta2) g^2``, or
      ``mean(g^2)`` for one v a row; ``w -= lr m' / (sqrt(v') + eps)`` with the bias corrections
      ``m' = m / (1 - beta1^step)`` (only with `first`) and ``v' = v / (1 - beta2^step)``.

    Rows that are not touched keep row and state.

    Args:
        table: float64, float32, bfloat16 or float16 ``[R, d]``, contiguous; updated.
        first: None, or m ``[R, d]`` in float32 (float64 for float64), contiguous; updated. Not for adagrad.
        second: s ``[R]`` for adagrad, v ``[R]`` or ``[R, d]`` for adam, None for sgd; dtype as first; updated.
        grad: ``[..., C, d]`` in the dtype of table, one row a slot of the plan; ``[R, d]`` without a plan.
        keys: of an `ops.row_plan` for the table; None: every row is touched.
        runs: likewise.
        count: likewise.
        step: int64, one element, where the table is: the number of this step, from 1.
        rule: ``"sgd"``, ``"adagrad"`` or ``"adam"``.
        lr: learning rate.
        beta1: momentum, or decay of m.
        beta2: decay of v.
        eps: added to the root.
        weight_decay: decoupled, on touched rows.
        maximize: ascend.
        seed: None rounds to nearest. An integer rounds a bfloat16 table stochastically, by random bits that depend on
            seed, step, row and column only: the same on every device and for every thread count.

    Returns:
        None.

    On CUDA nothing waits for the device, so the call can be captured in a graph; `lr` and the like are captured as they
    are.

    Raises:
        ValueError: a wrong dtype, shape, device, layout, rule, or state for the rule.
    """
    torch.ops.engram.row_update(
        table, first, second, grad, keys, runs, count, step, rule, lr, beta1, beta2, eps, weight_decay, maximize, seed
    )


@torch.library.register_fake("engram::row_update")
def _(
    table: Tensor, first: Tensor | None, second: Tensor | None, grad: Tensor, keys: Tensor | None,
    runs: Tensor | None, count: Tensor | None, step: Tensor, rule: str, lr: float, beta1: float = 0.0,
    beta2: float = 0.0, eps: float = 0.0, weight_decay: float = 0.0, maximize: bool = False, seed: int | None = None,
) -> None:  # fmt: skip
    same_device("row_update", table=table, first=first, second=second, grad=grad, keys=keys, runs=runs, count=count,
                step=step)
