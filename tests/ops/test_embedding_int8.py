"""embedding_int8: the rounding of its products, tables past 2**31 elements, errors; see test_scaled_lookups."""
import re

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, HALF_DTYPES, bits, named

LOOKUP = [ops.embedding_int8, reference.embedding_int8]
ALL = torch.arange(-128, 128).to(torch.int8)


def scales_of_all_kinds() -> torch.Tensor:
    """float32: random in sign, exponent and mantissa, subnormal ones too, and those at the edges."""
    draw = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (3000,), generator=draw).int().view(torch.float32)
    usual = torch.randn(1000, generator=draw)
    near_half_types = 2.0 ** torch.randint(-30, 17, (1000,), generator=draw) * (1 + torch.rand(1000, generator=draw))
    edges = [0.0, -0.0, 1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-133, 2.0**-24, 65504 / 127, 65520 / 127, 3.4e38,
             2.0**127, torch.inf, -torch.inf, torch.nan]
    short = usual.half().float()        # their products with int8 fall on ties
    return torch.cat([any_bits, usual, near_half_types, short, torch.tensor(edges)])


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next numbers towards and away from zero, of finite x in a half type, in float64."""
    magnitude = x.view(torch.int16) & 0x7fff
    return (((magnitude - 1).clamp(min=0)).view(x.dtype).double(), (magnitude + 1).view(x.dtype).double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", LOOKUP)
def test_every_product_is_rounded_once(function, dtype, device):
    scales = scales_of_all_kinds()
    values = ALL.repeat(len(scales), 1)
    rows = torch.arange(len(scales))[:, None]
    out = function(values.to(device), scales.to(device), rows.to(device), dtype=dtype)[:, 0].cpu()
    exact = values.double() * scales.double()[:, None]
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.signbit()[~out.isnan()], exact.signbit()[~out.isnan()])
    if dtype not in HALF_DTYPES:
        assert torch.equal(bits(out), bits(exact.to(dtype)))
        return
    # Nothing lies nearer, and of two that are as near the even one was taken. The first number past the largest counts
    # as what it would be with one more exponent: that is where infinity begins.
    found = exact.isfinite()
    out, exact = out[found], exact[found].abs()
    beyond = 2.0 ** (16 if dtype == torch.float16 else 128)
    here = torch.where(out.isinf(), beyond, out.double().abs())
    below, above = neighbours(torch.where(out.isinf(), torch.finfo(dtype).max, out))
    below = torch.where(out.isinf(), torch.finfo(dtype).max, below)
    above = torch.where(out.isinf(), torch.inf, above.nan_to_num(beyond, posinf=beyond))
    error, even = (exact - here).abs(), out.view(torch.int16) % 2 == 0
    closer = torch.minimum((exact - below).abs().where(here > 0, torch.inf), (above - exact).abs())
    past = out.isinf() & (exact >= here)
    assert (past | (error < closer) | (error == closer) & even).all()
    tie = error == closer
    assert tie.any() and (~tie & (error > 0)).any() and out.isinf().any()


def test_float32_on_the_way_would_show():
    """A product that float32 rounds to a tie of bfloat16: the second rounding then goes the wrong way."""
    scale = torch.tensor([0.])
    for candidate in torch.randint(0x3f800000, 0x40000000, (20000,), generator=torch.Generator().manual_seed(0)):
        scale = candidate.int().view(1).view(torch.float32)
        if (ALL.float() * scale).bfloat16().ne(reference.embedding_int8(ALL[None], scale, torch.tensor([0]))).any():
            break
    out = ops.embedding_int8(ALL[None], scale, torch.tensor([0]))
    assert out.ne((ALL.float() * scale).bfloat16()).any()
    assert torch.equal(out, reference.embedding_int8(ALL[None], scale, torch.tensor([0])))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 264])
def test_table_past_2_31_elements(tmp_path, width):
    """Sparse files hold the table: only the touched pages are ever real."""
    rows = 2**31 // width + 10
    values = torch.from_file(str(tmp_path / "values"), shared=True, size=rows * width, dtype=torch.int8)
    values = values.view(rows, width)
    scales = torch.from_file(str(tmp_path / "scales"), shared=True, size=rows, dtype=torch.float32)
    wanted = torch.tensor([[0, rows // 2, rows - 2, rows - 1]])
    values[wanted[0]] = torch.randint(-128, 128, (4, width), dtype=torch.int8)
    scales[wanted[0]] = torch.randn(4)
    expected = reference.embedding_int8(values[wanted[0]], scales[wanted[0]], torch.arange(4)[None])
    assert torch.equal(ops.embedding_int8(values, scales, wanted), expected)
    assert torch.equal(ops.embedding_int8(values, scales, wanted + 77, row_begin=77), expected)
    if rows <= 2**31:
        assert torch.equal(ops.embedding_int8(values, scales, wanted.int()), expected)
    with pytest.raises(IndexError):
        ops.embedding_int8(values, scales, wanted + 1)


@pytest.mark.parametrize("argument, value, expected", [
    ("values", torch.zeros(37, 80), "int8 [R, d]"),
    ("values", torch.zeros(37, 80, dtype=torch.uint8), "int8 [R, d], got uint8"),
    ("values", torch.zeros(37 * 80, dtype=torch.int8), "int8 [R, d]"),
    ("scales", torch.zeros(37, dtype=torch.float64), "float32, got float64"),
    ("scales", torch.zeros(37, dtype=torch.bfloat16), "float32, got bfloat16"),
    ("scales", torch.zeros(37, 1), "[37]"),
    ("scales", torch.zeros(36), "[37]"),
    ("rows", torch.zeros(2, 5, 4), "int64 or int32"),
    ("rows", torch.zeros(2, 5, 4, dtype=torch.int16), "int64 or int32"),
    ("rows", torch.tensor(3), "[..., C]"),
    ("dtype", torch.int8, "float64, float32, bfloat16 or float16, got int8"),
    ("row_begin", -3, "at least 0, got -3"),
    ("mask", torch.ones(2, 5), "bool"),
    ("mask", torch.ones(2, 5, 4, dtype=torch.bool), "[2, 5]"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[2, 5]"),
])
def test_errors(argument, value, expected):
    inputs = named("embedding_int8", "plain")[0](dtype=torch.float32) | {argument: value}
    with pytest.raises(ValueError, match=rf"^embedding_int8: {argument} must be .*{re.escape(expected)}"):
        ops.embedding_int8(**inputs)
    with pytest.raises(ValueError, match=rf"^embedding_int8: {argument} must be "):
        reference.embedding_int8(**inputs)
