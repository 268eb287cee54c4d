"""Errors against float64 on the rounded inputs: what the dtype's own rounding of the inputs costs is nobody's fault."""
from collections.abc import Iterator

import torch

from benchmarks import peers
from benchmarks.shapes import Shape
from benchmarks.works import OPTIONS
from engram import ops, reference
from samples import named, relative_error, to_double

OUTPUTS = ("y", "dk", "dh", "dv")
# Norm-wise. bfloat16: also no worse than the demo in eager bfloat16.
LIMITS = {
    torch.float32: dict(y=1e-6, dk=1e-4, dh=1e-4),
    torch.bfloat16: dict(y=3e-3, dk=3e-3, dh=3e-3, dv=3e-3),
}
WAYS = {
    "ours": ops.gate_conv, "eager": reference.gate_conv, "demo": peers.demo_gate_conv, "smart": peers.smart_gate_conv
}


def measure(name: str, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> dict:
    """gate_conv's errors on y and the gradients of key, hidden and value, ours beside those of eager code."""
    sizes = dict(batch=shape.batch, tokens=shape.tokens, branches=shape.branches, width=shape.width)
    inputs = named("gate_conv", "plain")[0].at(**sizes)(device, dtype)
    grad = torch.randn(inputs["hidden"].shape, generator=torch.Generator().manual_seed(1)).to(inputs["hidden"])
    exact = dict(zip(OUTPUTS, _outputs(reference.gate_conv, to_double(inputs), grad.double())))
    errors = {}
    for way, function in WAYS.items():
        outputs = zip(OUTPUTS, _outputs(function, inputs, grad))
        errors[way] = {output: relative_error(tensor, exact[output]) for output, tensor in outputs}
    limits = {output: min(limit, errors["demo"][output]) if dtype == torch.bfloat16 else limit
              for output, limit in LIMITS[dtype].items()}
    return dict(
        kind="accuracy", op="gate_conv", device=device, shape=name, sizes=str(shape),
        dtype=str(dtype).removeprefix("torch."),
        errors=errors, limits=limits, met=all(errors["ours"][output] <= limit for output, limit in limits.items()),
    )


def _outputs(function, inputs: dict, grad: torch.Tensor) -> Iterator[torch.Tensor]:
    names = ("hidden", "key", "value", "hidden_weight", "key_weight", "conv_weight", "conv_norm_weight")
    tensors = [inputs[name].detach() for name in names]
    leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
    y = function(*tensors, **OPTIONS)
    hidden, key, value = torch.autograd.grad(y, leaves, grad)
    return iter((y.detach(), key, hidden, value))
