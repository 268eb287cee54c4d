"""gate_conv: its errors, and that it is what its name says."""
import re

import pytest
import torch
from engram import ops, reference
from engram.ops import Ring
from samples import DEVICES, DIFFERENTIABLE, DTYPES, Draw, named, relative_error

GATE_CONV = [ops.gate_conv, reference.gate_conv]
PER_TOKEN = ("hidden", "key", "value")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sample", named(
    "gate_conv", "plain", "documents", "mask", "everything", "copysign", "bare"), ids=str)
def test_is_short_conv_of_gate(sample, dtype, device):
    inputs = sample(device, dtype)
    mask = inputs["mask"]
    if "lengths" in inputs:
        mask = mask & (torch.arange(mask.shape[1], device=device) < inputs["lengths"][:, None])
    gated = ops.gate(*(inputs[n] for n in ("hidden", "key", "value", "hidden_weight", "key_weight")), eps=inputs["eps"],
                     zero_rule=inputs["zero_rule"], mask=mask)
    expected = ops.short_conv(
        gated, inputs["conv_weight"], inputs["conv_norm_weight"], dilation=inputs["dilation"], eps=inputs["conv_eps"],
        activation=inputs["activation"], document_ids=inputs["document_ids"], mask=mask)
    out = ops.gate_conv(**inputs | dict(residual=False))
    assert relative_error(out, expected) <= (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", GATE_CONV)
def test_masked_residual_is_hidden_bit_for_bit(function, dtype, device):
    inputs = named("gate_conv", "mask_residual")[0](device, dtype)
    masked = ~inputs["mask"]
    inputs["hidden"][masked] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype, device=device).repeat(4)
    inputs["key"][masked], inputs["value"][masked] = torch.nan, torch.inf
    out = function(**inputs)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    assert torch.equal(out[masked].view(integers), inputs["hidden"][masked].view(integers))
    assert out[~masked].isfinite().all()
    assert not function(**inputs | dict(residual=False))[masked].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_weight_leaves_the_gate(device):
    """What a model starts from; the conv weight has a gradient all the same."""
    inputs = named("gate_conv", "plain")[0](device, torch.float32)
    inputs["conv_weight"] = torch.zeros_like(inputs["conv_weight"]).requires_grad_()
    out = ops.gate_conv(**inputs)
    gated = ops.gate(*(inputs[n] for n in ("hidden", "key", "value", "hidden_weight", "key_weight")), eps=inputs["eps"])
    torch.testing.assert_close(out, gated, rtol=1e-6, atol=1e-7)
    out.sum().backward()
    assert inputs["conv_weight"].grad.any()


def test_a_state_of_other_sizes():
    inputs = named("gate_conv", "plain")[0]("cpu", torch.float32)
    first = inputs["value"]
    for kept in ({"other": first[:, :0]}, {"value": first[:1, :0], "stats": first[:1, :0]}):
        with pytest.raises(ValueError, match="^gate_conv: state must keep"):
            ops.gate_conv(**inputs, state=Ring(kept, 9, 0))


