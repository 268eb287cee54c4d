"""Quantised tables: from float rows to values and scales, and back.

Two formats, looked up by `ops.embedding_fp8` and `ops.embedding_int8`:

* "fp8": float8_e4m3fn values [R, d] and float8_e8m0fnu scales [R, ceil(d / 32)], DeepSeek-V4.1's layout. The scale of
  32 values is the smallest power of two with max|x| <= 464 * scale, so that the largest of them rounds to 448 at most
  (464 is half a step above). Each value x comes back as y with |y - x| <= max(2**-4 |x|, 2**-10 scale): a relative
  error of 2**-4 (half a unit of four significant bits), and for small ones 2**-17 of the largest of the 32, since that
  is above 232 * scale. Below 464 * 2**-127 the scale stays 2**-127.
* "int8": int8 values [R, d] and float32 scales [R]. The scale of a row is max|x| / 127, rounded up to 17 significant
  bits and at least 2**-126; |y - x| <= scale / 2, up to the rounding of x / scale in float32 (2**-17 of a step).

Either way the dequantised float32 rows are exact, and quantising them again gives the same bytes.
"""
import torch
from torch import Tensor

from engram import ops
from engram.progress import Progress, reporting
from engram.storage import zeros_where_touched

__all__ = ["FORMATS", "quantize_table", "dequantize_table", "zero_table"]

FORMATS = ("fp8", "int8")
LARGEST = 464 * 2.0**119        # larger ones would come back as inf in float32
CHUNK = 1 << 20                 # elements that are worked on at a time

_BLOCK = 32                     # values of a row that share a scale in fp8


