"""Row lookup in float8 tables: public function and fake kernel."""

import torch
from torch import Tensor

from engram.ops._frozen import refuse_gradient, register_fake_lookup


def embedding_fp8(
    values: Tensor,
    scales: Tensor,
    rows: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_begin: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Rows of a float8 table by global row id r = rows[..., c]: ``out[..., c, j] = values[r, j] * scales[r, j // 32]``.

    The format of DeepSeek-V4.1's tables: e4m3 numbers with one power of two for every 32 neighbours, in two tensors.
    All 65,536 pairs of bytes count as IEEE arithmetic has them: scale byte 0 is 2**-127 (not 0), 255 is NaN, and the
    product is rounded once, to the nearest number of ``dtype``; bfloat16 holds it unless it is subnormal or too large.

    Args:
        values: float8_e4m3fn ``[R, d]``; R * d may pass 2**31. Raw bytes: ``bytes.view(torch.float8_e4m3fn)``.
        scales: float8_e8m0fnu ``[R, ceil(d / 32)]``; the last one may stand for fewer than 32 values.
        rows: int32 or int64 ``[..., C]``, global row ids.
        dtype: of the result: float64, float32, bfloat16 or float16.
        row_begin: None, or k: the table is the shard ``[k, k + R)`` of a bigger one; rows outside it give zeros.
        mask: bool ``[...]``, the leading shape of rows; False = zeros, not read.

    Returns:
        ``[..., C, d]`` in ``dtype``. There is no gradient: a float8 table is frozen.

    Raises:
        IndexError: a row outside ``[0, R)`` without ``row_begin`` (on CUDA it reads as zero, unless ENGRAM_DEBUG=1).
        ValueError: a wrong dtype, shape or device; values or scales that require a gradient while one is recorded.
    """
    refuse_gradient("embedding_fp8", values=values, scales=scales)
    out: Tensor = torch.ops.engram.embedding_fp8(values, scales, rows, dtype, row_begin, mask)
    return out


register_fake_lookup("embedding_fp8")
