"""From float rows to quantised tables and back, and the module that looks them up."""
import copy
import threading

import pytest
import torch
from engram import huge_page_share, nn, ops, quantize
from engram.quantize import FORMATS, dequantize_table, quantize_table, zero_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def raw(pair) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int32) for tensor in pair]


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(raw(first), raw(second), strict=True))


def rows_of_all_sizes(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose largest element goes from subnormal to the largest that is allowed, among zeros and smaller ones."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(600, width, generator=draw, dtype=torch.float64)
    low, high = {torch.float16: (-24, 13)}.get(dtype, (-149, 124))
    exponents = torch.randint(low, high, (600, 1), generator=draw) + torch.randint(-12, 1, (600, width), generator=draw)
    rows = (rows * 2.0**exponents).to(dtype)
    rows[:20] = 0
    rows[20:40, 1:] = 0
    return rows


def scale_of(x: torch.Tensor) -> torch.Tensor:
    """The scale of each block of 32 by the definition, in float64."""
    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).abs().amax(-1)
    return 2.0 ** torch.ceil(torch.log2((blocks / 464).clamp(min=2.0**-127)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 32, 80, 256])
def test_fp8_errors_are_bounded(width, dtype):
    x = rows_of_all_sizes(width, dtype)
    values, scales = quantize_table(x, "fp8")
    assert values.shape == x.shape and values.dtype == torch.float8_e4m3fn
    assert scales.shape == (600, -(-width // 32)) and scales.dtype == torch.float8_e8m0fnu
    assert torch.equal(scales.double(), scale_of(x))
    y, x = dequantize_table(values, scales, dtype=torch.float64), x.double()
    scale = scales.double().repeat_interleave(32, 1)[:, :width]
    error = (y - x).abs()
    assert (error <= torch.maximum(2.0**-4 * x.abs(), 2.0**-10 * scale)).all()
    largest = (464 * 2.0**-127 < scale * 464) & (scale > 2.0**-127)    # where the scale follows the block
    block = torch.nn.functional.pad(x, (0, -width % 32)).unflatten(1, (-1, 32)).abs().amax(-1)
    block = block.repeat_interleave(32, 1)[:, :width]
    assert (error <= torch.maximum(2.0**-4 * x.abs(), 2.0**-17 * block))[largest].all() and largest.any()
    assert torch.equal(y.signbit(), x.signbit()) and not values.float().isnan().any()
    # As near as can be: no other value under the same scale is nearer.
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (x[:40, :, None] / scale[:40, :, None] - grid[~grid.isnan()]).abs().amin(-1) * scale[:40]
    assert torch.equal(error[:40], nearest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 80, 256])
def test_int8_errors_are_bounded(width, dtype):
    x = rows_of_all_sizes(width, dtype)
    values, scales = quantize_table(x, "int8")
    assert values.shape == x.shape and values.dtype == torch.int8
    assert scales.shape == (600,) and scales.dtype == torch.float32
    y, x, scale = dequantize_table(values, scales, dtype=torch.float64), x.double(), scales.double()[:, None]
    least = (x.abs().amax(1, True) / 127).clamp(min=2.0**-126)
    assert ((scale >= least * (1 - 2.0**-24)) & (scale <= least * (1 + 2.0**-15))).all()
    assert ((y - x).abs() <= scale * (0.5 + 2.0**-17)).all()
    assert values.min() >= -127
    usual = least > 2.0**-126
    assert (values.abs().amax(1, True)[usual] == 127).all() and usual.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 80])
@pytest.mark.parametrize("format", FORMATS)
def test_again_gives_the_same_bytes(format, width, dtype):
    once = quantize_table(rows_of_all_sizes(width, dtype), format)
    for exact in (torch.float32, torch.float64):
        assert same(quantize_table(dequantize_table(*once, dtype=exact), format), once)
    assert torch.equal(dequantize_table(*once).double(), dequantize_table(*once, dtype=torch.float64))
    if format == "fp8":
        fits = once[1].view(torch.uint8).amin(1) >= 3       # above: bfloat16 is subnormal below 2**-133
        y = dequantize_table(*once, dtype=torch.bfloat16)
        assert same([t[fits] for t in raw(quantize_table(y, format))], [t[fits] for t in raw(once)])


