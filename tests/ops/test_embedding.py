"""embedding: its errors, the edges of the table, tables past 2**31 elements."""
import importlib
import re
import time
from pathlib import Path

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, SAMPLES, named

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
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cuts", [(0, 37), (0, 1, 37), (0, 12, 12, 30, 37)], ids=str)
def test_shards_are_slices_of_the_whole(cuts, masked, dtype, device):
    """Forward, dense and sparse gradients of each shard: the bits of the unsharded op, whatever the cut."""
    inputs = named("embedding", "mask" if masked else "repeats")[0](device, dtype)
    table = inputs["table"].requires_grad_()
    out = ops.embedding(**inputs)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    dense, = torch.autograd.grad(out, table, grad_out)
    for begin, end in zip(cuts, cuts[1:]):
        shard = table.detach()[begin:end].requires_grad_()
        options = inputs | dict(table=shard, row_begin=begin)
        part = ops.embedding(**options)
        inside = (inputs["rows"] >= begin) & (inputs["rows"] < end)
        assert torch.equal(part, torch.where(inside[..., None], out, 0))
        plan = ops.row_plan(inputs["rows"], end - begin, row_begin=begin, mask=inputs["mask"])
        for sparse, given in ((False, None), (True, None), (False, plan), (True, plan)):
            grad, = torch.autograd.grad(ops.embedding(**options, sparse_grad=sparse, plan=given), shard, grad_out)
            assert torch.equal(grad.to_dense(), dense[begin:end])
            if sparse:
                seen = inside if inputs["mask"] is None else inside & inputs["mask"][..., None]
                assert torch.equal(grad.indices()[0], inputs["rows"][seen].unique() - begin)


def test_rows_of_other_shards_cost_nothing(tmp_path):
    """The lookup reads no page of the table for them, and their gradient is empty."""
    rows, width = 1 << 16, 64
    path = str(tmp_path / "table")
    table = torch.from_file(path, shared=True, size=rows * width).view(rows, width)
    foreign = torch.randint(rows, (4096, 8))
    foreign[::2] += 2 * rows                    # below the shard [rows, 2 * rows), and beyond it

    def resident() -> int:
        return int(Path("/proc/self/smaps").read_text().split(path)[1].split("Rss:")[1].split()[0])

    out = ops.embedding(table, foreign, row_begin=rows)
    assert resident() == 0 and not out.any()
    keys, runs, count = ops.row_plan(foreign, rows, row_begin=rows)
    assert count.item() == 0
    assert torch.ops.engram.row_sum(out, keys, runs, count)[1].shape == (0, width)
    ops.embedding(table, foreign[1:2], row_begin=0)
    assert resident() > 0


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


AVAILABLE_GIB = int(re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)[1]) / 2**20


@pytest.mark.slow
@pytest.mark.skipif(AVAILABLE_GIB < 6, reason=f"its dense gradient takes 4 of 6 GiB that should be available "
                                              f"(/proc/meminfo), and {AVAILABLE_GIB:.1f} are")
