"""Processes for tests of engram.distributed: four ranks over gloo that stay, and take one job after the other."""
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sharded_cases

SIZE = 4
SECONDS = 40    # a rank that waits longer for another has failed


def context() -> Any:
    """Ranks are forked from a server that has imported torch and done nothing: importing it takes seconds."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "engram.distributed", "sharded_cases"])
    return found


def join(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size,
                            timeout=timedelta(seconds=SECONDS))


def _serve(rank: int, store: str, pipe) -> None:
    join(rank, SIZE, store)
    groups = {size: dist.new_group(range(size)) for size in range(1, SIZE + 1)}
    sharded_cases.PREFETCH_GROUPS |= {groups[size]: dist.new_group(range(size)) for size in range(1, SIZE + 1)}
    while (job := pipe.recv()) is not None:
        function, size, options = job
        try:
            pipe.send((None, function(groups[size], **options)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


class Crew:
    """`run(function, size, **options)` calls `function(group, **options)` on the first `size` ranks, in a group of just
    them, and returns what each returned. An error there is an AssertionError here, and the ranks start afresh."""

    def __init__(self) -> None:
        self.processes: list = []

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            mine, theirs = context().Pipe()
            process = context().Process(target=_serve, args=(rank, str(Path(self.folder.name) / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable, size: int, **options: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes[:size]:
            pipe.send((function, size, options))
        try:
            answers = [pipe.recv() if pipe.poll(3 * SECONDS) else ("no answer", None) for pipe in self.pipes[:size]]
        except EOFError:
            answers = [("a rank has died", None)]
        faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(answers) if fault is not None]
        if faults:
            self.stop()
            raise AssertionError("\n".join(faults))
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


def launch(function: Callable, size: int, **options: Any) -> list[int]:
    """`function(rank, size, store, **options)` in processes of their own, for those that die; their exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [context().Process(target=function, args=(rank, size, str(Path(folder) / "store")), kwargs=options)
                     for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(3 * SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        return [process.exitcode for process in processes]