def test_every_value_under_every_scale_survives():
    """What a block holds comes back as it was, wherever its largest value needs the scale it has."""
    values = torch.cat([torch.arange(0x7f), torch.arange(0x80, 0xff)]).to(torch.uint8)
    rows = torch.stack([torch.full((254,), 0x7e, dtype=torch.uint8), values], -1).repeat(247, 1)    # 448 beside each
    scales = torch.arange(247, dtype=torch.uint8).repeat_interleave(254)[:, None]
    table = rows.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
    assert same(quantize_table(dequantize_table(*table), "fp8"), table)


@pytest.mark.parametrize("limit, byte", [(448.0, 127), (464.0, 127), (464.0001, 128), (232.0, 126), (232.0001, 127)])
def test_fp8_scale_at_its_edges(limit, byte):
    for sign in (1, -1):
        values, scales = quantize_table(torch.tensor([[limit * sign, 1.0]], dtype=torch.float64))
        assert scales.view(torch.uint8).item() == byte
        nearest = min((448, 480, 224, 240), key=lambda y: abs(y - limit))
        assert abs(values[0, 0].double().item()) * 2.0**(byte - 127) == nearest


def test_float64_is_rounded_once():
    """Just above a tie of e4m3, nearer than float32 can tell: to the far neighbour, which float32 would not reach."""
    tie = 256 + 16.0
    x = torch.tensor([[448.0, tie + 2.0**-40, tie - 2.0**-40, tie, 2.0**-10 + 2.0**-60]], dtype=torch.float64)
    values, scales = quantize_table(x)
    assert scales.view(torch.uint8).item() == 127
    assert values[0].double().tolist() == [448, 288, 256, 256, 2.0**-9]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows, dim", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_small_tables(format, rows, dim):
    values, scales = quantize_table(torch.ones(rows, dim), format)
    assert values.shape == (rows, dim) and len(scales) == rows
    torch.testing.assert_close(dequantize_table(values, scales), torch.ones(rows, dim), rtol=2.0**-16, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_chunks_do_not_show(format, monkeypatch):
    x = torch.randn(1001, 48)
    whole = quantize_table(x, format)
    monkeypatch.setattr(quantize, "CHUNK", 48 * 7)
    assert same(quantize_table(x, format), whole)
    assert same(quantize_table(x.t().contiguous().t(), format), whole)
    monkeypatch.setattr(quantize, "CHUNK", 1)
    assert same(quantize_table(x, format), whole)


@pytest.mark.parametrize("format", FORMATS)
def test_the_source_is_read_in_chunks(format, monkeypatch):
    """Beside the result there is never more than some copies of a chunk, whatever the size of the table."""
    monkeypatch.setattr(quantize, "CHUNK", 1 << 12)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            storages = [x.untyped_storage() for x in torch.utils._pytree.tree_leaves(out)
                        if isinstance(x, torch.Tensor) and not x.is_meta]
            largest = max([largest, *(s.nbytes() for s in storages if s.data_ptr() not in known)])
            return out

    x, out = torch.randn(4000, 64), zero_table(4000, 64, format)
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *out)}
    with Watch():
        quantize_table(x, format, out=out)
    assert 0 < largest <= 1 << 16 and x.nbytes > 10 * largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.2e38])
def test_what_has_no_scale_is_refused(bad, format, dtype, monkeypatch):
    monkeypatch.setattr(quantize, "CHUNK", 100)
    x = torch.ones(77, 10, dtype=dtype)
    x[53, 4] = bad
    message = r"^quantize_table: table must be finite and at most .*, got .*(nan|inf|e\+38) in row 53"
    with pytest.raises(ValueError, match=message):
        quantize_table(x, format)


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_come_back_finite(format):
    x = torch.tensor([[quantize.LARGEST, -quantize.LARGEST, 1.0]])
    y = dequantize_table(*quantize_table(x, format))
    assert y.isfinite().all() and torch.allclose(y[:, :2], x[:, :2], rtol=2.0**-4)


