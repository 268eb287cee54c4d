"""The stages of the modules, named for profilers: hash, lookup, projections, gate and convolution.

The ops need nothing of this: they show under their own names, `engram::gate_conv` and so on, in torch.profiler, and on
CUDA as NVTX ranges of the domain "engram". The stages around them are off unless asked for, with `ENGRAM_PROFILE=1` in
the environment or within `stages()`; `engram.embedding` is then a range of torch.profiler, and of NVTX where there is a
GPU. A compiled graph has no stages.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

_enabled = os.environ.get("ENGRAM_PROFILE", "") not in ("", "0")
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def stages(enabled: bool = True) -> Iterator[None]:
    """Within this context the modules name their stages; with False they do not, whatever the environment says."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def stage(name: str) -> contextlib.AbstractContextManager[None]:
    """A range `engram.<name>` around what is done in the context; where stages are off, one that does nothing."""
    if not _enabled or torch.compiler.is_compiling():
        return _NOTHING
    return named_range(f"engram.{name}")


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range of torch.profiler, and of NVTX where there is a GPU."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else _NOTHING
    with nvtx, torch.profiler.record_function(name):
        yield
