"""Row lookup in int8 tables: public function and fake kernel."""

import torch
from torch import Tensor

from engram.ops._frozen import refuse_gradient, register_fake_lookup


def embedding_int8(
    values: Tensor,
    scales: Tensor,
    rows: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_begin: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Rows of an int8 table by global row id r = rows[..., c]: ``out[..., c, j] = values[r, j] * scales[r]``.

    The exact product is rounded once, to the nearest number of ``dtype``; float32 is no station on the way.

    Args:
        values: int8 ``[R, d]``; R * d may pass 2**31.
        scales: float32 ``[R]``, any value.
        rows: int32 or int64 ``[..., C]``, global row ids.
        dtype: of the result: float64, float32, bfloat16 or float16.
        row_begin: None, or k: the table is the shard ``[k, k + R)`` of a bigger one; rows outside it give zeros.
        mask: bool ``[...]``, the leading shape of rows; False = zeros, not read.

    Returns:
        ``[..., C, d]`` in ``dtype``. There is no gradient: an int8 table and its scales are frozen.

    Raises:
        IndexError: a row outside ``[0, R)`` without ``row_begin`` (on CUDA it reads as zero, unless ENGRAM_DEBUG=1).
        ValueError: a wrong dtype, shape or device; scales that require a gradient while one is recorded.
    """
    refuse_gradient("embedding_int8", scales=scales)
    out: Tensor = torch.ops.engram.embedding_int8(values, scales, rows, dtype, row_begin, mask)
    return out


register_fake_lookup("embedding_int8")
