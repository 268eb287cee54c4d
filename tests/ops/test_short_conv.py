"""short_conv: its errors, its reach, and what documents, masks and lengths cut off."""
import re

import pytest
import torch
from engram import ops, reference
from engram.ops import Ring
from samples import DEVICES, DTYPES, named

CONV = [ops.short_conv, reference.short_conv]


def taps_seen(function, tokens, taps=3, dilation=1, **rest) -> list[list[int]]:
    """Which positions each position reads, newest first: position p holds 2**p, tap j weighs 2**(20*(K-1-j))."""
    x = 2.0 ** torch.arange(tokens, dtype=torch.float64).view(1, tokens, 1, 1)
    weight = 2.0 ** (16 * torch.arange(taps - 1, -1, -1, dtype=torch.float64).view(1, 1, taps))
    out = function(x, weight, None, dilation=dilation, activation=None, residual=False, **rest).flatten()
    result = []
    for value in out.tolist():
        digits = [int(value) >> 16 * tap & 0xFFFF for tap in range(taps)]
        result.append([digit.bit_length() - 1 for digit in digits if digit])
    return result


@pytest.mark.parametrize("function", CONV)
def test_taps_and_dilation(function):
    assert taps_seen(function, 5, taps=3, dilation=2) == [[0], [1], [2, 0], [3, 1], [4, 2, 0]]
    assert taps_seen(function, 3, taps=1, dilation=4) == [[0], [1], [2]]


@pytest.mark.parametrize("function", CONV)
def test_documents_and_their_return(function):
    """A B A: between the two A lies a change, even where no tap stands on it."""
    documents = torch.tensor([[1, 1, 2, 1, 1]])
    assert taps_seen(function, 5, document_ids=documents) == [[0], [1, 0], [2], [3], [4, 3]]
    assert taps_seen(function, 5, dilation=2, document_ids=documents) == [[0], [1], [2], [3], [4]]
    assert taps_seen(function, 3, document_ids=torch.tensor([[0, 1, 2]])) == [[0], [1], [2]]


@pytest.mark.parametrize("function", CONV)
def test_a_masked_position_only_hides_itself(function):
    mask = torch.tensor([[True, False, True, True]])
    assert taps_seen(function, 4, mask=mask) == [[0], [], [2, 0], [3, 2]]


@pytest.mark.parametrize("function", CONV)
def test_lengths(function):
    assert taps_seen(function, 4, lengths=torch.tensor([2])) == [[0], [1, 0], [], []]
    assert taps_seen(function, 2, lengths=torch.tensor([9])) == [[0], [1, 0]]
    assert taps_seen(function, 2, lengths=torch.tensor([0], dtype=torch.int32)) == [[], []]


@pytest.mark.parametrize("function", CONV)
@pytest.mark.parametrize("dilation", [5, 2**40, 2**62])
def test_dilation_past_the_sequence(function, dilation):
    """Only the current token is left; the distance of the oldest tap may pass int64."""
    assert taps_seen(function, 4, taps=4, dilation=dilation) == [[0], [1], [2], [3]]
    inputs = named("short_conv", "plain")[0]() | dict(dilation=dilation)
    inputs["x"] = inputs["x"][:, :5].requires_grad_()
    out = function(**inputs)
    one = function(**inputs | dict(weight=inputs["weight"][..., -1:]))
    torch.testing.assert_close(out, one, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs["x"]), torch.autograd.grad(one.sum(), inputs["x"]),
                               rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", CONV)
