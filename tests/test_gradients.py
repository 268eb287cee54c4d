"""Gradients: gradcheck in float64, every dtype against float64 on the same numbers, and where others break."""
import pytest
import torch
from engram import ops, reference
from samples import (
    DEVICES, DIFFERENTIABLE, DTYPES, HALF_DTYPES, SAMPLES, each_sample, named, relative_error, strided, to_double,
)
from torch.autograd import gradcheck

# Norm-wise: float32 loses digits where the gate is steep (slope up to 500); half results are rounded once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.005, torch.float16: 0.001}
FLOAT_SAMPLES = each_sample(*DIFFERENTIABLE)


def leaves(op: str, inputs: dict, names=None) -> dict:
    names = [n for n in names or DIFFERENTIABLE[op] if inputs[n] is not None]
    return {name: inputs[name].detach().requires_grad_() for name in names}


def run(function, inputs: dict, wanted: dict, grad_out=None):
    """Forward and backward; returns the output, the incoming gradient and the gradients of `wanted` by name."""
    out = function(**{**inputs, **wanted})
    if grad_out is None:
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    grads = torch.autograd.grad(out, list(wanted.values()), grad_out.to(out))
    return out.detach(), grad_out, dict(zip(wanted, grads))


def assert_gradients_match(op: str, inputs: dict, grad_out=None) -> dict:
    """Each gradient to the rounding of its own dtype, or of the type that the op computes in."""
    wanted = leaves(op, inputs)
    _, grad_out, actual = run(getattr(ops, op), inputs, wanted, grad_out)
    inputs64 = to_double(inputs)
    _, _, expected = run(getattr(reference, op), inputs64, leaves(op, inputs64), grad_out)
    computed = TOLERANCE[torch.float64 if inputs[DIFFERENTIABLE[op][0]].dtype == torch.float64 else torch.float32]
    for name in wanted:
        tolerance = max(TOLERANCE[inputs[name].dtype], computed)
        assert actual[name].dtype == inputs[name].dtype and actual[name].isfinite().all(), name
        assert relative_error(actual[name], expected[name]) <= tolerance, name
    return actual


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, sample", FLOAT_SAMPLES, ids=str)
def test_against_float64(op, sample, dtype, device):
    assert_gradients_match(op, sample(device, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, sample", FLOAT_SAMPLES, ids=str)
def test_gradcheck(op, sample, device):
    inputs = sample(device, torch.float64)
    # gradcheck nudges its inputs in place, in float64.
    wanted = {name: x.clone(memory_format=torch.contiguous_format).detach().double().requires_grad_()
              for name, x in leaves(op, inputs).items()}

    def function(*xs):
        return getattr(ops, op)(**{**inputs, **dict(zip(wanted, xs))})

    entries = sum(x.numel() for x in wanted.values()) * function(*wanted.values()).numel()
    assert gradcheck(function, tuple(wanted.values()), fast_mode=not 0 < entries <= 10_000)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, name", [
    ("gate", "mask_residual"), ("short_conv", "everything"), ("gate_conv", "everything"),
])
def test_each_gradient_alone_equals_all_together(op, name, device):
    inputs = named(op, name)[0](device, torch.float32)
    _, _, together = run(getattr(ops, op), inputs, leaves(op, inputs))
    for name in together:
        _, _, alone = run(getattr(ops, op), inputs, leaves(op, inputs, [name]))
        assert torch.equal(alone[name], together[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_incoming_gradient_of_any_layout(op, layout, device):
    inputs = named(op, "plain")[0](device, torch.float32)
    wanted = leaves(op, inputs)
    out = getattr(ops, op)(**{**inputs, **wanted})
    grad_out = strided(torch.randn_like(out), layout)
    actual = torch.autograd.grad(out, list(wanted.values()), grad_out, retain_graph=True)
    expected = torch.autograd.grad(out, list(wanted.values()), grad_out.contiguous())
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


# The score s = <h, k> / sqrt(D) with one nonzero product and D = 16 is exact: key[0] / 4 for hidden = (1, 0, ...).
SCORES = [s * sign for s in (0.0, 1e-9, 1e-6, 1e-3, 1.0) for sign in (1, -1)]


def score_inputs(device, dtype, norm: bool, zero_rule: str) -> dict:
    tokens, branches, width = len(SCORES), 2, 16
    generator = torch.Generator().manual_seed(3)
    hidden = torch.zeros(tokens, branches, width, dtype=torch.float64)
    key = torch.randn(tokens, branches, width, generator=generator, dtype=torch.float64)
    hidden[..., 0] = 1
    key[..., 0] = torch.tensor(SCORES, dtype=torch.float64)[:, None] * 4
    weights = [torch.rand(branches, width, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2)]
    if norm:
        # Around the clamp itself rounding decides, once there is a norm: keep away from it.
        key[[abs(s) == 1e-6 for s in SCORES], :, 0] *= 2
    cast = lambda x: x.to(dtype).to(device)                                             # noqa: E731
    return dict(
        hidden=cast(hidden), key=cast(key), value=cast(torch.randn(tokens, width, generator=generator)),
        hidden_weight=cast(weights[0]) if norm else None, key_weight=cast(weights[1]) if norm else None,
        eps=1e-6, zero_rule=zero_rule,
        # The clamp as the kernel sees it: in the accumulation type.
        clamp=1e-6 if dtype == torch.float64 else torch.tensor(1e-6, dtype=torch.float32).item(),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero_rule", ["sign", "copysign"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_gradient_around_the_clamp(dtype, norm, zero_rule, device):
    inputs = score_inputs(device, dtype, norm, zero_rule)
    # Token by token: the steep ones would otherwise drown the others.
    for token in range(len(SCORES)):
        one = {k: v[token:token + 1] if k in ("hidden", "key", "value") else v for k, v in inputs.items()}
        grads = assert_gradients_match("gate", one)
        if abs(SCORES[token]) < 1e-7:
            assert not grads["hidden"].any() and not grads["key"].any()
        if abs(SCORES[token]) > 1e-4:
            assert grads["hidden"].any() and grads["key"].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1.1920929e-07, 1e-20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_gradient_of_zero_rows(dtype, eps, residual, device):
    inputs = named("gate", "plain")[0](device, dtype) | dict(eps=eps, residual=residual)
    inputs["hidden"][0, 0] = 0
    inputs["key"][0, 1] = 0
    inputs["hidden"][0, 2], inputs["key"][0, 2] = 0, 0
    inputs["hidden"][0, 3], inputs["key"][0, 3], inputs["value"][0, 3] = 0, 0, 0
    assert_gradients_match("gate", inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", ["plain", "no_norm", "no_residual"])
def test_short_conv_gradient_of_zero_rows(sample, dtype, device):
    inputs = named("short_conv", sample)[0](device, dtype)
    inputs["x"][0] = 0
    inputs["x"][1, 2:5] = 0
    assert_gradients_match("short_conv", inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_short_conv_gradient_of_tiny_values(dtype, device):
    """Below sqrt(eps) the norm no longer hides the scale: the term with eps carries the gradient."""
    inputs = named("short_conv", "plain")[0](device, dtype)
    inputs["x"] *= 1e-3
    assert_gradients_match("short_conv", inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("op", ["gate", "short_conv", "gate_conv"])
def test_all_masked(op, residual, dtype, device):
    inputs = named(op, "mask")[0](device, dtype) | dict(residual=residual)
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    first = DIFFERENTIABLE[op][0]
    inputs[first].fill_(torch.nan)
    grad_out = torch.full_like(inputs[first], torch.inf)
    out, _, grads = run(getattr(ops, op), inputs, leaves(op, inputs), grad_out)
    same = grads.pop(first)
    assert torch.equal(same, grad_out) if residual else not same.any()
    assert out.isnan().all() if residual else not out.any()
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("op, name", [
    ("embedding", "mask"), ("gate", "mask"), ("short_conv", "long"), ("gate_conv", "long"),
])
def test_masked_positions_poison_nothing(op, name, bad, residual, dtype, device):
    """NaN or inf at masked positions, in the inputs and in the incoming gradient, changes no bit anywhere else."""
    inputs = named(op, name)[0](device, dtype)
    if op != "embedding":
        inputs["residual"] = residual
    mask = inputs["mask"]
    out, grad_out, clean = run(getattr(ops, op), inputs, leaves(op, inputs))
    per_token = [n for n in DIFFERENTIABLE[op] if n in ("hidden", "key", "value", "x")]
    poisoned = {**inputs, **{n: inputs[n].clone() for n in per_token}}
    for name in per_token:
        poisoned[name][~mask] = bad
    poisoned_grad = grad_out.clone()
    poisoned_grad[~mask] = bad
    out_poisoned, _, grads = run(getattr(ops, op), poisoned, leaves(op, poisoned), poisoned_grad)
    assert torch.equal(out_poisoned[mask], out[mask])
    for name, grad in grads.items():
        if name in per_token:
            assert torch.equal(grad[mask], clean[name][mask]), name
            passed_on = poisoned_grad if residual and name == DIFFERENTIABLE[op][0] else torch.zeros_like(grad)
            torch.testing.assert_close(grad[~mask], passed_on[~mask], rtol=0, atol=0, equal_nan=True)
        else:
            assert torch.equal(grad, clean[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_embedding_sums_in_float32(dtype, device):
    """4096 ones in one row: kept in bfloat16 the sum would stop at 256, in float16 at 2048."""
    table = torch.zeros(5, 3, dtype=dtype, device=device, requires_grad=True)
    rows = torch.full((2, 256, 8), 3, device=device)
    ops.embedding(table, rows).sum().backward()
    expected = torch.zeros(5, 3)
    expected[3] = 4096
    assert torch.equal(table.grad.float().cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_double_backward_is_refused(op, device):
    inputs = named(op, "plain")[0](device, torch.float64)
    wanted = leaves(op, inputs)
    out = getattr(ops, op)(**{**inputs, **wanted})
    grads = torch.autograd.grad(out.square().sum(), list(wanted.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grads[0].sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, changed", [
    ("embedding", "rows"), ("embedding", "mask"), ("gate", "mask"), ("gate", "key"), ("short_conv", "document_ids"),
    ("short_conv", "mask"), ("gate_conv", "value"), ("gate_conv", "document_ids"),
])
def test_changing_saved_inputs_is_refused(op, changed, device):
    inputs = named(op, "long" if "conv" in op else "mask")[0](device, torch.float32)
    out = getattr(ops, op)(**{**inputs, **leaves(op, inputs)})
    inputs[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_every_sample_has_a_gradient_to_check():
    for op, names in DIFFERENTIABLE.items():
        for name in names:
            assert any(sample()[name] is not None and sample()[name].numel() for sample in SAMPLES[op]), (op, name)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_forward_mode_is_refused(op):
    """Not answered with tangents of zero."""
    inputs = named(op, "plain")[0]("cpu", torch.float64)
    with torch.autograd.forward_ad.dual_level():
        name = DIFFERENTIABLE[op][0]
        inputs[name] = torch.autograd.forward_ad.make_dual(inputs[name].detach(), torch.ones_like(inputs[name]))
        with pytest.raises((RuntimeError, NotImplementedError), match="forward|jvp"):
            getattr(ops, op)(**inputs)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_calls_with_and_without_gradient_agree_with_the_bare_operator(op):
    """The public function has a way of its own past torch.library's autograd kernel."""
    inputs = named(op, "plain")[0]("cpu", torch.float64)
    wanted = leaves(op, inputs)
    out, grad_out, grads = run(getattr(ops, op), inputs, wanted)
    with torch.no_grad():
        assert torch.equal(getattr(ops, op)(**inputs), out)

    def traced(**tensors):
        return getattr(ops, op)(**tensors)

    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    other, _, others = run(compiled, inputs, wanted, grad_out)
    assert torch.equal(other, out) and all(torch.equal(others[name], grads[name]) for name in wanted)
