"""MultiHeadEmbedding whose table is spread over the ranks of a process group."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram import ops
from engram.boundaries import describe
from engram.distributed.exchange import Lookup, Route
from engram.distributed.peers import Peers
from engram.distributed.table import ShardedTable
from engram.nn import MultiHeadEmbedding, empty_weight
from engram.progress import Progress
from engram.storage import fill_normal_pieces_

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ShardedMultiHeadEmbedding(ShardedTable, MultiHeadEmbedding):
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
        row_multiple: as of `nn.MultiHeadEmbedding`.
        device, dtype: of `weight`; on "meta" no memory is taken, then `to_empty` takes that of the own rows.
        peers: in place of both groups, what tables of one model share.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: no head, a size, width or multiple below 1, a wrong sharding or split, or ranks that differ in an
            argument.
        TypeError: sizes or splits that are no integers.
    """

    NAME = "ShardedMultiHeadEmbedding"
    TENSORS = ("weight",)

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
        row_multiple: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        peers: Peers | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.sparse, self.std, self.gradient_scale = sparse, std, gradient_scale
        dtype = dtype or torch.get_default_dtype()
        rows = self._share(
            sizes, dim, peers or Peers(group, prefetch_group), "", sharding=sharding, splits=splits,
            equal_tokens=equal_tokens, row_multiple=row_multiple, dtype=dtype, gradient_scale=gradient_scale,
            sparse=sparse)
        self.weight = nn.Parameter(empty_weight(rows, dim, device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the rows from N(0, std): the same ones at any world size."""
        if not self.weight.is_meta:
            pieces = [(p.begin * self.dim, p.end * self.dim) for p in self._pieces]
            fill_normal_pieces_(self.weight, self.std, pieces, self.layout.rows * self.dim)

    def _pick(self, ids: Tensor) -> Tensor:
        return ops.embedding(self.weight, ids[:, None], row_begin=0)[:, 0]

    def _read(self, route: Route, fetched: Tensor) -> Tensor:
        out: Tensor = Lookup.apply(  # type: ignore[no-untyped-call]  # torch's
            self.weight, fetched, route, self.peers, self.sparse, self.gradient_scale)
        return out

    def load_full_weight(
        self, source: Tensor | str | os.PathLike[str], name: str | None = None, *, progress: Progress = False
    ) -> None:
        """Copy the own rows out of a whole table. No rank ever holds more than its shard and 64 MiB.

        Args:
            source: [R, d], float64, float32, bfloat16 or float16, on any device, or where safetensors files have it: a
                file, or the index or folder of several.
            name: of the tensor in the files; None: the only one of shape [R, d].
            progress: see `engram.progress`; counts the own rows.

        Raises:
            FileNotFoundError: no such file.
            RuntimeError: `weight` is on the meta device.
            ValueError: another shape or dtype, no or several such tensors in the files, or a malformed file.
        """
        op = "load_full_weight"
        self._refuse_meta(op)
        if not isinstance(source, Tensor):
            return self._copy_rows([self._stored(op, source, "weight", FLOATS, name)], progress)
        if list(source.shape) != self._whole_shape("weight") or source.dtype not in FLOATS:
            raise ValueError(f"{self.NAME}.{op}: source must be {self._whole_shape('weight')}, float64, float32, "
                             f"bfloat16 or float16, got {describe(source)}")
        self._copy_rows([source], progress)
