"""Sums over the slots that touch the same row: public function, fake kernel."""

import torch
from torch import Tensor

from engram.ops._fake import same_device


def row_sum(values: Tensor, keys: Tensor, runs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Sum what belongs to the same row: the gradient of a table, reduced to the rows that were read.

    Args:
        values: float64, float32, bfloat16 or float16 ``[..., C, d]``, one row for each slot of the plan.
        keys: of an `ops.row_plan` of as many slots.
        runs: likewise.
        count: likewise.

    Returns:
        ``(rows, sums)``: int64 ``[n]``, the touched rows in ascending order, and ``[n, d]`` in the dtype of values.
        Sums are kept in float32 (float64 for float64), in the order of the slots, and rounded once.

    On CUDA this waits for the device, which knows n.

    Raises:
        ValueError: a wrong dtype, shape or device.
    """
    found: tuple[Tensor, Tensor] = torch.ops.engram.row_sum(values, keys, runs, count)
    return found


@torch.library.register_fake("engram::row_sum")
def _(values: Tensor, keys: Tensor, runs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    same_device("row_sum", values=values, keys=keys, runs=runs, count=count)
    touched = torch.library.get_ctx().new_dynamic_size()
    return keys.new_empty(touched), values.new_empty((touched, values.shape[-1]))
