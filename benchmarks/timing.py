"""Interleaved timing: every contender once a round, so that whatever disturbs the machine disturbs all of them."""
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    `call(i)` does it once; `i` grows with every call, whoever is called, so that contenders which draw their input from
    a list never find in a cache what the one before them has read. `group`: how goals and tables refer to it (two ways
    to compile are both "compile", and the better one counts). `tolerance`: how far, relative and norm-wise, its outputs
    may be from ours; None: what the dtype allows. `compare` turns a result into the tensors to compare; None: nothing
    is. `bytes`: necessary ones, where they are not the work's.
    """

    name: str
    call: Callable[[int], object]
    group: str = ""
    tolerance: float | None = None
    compare: Callable[[object], list] | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.name)


def interleave(
    contenders: Sequence[Contender], seconds: float, *, least: int = 7, most: int = 300, first: int = 0
) -> dict[str, list[float]]:
    """Time the contenders in turn: A B C A B C ...

    Args:
        contenders: in this order; they are expected to be warm.
        seconds: for all rounds together, as far as `least` and `most` allow.
        least, most: rounds.
        first: the `i` of the first call.

    Returns:
        For each contender's name its times in seconds, one a round. What a call returns is freed outside of its time.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin, i = time.perf_counter(), first
        for done in range(most):
            elapsed = time.perf_counter() - begin
            if done >= least and elapsed * (done + 1) / done > seconds:
                break
            for contender in contenders:
                start = time.perf_counter()
                result = contender.call(i)
                times[contender.name].append(time.perf_counter() - start)
                del result
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
