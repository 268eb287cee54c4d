"""row_sum: its errors, runs of every length, hot rows."""
import re

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, named, relative_error

RUNS = [1, 2, 31, 32, 33, 1023, 1024, 1025]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 33])
def test_run_lengths(width, dtype, device):
    """Every length beside every other, with rows that nothing touches in between."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.repeat_interleave(torch.arange(len(RUNS)) * 3 + 1, torch.tensor(RUNS))
    rows = rows[torch.randperm(len(rows), generator=draw)].to(device)
    values = torch.randn(len(rows), width, generator=draw, dtype=torch.float64).to(dtype).to(device)
    plan = ops.row_plan(rows[:, None], 3 * len(RUNS))
    touched, sums = ops.row_sum(values, *plan)
    assert torch.equal(touched.cpu(), torch.arange(len(RUNS)) * 3 + 1) and sums.dtype == dtype
    _, expected = reference.row_sum(values.double(), *plan)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for length, one, right in zip(RUNS, sums, expected):
        assert relative_error(one, right) <= tolerance, length


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_takes_all(dtype, device):
    rows = torch.full((100_000, 1), 7, device=device)
    rows, sums = ops.row_sum(torch.ones(100_000, 2, dtype=dtype, device=device), *ops.row_plan(rows, 8))
    expected = torch.tensor(100_000.0).to(dtype).item()     # in float16: infinity, and not 2048
    assert rows.tolist() == [7] and sums.tolist() == [[expected, expected]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_single_values_are_kept(dtype, device):
    """A sum of one value is that value, zeros with a sign, the smallest and infinity included; a NaN stays one."""
    values = torch.arange(-2**15, 2**15, dtype=torch.int16, device=device).view(-1, 8).view(dtype)
    _, sums = ops.row_sum(values, *ops.row_plan(torch.arange(len(values), device=device)[:, None], len(values)))
    same = sums.view(torch.int16) == values.view(torch.int16)
    assert bool((same | (sums.isnan() & values.isnan())).all())


@pytest.mark.parametrize("argument, value, expected", [
    ("values", torch.zeros(2, 5, 4, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("values", torch.zeros(40), "[..., C, d]"),
    ("keys", torch.zeros(40), "int64"),
    ("keys", torch.zeros(40, 1, dtype=torch.int64), "[slots]"),
    ("keys", torch.zeros(39, dtype=torch.int64), "[slots]"),
    ("runs", torch.zeros(40, dtype=torch.int64), "[slots + 1]"),
    ("count", torch.zeros(2, dtype=torch.int64), "[1]"),
    ("count", torch.zeros(1), "int64"),
])
def test_errors(argument, value, expected):
    inputs = named("row_sum", "plain")[0](dtype=torch.float32) | {argument: value}
    with pytest.raises(ValueError, match=rf"^row_sum: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.row_sum(**inputs)


@pytest.mark.parametrize("count", [-1, 41, 10**12])
def test_what_is_no_plan(count):
    inputs = named("row_sum", "plain")[0](dtype=torch.float32) | dict(count=torch.tensor([count]))
    with pytest.raises(ValueError, match="^row_sum: keys must be a row plan for .* rows, got something else"):
        ops.row_sum(**inputs)


@pytest.mark.parametrize("argument", ["keys", "runs", "count"])
def test_devices_do_not_mix(argument):
    inputs = named("row_sum", "plain")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^row_sum: .*{argument} on meta"):
        ops.row_sum(**inputs)
