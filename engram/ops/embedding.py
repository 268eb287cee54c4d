"""Row lookup in multi-head tables: public function, fake kernels, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engram.ops._autograd import differentiable
from engram.ops._fake import same_device
from engram.ops.row_plan import RowPlan, row_plan


def embedding(
    table: Tensor,
    rows: Tensor,
    *,
    sparse_grad: bool = False,
    row_begin: int | None = None,
    mask: Tensor | None = None,
    plan: RowPlan | None = None,
) -> Tensor:
    """Rows of a table by global row id: ``out[..., c, :] = table[rows[..., c]]`` (arXiv:2601.07372, section 2.2).

    Args:
        table: float64, float32, bfloat16 or float16 ``[R, d]``; R * d may pass 2**31.
        rows: int32 or int64 ``[..., C]``, global row ids.
        sparse_grad: the table's gradient is a coalesced sparse COO tensor of the rows that were read, so that a step
            costs what the batch touches and nothing in proportion to the table; else dense.
        row_begin: None, or k: the table is the shard ``[k, k + R)`` of a bigger one; rows outside it give zeros and get
            no gradient.
        mask: bool ``[...]``, the leading shape of rows; False = zeros, not read, no gradient.
        plan: `row_plan(rows, R, row_begin=row_begin, mask=mask)`, where there is one already; None: made in the
            backward.

    Returns:
        ``[..., C, d]`` in the table's dtype.

    The gradient is summed in float32 (float64 for float64) in the order of the tokens and rounded once, so it is the
    same for any thread count, and 4096 bfloat16 ones on one row are 4096. A sparse one takes memory for the slots of
    the batch only; on CUDA it waits for the device, to learn how many rows there are.

    Raises:
        IndexError: a row outside ``[0, R)`` without ``row_begin`` (on CUDA it reads as zero, unless ENGRAM_DEBUG=1).
        ValueError: a wrong dtype, shape or device, or a plan of other rows than so many.
    """
    keys, runs, count = (None, None, None) if plan is None else plan
    return _embedding(table, rows, row_begin, mask, sparse_grad, keys, runs, count)


@torch.library.register_fake("engram::embedding")
def _(
    table: Tensor, rows: Tensor, row_begin: int | None = None, mask: Tensor | None = None, sparse_grad: bool = False,
    keys: Tensor | None = None, runs: Tensor | None = None, count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    same_device("embedding", table=table, rows=rows, mask=mask, keys=keys, runs=runs, count=count)
    return table.new_empty((*rows.shape, table.shape[1]))


@torch.library.register_fake("engram::embedding_backward")
def _(grad_out: Tensor, keys: Tensor, runs: Tensor, count: Tensor, num_rows: int) -> Tensor:
    same_device("embedding_backward", grad_out=grad_out, keys=keys, runs=runs, count=count)
    return grad_out.new_empty((num_rows, grad_out.shape[-1]))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    table, rows, ctx.row_begin, mask, ctx.sparse_grad, *plan = inputs
    if plan[0] is None:
        ctx.save_for_backward(rows, mask)
    else:
        ctx.save_for_backward(*plan)
    ctx.shape = table.shape


@once_differentiable
def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    plan = ctx.saved_tensors
    if len(plan) == 2:
        rows, mask = plan
        plan = row_plan(rows, ctx.shape[0], row_begin=ctx.row_begin, mask=mask)
    if ctx.sparse_grad:
        rows, sums = torch.ops.engram.row_sum(grad_out, *plan)
        grad = torch.sparse_coo_tensor(rows[None], sums, ctx.shape, check_invariants=False, is_coalesced=True)
    else:
        grad = torch.ops.engram.embedding_backward(grad_out, *plan, ctx.shape[0])
    return grad, *[None] * 7


_embedding: Callable[..., Tensor] = differentiable("embedding", _backward, _setup_context)
