"""`engram report`: what this installation is."""

import argparse
import platform
from typing import Any

import torch

import engram


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print it; returns the exit status and `engram.build_info()`."""
    info = engram.build_info()
    built, running = info["torch"]["built"], info["torch"]["running"]
    lines = {
        "engram": info["version"],
        "torch": f"{running} (built with {built})",
        "python": platform.python_version(),
        "compiler": info["compiler"],
        "cpu": f"{info['cpu']} kernels, {torch.get_num_threads()} threads",
        "cuda": cuda_line(info["cuda"]),
    }
    for name, line in lines.items():
        print(f"{name:10}{line}")
    return 0, info


def cuda_line(architectures: Any) -> str:
    """What can run on a GPU here: the kernels' architectures and the device, or what is missing."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if architectures:
        kernels = architectures if isinstance(architectures, str) else " ".join(map(str, architectures))
        return f"kernels for {kernels}; " + (f"running on {device}" if device else "no GPU is visible")
    return "CPU-only build" + (f"; the {device} is not used by engram's operators" if device else "")
