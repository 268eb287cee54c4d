"""How far long work has come: what `progress=` of a function takes.

False: nothing is told and nothing printed. A function: it is called with what is done and what there is to do, after
every step. True: on a terminal a bar with the time that is left, where tqdm is installed; elsewhere a line every few
seconds. Both go to stderr.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress", "reporting"]

Progress = bool | Callable[[int, int], None]

SECONDS = 5.0  # between two lines


@contextmanager
def reporting(progress: Progress, what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Within the context: what to call with the numbers `(done, total)` after each step.

    Args:
        progress: as the caller got it.
        what: is done; stands before the bar or in the line.
        unit: of the numbers; "B", bytes, is written with prefixes.
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total: None
    elif sys.stderr.isatty() and _has_tqdm():
        yield from _bar(what, unit)
    else:
        yield _Lines(what)


def _has_tqdm() -> bool:
    try:
        import tqdm  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, unit_scale=unit == "B", unit_divisor=1024, dynamic_ncols=True) as bar:
        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


class _Lines:
    """A line on stderr at most every SECONDS; what takes less than that has none."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.began = self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last < SECONDS or not done:
            return
        self.last = now
        left = (now - self.began) / done * (total - done)
        print(f"{self.what}: {done / total:.0%}, {left:.0f} s left", file=sys.stderr, flush=True)
