"""row_update: its errors, stochastic rounding, what it may not touch."""
import re

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, SAMPLES, named, results_of

BF16 = torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam", "adam_rows", "shard"])
def test_untouched_rows_keep_every_bit(name, dtype, device):
    inputs = named("row_update", name)[0](device, dtype)
    inputs["table"][3] = torch.nan              # nor are they read
    rows = set((inputs["keys"] >> inputs["keys"].numel().bit_length())[: int(inputs["runs"][-1])].tolist())
    untouched = [row for row in range(37) if row not in rows]
    before = [inputs[n].clone() for n in ("table", "first", "second") if inputs[n] is not None]
    after = results_of("row_update", ops.row_update, inputs)
    for a, b in zip(after, before):
        assert torch.equal(a[untouched].nan_to_num(9.0), b[untouched].nan_to_num(9.0))
        assert not torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adam", "adam_rows", "adagrad", "momentum", "many"])
def test_a_plan_of_all_rows_is_no_plan(name, device):
    """Row r of a dense gradient and a plan that touches row r once are the same work, to the bit."""
    inputs = named("row_update", name)[0](device, torch.float32)
    rows, width = inputs["table"].shape
    dense = inputs | dict(grad=torch.randn(rows, width).to(device), keys=None, runs=None, count=None)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(device)
    plan = ops.row_plan(order[:, None], rows)
    planned = dense | dict(zip(("keys", "runs", "count"), plan), grad=dense["grad"][order])
    for a, b in zip(*(results_of("row_update", ops.row_update, x) for x in (dense, planned)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 15, 16, 100, 257])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**62])
def test_random_bits_are_the_references(width, seed, device):
    """With a gradient of zero the update rounds the table itself: float32 numbers that bfloat16 has, kept; and with one
    that is exact in float32 the bits decide alone."""
    table = torch.randn(50, width).bfloat16().to(device)
    change = (torch.randn(50, width) / 300).bfloat16().to(device)
    for step in (1, 2, 10**9):
        inputs = dict(first=None, second=None, keys=None, runs=None, count=None, rule="sgd", lr=1.0, seed=seed,
                      step=torch.tensor([step], device=device))
        actual, expected = table.clone(), table.clone()
        ops.row_update(actual, grad=change, **inputs)
        reference.row_update(expected, grad=change, **inputs)
        assert torch.equal(actual, expected)
        nearest = (table.float() - change.float()).bfloat16()
        assert width < 15 or not torch.equal(actual, nearest)
        ops.row_update(actual, grad=torch.zeros_like(change), **inputs)
        assert torch.equal(actual, expected)


def test_stochastic_rounding_is_right_in_the_mean():
    """A step of a 300th of bfloat16's spacing is lost by rounding to nearest, and arrives in the mean otherwise."""
    begin, change = torch.ones(400, 256, dtype=BF16), torch.full((400, 256), 2.0**-7 / 300, dtype=BF16)
    for seed, wanted in ((None, 0.0), (7, 1.0)):
        table = begin.clone()
        for step in range(1, 101):
            ops.row_update(table, None, None, change, None, None, None, torch.tensor([step]), rule="sgd", lr=1.0,
                           seed=seed)
        moved = (begin.double() - table.double()).mean() / (100 * change[0, 0].double())
        assert abs(moved - wanted) < 0.02


def test_stochastic_rounding_of_what_is_not_finite():
    table = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, torch.finfo(BF16).max]], dtype=BF16)
    after = table.clone()
    ops.row_update(after, None, None, torch.zeros_like(table), None, None, None, torch.tensor([1]), rule="sgd", lr=1.0,
                   seed=3)
    assert torch.equal(after.nan_to_num(5.0), table.nan_to_num(5.0)) and after.isnan().equal(table.isnan())


