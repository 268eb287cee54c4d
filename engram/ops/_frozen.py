"""What the lookups of quantised tables share."""

import torch
from torch import Tensor


def refuse_gradient(op: str, **tensors: Tensor) -> None:
    """These operators have no backward: without this check a table would silently stay as it is."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ValueError(
                f"{op}: {name} must not require a gradient, got requires_grad=True: a quantised table is frozen; "
                "train a float table (ops.embedding) and quantise it, or pass it under torch.no_grad()"
            )
