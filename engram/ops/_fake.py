"""What the fake kernels share."""

import torch
from torch import Tensor


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Meta and fake tensors never reach the binding's checks: mixed devices would pass in silence."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {places}")


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """float64 sums stay float64, everything else is summed in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
