"""What the lookups of quantised tables share."""

import torch
from torch import Tensor

from engram.ops._fake import same_device


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


def register_fake_lookup(op: str) -> None:
    """The fake kernel of an operator ``(values, scales, rows, dtype, row_begin, mask)``."""

    @torch.library.register_fake(f"engram::{op}")
    def _(
        values: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype, row_begin: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        same_device(op, values=values, scales=scales, rows=rows, mask=mask)
        return values.new_empty((*rows.shape, values.shape[1]), dtype=dtype)