def test_gradient_past_2_31_elements():
    width = 264
    rows = 2**31 // width + 10
    touched = torch.tensor([[0, rows - 1, rows - 1, rows // 2]])
    grad_out = torch.randn(1, 4, width).bfloat16()
    grad = torch.ops.engram.embedding_backward(grad_out, *ops.row_plan(touched, rows), rows)
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
    def backward():
        torch.ops.engram.embedding_backward(grad_out, *ops.row_plan(rows, table_rows), table_rows)

    assert fastest(backward) < 40 * forward


def gradients(inputs: dict, function=ops.embedding, **options) -> torch.Tensor:
    table = inputs["table"].detach().clone().requires_grad_()
    out = function(**inputs | dict(table=table) | options)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(out, table, grad_out.to(out))[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", SAMPLES["embedding"], ids=str)
def test_sparse_gradient(sample, dtype, device):
    """Coalesced, of the rows that were read only, and to the bit the dense one; a plan changes nothing."""
    inputs = sample(device, dtype)
    sparse, dense = gradients(inputs, sparse_grad=True), gradients(inputs)
    assert sparse.layout == torch.sparse_coo and sparse.is_coalesced() and sparse.dtype == dtype
    rows = sparse.indices()[0]
    assert sparse.shape == dense.shape and bool((rows.diff() > 0).all())
    assert torch.equal(sparse.to_dense(), dense)
    read = inputs["rows"] - (inputs["row_begin"] or 0)
    seen = torch.ones_like(read, dtype=torch.bool) if inputs["mask"] is None else inputs["mask"][..., None]
    inside = seen & (inputs["rows"] >= (inputs["row_begin"] or 0)) & (read < len(dense))
    assert torch.equal(rows, read[inside].unique())
    plan = ops.row_plan(inputs["rows"], len(dense), row_begin=inputs["row_begin"], mask=inputs["mask"])
    assert torch.equal(gradients(inputs, sparse_grad=True, plan=plan).to_dense(), dense)
    assert torch.equal(gradients(inputs, plan=plan), dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "mask", "repeats", "shard"])
def test_the_reference_is_sparse_too(name, dtype):
    inputs = named("embedding", name)[0]("cpu", dtype)
    expected, actual = gradients(inputs, reference.embedding, sparse_grad=True), gradients(inputs, sparse_grad=True)
    assert expected.is_coalesced() and torch.equal(expected.indices(), actual.indices())
    assert torch.allclose(expected.values().double(), actual.values().double(), rtol=2**-7 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_4096_ones(dtype, device):
    table = torch.zeros(9, 8, dtype=dtype, device=device, requires_grad=True)
    ops.embedding(table, torch.full((4096, 1), 5, device=device), sparse_grad=True).sum().backward()
    assert table.grad._indices().tolist() == [[5]] and table.grad._values().tolist() == [[4096.0] * 8]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sparse_gradient_compiles(backend):
    """One graph, forward and backward, and none but dynamic recompilations for other sizes."""
    compiled = torch.compile(lambda table, rows: ops.embedding(table, rows, sparse_grad=True).sin(), fullgraph=True,
                             dynamic=True, backend=backend)
    for tokens in (6, 11):
        tables = [torch.randn(40, 8).requires_grad_() for _ in range(2)]
        tables[1].data.copy_(tables[0].data)
        rows = torch.randint(40, (tokens, 5))
        compiled(tables[0], rows).sum().backward()
        ops.embedding(tables[1], rows).sin().sum().backward()
        assert tables[0].grad.layout == torch.sparse_coo
        assert torch.allclose(tables[0].grad.to_dense(), tables[1].grad)


def test_a_frozen_table_costs_nothing(monkeypatch):
    def never(*_):
        raise AssertionError("a backward for a table that needs none")

    weight = torch.ones(4, requires_grad=True)
    monkeypatch.setattr(importlib.import_module("engram.ops.embedding"), "row_plan", never)
    (ops.embedding(torch.ones(9, 4), torch.zeros(3, 2, dtype=torch.int64), sparse_grad=True) * weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 6.0))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 264])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_sparse_gradient_past_2_31_elements(tmp_path, width, kind):
    rows = 2**31 // width + 10
    if width == 1 and kind == torch.int32:
        rows = 2**31 - 1
    table = torch.from_file(str(tmp_path / "table"), shared=True, size=rows * width, dtype=torch.bfloat16)
    table = table.view(rows, width).requires_grad_()
    touched = torch.tensor([[0, rows - 1, rows - 1, rows // 2]], dtype=torch.int64)
    if rows <= 2**31 - 1:
        touched = touched.to(kind)
    grad_out = torch.randn(1, 4, width).bfloat16()
    grad, = torch.autograd.grad(ops.embedding(table, touched, sparse_grad=True), table, grad_out)
    last = (grad_out[0, 1].float() + grad_out[0, 2].float()).bfloat16()
    assert grad.indices()[0].tolist() == [0, rows // 2, rows - 1]
    assert torch.equal(grad.values(), torch.stack([grad_out[0, 0], grad_out[0, 3], last]))


@pytest.mark.parametrize("argument, value, expected", [
    ("keys", torch.zeros(39, dtype=torch.int64), "[slots]"),
    ("keys", torch.zeros(40), "int64"),
    ("runs", torch.zeros(40, dtype=torch.int64), "[slots + 1]"),
    ("count", torch.zeros(2, dtype=torch.int64), "[1]"),
])
def test_plan_errors(argument, value, expected):
    inputs = named("embedding", "plain")[0]()
    plan = ops.row_plan(inputs["rows"], 37)._replace(**{argument: value})
    with pytest.raises(ValueError, match=rf"^embedding: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.embedding(**inputs, plan=plan)


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


@pytest.mark.parametrize("change, message", [
    (dict(grad_out=torch.zeros(2, 5, 3, 16)), "keys must be"),
    (dict(grad_out=torch.zeros(2, 5, 4, 16, dtype=torch.int64)), "grad_out must be"),
    (dict(grad_out=torch.zeros(40)), "grad_out must be"),
    (dict(num_rows=-1), "num_rows must be at least 0"),
    (dict(num_rows=5), "keys must be a row plan for 5 rows, got one that touches row 36"),
])
def test_backward_errors(change, message):
    rows = named("embedding", "plain")[0]()["rows"]
    rows[0, 0, 0] = 36
    inputs = dict(zip(("keys", "runs", "count"), ops.row_plan(rows, 37)), grad_out=torch.zeros(2, 5, 4, 16), num_rows=37)
    with pytest.raises(ValueError, match=f"^embedding_backward: {message}"):
        torch.ops.engram.embedding_backward(**inputs | change)


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