def gradients(inputs: dict, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Out, stats and what the differentiable inputs get."""
    leaves = {n: inputs[n].detach().clone().requires_grad_()
              for n in DIFFERENTIABLE["gate_conv"] if inputs[n] is not None}
    out, stats = torch.ops.engram.gate_conv(**inputs | leaves)
    return out.detach(), stats, dict(zip(leaves, torch.autograd.grad(out, leaves.values(), grad_out)))


def after(inputs: dict, stats: torch.Tensor, cut: int, past: int) -> dict:
    """The tokens from `cut` on, with `past` positions before them."""
    later = inputs | {name: inputs[name][:, cut:] for name in PER_TOKEN}
    marks = {name: x[:, cut - past:] for name in ("document_ids", "mask") if (x := inputs[name]) is not None}
    return later | marks | dict(past_value=inputs["value"][:, cut - past:cut], past_stats=stats[:, cut - past:cut])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", named(
    "gate_conv", "plain", "long", "everything", "branches_1", "branches_3", "taps_2_dilation_4", "taps_5_dilation_3",
    "no_norm", "mask_residual", "width_130", "mixed"), ids=str)
def test_goes_on_from_a_past(sample, dtype, device):
    """The tokens after a cut, given value and stats of those before it: what one call over everything says of them."""
    inputs = sample(device, dtype)
    if "lengths" in inputs:
        inputs["mask"] &= torch.arange(inputs["mask"].shape[1], device=device) < inputs.pop("lengths")[:, None]
    tokens, reach = inputs["hidden"].shape[1], (inputs["conv_weight"].shape[-1] - 1) * inputs["dilation"]
    grad_out = Draw(device, dtype, 1).normal(*inputs["hidden"].shape)
    for cut in sorted({1, reach // 2, tokens - 1}):
        grad_out[:, :cut] = 0
        out, stats, grads = gradients(inputs, grad_out)
        for past in {cut, min(cut, reach)}:
            later_out, later_stats, later_grads = gradients(after(inputs, stats, cut, past), grad_out[:, cut:])
            assert torch.equal(later_out, out[:, cut:])
            assert torch.equal(later_stats, stats[:, cut:])
            for name in PER_TOKEN:
                assert torch.equal(later_grads[name], grads[name][:, cut:]), name
            for name in ("conv_weight", "conv_norm_weight"):
                if name in grads:                       # the past is read, so it is in the gradient of taps
                    assert relative_error(later_grads[name], grads[name]) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", named("gate_conv", "plain", "documents", "taps_5_dilation_3"), ids=str)
def test_norm_weights_get_nothing_from_the_past(sample, device):
    inputs = sample(device, torch.float64)
    cut = inputs["hidden"].shape[1] // 2
    inputs["key"][:, :cut] = 0                          # there the score is 0, where it passes no gradient
    grad_out = Draw(device, torch.float64, 1).normal(*inputs["hidden"].shape)
    grad_out[:, :cut] = 0
    _, stats, grads = gradients(inputs, grad_out)
    _, _, later = gradients(after(inputs, stats, cut, cut), grad_out[:, cut:])
    for name in ("hidden_weight", "key_weight"):
        assert grads[name].any()
        assert relative_error(later[name], grads[name]) <= TOLERANCE[torch.float64], name


@pytest.mark.parametrize("argument, value", [
    ("past_value", None), ("past_stats", None), ("past_value", torch.zeros(2, 3, 4, 16)),
    ("past_value", torch.zeros(2, 3, 15)), ("past_value", torch.zeros(1, 3, 16)),
    ("past_value", torch.zeros(2, 3, 16, dtype=torch.bfloat16)), ("past_stats", torch.zeros(2, 3, 12)),
    ("past_stats", torch.zeros(2, 4, 13)), ("past_stats", torch.zeros(2, 3, 13, dtype=torch.float64)),
    ("mask", torch.ones(2, 11, dtype=torch.bool)), ("document_ids", torch.zeros(2, 11, dtype=torch.int64)),
])
@pytest.mark.parametrize("op", ["gate_conv", "gate_conv_backward"])
def test_past_errors(op, argument, value):
    inputs = named("gate_conv", "plain")[0]("cpu", torch.float32)
    inputs |= dict(past_value=torch.zeros(2, 3, 16), past_stats=torch.zeros(2, 3, 13)) | {argument: value}
    if op == "gate_conv_backward":
        inputs.pop("eps")
        inputs |= dict(grad_out=torch.zeros(2, 11, 4, 16), stats=torch.zeros(2, 11, 13))
    named_first = "past_value" if value is None else argument
    with pytest.raises(ValueError, match=rf"^{op}: {named_first} must be .*, got "):
        getattr(torch.ops.engram, op)(**inputs)


FLOATS = "float64, float32, bfloat16 or float16"


@pytest.mark.parametrize("argument, value, expected", [
    ("hidden", torch.zeros(2, 11, 4, 16, dtype=torch.int64), FLOATS),
    ("hidden", torch.zeros(11, 4, 16), "[B, T, G, D]"),
    ("key", torch.zeros(2, 11, 4, 16, dtype=torch.int64), FLOATS),
    ("key", torch.zeros(2, 11, 4, 15), "the shape of hidden"),
    ("key", torch.zeros(2, 11, 4, 16, dtype=torch.float64), "float32 like hidden or bfloat16 or float16"),
    ("value", torch.zeros(2, 11, 16, dtype=torch.float64), "float32 like key"),
    ("value", torch.zeros(2, 11, 4, 16), "[2, 11, 16]"),
    ("hidden_weight", torch.ones(16), "[G, D] = [4, 16]"),
    ("key_weight", torch.ones(4, 16, dtype=torch.bool), FLOATS),
    ("conv_weight", torch.zeros(4, 16), "K >= 1"),
    ("conv_weight", torch.zeros(4, 16, 0), "K >= 1"),
    ("conv_weight", torch.zeros(64, 1, 4), "[G, D, K] = [4, 16, 4]"),
    ("conv_weight", torch.zeros(4, 16, 4, dtype=torch.int64), FLOATS),
    ("conv_norm_weight", torch.ones(16), "[G, D] = [4, 16]"),
    ("conv_norm_weight", torch.ones(4, 16, dtype=torch.int64), FLOATS),
    ("eps", -1.0, "at least 0"),
    ("conv_eps", -1.0, "at least 0"),
    ("dilation", 0, "at least 1"),
    ("clamp", -1.0, "above 0"),
    ("clamp", 0.0, "above 0"),
    ("zero_rule", "plus", "'sign' or 'copysign'"),
    ("activation", "gelu", "'silu' or None"),
    ("document_ids", torch.zeros(2, 11), "integer"),
    ("document_ids", torch.zeros(11, dtype=torch.int64), "[2, 11]"),
    ("mask", torch.ones(2, 11), "bool"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[2, 11]"),
    ("lengths", torch.zeros(2), "integer"),
    ("lengths", torch.zeros(3, dtype=torch.int64), "[B] = [2]"),
])
def test_errors(argument, value, expected):
    inputs = named("gate_conv", "plain")[0]("cpu", torch.float32) | {argument: value}
    with pytest.raises(ValueError, match=rf"^gate_conv: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.gate_conv(**inputs)


@pytest.mark.parametrize("argument, value", [
    ("grad_out", torch.zeros(2, 11, 4, 15)), ("grad_out", torch.zeros(2, 11, 4, 16, dtype=torch.float64)),
    ("stats", torch.zeros(2, 11, 12)), ("stats", torch.zeros(2, 11, 13, dtype=torch.float64)), ("dilation", 0),
    ("activation", "gelu"), ("zero_rule", "plus"),
])
def test_backward_errors(argument, value):
    inputs = named("gate_conv", "plain")[0]("cpu", torch.float32)
    inputs.pop("eps")
    inputs |= dict(grad_out=torch.zeros(2, 11, 4, 16), stats=torch.zeros(2, 11, 13)) | {argument: value}
    with pytest.raises(ValueError, match=rf"^gate_conv_backward: {argument} must be .*, got "):
        torch.ops.engram.gate_conv_backward(**inputs)


@pytest.mark.parametrize("argument", [
    "key", "value", "hidden_weight", "key_weight", "conv_weight", "conv_norm_weight", "document_ids", "mask",
])
def test_devices_do_not_mix(argument):
    inputs = named("gate_conv", "long")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^gate_conv: .*{argument} on meta"):
        ops.gate_conv(**inputs)


@pytest.mark.parametrize("argument, value, expected", [
    ("past_value", torch.zeros(2, 3, 16, dtype=torch.bfloat16), "of the dtype of value"),
    ("past_value", torch.zeros(2, 16), "[B, P, D]"),
    ("past_value", torch.zeros(1, 3, 16), "[B, P, D]"),
    ("past_value", None, "given together with past_stats"),
    ("past_stats", torch.zeros(2, 3, 13, dtype=torch.float64), "of the accumulation dtype"),
    ("past_stats", torch.zeros(2, 4, 13), "[B, P, 3 * G + 1]"),
    ("document_ids", torch.zeros(2, 11, dtype=torch.int64), "[B, P + T]"),
    ("mask", torch.ones(2, 11, dtype=torch.bool), "[B, P + T]"),
])
def test_errors_of_a_past(argument, value, expected):
    inputs = named("gate_conv", "plain")[0]("cpu", torch.float32)
    past = dict(past_value=torch.zeros(2, 3, 16), past_stats=torch.zeros(2, 3, 13)) | {argument: value}
    with pytest.raises(ValueError, match=rf"^gate_conv: {argument} must be .*{re.escape(expected)}.*, got "):
        torch.ops.engram.gate_conv(**inputs | past)
