"""gate: its errors, the zero rules, saturation, and what a mask leaves untouched."""
import re

import pytest
import torch
from engram import ops, reference
from samples import DEVICES, DTYPES, named

GATE = [ops.gate, reference.gate]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", GATE)
@pytest.mark.parametrize("zero_rule, u", [("sign", 0.0), ("copysign", 1.0)])
def test_zero_rules(function, zero_rule, u, dtype, device):
    """A score of exactly zero, with a clamp that makes the difference visible in every dtype."""
    hidden, ones = torch.zeros(3, 2, 16, dtype=dtype, device=device), torch.ones(3, 2, 16, dtype=dtype, device=device)
    out = function(hidden, ones, ones[:, 0], None, None, eps=1e-6, clamp=1.0, zero_rule=zero_rule)
    expected = torch.sigmoid(torch.full_like(out, u, dtype=torch.float64))
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, smallest", [(torch.float64, 5e-324), (torch.float32, 1e-45)])
@pytest.mark.parametrize("function", GATE)
@pytest.mark.parametrize("zero_rule, u", [("sign", 0.0), ("copysign", -1.0)])
def test_zero_rules_at_minus_zero(function, zero_rule, u, dtype, smallest, device):
    """Where the score comes out as -0: the negative sum underflows when it is divided by sqrt(D)."""
    hidden, ones = torch.zeros(3, 2, 16, dtype=dtype, device=device), torch.ones(3, 2, 16, dtype=dtype, device=device)
    hidden[..., 0] = -smallest
    out = function(hidden, ones, ones[:, 0], None, None, eps=1e-6, clamp=1.0, zero_rule=zero_rule)
    expected = torch.sigmoid(torch.full_like(out, u))
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("function", GATE)
def test_between_zero_and_the_clamp(function):
    """There u is +-sqrt(clamp), by the sign of the score, under either rule."""
    hidden = torch.tensor([1e-9, -1e-9], dtype=torch.float64).view(2, 1, 1)
    one = torch.ones(2, 1, 1, dtype=torch.float64)
    expected = torch.sigmoid(torch.tensor([1e-3, -1e-3], dtype=torch.float64))
    for zero_rule in ("sign", "copysign"):
        out = function(hidden, one, one[:, 0], None, None, eps=1e-6, zero_rule=zero_rule)
        torch.testing.assert_close(out.flatten(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_gates(dtype, device):
    """Scores of +-1e4 and beyond: the gate is 1 or 0, never NaN, and neither are the gradients."""
    ones = torch.ones(2, 1, 16, dtype=dtype, device=device)
    hidden, key = ones.clone().requires_grad_(), (ones * 1e4).requires_grad_()
    weight = torch.tensor([1.0, -1.0], device=device).view(2, 1, 1).to(dtype)
    value = torch.full((2, 16), 3.0, dtype=dtype, device=device, requires_grad=True)
    out = ops.gate(hidden * weight * 100, key, value, None, None, eps=1e-6)
    assert torch.equal(out[0], 3 * ones[0]) and not out[1].any()
    for grad in torch.autograd.grad(out.sum(), (hidden, key, value)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", GATE)
def test_masked_residual_is_hidden_bit_for_bit(function, dtype, device):
    inputs = named("gate", "mask_residual")[0](device, dtype)
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype, device=device)
    inputs["hidden"][..., :4] = specials
    inputs["key"][~inputs["mask"]] = torch.nan
    out = function(**inputs)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    masked = ~inputs["mask"]
    assert torch.equal(out[masked].view(integers), inputs["hidden"][masked].view(integers))
    assert not function(**inputs | dict(residual=False))[masked].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_hidden_beside_half_keys(dtype, device):
    """Nothing is rounded to the half type on the way: equal to all inputs widened beforehand."""
    inputs = named("gate", "mixed")[0](device, dtype)
    widened = inputs | {name: inputs[name].float() for name in ("key", "value")}
    torch.testing.assert_close(ops.gate(**inputs), ops.gate(**widened), rtol=1e-6, atol=1e-7)
    assert ops.gate(**inputs).dtype == torch.float32


@pytest.mark.parametrize("argument, value, expected", [
    ("hidden", torch.zeros(2, 5, 4, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("hidden", torch.zeros(16), "[..., G, D]"),
    ("key", torch.zeros(2, 5, 4, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("key", torch.zeros(2, 5, 4, 15), "the shape of hidden"),
    ("key", torch.zeros(2, 5, 16), "the shape of hidden"),
    ("key", torch.zeros(2, 5, 1, 16), "the shape of hidden"),
    ("key", torch.zeros(2, 5, 4, 16, dtype=torch.float64), "float32 like hidden or bfloat16 or float16"),
    ("value", torch.zeros(2, 5, 16, dtype=torch.float64), "float32 like key"),
    ("value", torch.zeros(2, 5, 16, dtype=torch.bfloat16), "float32 like key"),
    ("value", torch.zeros(2, 5, 15), "[..., D] = [2, 5, 16]"),
    ("value", torch.zeros(2, 5, 4, 16), "[..., D] = [2, 5, 16]"),
    ("hidden_weight", torch.ones(16), "[G, D] = [4, 16]"),
    ("hidden_weight", torch.ones(4, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("key_weight", torch.ones(1, 16), "[G, D] = [4, 16]"),
    ("key_weight", torch.ones(4, 16, dtype=torch.bool), "float64, float32, bfloat16 or float16"),
    ("eps", -1.0, "at least 0"),
    ("eps", torch.nan, "at least 0"),
    ("clamp", -1.0, "above 0"),
    ("clamp", 0.0, "above 0"),
    ("zero_rule", "plus", "'sign' or 'copysign'"),
    ("mask", torch.ones(2, 5), "bool"),
    ("mask", torch.ones(2, 5, dtype=torch.uint8), "bool"),
    ("mask", torch.ones(2, 5, 4, dtype=torch.bool), "[2, 5]"),
    ("mask", torch.ones(5, dtype=torch.bool), "[2, 5]"),
])
def test_errors(argument, value, expected):
    inputs = named("gate", "plain")[0]("cpu", torch.float32) | {argument: value}
    with pytest.raises(ValueError, match=rf"^gate: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.gate(**inputs)


@pytest.mark.parametrize("hidden, key", [
    (torch.float64, torch.float32), (torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float16, torch.float32),
])
@pytest.mark.parametrize("function", GATE)
def test_dtypes_that_do_not_go_together(function, hidden, key):
    inputs = named("gate", "plain")[0]()
    inputs |= dict(hidden=inputs["hidden"].to(hidden), key=inputs["key"].to(key), value=inputs["value"].to(key))
    with pytest.raises(ValueError, match="^gate: key must .*dtype|^gate: key must be .* like hidden"):
        function(**inputs)


@pytest.mark.parametrize("argument, value", [
    ("grad_out", torch.zeros(2, 5, 4, 15)), ("grad_out", torch.zeros(2, 5, 4, 16, dtype=torch.float64)),
    ("stats", torch.zeros(2, 5, 4, 2)), ("stats", torch.zeros(2, 5, 4, 3, dtype=torch.float64)),
    ("clamp", -1.0), ("zero_rule", "plus"),
])
def test_backward_errors(argument, value):
    inputs = named("gate", "plain")[0]("cpu", torch.float32)
    inputs.pop("eps")
    inputs |= dict(grad_out=torch.zeros(2, 5, 4, 16), stats=torch.zeros(2, 5, 4, 3), clamp=1e-6) | {argument: value}
    with pytest.raises(ValueError, match=rf"^gate_backward: {argument} must be .*, got "):
        torch.ops.engram.gate_backward(**inputs)


@pytest.mark.parametrize("argument", ["key", "value", "hidden_weight", "key_weight", "mask"])
def test_devices_do_not_mix(argument):
    inputs = named("gate", "mask")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^gate: .*{argument} on meta"):
        ops.gate(**inputs)
