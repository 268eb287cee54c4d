"""The ranks that share a table: collectives, and a lane beside the main one for what runs ahead."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Peers:
    """A process group and this rank's place in it. All copies of a module share one.

    `bytes_sent` counts what this rank has sent to others in `exchange`.

    Args:
        group: None: all ranks.
        prefetch_group: another group of the same ranks, for what runs ahead; None: made when it is first needed, which
            torch only offers to groups of all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this rank is not in the group, or `prefetch_group` is no other group of the same ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, prefetch_group: dist.ProcessGroup | None = None
    ) -> None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None:
            raise RuntimeError("engram.distributed needs torch.distributed: call init_process_group first")
        self.group = world if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("engram.distributed: this rank must be in the group")
        self.bytes_sent = 0
        self._worker: ThreadPoolExecutor | None = None
        self._side = None if prefetch_group is None else Peers(prefetch_group)
        if self._side is not None and (prefetch_group is self.group or self._ranks() != self._side._ranks()):
            raise ValueError("engram.distributed: prefetch_group must be another group of the same ranks, got "
                             f"{self._side._ranks()} for {self._ranks()}")
        self._stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Peers":
        return self

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    @property
    def device_type(self) -> str:
        """Where the group's collectives work."""
        return "cuda" if "nccl" in dist.get_backend(self.group) else "cpu"

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[r]` entries of x, in order of the ranks, to each rank r; get `receive[r]` from each, in order."""
        if self.size == 1:
            return x
        self.bytes_sent += (sum(send) - send[self.rank]) * x[:1].numel() * x.element_size() if len(x) else 0
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        return out

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """int64 [W] of each rank to int64 [W] from each."""
        if self.size == 1:
            return counts
        out = torch.empty_like(counts)
        dist.all_to_all_single(out, counts, group=self.group)
        return out

    def gather(self, x: Tensor) -> list[Tensor]:
        """Tensors of one shape from all ranks, in their order."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def agree(self, op: str, **values: Any) -> None:
        """Raise ValueError, on every rank alike, unless all have the same values: before anything could hang."""
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, values, group=self.group)
        for name in values:
            found = [other.get(name, "nothing") for other in everybody]
            if any(value != found[0] for value in found):
                rank = next(rank for rank, value in enumerate(found) if value != found[0])
                raise ValueError(f"{op}: all ranks must have the same {name}, got {_short(found[0])} on rank 0 and "
                                 f"{_short(found[rank])} on rank {rank}")

    def ahead(self, work: Callable[["Peers"], Any], device: torch.device) -> Future[Any]:
        """Run `work(peers)` on a thread of its own (on CUDA with a stream of its own), one after the other.

        Its collectives run in a group of their own, so they cannot get between those of the main thread.

        Raises:
            ValueError: a group of some ranks only, without a prefetch_group.
        """
        if self._side is None:
            if self.size < dist.get_world_size():
                raise ValueError("engram.distributed: prefetch needs a prefetch_group where the group is not of all "
                                 "ranks: another dist.new_group of the same ones")
            self._side = Peers(dist.new_group(self._ranks(), backend=dist.get_backend(self.group)))
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "engram-prefetch")
        if device.type != "cuda":
            return self._worker.submit(self._run, self._side, work)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        side, stream, ready = self._side, self._stream, torch.cuda.current_stream(device).record_event()

        def on_stream() -> Any:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                return self._run(side, work)

        return self._worker.submit(on_stream)

    def caught_up(self, device: torch.device) -> None:
        """What was done ahead is ordered before what the caller does next."""
        if device.type == "cuda" and self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)

    def _run(self, side: "Peers", work: Callable[["Peers"], Any]) -> Any:
        with torch.no_grad():
            before = side.bytes_sent
            result = work(side)
            self.bytes_sent += side.bytes_sent - before
            return result


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
