"""Row lookup in multi-head tables: public function, fake kernels, autograd."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engram.ops._fake import same_device


def embedding(
    table: Tensor, rows: Tensor, *, sparse_grad: bool = False, row_begin: int | None = None, mask: Tensor | None = None
) -> Tensor:
    """Rows of a table by global row id: ``out[..., c, :] = table[rows[..., c]]`` (arXiv:2601.07372, section 2.2).

    Args:
        table: float64, float32, bfloat16 or float16 ``[R, d]``; R * d may pass 2**31.
        rows: int32 or int64 ``[..., C]``, global row ids.
        sparse_grad: not available yet.
        row_begin: None, or k: the table is the shard ``[k, k + R)`` of a bigger one; rows outside it give zeros and get
            no gradient.
        mask: bool ``[...]``, the leading shape of rows; False = zeros, not read, no gradient.

    Returns:
        ``[..., C, d]`` in the table's dtype.

    The gradient of the table is dense. It is summed in float32 (float64 for float64) in the order of the tokens and
    rounded once, so it is the same for any thread count, and 4096 bfloat16 ones on one row are 4096.

    Raises:
        IndexError: a row outside ``[0, R)`` without ``row_begin`` (on CUDA it reads as zero, unless ENGRAM_DEBUG=1).
        ValueError: a wrong dtype, shape or device.
        NotImplementedError: ``sparse_grad=True``.
    """
    if sparse_grad:
        raise NotImplementedError("embedding: sparse_grad=True is not available yet, use sparse_grad=False")
    return torch.ops.engram.embedding(table, rows, row_begin=row_begin, mask=mask)


@torch.library.register_fake("engram::embedding")
def _(table, rows, row_begin=None, mask=None):
    same_device("embedding", table=table, rows=rows, mask=mask)
    return table.new_empty((*rows.shape, table.shape[1]))


@torch.library.register_fake("engram::embedding_backward")
def _(grad_out, rows, num_rows, row_begin=None, mask=None):
    same_device("embedding_backward", grad_out=grad_out, rows=rows, mask=mask)
    return grad_out.new_empty((num_rows, grad_out.shape[-1]))


def _setup_context(ctx, inputs, output):
    table, rows, ctx.row_begin, mask = inputs
    ctx.save_for_backward(rows, mask)
    ctx.num_rows = table.shape[0]


@once_differentiable
def _backward(ctx, grad_out):
    rows, mask = ctx.saved_tensors
    grad = torch.ops.engram.embedding_backward(grad_out, rows, ctx.num_rows, row_begin=ctx.row_begin, mask=mask)
    return grad, None, None, None


torch.library.register_autograd("engram::embedding", _backward, setup_context=_setup_context)
