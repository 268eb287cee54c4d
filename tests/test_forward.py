"""Every op against the float64 reference on the same (rounded) numbers: all samples, all dtypes, all devices."""
import os
import subprocess
import sys
from pathlib import Path

import engram
import pytest
import torch
from engram import ops, reference
from samples import (
    DEVICES, DIFFERENTIABLE, DTYPES, HALF_DTYPES, bits, each_sample, named, relative_error, results_of, to_double,
)

# Norm-wise. A half result is the float32 result rounded once: at most the unit roundoff, 2**-8 and 2**-11.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_unchanged(inputs: dict, fresh: dict) -> None:
    for name, value in fresh.items():
        if isinstance(value, torch.Tensor):
            kind = torch.uint8 if value.dtype.itemsize == 1 else value.dtype       # float8 cannot be compared
            assert torch.equal(inputs[name].view(kind), value.view(kind)), f"{name} was written to"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, sample", each_sample(*DIFFERENTIABLE), ids=str)
def test_float_ops(op, sample, dtype, device):
    inputs = sample(device, dtype)
    out = getattr(ops, op)(**inputs)
    expected = getattr(reference, op)(**to_double(inputs))
    assert out.dtype == inputs[DIFFERENTIABLE[op][0]].dtype and out.device.type == device and out.is_contiguous()
    if op == "embedding":
        assert torch.equal(out.double(), expected)
    else:
        assert relative_error(out, expected) <= TOLERANCE[dtype]
    assert_unchanged(inputs, sample(device, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, sample", each_sample("ngram_hash", "row_plan"), ids=str)
def test_integer_ops(op, sample, device):
    inputs = sample(device)
    actual = results_of(op, getattr(ops, op), inputs)
    for out, expected in zip(actual, results_of(op, getattr(reference, op), inputs), strict=True):
        assert out.dtype == torch.int64 and out.is_contiguous()
        assert torch.equal(out, expected)
    assert_unchanged(inputs, sample(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, sample", each_sample("embedding_fp8", "embedding_int8"), ids=str)
def test_scaled_lookups(op, sample, dtype, device):
    """To the bit, for there is one rounding."""
    inputs = sample(device, dtype)
    out = getattr(ops, op)(**inputs)
    assert out.dtype == dtype and out.device.type == device and out.is_contiguous()
    assert torch.equal(bits(out), bits(getattr(reference, op)(**inputs)))
    assert_unchanged(inputs, sample(device, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, sample", each_sample("row_sum", "row_update"), ids=str)
def test_row_ops(op, sample, dtype, device):
    """Sums and states to the rounding of their dtype; a stochastically rounded table to one more bit."""
    inputs = sample(device, dtype)
    actual = results_of(op, getattr(ops, op), inputs)
    oracle = to_double(inputs) | ({"seed": None} if op == "row_update" else {})
    for out, expected in zip(actual, results_of(op, getattr(reference, op), oracle), strict=True):
        if expected.dtype == torch.int64:
            assert torch.equal(out, expected)
        else:
            assert relative_error(out, expected) <= TOLERANCE[out.dtype] * (2 if inputs.get("seed") else 1)
    assert_unchanged(inputs, sample(device, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("op, name", [("gate", "many"), ("short_conv", "long"), ("gate_conv", "long")])
def test_half_results_are_rounded_once(op, name, dtype, device):
    inputs = named(op, name)[0](device, dtype)
    out = getattr(ops, op)(**inputs)
    expected = getattr(reference, op)(**to_double(inputs)).to(dtype)
    # Float32 sums seldom land on the other side of a rounding boundary; a second rounding on the way moves many.
    assert (out != expected).double().mean() < 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("op", ["gate", "short_conv", "gate_conv"])
def test_nan_flows_through(op, bad, dtype, device):
    """A NaN or inf in one branch of one token reaches what depends on it and nothing else."""
    inputs = named(op, "plain")[0](device, dtype)
    clean = getattr(ops, op)(**inputs)
    first = inputs[DIFFERENTIABLE[op][0]]
    first[1, 3, 2, 5] = bad
    out = getattr(ops, op)(**inputs)
    reached = torch.zeros_like(out, dtype=torch.bool)
    if op == "gate":
        reached[1, 3, 2] = True
    else:
        reached[1, 3::inputs["dilation"], 2] = True
    assert torch.equal(out[~reached], clean[~reached])
    assert not out[1, 3, 2].isfinite().all()
    if bad != bad:
        assert out[reached].isnan().all()


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_autocast_is_ignored(op):
    inputs = named(op, "plain")[0]("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = getattr(ops, op)(**inputs)
    assert torch.equal(out, getattr(ops, op)(**inputs))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    """Widths, masks and dtypes again, forward and backward, in a process that is held to this one."""
    chosen = engram.build_info()["cpu"]
    if isa == chosen:
        pytest.skip("the rest of this run already uses this instruction set")
    environment = os.environ | dict(ENGRAM_CPU_ISA=isa)
    check = f"import engram; assert engram.build_info()['cpu'] == {isa!r}"
    available = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    if "this processor does not have it" in available.stderr:
        pytest.skip("this processor does not have the instruction set")
    assert available.returncode == 0, available.stderr
    here = Path(__file__).parent
    again = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here / "test_forward.py"),
         str(here / "test_gradients.py"), str(here / "ops" / "test_embedding_fp8.py"),
         str(here / "ops" / "test_embedding_int8.py"),
         "-k", "integer_ops or scaled_lookups or every_pair or every_product or "
               "(float_ops or row_ops or against_float64) and (width or mixed or mask or long) and not dtype0"],
        env=environment, cwd=here.parent, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-3000:]


def test_unknown_instruction_set():
    environment = os.environ | dict(ENGRAM_CPU_ISA="mmx")
    run = subprocess.run([sys.executable, "-c", "import engram; engram.build_info()"], env=environment,
                         capture_output=True, text=True)
    assert run.returncode != 0 and "ENGRAM_CPU_ISA must be baseline, avx2 or avx512, got 'mmx'" in run.stderr
