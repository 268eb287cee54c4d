"""MultiHeadEmbedding whose table is spread over the ranks of a process group."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from engram import ops
from engram.boundaries import describe
from engram.distributed.exchange import Lookup, OwnedColumns, Route, UniqueRows
from engram.distributed.layout import Layout, Piece
from engram.distributed.peers import Peers
from engram.nn import MultiHeadEmbedding
from engram.progress import Progress, reporting
from engram.storage import empty_table, fill_normal_pieces_

NAME = "ShardedMultiHeadEmbedding"
COPY_BYTES = 64 << 20  # of a full table at a time


class _Prefetched(NamedTuple):
    rows: Tensor
    mask: Tensor | None
    version: int  # of the weight
    result: "Future[tuple[Route, Tensor]]"


class ShardedMultiHeadEmbedding(MultiHeadEmbedding):
    """`nn.MultiHeadEmbedding` bit for bit, with a table that is larger than one device.

    Parameter: `weight` [local rows, dim], a plain tensor of the rows that this rank owns (`layout`). Every method that
    communicates (the constructor, `forward`, its backward, `prefetch`) must be called by all ranks of the group, in the
    same order, also by ranks without tokens; a rank whose loss does not depend on the output leaves the others waiting
    in the backward.

    Row ids are made unique before they travel, rows come back in one all-to-all, and gradients are summed per row
    before they travel, in float32 (float64 for float64), then by the owner in rank order, and rounded once. Gradients
    are summed over ranks, not averaged.

    Args:
        sizes: rows of each of the C heads.
        dim: d, width of a row.
        group: the ranks that share the table; None: all.
        sharding: "rows", "heads" or "strided-heads", see `Layout`.
        splits: uneven shares, see `Layout`.
        sparse: the gradient of `weight` is a coalesced sparse tensor of the owned rows that were read on any rank.
        equal_tokens: all ranks always look up equally many tokens. With whole heads all sizes are known then, so no
            lengths travel and no device is waited for, but each slot's row travels, repeated or not, and row c must be
            in head c. With "rows" it changes nothing: how many unique rows each owner has is known to nobody else.
        gradient_scale: multiplies the gradient of `weight`: 1 / W beside losses that DistributedDataParallel averages.
        prefetch_group: another group of the same ranks, which `prefetch` needs where `group` is not of all ranks.
        std: standard deviation of the initial rows. On the CPU they are the rows that an unsharded module draws after
            the same torch.manual_seed; all ranks must have the same one.
        device, dtype: of `weight`; on "meta" no memory is taken, then `to_empty` takes that of the own rows.
        peers: in place of both groups, what tables of one model share.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: no head, a size or width below 1, a wrong sharding or split, or ranks that differ in an argument.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        sharding: str = "rows",
        splits: Sequence[int] | None = None,
        sparse: bool = False,
        equal_tokens: bool = False,
        gradient_scale: float = 1.0,
        prefetch_group: torch.distributed.ProcessGroup | None = None,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        peers: Peers | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.peers = Peers(group, prefetch_group) if peers is None else peers
        self.sparse, self.dim, self.std = sparse, dim, std
        self.sizes = tuple(int(size) for size in sizes)
        self.equal_tokens, self.gradient_scale = equal_tokens, float(gradient_scale)
        fault = None
        try:
            if not self.sizes or min(self.sizes) < 1 or dim < 1:
                raise ValueError(f"needs sizes >= 1 and dim >= 1, got {list(self.sizes)} and {dim}")
            self.layout = Layout(self.sizes, self.peers.size, sharding, None if splits is None else tuple(splits))
        except ValueError as error:  # told after the ranks have compared, so that none waits for one that has failed
            fault = error
        dtype = dtype or torch.get_default_dtype()
        self.peers.agree(
            NAME, sizes=self.sizes, dim=dim, sharding=sharding, splits=splits and list(splits), dtype=dtype,
            equal_tokens=equal_tokens, gradient_scale=gradient_scale, sparse=sparse,
        )
        if fault is not None:
            raise ValueError(f"{NAME}: {fault}")
        rows = self.layout.local_rows[self.peers.rank]
        device = torch.empty(0, device=device).device
        if device.type == "cpu":
            weight = empty_table(rows, dim, dtype=dtype)
        else:
            weight = torch.empty(rows, dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self._prefetched: _Prefetched | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the rows from N(0, std): the same ones at any world size."""
        if not self.weight.is_meta:
            pieces = [(p.begin * self.dim, p.end * self.dim) for p in self._pieces]
            fill_normal_pieces_(self.weight, self.std, pieces, self.layout.rows * self.dim)

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        return self.layout.of_rank(self.peers.rank)

    @torch.compiler.disable
    def forward(self, rows: Tensor, mask: Tensor | None = None, plan: ops.RowPlan | None = None) -> Tensor:
        """Look rows up, wherever they are.

        Args:
            rows: int32 or int64 [..., C], global rows: head offsets are already in. Their number may differ from rank
                to rank, unless `equal_tokens`; it may be 0.
            mask: bool [...], False = zeros, no gradient.
            plan: must be None: ranks sort differently.

        Returns:
            [..., C, d] in the dtype of `weight`.

        Raises:
            IndexError: a row outside the table, or with `equal_tokens` outside the head of its column (on CUDA it reads
                as zero, unless ENGRAM_DEBUG=1).
            RuntimeError: `weight` is on the meta device, or a lookup that was prefetched differs from this one.
            ValueError: a wrong shape, dtype or device.
        """
        if plan is not None:
            raise ValueError(f"{NAME}: plan must be None, the lookup makes its own")
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            self._check(rows, mask)
            route, fetched = self._exchange(self.peers, rows, mask)
        else:
            route, fetched = self._take(prefetched, rows, mask)
        out: Tensor = Lookup.apply(  # type: ignore[no-untyped-call]  # torch's
            self.weight, fetched, route, self.peers, self.sparse, self.gradient_scale)
        return out

    def prefetch(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Start the lookup of the next forward, beside what the caller does now: on a thread, on CUDA with a stream.

        Arguments as of `forward`, which must get the same ones; `weight` must not change in between, nor rows and mask
        in place. The result has the same bits. (On CUDA other rows are found by an assertion on the device.)

        Raises:
            RuntimeError: the last lookup that was prefetched has not been used.
            As `forward`.
        """
        if self._prefetched is not None:
            raise RuntimeError(f"{NAME}.prefetch: the last one was not used; call forward or discard_prefetched first")
        self._check(rows, mask)
        work = self.peers.ahead(lambda peers: self._exchange(peers, rows, mask), self.weight.device)
        self._prefetched = _Prefetched(rows, mask, self.weight._version, work)

    def discard_prefetched(self) -> None:
        """Forget the lookup that was prefetched, once it is done; on all ranks."""
        if self._prefetched is not None:
            prefetched, self._prefetched = self._prefetched, None
            prefetched.result.result()

    def _take(self, prefetched: _Prefetched, rows: Tensor, mask: Tensor | None) -> tuple[Route, Tensor]:
        route, fetched = prefetched.result.result()
        self.peers.caught_up(self.weight.device)
        if self.weight._version != prefetched.version:
            raise RuntimeError(f"{NAME}: weight has changed since the lookup was prefetched; prefetch after the step")
        for name, wanted, given in (("rows", prefetched.rows, rows), ("mask", prefetched.mask, mask)):
            if wanted is given:
                continue
            if wanted is not None and given is not None and wanted.shape == given.shape:
                if given.is_cuda:
                    torch._assert_async((wanted == given).all(), f"{NAME}: {name} differ from those prefetched")
                    continue
                if torch.equal(wanted, given.to(wanted.dtype)):
                    continue
            raise RuntimeError(f"{NAME}: {name} must be what was prefetched, got another")
        if fetched.is_cuda:
            for tensor in (fetched, route.ids):
                tensor.record_stream(torch.cuda.current_stream(fetched.device))
        return route, fetched

    def _exchange(self, peers: Peers, rows: Tensor, mask: Tensor | None) -> tuple[Route, Tensor]:
        static = self.equal_tokens and self.layout.sharding != "rows"
        with torch.no_grad():
            if static and os.environ.get("ENGRAM_DEBUG") == "1":
                peers.agree(NAME, tokens=rows.shape[:-1].numel())
            route = (OwnedColumns if static else UniqueRows)(self.layout, peers, rows, mask)
            return route, route.fetch(peers, self.weight)

    def _check(self, rows: Tensor, mask: Tensor | None) -> None:
        if self.weight.is_meta:
            raise RuntimeError(f"{NAME}: weight is on the meta device; call to_empty() and load or draw it first")
        if rows.dim() == 0 or rows.shape[-1] != len(self.sizes) or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{NAME}: rows must be int32 or int64 [..., {len(self.sizes)}], got {describe(rows)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != rows.shape[:-1]):
            raise ValueError(f"{NAME}: mask must be bool {list(rows.shape[:-1])}, got {describe(mask)}")
        for name, tensor in (("rows", rows), ("mask", mask)):
            if tensor is not None and tensor.device != self.weight.device:
                raise ValueError(f"{NAME}: {name} must be on {self.weight.device} like weight, got {tensor.device}")

    @torch.no_grad()
    def load_full_weight(
        self, source: Tensor | str | os.PathLike[str], name: str | None = None, *, progress: Progress = False
    ) -> None:
        """Copy the own rows out of a whole table. No rank ever holds more than its shard and 64 MiB.

        Args:
            source: [R, d] of any float dtype and device, or a safetensors file that has it.
            name: of the tensor in the file; None: the only one of shape [R, d].
            progress: see `engram.progress`; counts the own rows.

        Raises:
            RuntimeError: `weight` is on the meta device.
            ValueError: another shape, or no or several tensors of that shape in the file.
        """
        if self.weight.is_meta:
            raise RuntimeError(f"{NAME}.load_full_weight: weight is on the meta device; call to_empty() first")
        shape = [self.layout.rows, self.dim]
        if isinstance(source, Tensor):
            if list(source.shape) != shape:
                raise ValueError(f"{NAME}.load_full_weight: source must be {shape}, got {describe(source)}")
            return self._copy_rows(source, progress)
        from safetensors import safe_open

        with safe_open(Path(source), framework="pt") as file:
            found = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}
            names = [key for key, size in found.items() if size == shape and name in (None, key)]
            if len(names) != 1:
                wanted = "one tensor" if name is None else name
                raise ValueError(f"{NAME}.load_full_weight: {source} must have {wanted} of shape {shape}, got {found}")
            self._copy_rows(file.get_slice(names[0]), progress)

    def _copy_rows(self, source: Any, progress: Progress) -> None:
        block, total = max(1, COPY_BYTES // (8 * self.dim)), len(self.weight)
        with reporting(progress, "loading", " rows") as report:
            for piece in self._pieces:
                for begin in range(piece.begin, piece.end, block):
                    end = min(begin + block, piece.end)
                    local = piece.local + begin - piece.begin
                    self.weight[local : local + end - begin].copy_(source[begin:end])
                    report(local + end - begin, total)

    def distributed_view(self, tensor: Tensor) -> DTensor:
        """What belongs to the own rows, [local rows, ...] of one or two dimensions, as a DTensor [R, ...] over the own
        pieces that share its memory: what `torch.distributed.checkpoint` can save and load at any world size."""
        trailing = tuple(tensor.shape[1:])
        parts = [tensor[p.local : p.local + p.end - p.begin] for p in self._pieces]
        offsets = [(p.begin, *(0 for _ in trailing)) for p in self._pieces]
        mesh = DeviceMesh.from_group(self.peers.group, self.peers.device_type)
        shape = torch.Size((self.layout.rows, *trailing))
        stride = (*trailing, 1)
        return DTensor.from_local(
            LocalShardsWrapper(parts, offsets), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def local_part(self, tensor: Tensor, what: str = "weight") -> Tensor:
        """The own rows [local rows, ...] of a DTensor as of `distributed_view`, or of a whole tensor [R, ...].

        Raises:
            ValueError: another shape, or a DTensor that is cut up otherwise.
        """
        if tensor.shape[:1] != (self.layout.rows,):
            raise ValueError(f"{NAME}: {what} must have {self.layout.rows} rows, got {list(tensor.shape)}")
        if isinstance(tensor, DTensor):
            shards = tensor._local_tensor
            begins = [(p.begin, p.end - p.begin) for p in self._pieces]
            if not isinstance(shards, LocalShardsWrapper) or begins != [
                (offset[0], shard.shape[0]) for shard, offset in zip(shards.local_shards(), shards.local_offsets())
            ]:
                raise ValueError(f"{NAME}: {what} is cut up for other ranks; load it with torch.distributed.checkpoint")
            parts = shards.local_shards()
        else:
            parts = [tensor[p.begin : p.end] for p in self._pieces]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else self.weight.new_empty((0, *tensor.shape[1:]))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.distributed_view(self.weight.detach())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:
        key = prefix + "weight"
        if key in state_dict:
            try:
                state_dict = {**state_dict, key: self.local_part(state_dict[key])}
            except ValueError as error:
                errors.append(f"{key}: {error}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        mine = self.layout.local_rows[self.peers.rank]
        return f"{super().extra_repr()}, {self.layout.sharding} over {self.peers.size} ranks, {mine} rows here"
