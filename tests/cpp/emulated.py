"""A pytest plugin: the CPU side of torch.ops.engram runs the CUDA kernels, emulated, so that any test does.

    ENGRAM_EMULATED_LIBRARY=.../libengram_emulated.so PYTHONPATH=tests/cpp pytest -p emulated tests/test_forward.py

Outputs start as NaN, so that what a kernel forgets to write shows. With NVTX_INJECTION64_PATH=.../libnvtx_recorder.so
the session also fails unless every call of an op made its one NVTX range.
"""
import ctypes
import functools
import os
from collections import Counter

import engram  # noqa: F401  registers torch.ops.engram
import torch

calls: Counter[str] = Counter()
torch.ops.load_library(os.environ["ENGRAM_EMULATED_LIBRARY"])
torch.use_deterministic_algorithms(True, warn_only=True)    # fills torch.empty, too
library = torch.library.Library("engram", "IMPL")           # overrides as long as it lives


def counted(name: str):
    op = getattr(torch.ops.engram_emulated, name).default

    @functools.wraps(op)
    def call(*args, **kwargs):
        calls[name] += 1
        return op(*args, **kwargs)

    return call


for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
    namespace, _, name = qualified.partition("::")
    if namespace == "engram_emulated":
        library.impl(name, counted(name), "CPU", allow_override=True)


def wrong_ranges() -> list[str]:
    """What the recorder of NVTX ranges has seen otherwise than it should, if there is one."""
    path = os.environ.get("NVTX_INJECTION64_PATH")
    if path is None:
        return []
    count = ctypes.CDLL(path).nvtx_recorder_count
    seen = {name: count(name.encode()) for name in [*calls, "open"]}
    return [f"{name}: {seen[name]} ranges, not {wanted}" for name, wanted in {**calls, "open": 0}.items()
            if seen[name] != wanted]


def pytest_sessionfinish(session, exitstatus):
    if session.testscollected and not session.config.option.collectonly and (not calls or wrong_ranges()):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    ran = ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
    terminalreporter.write_line(f"emulated CUDA ops: {ran or 'NONE RAN'}")
    for line in wrong_ranges():
        terminalreporter.write_line(f"NVTX: {line}")
