"""The two ways of a lookup through the ranks, forward and back.

Either way a rank learns which of its rows the others ask for, sends them, and gets its own in the order of `index`.

`UniqueRows` sends each row once: the slots are sorted (`ops.row_plan`), each owner is told how many rows come, then the
ids go out and the rows come back. Gradients are summed per row before they travel, in float32.

`OwnedColumns` is for whole heads and equal token counts: column c of the row ids belongs to one rank, so all sizes are
known, no lengths travel and no device is waited for; each slot's row travels, repeated or not. It ships row ids and not
token ids: hashing again at the owner would save half of the ids, a few percent beside the rows, but would need every
rank's documents, masks and histories there as well.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engram import ops
from engram.distributed.layout import Layout
from engram.distributed.peers import Peers


class Route(Protocol):
    """How the slots of one lookup reach the owners of their rows."""

    ids: Tensor  # integer [sum(asked)]: own rows that others ask for, negative = none
    asked: list[int]  # how many of them each rank asks for
    wanted: list[int]  # how many rows this rank gets from each
    index: Tensor  # int64 [..., C]: which of the rows that this rank gets is each slot's; outside of them = none

    def collect(self, peers: Peers, grad: Tensor) -> Tensor:
        """The gradient [..., C, d] of the slots to that of `ids`, [received, d] in the accumulation type, on the
        owners."""


class UniqueRows:
    """Each row that is looked up travels once."""

    def __init__(self, layout: Layout, peers: Peers, rows: Tensor, mask: Tensor | None) -> None:
        with peers.or_refuse(rows.device):
            self.plan = plan = ops.row_plan(rows, layout.rows, mask=mask)
        ascending = sorted(layout.pieces)
        edges, owners, shifts = _once(layout, "pieces", rows.device, lambda: (
            [piece.begin for piece in ascending] + [layout.rows], [piece.owner for piece in ascending],
            [piece.local - piece.begin for piece in ascending]))
        before = plan.rows_before(edges)  # the unique rows of each piece are a range of all of them
        wanted = before.new_zeros(peers.size).index_add_(0, owners, before.diff())
        asked = peers.exchange_counts(wanted)
        numbers = torch.cat([before, wanted, asked]).tolist()  # the only wait for a device
        begins = numbers[: len(edges)]
        self.wanted, self.asked = numbers[len(edges) :][: peers.size], numbers[-peers.size :]
        peers.check_refusals(self.asked)

        count = begins[-1]
        unique = plan.rows(count)
        local = unique + torch.repeat_interleave(shifts, before.diff(), output_size=count)
        self.order = None  # of the unique rows on the wire, by owner; None: by row is by owner
        if ascending != list(layout.pieces):
            parts = dict(zip(ascending, torch.arange(count, device=rows.device).tensor_split(begins[1:-1])))
            self.order = torch.cat([parts[piece] for piece in layout.pieces])
            local = local[self.order]
        index = plan.index(count)
        if self.order is not None:
            places = torch.arange(count + 1, device=rows.device)
            places[self.order] = places[:-1].clone()
            index = places[index]
        self.index = index.view(rows.shape)  # slots that are skipped point behind the last row
        self.ids = peers.exchange(local.to(_id_dtype(layout)), self.wanted, self.asked)

    def collect(self, peers: Peers, grad: Tensor) -> Tensor:
        _, sums = ops.row_sum(grad.to(_sum_dtype(grad)), *self.plan)
        return peers.exchange(sums if self.order is None else sums[self.order], self.wanted, self.asked)


class OwnedColumns:
    """Each slot's row travels, from the rank that has its column's head. All ranks have the same number of tokens."""

    def __init__(self, layout: Layout, peers: Peers, rows: Tensor, mask: Tensor | None) -> None:
        flat = rows.reshape(-1, rows.shape[-1])
        tokens = flat.shape[0]
        begins, sizes, starts, befores, counts, places = _once(layout, "heads", rows.device, lambda: (
            layout.head_begins[:-1], layout.sizes, *zip(*_columns(layout))))
        local = flat.long() - begins
        read = (local >= 0) & (local < sizes)
        if mask is not None:
            visible = mask.reshape(-1, 1)
            wrong, read = ~read & visible, read & visible
        else:
            wrong = ~read
        if (not rows.is_cuda or os.environ.get("ENGRAM_DEBUG") == "1") and wrong.any():
            token, column = wrong.nonzero()[0].tolist()
            low, high = layout.head_begins[column : column + 2]
            raise IndexError(f"engram.distributed: with equal_tokens, rows of column {column} must be in "
                             f"[{low}, {high}), its head, got {flat[token, column].item()}")
        local = torch.where(read, local + starts, -1)
        self.heads = layout.heads
        own = len(self.heads[peers.rank])
        self.wanted, self.asked = [tokens * len(heads) for heads in self.heads], [tokens * own] * peers.size
        self.ids = peers.exchange(self._by_owner(local.to(_id_dtype(layout))), self.wanted, self.asked)
        index = tokens * befores + torch.arange(tokens, device=rows.device)[:, None] * counts + places
        self.index = torch.where(read, index, -1).view(rows.shape)

    def _by_owner(self, x: Tensor) -> Tensor:
        """[T, C, ...] to [T * C, ...]: each rank's columns, token by token."""
        return torch.cat([x[:, heads.start : heads.stop : heads.step].flatten(0, 1) for heads in self.heads])

    def collect(self, peers: Peers, grad: Tensor) -> Tensor:
        flat = grad.reshape(-1, *grad.shape[-2:])
        values = peers.exchange(self._by_owner(flat), self.wanted, self.asked)
        return values.to(_sum_dtype(grad))


