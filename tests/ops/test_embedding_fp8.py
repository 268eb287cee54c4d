"""embedding_fp8: every pair of bytes, tables past 2**31 elements, errors; see test_scaled_lookups."""
import math
import re

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, bits, named

LOOKUP = [ops.embedding_fp8, reference.embedding_fp8]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def e4m3(byte: int) -> float:
    """A value by the definition of the format."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (2.0**(exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9)


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0**(byte - 127)


VALUES = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)
SCALES = torch.tensor([e8m0(byte) for byte in range(256)], dtype=torch.float64)


def one_of_each(width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [65536 / width, width] and [65536 / width, ceil(width / 32)]: every value under every scale."""
    per_scale = 256 // width
    values = torch.arange(256, dtype=torch.uint8).view(per_scale, width).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(per_scale)
    return values.to(device), scales[:, None].expand(-1, -(-width // 32)).contiguous().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", LOOKUP)
@pytest.mark.parametrize("width", [256, 1, 8])
def test_every_pair_of_bytes(width, function, dtype, device):
    values, scales = one_of_each(width, device)
    out = function(values.view(E4M3), scales.view(E8M0), torch.arange(len(values), device=device)[:, None], dtype=dtype)
    exact = (VALUES * SCALES[:, None]).view(-1, 1, width)
    # Four bits are exact in float32, or past its largest number; so the second rounding is the only one.
    expected = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert torch.equal(bits(out.cpu()), bits(expected))


def test_every_pair_is_as_torch_has_it():
    values, scales = one_of_each(256, "cpu")
    torch.testing.assert_close(values[0].view(E4M3).double(), VALUES, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scales[:, 0].view(E8M0).double(), SCALES, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_block_has_its_own_scale(dtype, device):
    """Blocks end at multiples of 32, the last one may be short."""
    width = 75
    values = torch.full((4, width), 0x38, dtype=torch.uint8, device=device)      # 1.0
    scales = torch.arange(120, 132, dtype=torch.uint8, device=device).view(4, 3)
    out = ops.embedding_fp8(values.view(E4M3), scales.view(E8M0), torch.arange(4, device=device), dtype=dtype)
    expected = (2.0 ** (scales.double() - 127)).repeat_interleave(32, 1)[:, :width]
    assert torch.equal(out.double(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 264])
def test_table_past_2_31_elements(tmp_path, width):
    """Sparse files hold the table: only the touched pages are ever real."""
    rows, blocks = 2**31 // width + 10, -(-width // 32)
    values, scales = (torch.from_file(str(tmp_path / name), shared=True, size=rows * columns, dtype=torch.uint8)
                      .view(rows, columns) for name, columns in (("values", width), ("scales", blocks)))
    wanted = torch.tensor([[0, rows // 2, rows - 2, rows - 1]])
    values[wanted[0]] = torch.randint(0, 126, (4, width), dtype=torch.uint8)
    scales[wanted[0]] = torch.randint(110, 140, (4, blocks), dtype=torch.uint8)
    small = values[wanted[0]].view(E4M3), scales[wanted[0]].view(E8M0)
    expected = reference.embedding_fp8(*small, torch.arange(4)[None])
    table = values.view(E4M3), scales.view(E8M0)
    assert torch.equal(ops.embedding_fp8(*table, wanted), expected)
    assert torch.equal(ops.embedding_fp8(*table, wanted + 77, row_begin=77), expected)
    if rows <= 2**31:
        assert torch.equal(ops.embedding_fp8(*table, wanted.int()), expected)
    with pytest.raises(IndexError):
        ops.embedding_fp8(*table, wanted + 1)


@pytest.mark.parametrize("argument, value, expected", [
    ("values", torch.zeros(37, 80), "float8_e4m3fn [R, d]"),
    ("values", torch.zeros(37, 80, dtype=torch.uint8), "float8_e4m3fn [R, d], got uint8"),
    ("values", torch.zeros(37, 80).to(torch.float8_e5m2), "float8_e4m3fn [R, d]"),
    ("values", torch.zeros(37 * 80).to(E4M3), "float8_e4m3fn [R, d]"),
    ("scales", torch.zeros(37, 3), "float8_e8m0fnu"),
    ("scales", torch.zeros(37, 3, dtype=torch.uint8), "float8_e8m0fnu"),
    ("scales", torch.ones(37, 2).to(E8M0), "[37, 3]"),
    ("scales", torch.ones(36, 3).to(E8M0), "[37, 3]"),
    ("scales", torch.ones(37).to(E8M0), "[37, 3]"),
    ("rows", torch.zeros(2, 5, 4), "int64 or int32"),
    ("rows", torch.zeros(2, 5, 4, dtype=torch.int16), "int64 or int32"),
    ("rows", torch.tensor(3), "[..., C]"),
    ("dtype", torch.int32, "float64, float32, bfloat16 or float16, got int32"),
    ("dtype", E4M3, "float64, float32, bfloat16 or float16, got float8_e4m3fn"),
    ("row_begin", -3, "at least 0, got -3"),
    ("mask", torch.ones(2, 5), "bool"),
    ("mask", torch.ones(2, 5, 4, dtype=torch.bool), "[2, 5]"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[2, 5]"),
])
def test_errors(argument, value, expected):
    inputs = named("embedding_fp8", "plain")[0](dtype=torch.float32) | {argument: value}
    with pytest.raises(ValueError, match=rf"^embedding_fp8: {argument} must be .*{re.escape(expected)}"):
        ops.embedding_fp8(**inputs)
    with pytest.raises(ValueError, match=rf"^embedding_fp8: {argument} must be "):
        reference.embedding_fp8(**inputs)
