"""The ranks that share a table: collectives, and a lane beside the main one for what runs ahead."""

import atexit
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

_REFUSED = -1  # in place of a count of rows


class Peers:
    """A process group and this rank's place in it. All copies of a module share one.

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
        self._sent = 0
        self._side = None if prefetch_group is None else Peers(prefetch_group)
        if self._side is not None and (prefetch_group is self.group or self._ranks() != self._side._ranks()):
            raise ValueError("engram.distributed: prefetch_group must be another group of the same ranks, got "
                             f"{self._side._ranks()} for {self._ranks()}")
        _ALIVE.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Peers":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("engram.distributed: a sharded table belongs to a process group, so it cannot be pickled; save "
                        "its state_dict() with torch.distributed.checkpoint")

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent to others in `exchange`, here and ahead."""
        return self._sent + (0 if self._side is None else self._side.bytes_sent)

    def device_type(self, x: Tensor | None = None) -> str:
        """Where the group's collectives work: that of x if they do there, else the CPU if they do there."""
        kinds = [device.type for device in self.group._device_types]
        return next(kind for kind in (x.device.type if x is not None else "cpu", "cpu", *kinds) if kind in kinds)

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[r]` entries of x, in order of the ranks, to each rank r; get `receive[r]` from each, in order."""
        if self.size == 1:
            return x
        self._sent += (sum(send) - send[self.rank]) * x[:1].numel() * x.element_size() if len(x) else 0
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        return out

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """int64 [W] of each rank to int64 [W] from each. What comes back is for `check_refusals`."""
        if self.size == 1:
            return counts
        out = torch.empty_like(counts)
        dist.all_to_all_single(out, counts, group=self.group)
        return out

    @contextmanager
    def or_refuse(self, device: torch.device) -> Iterator[None]:
        """For what comes before `exchange_counts`: what fails here fails on all ranks, so that none waits for one that
        has given up."""
        try:
            yield
        except Exception:
            self.refuse(device)
            raise

    def refuse(self, device: torch.device) -> None:
        """Take part in the `exchange_counts` of the others, to say that there is nothing to exchange."""
        where = self.device_type() if device.type == "meta" else device
        self.exchange_counts(torch.full((self.size,), _REFUSED, dtype=torch.int64, device=where))

    def check_refusals(self, counts: Sequence[int]) -> None:
        """Raise RuntimeError where one of the ranks has refused."""
        if _REFUSED in counts:
            raise RuntimeError(f"engram.distributed: rank {counts.index(_REFUSED)} has refused its part of a lookup, "
                               "so no rank can have its own; the error there says why")

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

    def ahead(self, work: Callable[["Peers"], Any], device: torch.device) -> "Ahead":
        """Run `work(peers)` on a thread (on CUDA with a stream), after all that was given to it before.

        Its collectives run in a group of their own, so they cannot get between those of the main thread.

        Raises:
            ValueError: a group of some ranks only, without a prefetch_group.
        """
        if self._side is None:
            if self.group not in _SIDES:
                if self.size < dist.get_world_size():
                    raise ValueError("engram.distributed: prefetch needs a prefetch_group where the group is not of "
                                     "all ranks: another dist.new_group of the same ones")
                _SIDES[self.group] = dist.new_group(
                    self._ranks(), backend=dist.get_backend_config(self.group), timeout=_timeout(self.group))
            self._side = Peers(_SIDES[self.group])
        side = self._side
        lane = _LANES.setdefault(side.group, _Lane())

        def run() -> tuple[Any, None]:
            with torch.no_grad():
                return work(side), None

        if device.type != "cuda":
            return Ahead(lane.worker.submit(run), device)
        stream = lane.stream = lane.stream or torch.cuda.Stream(device)
        ready = torch.cuda.current_stream(device).record_event()

        def on_stream() -> tuple[Any, torch.cuda.Event]:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                return run()[0], stream.record_event()

        return Ahead(lane.worker.submit(on_stream), device)


class Ahead:
    """What runs ahead, or is done."""

    def __init__(self, future: Future[Any], device: torch.device) -> None:
        self._future, self._device = future, device

    def result(self) -> Any:
        """Wait for it; on CUDA the current stream waits for its work. Raises what it has raised."""
        result, event = self._future.result()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return result

    def forget(self) -> None:
        """Wait for it, whatever comes of it."""
        self._future.exception()


class _Lane:
    """One for each group that work runs ahead in, whoever shares it: its collectives have the same order on all ranks
    because the calls have."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(1, "engram-prefetch")
        self.stream: torch.cuda.Stream | None = None


_LANES: "WeakKeyDictionary[dist.ProcessGroup, _Lane]" = WeakKeyDictionary()
_SIDES: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()  # made here, by main group
_ALIVE: "WeakSet[Peers]" = WeakSet()


@atexit.register
def _let_go() -> None:
    """End the threads of destroyed groups while there is an interpreter: one that lets go of its last tensor after that
    waits for a lock that is gone, and takes the process down (torch 2.13)."""
    if _ALIVE and not dist.is_initialized():  # else what is yet to run at exit may use them
        for peers in list(_ALIVE):
            del peers.group, peers._side
        gc.collect()


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Of the group: new_group gives torch's default instead, whatever init_process_group was told."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
