"""What a profiler shows: the ops under their own names, and the stages of the layer where they are asked for."""
import os
import subprocess
import sys
import time

import pytest
import torch
from samples import DIFFERENTIABLE, SAMPLES, named
from test_nn import build, configure, draw
from torch.profiler import ProfilerActivity, profile

from engram import ops, profiling

STAGES = ["engram.hash", "engram.lookup", "engram.projections", "engram.gate_conv"]


def seen(function) -> list[str]:
    """Names of what ran, in order of time."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    return [event.name for event in trace.events()]


@pytest.fixture
def layer():
    module = build()
    hidden, ids = draw()
    return lambda: module(hidden, ids)


@pytest.mark.parametrize("op", SAMPLES)
def test_ops_show_under_their_names(op):
    inputs = named(op, "plain")[0]()
    leaves = [inputs[name].requires_grad_() for name in DIFFERENTIABLE.get(op, ())]

    def run():
        out = getattr(ops, op)(**inputs)
        if leaves:
            out.sum().backward()

    names = seen(run)
    assert names.count(f"engram::{op}") == 1
    assert names.count(f"engram::{op}_backward") == bool(leaves)


@pytest.mark.parametrize("options", [{}, dict(kernel_size=0)])
def test_stages_show_where_asked_for(options):
    module = build(configure(**options))
    hidden, ids = draw()
    before = module(hidden, ids)
    with profiling.stages():
        names = seen(lambda: module(hidden, ids))
        assert [name for name in names if name.startswith("engram.")] == STAGES
        assert torch.equal(module(hidden, ids), before)
        with profiling.stages(False):
            assert not any(name in STAGES for name in seen(lambda: module(hidden, ids)))
    assert not any(name in STAGES for name in seen(lambda: module(hidden, ids)))


def test_stages_hold_their_ops(layer):
    with profiling.stages(), profile(activities=[ProfilerActivity.CPU]) as trace:
        layer()
    def stage_of(event) -> str:  # past the ranges of autograd, which are named after its functions
        return event.name if event.name.startswith("engram.") else stage_of(event.cpu_parent)

    found = {event.name: stage_of(event) for event in trace.events() if event.name.startswith("engram::")}
    assert found == {
        "engram::ngram_hash": "engram.hash", "engram::embedding": "engram.lookup",
        "engram::gate_conv": "engram.gate_conv",
    }


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_for_stages(value, on):
    environment = {name: v for name, v in os.environ.items() if name != "ENGRAM_PROFILE"}
    if value is not None:
        environment["ENGRAM_PROFILE"] = value
    code = "import engram; print(type(engram.profiling.stage('hash')).__name__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
                          capture_output=True, text=True, check=True)
    assert (done.stdout.strip() != "nullcontext") == on


@pytest.mark.parametrize("enabled", [False, True])
def test_stages_break_no_graph(enabled):
    module = build()
    hidden, ids = draw()
    with profiling.stages(enabled):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(hidden, ids), module(hidden, ids))
        exported = torch.export.export(module, (hidden, ids)).module()
        assert torch.equal(exported(hidden, ids), module(hidden, ids))


def test_stages_cost_nothing_when_off():
    def fastest() -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(1000):
                with profiling.stage("hash"):
                    pass
            times.append((time.perf_counter() - start) / 1000)
        return min(times)

    off = fastest()
    with profiling.stages():
        on = fastest()
    assert off < 2e-6 and off < on / 3          # measured: 0.2 and 10 microseconds


def test_nvtx_follows_the_gpu(monkeypatch, layer):
    """Where torch sees a GPU each stage is an NVTX range as well."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    layer()
    assert calls == []
    with profiling.stages():
        layer()
    assert calls == [part for name in STAGES for part in (name, "end")]
