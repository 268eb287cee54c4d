"""Interleaved timing: every contender once a round, so that whatever disturbs the machine disturbs all of them."""
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    `call(i)` does it once; `i` grows with every call, whoever is called, so that contenders which draw their input from
    a list never find in a cache what the one before them has read. `group`: how goals and tables refer to it (two ways
    to compile are both "compile", and the better one counts). `tolerance`: how far, relative and norm-wise, its outputs
    may be from ours; None: what the dtype allows. `compare` turns a result into the tensors to compare; None: nothing
    is. `bytes`: necessary ones, where they are not the work's. `compiled`: by torch.compile, whose mistakes are noted.
    """

    name: str
    call: Callable[[int], object]
    group: str = ""
    tolerance: float | None = None
    compare: Callable[[object], list] | None = None
    bytes: int | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.name)


def processor_time(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result                      # is freed outside of its time
    return seconds


class GpuTime:
    """Seconds that the GPU needs for one call, between two CUDA events, with nothing of earlier calls in its L2 cache.

    The GPU is held busy until the host has issued the whole call: what is timed is the device, not Python. More
    kernels than a millisecond is enough for are timed as they come.
    """

    FLUSH_BYTES, HOLD_CYCLES = 2**29, 2_000_000  # several times the largest L2; about a millisecond

    def __init__(self, cuda=torch.cuda) -> None:
        self.cuda = cuda
        self.flushed = torch.empty(self.FLUSH_BYTES, dtype=torch.uint8, device="cuda" if cuda is torch.cuda else "cpu")

    def __call__(self, call: Callable[[], object]) -> float:
        begin, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        self.cuda._sleep(self.HOLD_CYCLES)
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return begin.elapsed_time(end) / 1e3


@lru_cache
def timer_of(device: str) -> Callable[[Callable[[], object]], float]:
    """How a call is timed on this device."""
    return GpuTime() if device == "cuda" else processor_time


def interleave(
    contenders: Sequence[Contender], seconds: float, *, least: int = 7, most: int = 300, first: int = 0,
    timer: Callable[[Callable[[], object]], float] = processor_time,
) -> dict[str, list[float]]:
    """Time the contenders in turn, each once a round, every round in another order: A B C, C A B, ...

    In one fixed order a contender would always pay for what the same neighbour leaves behind: memory given back to the
    system has to be faulted in again.

    Args:
        contenders: expected to be warm.
        seconds: for all rounds together, as far as `least` and `most` allow.
        least, most: rounds.
        first: the `i` of the first call.
        timer: calls a function and returns its seconds.

    Returns:
        For each contender's name its times in seconds, one a round. What a call returns is freed outside of its time.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    order, generator = list(contenders), random.Random(0)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin, i = time.perf_counter(), first
        for done in range(most):
            elapsed = time.perf_counter() - begin
            if done >= least and elapsed * (done + 1) / done > seconds:
                break
            generator.shuffle(order)
            for contender in order:
                times[contender.name].append(timer(lambda: contender.call(i)))
                i += 1
    finally:
        if collecting:
            gc.enable()
    return times


def summary(times: Sequence[float]) -> dict:
    """Median and spread in milliseconds, and how many runs."""
    low, median, high = np.percentile(times, [10, 50, 90])
    milliseconds = dict(median_ms=median, min_ms=min(times), p10_ms=low, p90_ms=high)
    return {name: float(f"{1e3 * value:.5g}") for name, value in milliseconds.items()} | {"runs": len(times)}
