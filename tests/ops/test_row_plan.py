"""row_plan: its errors, and the order over sizes that take every way through the sort."""
import re

import hypothesis
import pytest
import torch
from engram import ops, reference
from hypothesis import strategies as st
from samples import DEVICES, named

INT64_MAX = torch.iinfo(torch.int64).max
PLAN = [ops.row_plan, reference.row_plan]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [1, 2, 255, 256, 257, 4095, 4096, 4097, 70_000])
@pytest.mark.parametrize("rows", [1, 2, 60, 5000, 2**33])
def test_sizes(slots, rows, device):
    draw = torch.Generator().manual_seed(slots)
    for high in (rows, max(1, rows // 100)):    # with few rows of many, buckets of the sort stay empty
        touched = torch.randint(high, (slots, 1), generator=draw).to(device)
        for found, expected in zip(ops.row_plan(touched, rows), reference.row_plan(touched, rows), strict=True):
            assert torch.equal(found, expected)


@hypothesis.given(st.lists(st.tuples(st.integers(-2, 12), st.booleans()), max_size=60), st.integers(0, 9),
                  st.integers(1, 3), st.one_of(st.none(), st.integers(0, 3)))
def test_any_rows(slots, num_rows, columns, row_begin):
    slots = slots[: len(slots) // columns * columns]
    rows = torch.tensor([row for row, _ in slots], dtype=torch.int64).view(-1, columns)
    mask = torch.tensor([seen for _, seen in slots], dtype=torch.bool)[::columns]
    if row_begin is None:                       # a visible row outside the table would be an error
        rows = rows.clamp(0, num_rows - 1)
        mask &= num_rows > 0
    for found, expected in zip(ops.row_plan(rows, num_rows, row_begin=row_begin, mask=mask),
                               reference.row_plan(rows, num_rows, row_begin=row_begin, mask=mask), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots, rows", [(0, 5), (1, 1), (40, 7), (300, 5000)])
@pytest.mark.parametrize("masked", [False, True])
def test_touched_rows(slots, rows, masked, device):
    """The unique rows of a plan, how many lie before given ones, and where each slot finds its own."""
    draw = torch.Generator().manual_seed(slots)
    touched = torch.randint(rows, (slots, 1), generator=draw).to(device)
    mask = (torch.rand(slots, generator=draw) < 0.5).to(device) if masked else None
    plan = ops.row_plan(touched, rows, mask=mask)
    seen = torch.ones(slots, dtype=torch.bool, device=device) if mask is None else mask
    unique, count = touched[seen].unique(), plan.count.item()
    assert torch.equal(plan.rows(count), unique)
    edges = torch.tensor([0, rows // 2, rows], device=device)
    assert plan.rows_before(edges).tolist() == [int((unique < edge).sum()) for edge in edges]
    index = plan.index(count)
    assert torch.equal(unique[index[seen]], touched[seen, 0]) and bool((index[~seen] == count).all())


def test_sorted_rows_stay():
    """What a coalesced gradient brings: nothing to sort, each row a run of its own."""
    rows = torch.arange(0, 30_000, 3)[:, None]
    plan = ops.row_plan(rows, 30_000)
    assert torch.equal(plan.keys >> rows.numel().bit_length(), rows[:, 0])
    assert torch.equal(plan.runs, torch.arange(rows.numel() + 1)) and plan.count.tolist() == [rows.numel()]


@pytest.mark.parametrize("function", PLAN)
@pytest.mark.parametrize("row", [-1, 37, INT64_MAX, -INT64_MAX - 1])
def test_rows_outside_the_table(function, row):
    inputs = named("row_plan", "plain")[0]()
    inputs["rows"][1, 2, 3] = row
    with pytest.raises(IndexError, match=rf"^row_plan: rows must be in \[0, 37\).*, got {row}$"):
        function(**inputs)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2] = False                          # masked rows are never read
    *_, count = function(**inputs | dict(mask=mask))
    assert 0 < count.item() <= 36


@pytest.mark.parametrize("argument, value, expected", [
    ("rows", torch.zeros(2, 5, 4), "int64 or int32"),
    ("rows", torch.tensor(3), "[..., C]"),
    ("num_rows", -1, "at least 0"),
    ("num_rows", 2**62, "small enough that row and slot numbers fit in 62 bits"),
    ("row_begin", -3, "at least 0"),
    ("mask", torch.ones(2, 5), "bool"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[2, 5]"),
])
def test_errors(argument, value, expected):
    inputs = named("row_plan", "plain")[0]() | {argument: value}
    with pytest.raises(ValueError, match=rf"^row_plan: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.row_plan(**inputs)


def test_devices_do_not_mix():
    inputs = named("row_plan", "mask")[0]()
    inputs["mask"] = inputs["mask"].to("meta")
    with pytest.raises(ValueError, match=r"^row_plan: .*mask on meta"):
        ops.row_plan(**inputs)
