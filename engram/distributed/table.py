"""What sharded tables have in common, whatever a row of theirs consists of."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.utils._pytree import tree_leaves

from engram.boundaries import describe
from engram.checkpoint import DTYPES, Stored, find_tensors
from engram.distributed.exchange import OwnedColumns, Route, UniqueRows
from engram.distributed.layout import Layout, Piece
from engram.distributed.peers import Ahead, Peers
from engram.progress import Progress, reporting

COPY_BYTES = 64 << 20  # of a full table at a time


class _Prefetched(NamedTuple):
    rows: Tensor
    mask: Tensor | None
    versions: list[int]  # of the table's tensors
    work: Ahead  # (Route, Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module has not prefetched anything."""


class ShardedTable(nn.Module):
    """The part of a sharded table that is the same for all: who owns which rows, how they reach those who look them up,
    prefetch, state dicts. Beside it a subclass has the module that it is a sharded form of as a base.

    A subclass names its tensors in `TENSORS`, each with one entry a row; what of them travels is up to `_pick` and
    `_read`.
    """

    NAME: str
    TENSORS: tuple[str, ...]

    def _share(
        self, sizes: Sequence[int], dim: int, peers: Peers, kind_fault: str, *, sharding: str,
        splits: Sequence[int] | None, equal_tokens: bool, row_multiple: int, **others: Any,
    ) -> int:
        """Find out what this rank owns, once all ranks have said that they mean the same table; returns its rows.

        `kind_fault`, what is wrong with other arguments, is raised after the ranks have compared, as all errors, so
        that none waits for one that has failed.
        """
        self.peers, self.dim, self.equal_tokens = peers, dim, equal_tokens
        self._prefetched: _Prefetched | None = None
        fault = None
        try:
            self.sizes = sizes = tuple(int(size) for size in sizes)
            splits = None if splits is None else tuple(int(split) for split in splits)
            if not sizes or min(*sizes, dim, row_multiple) < 1:
                raise ValueError(f"needs sizes, dim and row_multiple >= 1, got {list(sizes)}, {dim} and {row_multiple}")
            if kind_fault:
                raise ValueError(kind_fault)
            self.layout = Layout(sizes, peers.size, sharding, splits, padding=-sum(sizes) % row_multiple)
        except (TypeError, ValueError) as error:
            fault = error
        peers.agree(self.NAME, **dict(
            sizes=sizes if isinstance(sizes, tuple) else repr(sizes), dim=dim, sharding=sharding,
            splits=splits if isinstance(splits, tuple) else repr(splits), equal_tokens=equal_tokens,
            row_multiple=row_multiple), **others)
        if fault is not None:
            raise type(fault)(f"{self.NAME}: {fault}") from None
        return self.layout.local_rows[peers.rank]

    def _pick(self, ids: Tensor) -> Tensor:
        """What travels of the own rows `ids` [n], [n, ...]; of negative ones anything."""
        raise NotImplementedError

    def _read(self, route: Route, fetched: Tensor) -> Tensor:
        """What the slots of a lookup read, [..., C, d], from what came of the rows; nothing where `route.index` points
        outside of it."""
        raise NotImplementedError

    @property
    def _home(self) -> Tensor:
        home: Tensor = getattr(self, self.TENSORS[0])
        return home

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        return self.layout.of_rank(self.peers.rank)

    @property
    def _sizes_known(self) -> bool:
        return self.equal_tokens and self.layout.sharding != "rows"

    @torch.compiler.disable
    def forward(self, rows: Tensor, mask: Tensor | None = None, plan: None = None) -> Tensor:
        """Look rows up, wherever they are.

        An argument that one rank refuses is an error on all ranks; with whole heads and `equal_tokens`, where no
        lengths travel, the others wait for it until the process group gives up.

        Args:
            rows: int32 or int64 [..., C], global rows: head offsets are already in. Their number may differ from rank
                to rank, unless `equal_tokens`; it may be 0.
            mask: bool [...], False = zeros, no gradient.
            plan: must be None: ranks sort differently.

        Returns:
            [..., C, d], as the unsharded module.

        Raises:
            IndexError: a row outside the table, or with `equal_tokens` outside the head of its column (on CUDA it reads
                as zero, unless ENGRAM_DEBUG=1).
            RuntimeError: the table is on the meta device, a lookup that was prefetched differs from this one, or
                another rank has refused its lookup.
            ValueError: a wrong shape, dtype or device.
        """
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            with nullcontext() if self._sizes_known else self.peers.or_refuse(self._home.device):
                self._check(rows, mask, plan)
            route, fetched = self._exchange(self.peers, rows, mask)
        else:
            route, fetched = self._take(prefetched, rows, mask)
        return self._read(route, fetched)

    def prefetch(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Start the lookup of the next forward, beside what the caller does now: on a thread, on CUDA with a stream.

        Arguments as of `forward`, which must get the same ones; the table must not change in between, nor rows and mask
        in place. The result has the same bits. (On CUDA other rows are found by an assertion on the device.)

        Raises:
            RuntimeError: the last lookup that was prefetched has not been used.
            As `forward`; what is wrong with the rows themselves, and with other ranks' lookups, is raised there.
        """
        if self._prefetched is not None:
            raise RuntimeError(f"{self.NAME}.prefetch: the last one was not used; call forward or discard_prefetched "
                               "first")
        device = self._home.device
        try:
            self._check(rows, mask, None)
        except Exception:
            if not self._sizes_known:
                self.peers.ahead(lambda peers: peers.refuse(device), device).forget()
            raise
        work = self.peers.ahead(lambda peers: self._exchange(peers, rows, mask), device)
        self._prefetched = _Prefetched(rows, mask, self._versions(), work)

    def discard_prefetched(self) -> None:
        """Forget the lookup that was prefetched, if there is one, once it is done; on all ranks. Its errors are
        forgotten, too."""
        if self._prefetched is not None:
            prefetched, self._prefetched = self._prefetched, None
            prefetched.work.forget()

    def _take(self, prefetched: _Prefetched, rows: Tensor, mask: Tensor | None) -> tuple[Route, Tensor]:
        route, fetched = prefetched.work.result()
        if self._versions() != prefetched.versions:
            raise RuntimeError(f"{self.NAME}: {' or '.join(self.TENSORS)} has changed since the lookup was prefetched; "
                               "prefetch after the step")
        for name, wanted, given in (("rows", prefetched.rows, rows), ("mask", prefetched.mask, mask)):
            if wanted is given:
                continue
            if wanted is not None and given is not None and wanted.shape == given.shape:
                if given.is_cuda:
                    torch._assert_async((wanted == given).all(), f"{self.NAME}: {name} differ from those prefetched")
                    continue
                if torch.equal(wanted, given.to(wanted.dtype)):
                    continue
            raise RuntimeError(f"{self.NAME}: {name} must be what was prefetched, got another")
        if fetched.is_cuda:  # made on the side stream, read on this one from now on, in the backward too
            for value in (fetched, *tree_leaves(vars(route))):
                if isinstance(value, Tensor):
                    value.record_stream(torch.cuda.current_stream(fetched.device))
        return route, fetched

    def _versions(self) -> list[int]:
        tensors = [getattr(self, name) for name in self.TENSORS]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def _exchange(self, peers: Peers, rows: Tensor, mask: Tensor | None) -> tuple[Route, Tensor]:
        with torch.no_grad():
            if self._sizes_known and os.environ.get("ENGRAM_DEBUG") == "1":
                peers.agree(self.NAME, tokens=rows.shape[:-1].numel())
            route = (OwnedColumns if self._sizes_known else UniqueRows)(self.layout, peers, rows, mask)
            return route, peers.exchange(self._pick(route.ids), route.asked, route.wanted)

    def _check(self, rows: Tensor, mask: Tensor | None, plan: None) -> None:
        home, first, heads = self._home, self.TENSORS[0], len(self.sizes)
        if plan is not None:
            raise ValueError(f"{self.NAME}: plan must be None, the lookup makes its own")
        if home.is_meta:
            raise RuntimeError(f"{self.NAME}: {first} is on the meta device; call to_empty() and load it first")
        for name, tensor in (("rows", rows), ("mask", mask)):
            if tensor is not None and tensor.device != home.device:
                raise ValueError(f"{self.NAME}: {name} must be on {home.device} like {first}, got {tensor.device}")
        if rows.dim() == 0 or rows.shape[-1] != heads or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self.NAME}: rows must be int32 or int64 [..., {heads}], got {describe(rows)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != rows.shape[:-1]):
            raise ValueError(f"{self.NAME}: mask must be bool {list(rows.shape[:-1])}, got {describe(mask)}")

    # ------------------------------------------------------------------------------------- rows from a whole table

    def _refuse_meta(self, op: str) -> None:
        if self._home.is_meta:
            raise RuntimeError(f"{self.NAME}.{op}: {self.TENSORS[0]} is on the meta device; call to_empty() first")

    def _whole_shape(self, name: str) -> list[int]:
        return [self.layout.rows, *getattr(self, name).shape[1:]]

    def _stored(
        self, op: str, path: str | os.PathLike[str], tensor: str, dtypes: Sequence[torch.dtype], name: str | None
    ) -> Stored:
        """The whole table's `tensor` in files of the safetensors format: the one with that name, or the only one that
        fits."""
        shape = self._whole_shape(tensor)
        found = {key: entry for key, entry in find_tensors(f"{self.NAME}.{op}", path, [name or ""])[1].items()
                 if name in (None, key)}
        fits = [entry for entry in found.values() if list(entry.shape) == shape and DTYPES[entry.dtype] in dtypes]
        if len(fits) != 1:
            wanted = f"one tensor for {tensor}" if name is None else name
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            got = {key: f"{entry.dtype} {list(entry.shape)}" for key, entry in found.items()}
            raise ValueError(f"{self.NAME}.{op}: {path} must have {wanted} of shape {shape}, {kinds}, got {got}")
        return fits[0]

    @torch.no_grad()
    def _copy_rows(self, sources: Sequence[Tensor | Stored], progress: Progress) -> None:
        """The own rows of a whole table, one source for each of `TENSORS`, a block at a time."""
        block, total = max(1, COPY_BYTES // (8 * self.dim)), len(self._home)
        with ExitStack() as stack:
            report = stack.enter_context(reporting(progress, "loading", " rows"))
            files = {source.file for source in sources if not isinstance(source, Tensor)}
            handles = {file: stack.enter_context(open(file, "rb", buffering=0)) for file in files}
            for piece in self._pieces:
                for begin in range(piece.begin, piece.end, block):
                    end = min(begin + block, piece.end)
                    local = slice(piece.local + begin - piece.begin, piece.local + end - piece.begin)
                    for name, source in zip(self.TENSORS, sources):
                        rows = source[begin:end] if isinstance(source, Tensor) else source.read(handles, begin, end)
                        getattr(self, name)[local].copy_(rows)
                    report(local.stop, total)

    # ------------------------------------------------------------------------------------------------- state dicts

    def distributed_view(self, tensor: Tensor) -> DTensor:
        """What belongs to the own rows, [local rows, ...] of one or two dimensions, as a DTensor [R, ...] over the own
        pieces that share its memory: what `torch.distributed.checkpoint` can save and load at any world size."""
        trailing = tuple(tensor.shape[1:])
        # Nothing, at the end, where there are no rows: without any part torch would take it for a float32 matrix.
        pieces = self._pieces or (Piece(self.layout.rows, self.layout.rows, self.peers.rank, 0),)
        parts = [tensor[p.local : p.local + p.end - p.begin] for p in pieces]
        offsets = [(p.begin, *(0 for _ in trailing)) for p in pieces]
        mesh = DeviceMesh.from_group(self.peers.group, self.peers.device_type(tensor))
        shape = torch.Size((self.layout.rows, *trailing))
        stride = (*trailing, 1)
        return DTensor.from_local(
            LocalShardsWrapper(parts, offsets), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def local_part(self, tensor: Tensor, what: str = "the tensor") -> Tensor:
        """The own rows [local rows, ...] of a DTensor as of `distributed_view`, or of a whole tensor [R, ...].

        Raises:
            ValueError: another shape, or a DTensor that is cut up otherwise.
        """
        if tensor.shape[:1] != (self.layout.rows,):
            raise ValueError(f"{self.NAME}: {what} must have {self.layout.rows} rows, got {list(tensor.shape)}")
        if isinstance(tensor, DTensor):
            shards = tensor._local_tensor
            begins = [(p.begin, p.end - p.begin) for p in self._pieces] or [(self.layout.rows, 0)]
            if not isinstance(shards, LocalShardsWrapper) or begins != [
                (offset[0], shard.shape[0]) for shard, offset in zip(shards.local_shards(), shards.local_offsets())
            ]:
                raise ValueError(f"{self.NAME}: {what} is cut up for other ranks; load it with "
                                 "torch.distributed.checkpoint")
            parts: list[Tensor] = shards.local_shards()
        else:
            parts = [tensor[p.begin : p.end] for p in self._pieces]
        if len(parts) <= 1:
            return parts[0] if parts else tensor[:0]
        for name in self.TENSORS:  # a state dict of this very module: nothing to put together
            own: Tensor = getattr(self, name)
            places = [own[p.local :].data_ptr() for p in self._pieces]
            if own.dtype == parts[0].dtype and [part.data_ptr() for part in parts] == places:
                return own.detach()
        return torch.cat(parts)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.TENSORS:
            destination[prefix + name] = self.distributed_view(getattr(self, name).detach())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:
        for name in self.TENSORS:
            key = prefix + name
            if key not in state_dict:
                continue
            whole = state_dict[key]
            try:
                part = self.local_part(whole, name)
            except ValueError as error:
                errors.append(f"{key}: {error}")
                return
            if local_metadata.get("assign_to_params_buffers") and not isinstance(whole, DTensor):
                part = part.clone()  # a view would keep the whole table
            state_dict = {**state_dict, key: part}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        mine = self.layout.local_rows[self.peers.rank]
        return f"{super().extra_repr()}, {self.layout.sharding} over {self.peers.size} ranks, {mine} rows here"
