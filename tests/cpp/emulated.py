"""A pytest plugin: the CPU side of torch.ops.engram runs the CUDA kernels, emulated, so that any test does.

    ENGRAM_EMULATED_LIBRARY=.../libengram_emulated.so PYTHONPATH=tests/cpp pytest -p emulated tests/test_forward.py

Outputs start as NaN, so that what a kernel forgets to write shows.
"""
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


def pytest_sessionfinish(session, exitstatus):
    if session.testscollected and not session.config.option.collectonly and not calls:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    ran = ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
    terminalreporter.write_line(f"emulated CUDA ops: {ran or 'NONE RAN'}")
