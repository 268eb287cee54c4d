"""The Engram layer for PyTorch: hashed n-gram memory tables, a context gate and a short convolution.

``engram.ops`` holds the operators, ``engram.nn`` the modules, ``engram.reference`` the same operators in plain PyTorch,
``engram.optim`` the optimizers for sparse gradients of tables, ``engram.distributed`` tables spread over many devices,
``engram.hf`` what puts the layers into models of ``transformers``.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (loads libtorch, which _C needs)

try:
    import engram._C as _C  # importing it registers torch.ops.engram.*
except ImportError as error:
    raise ImportError(
        f"engram's compiled part (engram._C) cannot be loaded from {Path(__file__).parent}: install the package with "
        f"`python -m pip install .` (`-e .` inside the source tree) in this environment ({error})"
    ) from error

try:
    from engram import nn, ops, profiling, reference
except (AttributeError, RuntimeError) as error:  # how torch says that there is no such operator
    if not any(name in str(error) for name in ("engram::", "'engram' object")):
        raise
    raise ImportError(
        f"engram's compiled part ({_C.__file__}) is older than its Python files: run `python -m pip install -e .` in "
        f"the source tree again ({error})"
    ) from error
from engram.config import EngramConfig
from engram.storage import empty_table, huge_page_share
from engram.vocab import TokenMap

__version__ = "0.1.0"
__all__ = [
    "EngramConfig", "TokenMap", "build_info", "empty_table", "huge_page_share", "nn", "ops", "profiling", "reference"
]

# Imported when first asked for: what most users of the ops do not need.
_LAZY = ("checkpoint", "distributed", "hf", "models", "optim", "sizing", "statistics")

if TYPE_CHECKING:  # to whom a __getattr__ means that there is every attribute
    from engram import checkpoint as checkpoint, distributed as distributed, hf as hf, models as models
    from engram import optim as optim, sizing as sizing, statistics as statistics
else:

    def __getattr__(name: str) -> ModuleType:
        if name in _LAZY:
            return importlib.import_module(f"engram.{name}")
        raise AttributeError(f"module 'engram' has no attribute {name!r}")


def build_info() -> dict[str, Any]:
    """What this installation is: keys ``version``, ``torch`` (``built`` and ``running``), ``compiler``, ``cpu`` (the
    instruction set in use) and ``cuda`` (GPU architectures of the kernels, or None)."""
    info = _C.build_info()
    return {
        "version": __version__,
        "torch": {"built": info["torch"], "running": torch.__version__},
        "compiler": info["compiler"],
        "cpu": info["cpu"],
        "cuda": info["cuda"],
    }