def test_masked_residual_is_x_bit_for_bit(function, dtype, device):
    inputs = named("short_conv", "mask")[0](device, dtype)
    masked = ~inputs["mask"]
    inputs["x"][masked] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=dtype, device=device).repeat(4)
    out = function(**inputs)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
    assert torch.equal(out[masked].view(integers), inputs["x"][masked].view(integers))
    assert out[~masked].isfinite().all()
    assert not function(**inputs | dict(residual=False))[masked].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_documents_of_any_integer_dtype(dtype):
    inputs = named("short_conv", "documents")[0]()
    inputs["document_ids"] = inputs["document_ids"].abs()
    narrow = inputs | dict(document_ids=inputs["document_ids"].to(dtype))
    assert torch.equal(ops.short_conv(**narrow), ops.short_conv(**inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_weight_is_the_identity(device):
    """What a model starts from: the output is x to the bit, and the weight has a gradient all the same."""
    inputs = named("short_conv", "plain")[0](device, torch.float32)
    inputs["weight"] = torch.zeros_like(inputs["weight"]).requires_grad_()
    out = ops.short_conv(**inputs)
    assert torch.equal(out, inputs["x"])
    out.sum().backward()
    assert inputs["weight"].grad.any()


def test_a_state_of_other_sizes():
    inputs = named("short_conv", "plain")[0]("cpu", torch.float32)
    first = inputs["x"]
    for kept in ({"other": first[:, :0]}, {"x": first[:1, :0]}):
        with pytest.raises(ValueError, match="^short_conv: state must keep"):
            ops.short_conv(**inputs, state=Ring(kept, 9, 0))


@pytest.mark.parametrize("argument, value, expected", [
    ("x", torch.zeros(2, 11, 4, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("x", torch.zeros(11, 4, 16), "[B, T, G, D]"),
    ("weight", torch.zeros(4, 16), "[G, D, K] with K >= 1"),
    ("weight", torch.zeros(4, 16, 0), "[G, D, K] with K >= 1"),
    ("weight", torch.zeros(64, 1, 4), "[G, D, K] = [4, 16, 4]"),
    ("weight", torch.zeros(4, 16, 4, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("norm_weight", torch.ones(16), "[G, D] = [4, 16]"),
    ("norm_weight", torch.ones(4, 16, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
    ("dilation", 0, "at least 1"),
    ("dilation", -3, "at least 1"),
    ("eps", -1.0, "at least 0"),
    ("activation", "gelu", "'silu' or None"),
    ("activation", "", "'silu' or None"),
    ("document_ids", torch.zeros(2, 11), "integer"),
    ("document_ids", torch.zeros(11, dtype=torch.int64), "[B, T] = [2, 11]"),
    ("mask", torch.ones(2, 11), "bool"),
    ("mask", torch.ones(2, 1, dtype=torch.bool), "[B, T] = [2, 11]"),
    ("lengths", torch.zeros(2), "integer"),
    ("lengths", torch.zeros(2, dtype=torch.bool), "integer"),
    ("lengths", torch.zeros(3, dtype=torch.int64), "[B] = [2]"),
])
def test_errors(argument, value, expected):
    inputs = named("short_conv", "plain")[0]("cpu", torch.float32) | {argument: value}
    with pytest.raises(ValueError, match=rf"^short_conv: {argument} must be .*{re.escape(expected)}.*, got "):
        ops.short_conv(**inputs)


@pytest.mark.parametrize("argument, value", [
    ("grad_out", torch.zeros(2, 11, 4, 15)), ("grad_out", torch.zeros(2, 11, 4, 16, dtype=torch.float64)),
    ("rstd", torch.zeros(2, 11, 3)), ("rstd", torch.zeros(2, 11, 4, dtype=torch.float64)),
    ("dilation", 0), ("activation", "gelu"),
])
def test_backward_errors(argument, value):
    inputs = named("short_conv", "plain")[0]("cpu", torch.float32)
    inputs.pop("eps")
    inputs |= dict(grad_out=torch.zeros(2, 11, 4, 16), rstd=torch.zeros(2, 11, 4)) | {argument: value}
    with pytest.raises(ValueError, match=rf"^short_conv_backward: {argument} must be .*, got "):
        torch.ops.engram.short_conv_backward(**inputs)


@pytest.mark.parametrize("argument", ["weight", "norm_weight", "document_ids", "mask"])
def test_devices_do_not_mix(argument):
    inputs = named("short_conv", "long")[0]()
    inputs[argument] = inputs[argument].to("meta")
    with pytest.raises(ValueError, match=rf"^short_conv: .*{argument} on meta"):
        ops.short_conv(**inputs)