def zero_table(
    rows: int, dim: int, format: str = "fp8", *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Values and scales of a table of zeros; on the CPU in memory as of `empty_table`, which is claimed when written.

    Args:
        rows, dim: sizes, at least 0.
        format: "fp8" or "int8".
        device: torch's default device if None.

    Raises:
        ValueError: a negative size or an unknown format.
    """
    check_format("zero_table", format)
    if rows < 0 or dim < 0:
        raise ValueError(f"zero_table: rows and dim must be at least 0, got {rows} and {dim}")
    like = torch.empty(0, device=device)
    zeros = zeros_where_touched if type(like) is Tensor else torch.zeros    # fake tensors have no memory
    if format == "fp8":
        values = zeros((rows, dim), dtype=torch.float8_e4m3fn, device=like.device)
        return values, zeros((rows, -(-dim // _BLOCK)), dtype=torch.float8_e8m0fnu, device=like.device)
    values = zeros((rows, dim), dtype=torch.int8, device=like.device)
    return values, zeros((rows,), dtype=torch.float32, device=like.device)


@torch.no_grad()
def quantize_table(
    table: Tensor, format: str = "fp8", *, out: tuple[Tensor, Tensor] | None = None, progress: Progress = False
) -> tuple[Tensor, Tensor]:
    """Values and scales of float rows. Works through the table in chunks of rows, so what it takes beside the result is
    a few megabytes, whether `table` lies in memory or in a file; torch's threads share each chunk.

    Args:
        table: float64, float32, bfloat16 or float16 [R, d], finite, |x| <= 464 * 2**119 (3.08e38). float64 rows are
            rounded once for "fp8", by way of float32 for "int8".
        format: "fp8" or "int8" (the module's docstring has formulas and error bounds).
        out: (values, scales) to write to, such as a range of rows of a bigger table; None: new ones, on huge pages
            where the system gives them.
        progress: see `engram.progress`; counts rows, after every chunk.

    Returns:
        `out`, or new tensors on the table's device.

    Raises:
        ValueError: a wrong dtype, shape or format; an element that is NaN, infinite or too large (which row is said;
            the rows of earlier chunks have been written then).
    """
    check_format("quantize_table", format)
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if table.dim() != 2 or table.dtype not in floats:
        raise ValueError("quantize_table: table must be float64, float32, bfloat16 or float16 [R, d], "
                         f"got {table.dtype} {list(table.shape)}")
    rows, dim = table.shape
    if out is None:
        out = zero_table(rows, dim, format, device=table.device)
    else:
        wanted = zero_table(rows, dim, format, device="meta")
        for name, given, like in zip(("values", "scales"), out, wanted):
            if given.dtype != like.dtype or given.shape != like.shape:
                raise ValueError(f"quantize_table: {name} of out must be {like.dtype} {list(like.shape)}, "
                                 f"got {given.dtype} {list(given.shape)}")
    if table.numel() == 0 or table.is_meta:
        return out
    largest = min(LARGEST, torch.finfo(table.dtype).max)
    quantize = _quantize_fp8 if format == "fp8" else _quantize_int8
    step = max(1, CHUNK // dim)
    with reporting(progress, "quantising", " rows") as report:
        for begin in range(0, rows, step):
            chunk = table[begin : begin + step]
            fits = chunk.abs() <= largest           # False for NaN
            if not fits.all():
                row, column = (~fits).nonzero()[0].tolist()
                raise ValueError(f"quantize_table: table must be finite and at most {largest:.4g} in magnitude, "
                                 f"got {chunk[row, column].item()} in row {begin + row}")
            quantize(chunk, out[0][begin : begin + step], out[1][begin : begin + step])
            report(begin + len(chunk), rows)
    return out


def dequantize_table(values: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows of a quantised table as floats: a lookup of all of them.

    Args:
        values, scales: as of `quantize_table`, of either format.
        dtype: float64, float32 (both exact), bfloat16 (exact for "fp8" down to 2**-133) or float16.

    Returns:
        [R, d] in `dtype`.

    Raises:
        ValueError: values and scales are not of one of the formats.
    """
    lookup = ops.embedding_int8 if values.dtype == torch.int8 else ops.embedding_fp8
    return lookup(values, scales, torch.arange(len(values), device=values.device), dtype=dtype)


def check_format(who: str, format: str) -> None:
    """Raises ValueError unless `format` is one of FORMATS."""
    if format not in FORMATS:
        raise ValueError(f"{who}: format must be 'fp8' or 'int8', got {format!r}")


def _quantize_fp8(x: Tensor, values: Tensor, scales: Tensor) -> None:
    rows, dim = x.shape
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    blocks = torch.nn.functional.pad(x, (0, -dim % _BLOCK)).view(rows, -1, _BLOCK)
    # 464 = 0.90625 * 2**9, and frexp gives a fraction in [0.5, 1).
    fraction, exponent = torch.frexp(blocks.abs().amax(-1))
    exponent = exponent - 9 + (fraction > 0.90625).int()
    exponent = torch.where(fraction == 0, -127, exponent).clamp(min=-127)
    scaled = blocks * _power_of_two(-exponent[..., None])
    if x.dtype == torch.float64:
        # torch goes to float8 by way of float32. So here to four significant bits, or to the next multiple of 2**-9.
        step = _power_of_two(torch.frexp(scaled)[1].clamp(min=-5) - 4)
        scaled = torch.round(scaled / step) * step
    # What is above 448 is less than half a step above; not every torch rounds it down.
    scaled = scaled.clamp(-448, 448).view(rows, -1)[:, :dim]
    values.copy_(scaled.to(torch.float8_e4m3fn))
    scales.copy_((exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu))


def _power_of_two(exponent: Tensor) -> Tensor:
    """float32 2**exponent, exponent int32 in [-126, 127]."""
    return (exponent + 127 << 23).view(torch.float32)


def _quantize_int8(x: Tensor, values: Tensor, scales: Tensor) -> None:
    x = x.float()
    scale = (x.abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    # 17 bits and the 7 of a value make a product that is exact in float32.
    scale = (scale.view(torch.int32) + 127 & ~127).view(torch.float32)
    values.copy_(torch.round(x / scale[:, None]).to(torch.int8))
    scales.copy_(scale)
