"""What torch asks of an op: schema, fake kernel, autograd, torch.compile, torch.export."""
import engram
import pytest
import torch
from engram import ops
from samples import DEVICES, DIFFERENTIABLE, backward_inputs, named, results_of
from torch.library import opcheck

CHECKED = {
    "ngram_hash": ("plain", "everything", "int32", "transposed", "no_tokens"),
    "embedding": ("plain", "mask", "shard_int32_mask", "transposed", "no_tokens"),
    "decode": ("plain", "eos_everything", "mixed", "no_tokens"),
    "embedding_fp8": ("plain", "mask", "shard_int32_mask", "transposed", "no_tokens"),
    "embedding_int8": ("plain", "mask", "shard_int32_mask", "transposed", "no_tokens"),
    "row_plan": ("plain", "shard_int32_mask", "one_chunk", "transposed", "no_tokens"),
    "row_sum": ("plain", "mask", "transposed", "no_tokens"),
    "row_update": ("plain", "momentum", "adagrad", "adam", "stochastic", "dense", "no_tokens"),
    "gate": ("plain", "mask_residual", "no_weights", "mixed", "transposed", "no_tokens"),
    "short_conv": ("plain", "long", "bare", "weights_bfloat16", "transposed", "no_tokens"),
    "gate_conv": ("plain", "long", "bare", "mixed_mask", "transposed", "no_tokens"),
}
CASES = [(op, sample) for op, names in CHECKED.items() for sample in named(op, *names)]
BACKWARD_CASES = [(op, sample) for op, sample in CASES if op in DIFFERENTIABLE]
# Two sizes of the same case; a graph made with dynamic shapes at the first must serve the second. No other dimension is
# of the first sizes: torch takes dimensions that are equal at the first call for one and the same.
SIZES = {
    "decode": (dict(batch=6, tokens=11), dict(batch=3, tokens=21)),
    "ngram_hash": (dict(batch=6, tokens=9), dict(batch=3, tokens=21)),
    "embedding": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "embedding_fp8": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "embedding_int8": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "row_plan": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "row_sum": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "row_update": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "gate": (dict(shape=(6, 9)), dict(shape=(3, 21))),
    "short_conv": (dict(batch=6, tokens=9), dict(batch=3, tokens=21)),
    "gate_conv": (dict(batch=6, tokens=9), dict(batch=3, tokens=21)),
}
GROWING = {
    "decode": "documents", "ngram_hash": "everything", "embedding": "mask", "embedding_fp8": "mask", "embedding_int8": "mask",
    "row_plan": "mask", "row_sum": "mask",
    "row_update": "adam", "gate": "mask_residual", "short_conv": "documents",
    "gate_conv": "mask_residual",
}


def at_both_sizes(op: str, device: str) -> list[dict]:
    return [named(op, GROWING[op])[0].at(**size)(device, torch.float32) for size in SIZES[op]]


