"""embedding: its errors, the edges of the table, tables past 2**31 elements."""
import os
import re
import time

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, named

INT64_MAX = torch.iinfo(torch.int64).max
LOOKUP = [ops.embedding, reference.embedding]


@pytest.mark.parametrize("function", LOOKUP)
@pytest.mark.parametrize("row", [-1, -100, 37, 38, INT64_MAX, -INT64_MAX - 1])
def test_rows_outside_the_table(function, row):
    inputs = named("embedding", "plain")[0]()
    inputs["rows"][1, 2, 3] = row
    with pytest.raises(IndexError, match=rf"^embedding: rows must be in \[0, 37\).*, got {row}$"):
        function(**inputs)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2] = False                  # masked rows are never read
    assert not function(**inputs | dict(mask=mask))[1, 2].any()


@pytest.mark.parametrize("function", LOOKUP)
@pytest.mark.parametrize("row_begin", [0, 100, 2**62])
@pytest.mark.parametrize("far", [INT64_MAX, -INT64_MAX - 1, 0])
def test_rows_of_other_shards(function, row_begin, far):
    """Just outside and far outside the shard: zeros, no gradient, no wrapped difference."""
    table = torch.ones(5, 3, requires_grad=True)
    rows = torch.tensor([[row_begin - 1, row_begin, row_begin + 5, far]])
    out = function(table, rows, row_begin=row_begin)
    inside = torch.tensor([[row_begin <= row < row_begin + 5 for row in rows[0].tolist()]])
    assert torch.equal(out, inside[..., None].float().expand(1, 4, 3))
    out.sum().backward()
    assert table.grad.sum() == 3 * inside.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_of_the_table_are_not_read(dtype, device):
    room = torch.full((37 + 2, 7), 1234.0, dtype=dtype, device=device)
    table = room[1:-1]
    table.copy_(torch.randn(37, 7))
    rows = torch.arange(-1, 38, device=device)[:, None]
    assert torch.equal(ops.embedding(table, rows[1:-1])[:, 0], table)
    shard = ops.embedding(table, rows + 50, row_begin=50)[:, 0]
    assert torch.equal(shard[1:-1], table) and not shard[0].any() and not shard[-1].any()
    if device == "cpu":
        for outside in (rows[:1], rows[-1:]):
            with pytest.raises(IndexError):
                ops.embedding(table, outside)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_rows_that_were_read_get_a_gradient(dtype, device):
    inputs = named("embedding", "mask")[0](device, dtype)
    table = inputs["table"].requires_grad_()
    ops.embedding(**inputs).sum().backward()
    read = torch.bincount(inputs["rows"][inputs["mask"]].flatten(), minlength=37)
    assert torch.equal(table.grad, read[:, None].to(dtype).expand_as(table))
    assert (read == 0).any() and (read > 1).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int32_rows_equal_int64_rows(dtype, device):
    inputs = named("embedding", "int32")[0](device, dtype)
    tables = [inputs["table"].clone().requires_grad_() for _ in range(2)]
    outs = [ops.embedding(table, inputs["rows"].to(kind)) for table, kind in zip(tables, (torch.int32, torch.int64))]
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(*outs) and torch.equal(tables[0].grad, tables[1].grad)


@pytest.mark.parametrize("device", DEVICES)
def test_any_bits_are_copied(device):
    """A lookup is a copy: NaN payloads and the sign of zero survive."""
    bits = torch.arange(-2**15, 2**15, dtype=torch.int16, device=device).view(-1, 8)
    for dtype in (torch.bfloat16, torch.float16):
        out = ops.embedding(bits.view(dtype), torch.arange(bits.shape[0], device=device)[:, None])
        assert torch.equal(out.view(torch.int16)[:, 0], bits)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 264])
