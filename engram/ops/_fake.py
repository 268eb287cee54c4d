"""What the fake kernels share."""

from torch import Tensor


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Meta and fake tensors never reach the binding's checks: mixed devices would pass in silence."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got " + ", ".join(f"{k} on {v}" for k, v in given.items()))


def accumulate_dtype(tensor: Tensor):
    """float64 sums stay float64, everything else is summed in float32."""
    import torch

    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