def tensors(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if isinstance(value, (torch.Tensor, list))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, sample", CASES, ids=str)
def test_opcheck(op, sample, device):
    inputs = sample(device, torch.float32)
    for name in DIFFERENTIABLE.get(op, ()):
        if inputs[name] is not None:
            inputs[name].requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if op == "embedding_fp8":       # torch cannot compare float8 tensors; test_forward.py looks whether one was written to
        checks = checks[1:]
    opcheck(getattr(torch.ops.engram, op).default, (), inputs, test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, sample", BACKWARD_CASES, ids=str)
def test_opcheck_backward(op, sample, device):
    opcheck(getattr(torch.ops.engram, f"{op}_backward").default, (), backward_inputs(op, sample(device, torch.float32)))


@pytest.mark.skipif(engram.build_info()["cuda"] is not None, reason="a build with CUDA kernels")
@pytest.mark.parametrize("op", CHECKED)
def test_a_gpu_without_cuda_kernels_gets_a_sentence(op):
    """What is registered for CUDA tensors, called with CPU tensors past the dispatcher, since there is no GPU."""
    inputs = named(op, "plain")[0](dtype=torch.float32)
    for_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="^engram was built without CUDA kernels, so it has no op for CUDA tensors"):
        getattr(torch.ops.engram, op).default.redispatch(for_cuda, **inputs)
    if op in DIFFERENTIABLE:
        backward = getattr(torch.ops.engram, f"{op}_backward").default
        with pytest.raises(RuntimeError, match="^engram was built without CUDA kernels"):
            backward.redispatch(for_cuda, **backward_inputs(op, inputs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", SIZES)
def test_compile(op, device):
    """One graph, no recompilation for another batch and length, the same bits, gradients included."""
    function = getattr(ops, op)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for inputs, stance in zip(at_both_sizes(op, device), ("default", "fail_on_recompile")):
        wanted = [inputs[name].requires_grad_() for name in DIFFERENTIABLE.get(op, ())]
        with torch.compiler.set_stance(stance):
            actual = results_of(op, compiled, inputs)
        expected = results_of(op, function, inputs)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
        if wanted:
            gradients = [torch.autograd.grad(found[0].sum(), wanted) for found in (actual, expected)]
            assert all(torch.equal(a, e) for a, e in zip(*gradients))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compile_with_inductor(device):
    """All four ops in one graph, as a layer has them."""
    def layer(hidden, token_ids, constants, table, key_proj, gate_weights, conv_weights, document_ids):
        rows = ops.ngram_hash(token_ids, *constants, pad_id=2, document_ids=document_ids)
        memory = ops.embedding(table, rows[0]).flatten(2)
        key = (memory @ key_proj).unflatten(-1, hidden.shape[-2:])
        gated = ops.gate(hidden, key, memory, *gate_weights, eps=1e-6)
        return ops.short_conv(gated, *conv_weights, dilation=3, document_ids=document_ids)

    branches, width, heads, order = 2, 16, 2, 3
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for batch, tokens in ((2, 9), (3, 21)):
        hashing = named("ngram_hash", "documents")[0].at(
            batch=batch, tokens=tokens, heads=heads, order=order, layers=1)(device)
        moduli = hashing["moduli"]
        mixing = named("gate", "plain")[0].at(
            shape=(batch, tokens), branches=branches, width=width)(device, torch.float32)
        conv = named("short_conv", "plain")[0].at(branches=branches, width=width)(device, torch.float32)
        table = torch.randn(int(moduli.sum()), width // moduli.numel()).to(device)
        key_proj = (torch.randn(width, branches * width) / 4).to(device)
        learned = [mixing["hidden"], table, key_proj, mixing["hidden_weight"], mixing["key_weight"], conv["weight"],
                   conv["norm_weight"]]
        learned = [x.requires_grad_() for x in learned]
        constants = (hashing["multipliers"], moduli, hashing["offsets"])
        arguments = (learned[0], hashing["token_ids"], constants, *learned[1:3], tuple(learned[3:5]),
                     tuple(learned[5:]), hashing["document_ids"])
        actual, expected = compiled(*arguments), layer(*arguments)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual.square().sum(), learned), torch.autograd.grad(expected.square().sum(), learned),
            rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", SIZES)
def test_export(op, device):
    small, large = at_both_sizes(op, device)
    constants = {name: value for name, value in small.items() if name not in tensors(small)}

    class Module(torch.nn.Module):
        def forward(self, inputs):
            return results_of(op, getattr(ops, op), inputs | constants)

    def growing(value, other):
        if isinstance(value, list):
            return [growing(*pair) for pair in zip(value, other, strict=True)]
        return {i: torch.export.Dim.DYNAMIC for i, size in enumerate(value.shape) if size != other.shape[i]}

    grows = {name: growing(value, large[name]) for name, value in tensors(small).items()}
    program = torch.export.export(Module(), (tensors(small),), dynamic_shapes=(grows,))
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert getattr(torch.ops.engram, op).default in calls
    for inputs in (small, large):
        actual, expected = program.module()(tensors(inputs)), results_of(op, getattr(ops, op), inputs)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