@pytest.mark.parametrize("call, message", [
    (lambda: quantize_table(torch.ones(3, 4), "fp4"), "quantize_table: format must be 'fp8' or 'int8', got 'fp4'"),
    (lambda: quantize_table(torch.ones(4)), "quantize_table: table must be .*, got torch.float32 \\[4\\]"),
    (lambda: quantize_table(torch.ones(3, 4).int()), "quantize_table: table must be .*, got torch.int32"),
    (lambda: quantize_table(torch.ones(3, 4), out=zero_table(3, 5)),
     "quantize_table: values of out must be .*\\[3, 4\\]"),
    (lambda: quantize_table(torch.ones(3, 4), out=zero_table(3, 4, "int8")),
     "quantize_table: values of out must be torch.float8"),
    (lambda: quantize_table(torch.ones(3, 4), out=(zero_table(3, 4)[0], torch.ones(3))),
     "quantize_table: scales of out must be"),
    (lambda: zero_table(-1, 4), "zero_table: rows and dim must be at least 0, got -1 and 4"),
    (lambda: zero_table(1, 4, "int4"), "zero_table: format must be"),
    (lambda: dequantize_table(torch.ones(3, 4), torch.ones(3)), "embedding_fp8: values must be"),
])
def test_errors(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


# nn.QuantizedMultiHeadEmbedding

def module(format="fp8", sizes=(30, 20, 50), dim=40, **options) -> nn.QuantizedMultiHeadEmbedding:
    return nn.QuantizedMultiHeadEmbedding(sizes, dim, format=format, **options)


def float_rows(count=100, dim=40) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(0))


