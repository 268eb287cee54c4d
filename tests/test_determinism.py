"""The same bits on every run and for every thread count: forward and backward, at sizes cut into many blocks."""
import pytest
import torch
from engram import ops
from samples import DEVICES, DIFFERENTIABLE, Sample, named, results_of

LARGE = {
    "ngram_hash": named("ngram_hash", "long")[0].at(batch=3, tokens=5000),
    "embedding": named("embedding", "repeats")[0].at(shape=(4, 3000), table_rows=50, width=24),
    "decode": named("decode", "wraps")[0].at(batch=8, tokens=60, width=150, row_width=40),
    "embedding_fp8": named("embedding_fp8", "many")[0].at(shape=(4, 3000)),
    "embedding_int8": named("embedding_int8", "many")[0].at(shape=(4, 3000)),
    "row_plan": named("row_plan", "many")[0],
    "row_sum": named("row_sum", "repeats")[0].at(shape=(4, 3000), table_rows=50, width=24),
    "row_update": named("row_update", "stochastic")[0].at(shape=(4, 3000), table_rows=5000, width=24),
    "gate": named("gate", "mask_residual")[0].at(shape=(3, 900), width=48),
    "short_conv": named("short_conv", "long")[0].at(tokens=900, width=48),
    "gate_conv": named("gate_conv", "long")[0].at(tokens=900, width=48),
}


def results(op: str, sample: Sample, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = sample(device, dtype)
    wanted = {name: inputs[name].requires_grad_() for name in DIFFERENTIABLE.get(op, ())}
    if not wanted:
        return results_of(op, getattr(ops, op), inputs)
    out = getattr(ops, op)(**inputs)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, list(wanted.values()), grad_out)]


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", LARGE)
def test_thread_count_never_shows(op, dtype, restore_threads):
    expected = None
    for threads in (1, 2, 3, 7, 2):
        torch.set_num_threads(threads)
        found = results(op, LARGE[op], "cpu", dtype)
        expected = expected or found
        assert all(torch.equal(f, e) for f, e in zip(found, expected)), f"{threads} threads"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", LARGE)
def test_runs_agree(op, dtype, device):
    expected = results(op, LARGE[op], device, dtype)
    for _ in range(5 if device == "cpu" else 19):
        assert all(torch.equal(f, e) for f, e in zip(results(op, LARGE[op], device, dtype), expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["gate", "short_conv", "gate_conv"])
def test_memory_layout_never_shows(op, device):
    """A view at an odd address, too: vector loads must not depend on alignment."""
    inputs = named(op, "plain")[0](device, torch.float32)
    moved = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            room = value.new_empty(value.numel() + 1)
            value = room[1:].view(value.shape).copy_(value)
        moved[name] = value
    assert torch.equal(getattr(ops, op)(**moved), getattr(ops, op)(**inputs))