def test_table_past_2_31_elements(tmp_path, width):
    """A sparse file holds the table: only the touched pages are ever real."""
    rows = 2**31 // width + 10
    table = torch.from_file(str(tmp_path / "table"), shared=True, size=rows * width, dtype=torch.bfloat16)
    table = table.view(rows, width)
    wanted = torch.tensor([[0, rows // 2, rows - 2, rows - 1]])
    expected = torch.randn(4, width).bfloat16()
    table[wanted[0]] = expected
    assert torch.equal(ops.embedding(table, wanted)[0], expected)
    assert torch.equal(ops.embedding(table, wanted + 77, row_begin=77)[0], expected)
    if rows <= 2**31:
        assert torch.equal(ops.embedding(table, wanted.int())[0], expected)
    with pytest.raises(IndexError):
        ops.embedding(table, wanted + 1)


FREE_MEMORY = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(FREE_MEMORY < 8 << 30, reason="its dense gradient takes 4 GiB, and less than 8 are free")
def test_gradient_past_2_31_elements():
    width = 264
    rows = 2**31 // width + 10
    touched = torch.tensor([[0, rows - 1, rows - 1, rows // 2]])
    grad_out = torch.randn(1, 4, width).bfloat16()
    grad = torch.ops.engram.embedding_backward(grad_out, touched, rows)
    last = (grad_out[0, 1].float() + grad_out[0, 2].float()).bfloat16()
    assert torch.equal(grad[touched[0]], torch.stack([grad_out[0, 0], last, last, grad_out[0, 3]]))
    assert not grad[rows - 2].any() and not grad[1].any()


@pytest.mark.parametrize("table_rows", [1, 50_000])
def test_backward_keeps_pace_with_forward(table_rows):
    """Within a factor that a serial or quadratic sum misses by far, for scattered rows and for one that takes all."""
    table = torch.randn(table_rows, 64)
    rows = torch.randint(table_rows, (6000, 16), generator=torch.Generator().manual_seed(0))
    grad_out = torch.randn(6000, 16, 64)

    def fastest(function):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    forward = fastest(lambda: ops.embedding(table, rows))
    assert fastest(lambda: torch.ops.engram.embedding_backward(grad_out, rows, table_rows)) < 40 * forward


def test_sparse_gradients_wait_for_their_turn():
    inputs = named("embedding", "plain")[0]()
    with pytest.raises(NotImplementedError, match="^embedding: sparse_grad=True"):
        ops.embedding(**inputs, sparse_grad=True)


@pytest.mark.parametrize("argument, value, expected", [
    ("table", torch.zeros(37, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("table", torch.zeros(37, 16, dtype=torch.complex64), "float64, float32, bfloat16 or float16"),
    ("table", torch.zeros(37), "[R, d]"),
    ("table", torch.zeros(1, 37, 16), "[R, d]"),
    ("rows", torch.zeros(2, 5, 4), "int64 or int32"),
    ("rows", torch.zeros(2, 5, 4, dtype=torch.bool), "int64 or int32"),
    ("rows", torch.zeros(2, 5, 4, dtype=torch.int16), "int64 or int32"),
    ("rows", torch.tensor(3), "[..., C]"),
    ("mask", torch.ones(2, 5), "bool"),
    ("mask", torch.ones(2, 5, dtype=torch.int64), "bool"),
    ("mask", torch.ones(2, 5, 4, dtype=torch.bool), "[2, 5]"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[2, 5]"),
])
def test_errors(argument, value, expected):
    inputs = named("embedding", "plain")[0]() | {argument: value}
    with pytest.raises(ValueError, match=rf"^embedding: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.embedding(**inputs)


@pytest.mark.parametrize("change, error, message", [
    (dict(grad_out=torch.zeros(2, 5, 3, 16)), ValueError, "grad_out must be"),
    (dict(grad_out=torch.zeros(2, 5, 4, 16, dtype=torch.int64)), ValueError, "grad_out must be"),
    (dict(num_rows=-1), ValueError, "num_rows must be at least 0"),
    (dict(num_rows=5), IndexError, r"rows must be in \[0, 5\)"),
    (dict(mask=torch.ones(2, 4, dtype=torch.bool)), ValueError, "mask must be"),
])
def test_backward_errors(change, error, message):
    rows = named("embedding", "plain")[0]()["rows"]
    inputs = dict(grad_out=torch.zeros(2, 5, 4, 16), rows=rows, num_rows=37) | change
    with pytest.raises(error, match=f"^embedding_backward: {message}"):
        torch.ops.engram.embedding_backward(**inputs)


@pytest.mark.parametrize("argument", ["rows", "mask"])
def test_devices_do_not_mix(argument):
    inputs = named("embedding", "mask")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^embedding: .*{argument} on meta"):
        ops.embedding(**inputs)


@pytest.mark.parametrize("function", [ops.embedding, reference.embedding])
def test_a_shard_cannot_begin_below_zero(function):
    with pytest.raises(ValueError, match=r"^embedding: row_begin must be at least 0, got -3$"):
        function(torch.zeros(5, 2), torch.zeros(1, 1, dtype=torch.int64), row_begin=-3)