def some_rows() -> torch.Tensor:
    return torch.randint(100, (2, 7, 3), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
@pytest.mark.parametrize("format", FORMATS)
def test_module_looks_up(format, out_dtype):
    table = module(format, out_dtype=out_dtype)
    assert not table(some_rows()).any()         # zeros until something is loaded
    x = float_rows()
    table.load_float_rows(0, x[:33])
    table.load_float_rows(33, x[33:])
    expected = dequantize_table(*quantize_table(x, format), dtype=out_dtype or torch.bfloat16)
    rows, mask = some_rows(), torch.rand(2, 7) > 0.3
    out = table(rows, mask=mask)
    assert torch.equal(out, expected[rows] * mask[..., None, None])
    assert out.dtype == (out_dtype or torch.bfloat16) and not out.requires_grad
    assert torch.equal(table(rows.int(), mask, ops.row_plan(rows, 100)), out)


@pytest.mark.parametrize("format", FORMATS)
def test_module_has_buffers_alone(format):
    table = module(format)
    assert not list(table.parameters()) and {name for name, _ in table.named_buffers()} == {"values", "scales"}
    assert table.sizes == (30, 20, 50) and table.dim == 40 and f"format='{format}'" in repr(table)


@pytest.mark.parametrize("convert", [
    lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float16),
    copy.deepcopy, lambda m: m.share_memory(),
])
@pytest.mark.parametrize("format", FORMATS)
def test_conversions_leave_the_table(format, convert):
    table = module(format)
    table.load_float_rows(0, float_rows())
    expected = table(some_rows())
    table = convert(torch.nn.Sequential(table, torch.nn.Linear(3, 4)))[0]
    assert torch.equal(table(some_rows()), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_module_on_meta_and_back(format):
    table = module(format, sizes=(400_000_000,), dim=256, device="meta")
    assert table.values.is_meta and table.values.shape == (400_000_000, 256)
    assert table(torch.zeros(2, 5, 1, dtype=torch.int64, device="meta")).shape == (2, 5, 1, 256)
    table = module(format, device="meta").to_empty(device="cpu")
    table.reset_parameters()
    assert not table(some_rows()).any()
    table.load_float_rows(0, float_rows())
    other = module(format)
    other.load_state_dict(table.state_dict())
    assert same((other.values, other.scales), (table.values, table.scales))
    assert module(format).to(torch.half).to("meta").values.dtype == table.values.dtype


@pytest.mark.parametrize("format", FORMATS)
def test_module_of_fake_tensors(format):
    with FakeTensorMode():
        table = module(format, sizes=(400_000_000,), dim=256)
        assert isinstance(table.values, FakeTensor) and table.values.shape == (400_000_000, 256)
        assert table(torch.zeros(2, 5, 1, dtype=torch.int64)).shape == (2, 5, 1, 256)


@pytest.mark.parametrize("format, name, wrong", [
    ("fp8", "values", torch.ones(100, 40)), ("fp8", "scales", torch.ones(100, 2)),
    ("fp8", "scales", torch.ones(100, 2, dtype=torch.uint8)), ("int8", "values", torch.ones(100, 40)),
    ("int8", "scales", torch.ones(100, dtype=torch.float64)),
])
def test_state_dict_of_another_dtype_is_refused(format, name, wrong):
    table = module(format)
    table.load_float_rows(0, float_rows())
    expected, state = table(some_rows()), table.state_dict() | {name: wrong}
    with pytest.raises(RuntimeError, match=f"{name}: must be torch.*, got {wrong.dtype}"):
        table.load_state_dict(state)
    assert torch.equal(table(some_rows()), expected)
    with pytest.raises(RuntimeError, match="size mismatch for values"):
        table.load_state_dict(module(format, sizes=(7,)).state_dict())


@pytest.mark.parametrize("call, message", [
    (lambda: module(sizes=()), "needs sizes, dim and row_multiple >= 1"),
    (lambda: module(sizes=(3, 0)), "needs sizes, dim and row_multiple >= 1"),
    (lambda: module(dim=0), "needs sizes, dim and row_multiple >= 1"),
    (lambda: module("fp4"), "format must be 'fp8' or 'int8', got 'fp4'"),
    (lambda: module(out_dtype=torch.int8), "out_dtype must be float64, float32, bfloat16 or float16, got torch.int8"),
    (lambda: module()(torch.zeros(2, 4, dtype=torch.int64)), "rows must be \\[..., 3\\]"),
    (lambda: module().load_float_rows(0, torch.ones(2, 39)), "rows must be \\[n, 40\\]"),
    (lambda: module().load_float_rows(-1, torch.ones(2, 40)), "rows must lie within \\[0, 100\\), got \\[-1, 1\\)"),
    (lambda: module().load_float_rows(99, torch.ones(2, 40)), "rows must lie within \\[0, 100\\), got \\[99, 101\\)"),
])
def test_module_errors(call, message):
    with pytest.raises(ValueError, match=f"^QuantizedMultiHeadEmbedding: {message}"):
        call()


@pytest.mark.parametrize("format", FORMATS)
def test_module_uses_huge_pages(format):
    small, large = module(format), module(format, sizes=(200_000,), dim=64)
    large.load_float_rows(0, torch.ones(200_000, 64))
    plain = torch.empty(0).new_ones(16 << 20)
    assert huge_page_share(small.values) == 0 and large.values.data_ptr() % (2 << 20) == 0
    assert huge_page_share(large.values) >= huge_page_share(plain) or huge_page_share(large.values) > 0.9
    assert ("huge pages" in repr(large)) == (huge_page_share(large.values) > 0)


def test_lookups_run_beside_each_other():
    table = module()
    table.load_float_rows(0, float_rows())
    expected, found = table(some_rows()), []
    threads = [threading.Thread(target=lambda: found.append(table(some_rows()))) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert len(found) == 4 and all(torch.equal(out, expected) for out in found)