@pytest.mark.parametrize("device", DEVICES)
def test_halves_of_a_row_plan_do_not_interact(device):
    """Touched rows are independent of each other: two disjoint plans in turn are one."""
    inputs = named("row_update", "many")[0](device, torch.float32)
    rows = torch.arange(900, device=device)[:, None]
    grad = torch.randn(900, 24).to(device)
    results = []
    for parts in ((rows,), (rows[::2], rows[1::2])):
        state = {name: inputs[name].clone() for name in ("table", "first", "second")}
        for part in parts:
            plan = dict(zip(("keys", "runs", "count"), ops.row_plan(part, 900)))
            ops.row_update(**inputs | state | plan | dict(grad=grad[part[:, 0]]))
        results.append(state)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


FLOAT = torch.zeros(37, 16)


@pytest.mark.parametrize("argument, value, expected", [
    ("table", torch.zeros(37, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("table", torch.zeros(37), "[R, d]"),
    ("table", torch.zeros(16, 37).T, "contiguous"),
    ("first", torch.zeros(37, 16, dtype=torch.float64), "float32"),
    ("first", torch.zeros(37), "[R, d]"),
    ("first", torch.zeros(16, 37).T, "contiguous"),
    ("second", None, "given for adam"),
    ("second", torch.zeros(37, 15), "[R] or [R, d]"),
    ("second", torch.zeros(36), "[R]"),
    ("second", torch.zeros(37, dtype=BF16), "float32"),
    ("grad", torch.zeros(2, 5, 4, 16, dtype=BF16), "float32 like table"),
    ("grad", torch.zeros(2, 5, 4, 15), "[..., C, d]"),
    ("keys", None, "together with runs and count"),
    ("keys", torch.zeros(39, dtype=torch.int64), "[slots]"),
    ("runs", torch.zeros(39, dtype=torch.int64), "[slots + 1]"),
    ("count", torch.zeros(2, dtype=torch.int64), "[1]"),
    ("step", torch.ones(1), "int64"),
    ("step", torch.ones(2, dtype=torch.int64), "one element"),
    ("rule", "rmsprop", '"sgd", "adagrad" or "adam"'),
    ("lr", -1.0, "at least 0"),
    ("lr", float("nan"), "at least 0"),
    ("beta1", 1.0, "[0, 1)"),
    ("beta2", -0.1, "[0, 1)"),
    ("eps", -1e-8, "at least 0"),
    ("weight_decay", -1.0, "at least 0"),
    ("seed", 3, "None unless table is bfloat16"),
])
def test_errors(argument, value, expected):
    inputs = named("row_update", "adam")[0](dtype=torch.float32) | {argument: value}
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ValueError, match=rf"^row_update: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.row_update(**inputs)
    assert all(torch.equal(inputs[n], x) for n, x in before.items())


@pytest.mark.parametrize("change, message", [
    (dict(rule="sgd"), "second must be None for sgd"),
    (dict(rule="adagrad", second=torch.zeros(37)), "first must be None for adagrad"),
    (dict(rule="adagrad", first=None), r"second must be \[R\]"),
    (dict(keys=None, runs=None, count=None), r"grad must be \[R, d\], without a row plan"),
    (dict(table=torch.zeros(5, 16), first=torch.zeros(5, 16), second=torch.zeros(5, 16)), "keys must be a row plan for 5"),
])
def test_arguments_that_do_not_go_together(change, message):
    inputs = named("row_update", "adam")[0](dtype=torch.float32) | change
    with pytest.raises(ValueError, match=f"^row_update: {message}"):
        ops.row_update(**inputs)


@pytest.mark.parametrize("argument", ["first", "second", "grad", "keys", "runs", "count", "step"])
def test_devices_do_not_mix(argument):
    inputs = named("row_update", "adam")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^row_update: .*{argument} on meta"):
        ops.row_update(**inputs)


def test_every_rule_has_samples():
    seen = {(x["rule"], x["first"] is not None, x["second"] is not None and x["second"].dim(), x["keys"] is None)
            for x in (sample(dtype=torch.float32) for sample in SAMPLES["row_update"])}
    assert len({rule for rule, *_ in seen}) == 3 and len(seen) >= 9