class Lookup(torch.autograd.Function):
    """Rows that came to the slots that read them; back, the gradient of the slots to that of the owned rows."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, fetched: Tensor, route: Route, peers: Peers, sparse: bool, scale: float
    ) -> Tensor:
        ctx.route, ctx.peers, ctx.sparse, ctx.scale = route, peers, sparse, scale
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return ops.embedding(fetched, route.index, row_begin=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Senders come in rank order, so the sum over them has one order.
        values = ctx.route.collect(ctx.peers, grad)
        plan = ops.row_plan(ctx.route.ids[:, None], ctx.shape[0], row_begin=0)
        rows, sums = ops.row_sum(values, *plan)
        if ctx.scale != 1:
            sums = sums * ctx.scale
        sums = sums.to(ctx.dtype)
        if ctx.sparse:
            grad = torch.sparse_coo_tensor(rows[None], sums, ctx.shape, check_invariants=False, is_coalesced=True)
        else:
            grad = sums.new_zeros(ctx.shape).index_copy_(0, rows, sums)
        return grad, *[None] * 5


def _columns(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Of each head: its first row where it is kept, how many heads the ranks before its owner have, how many its owner
    has, and which of these it is."""
    found, before = [(0, 0, 0, 0)] * len(layout.sizes), 0
    for heads in layout.heads:
        starts = accumulate((layout.sizes[head] for head in heads), initial=0)
        for place, (head, start) in enumerate(zip(heads, starts)):
            found[head] = (start, before, len(heads), place)
        before += len(heads)
    return found


def _once(
    layout: Layout, what: str, device: torch.device, make: Callable[[], Iterable[Sequence[int]]]
) -> list[Tensor]:
    """int64 tensors of a layout on a device, copied there once."""
    if (what, device) not in layout.cache:
        layout.cache[what, device] = [torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in make()]
    kept: list[Tensor] = layout.cache[what, device]
    return kept


def _id_dtype(layout: Layout) -> torch.dtype:
    return torch.int32 if max(layout.local_rows) < 2**31 else torch.int64


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
