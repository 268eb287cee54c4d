"""Checkpoints of sharded tables: written by all ranks at once, read at any world size, never half replaced.

A folder holds one checkpoint a step and a file `latest` that names the good one:

    latest                  {"step": 40, "folder": "step-40"}
    step-40/*.distcp        what torch.distributed.checkpoint writes, and its .metadata
    step-40/checksums.json  CRC-32 and size of each of these files

A save writes `step-41.part`, renames it when all ranks have finished, then replaces `latest` in one go, then removes
what is older. Whenever it is killed, `latest` names a whole checkpoint.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engram.distributed.embedding import ShardedMultiHeadEmbedding
from engram.distributed.peers import Peers

LATEST, CHECKSUMS = "latest", "checksums.json"
BLOCK = 16 << 20

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, damaged, or does not fit. Raised on every rank."""


def shard_optimizer_state(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Let `optimizer.state_dict()` give the state of sharded tables as DTensors, as `model.state_dict()` gives the
    tables, and `load_state_dict()` take them: state is saved, loaded and resharded with its rows.

    For any torch optimizer whose state of a table is [local rows] or [local rows, d], those of `engram.optim` too.
    Without this, state of the rows of other ranks is lost in a distributed checkpoint.

    Args:
        optimizer: over parameters of `model`.
        model: with sharded tables (quantised ones are frozen and have no state).

    Returns:
        optimizer.
    """
    tables = {id(m.weight): m for m in model.modules() if isinstance(m, ShardedMultiHeadEmbedding)}

    def convert(
        state_dict: dict[str, Any], entry: Callable[[ShardedMultiHeadEmbedding, Tensor, str], Tensor]
    ) -> dict[str, Any]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        state = dict(state_dict["state"])
        for key, param in zip(keys, params):
            if id(param) in tables and key in state:
                table = tables[id(param)]
                state[key] = {
                    name: entry(table, value, f"{name} of parameter {key}") if _of_rows(name, value) else value
                    for name, value in state[key].items()
                }
        return {**state_dict, "state": state}

    optimizer.register_state_dict_post_hook(
        lambda _, state_dict: convert(state_dict, lambda table, value, what: table.distributed_view(value)))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: convert(state_dict, lambda table, value, what: table.local_part(value, what)))
    return optimizer


def _of_rows(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and name != "step"


def save_checkpoint(
    state_dict: dict[str, Any], folder: str | os.PathLike[str], step: int, group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint, all ranks together; the one before stays whole until this one is.

    Args:
        state_dict: nested dicts of tensors, DTensors and what can be pickled; all but DTensors are the same on all
            ranks.
        folder: of one run; a file system that all ranks see.
        step: a number that grows.
        group: None: all ranks.

    Raises:
        CheckpointError: another rank could not write, or this one.
        ValueError: ranks with another step.
    """
    peers = Peers(group)
    peers.agree("save_checkpoint", step=step, folder=str(folder))
    folder = Path(folder)
    part = folder / f"step-{step}.part"
    with _together(peers):
        if peers.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
    try:
        save(state_dict, storage_writer=FileSystemWriter(part, sync_files=True), process_group=peers.group)
    except CheckpointException as error:
        raise CheckpointError(f"cannot write {part}: {_reasons(error)}") from error
    sums: dict[str, Any] = {}
    with _together(peers):
        sums = {name: _checksum(part / name) for name in _own_files(part, peers)}
    everybody: list[Any] = [None] * peers.size
    dist.all_gather_object(everybody, sums, group=peers.group)
    with _together(peers):
        if peers.rank == 0:
            merged = {name: value for sums in everybody for name, value in sums.items()}
            _write(part / CHECKSUMS, json.dumps(merged))
            _sync(part)
            whole = folder / f"step-{step}"
            if _latest(folder) == (step, whole):  # saved again: the good one stays until it is replaced
                whole = folder / f"step-{step}-again"
            shutil.rmtree(whole, ignore_errors=True)
            os.replace(part, whole)
            _sync(folder)
            _write(folder / f"{LATEST}.part", json.dumps({"step": step, "folder": whole.name}))
            os.replace(folder / f"{LATEST}.part", folder / LATEST)
            _sync(folder)
            for old in folder.glob("step-*"):
                if old != whole:
                    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    state_dict: dict[str, Any], folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None
) -> int:
    """Read the latest checkpoint into the tensors of `state_dict`, in place, at any world size.

    Every byte is checked before anything is changed. Optimizers must have their state already, as
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` sees to.

    Args:
        state_dict: what to read, keys and shapes as they were saved.
        folder: as of `save_checkpoint`.
        group: None: all ranks.

    Returns:
        The step it was saved with.

    Raises:
        CheckpointError: no checkpoint, a damaged or missing file, or keys and shapes that do not fit.
    """
    peers, folder = Peers(group), Path(folder)
    with _together(peers):
        latest = _latest(folder)
        if latest is None:
            raise CheckpointError(f"no checkpoint in {folder}")
    step, whole = latest
    peers.agree("load_checkpoint", step=step)
    with _together(peers):
        _verify(whole, peers)
    try:
        load(state_dict, storage_reader=FileSystemReader(whole), process_group=peers.group)
    except CheckpointException as error:
        raise CheckpointError(f"cannot read {whole}: {_reasons(error)}") from error
    return step


@contextmanager
def _together(peers: Peers) -> Iterator[None]:
    """What fails on one rank fails on all, so that none waits for another that has given up."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    told: list[Any] = [None] * peers.size
    dist.all_gather_object(told, None if failure is None else str(failure), group=peers.group)
    for rank, text in enumerate(told):
        if text is not None:
            raise CheckpointError(f"{text} (rank {rank})") from failure


def _own_files(folder: Path, peers: Peers) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.name != CHECKSUMS)
    return names[peers.rank :: peers.size]


def _verify(whole: Path, peers: Peers) -> None:
    try:
        sums = json.loads((whole / CHECKSUMS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{whole / CHECKSUMS} cannot be read: {error}") from None
    for name in sorted(sums)[peers.rank :: peers.size]:
        try:
            found = _checksum(whole / name)
        except OSError as error:
            raise CheckpointError(f"{whole / name} cannot be read: {error.strerror}") from None
        if found != sums[name]:
            raise CheckpointError(f"{whole / name} is damaged: CRC-32 and size are {found}, were {sums[name]}")


def _checksum(path: Path) -> list[int]:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
        return [crc, file.tell()]


def _latest(folder: Path) -> tuple[int, Path] | None:
    try:
        latest = json.loads((folder / LATEST).read_text())
        return int(latest["step"]), folder / latest["folder"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {error}") from None


def _write(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reasons(error: CheckpointException) -> str:
    rank, (reason, _) = next(iter(error.failures.items()))
    return f"{reason} (rank {rank})"
