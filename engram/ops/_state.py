"""What a sequence leaves for its next tokens: rings of positions, read before the first token and appended to."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Marks(NamedTuple):
    """Of the next tokens, int64 [B, T] each: the run (a stretch of one document, counted on) and the document id."""

    runs: Tensor
    documents: Tensor


class Ring:
    """The last positions of each batch row, in tensors with fixed addresses that are updated in place.

    Position p lies in slot p % slots. Every slot has the number of its run (a stretch of one document: taps and n-grams
    stay within it), the document id it had, and whether it is visible; the payload is what the owner keeps beside.

    All operations are tensor operations of shapes that do not depend on data: they can be captured in a CUDA graph and
    traced by torch.compile.

    Args:
        payload: name to an empty tensor `[B, 0, ...]`: dtype, device and trailing sizes of what is kept.
        reach: how many positions before the next token are read.
        max_rollback: how many appended tokens can be taken back.
    """

    _ROWS = ("position", "room")  # [B]: tokens appended; how many of them can be taken back now
    _SLOTS = ("visible", "runs", "documents")  # [B, slots]

    def __init__(self, payload: dict[str, Tensor], reach: int, max_rollback: int) -> None:
        first = next(iter(payload.values()))
        batch, slots = first.shape[0], max(1, reach + max_rollback)
        self.reach, self.max_rollback, self.slots = reach, max_rollback, slots
        int64: dict[str, Any] = dict(dtype=torch.int64, device=first.device)
        self.tensors = {name: torch.zeros(batch, **int64) for name in self._ROWS}
        self.tensors["visible"] = torch.zeros(batch, slots, dtype=torch.bool, device=first.device)
        self.tensors |= {name: torch.zeros(batch, slots, **int64) for name in ("runs", "documents")}
        self.tensors |= {name: x.new_zeros(batch, slots, *x.shape[2:]) for name, x in payload.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor], reach: int, max_rollback: int) -> "Ring":
        """A ring around tensors that there are already."""
        ring = cls.__new__(cls)
        ring.reach, ring.max_rollback, ring.slots = reach, max_rollback, tensors["runs"].shape[1]
        ring.tensors = dict(tensors)
        return ring

    @property
    def position(self) -> Tensor:
        """int64 [B]: how many tokens have been appended."""
        return self.tensors["position"]

    def payload(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.tensors.items() if name not in self._ROWS + self._SLOTS}

    def check(self, op: str, like: Tensor, payload: dict[str, Tensor | None]) -> None:
        """Raise ValueError unless this ring keeps such a payload for the batch of `like`; None: of any size."""
        own = self.payload()
        if own.keys() != payload.keys():
            raise ValueError(f"{op}: state must keep {', '.join(payload)}, got one of {', '.join(own)}")
        for name, wanted in payload.items():
            tensor = own[name]
            trailing = tuple(tensor.shape[2:]) if wanted is None else tuple(wanted.shape[2:])
            dtype = tensor.dtype if wanted is None else wanted.dtype
            fits = tensor.shape[0] == like.shape[0] and tuple(tensor.shape[2:]) == trailing
            if not fits or tensor.dtype != dtype or tensor.device != like.device:
                sizes = [like.shape[0], self.slots, *trailing]
                raise ValueError(f"{op}: state must keep {name} {dtype} {sizes} on {like.device}, "
                                 f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}")

    def marks(self, document_ids: Tensor | None, like: Tensor, starts: Tensor | None = None) -> Marks:
        """Runs and documents of the next tokens.

        Args:
            document_ids: integer [B, T], or None: the tokens go on with the document before them.
            like: [B, T, ...], what the tokens belong to.
            starts: bool [B, T], True where a token starts a run whatever its document; None: nowhere.
        """
        batch, tokens = like.shape[:2]
        last = ((self.position - 1) % self.slots)[:, None]
        run, document = (self.tensors[name].gather(1, last) for name in ("runs", "documents"))
        documents = document.expand(batch, tokens) if document_ids is None else document_ids.long()
        if tuple(documents.shape) != (batch, tokens):
            return Marks(documents, documents)          # refused by the op that gets them
        change = documents != torch.cat([document, documents[:, :-1]], 1)[:, :tokens]
        if tokens:
            change[:, :1] &= (self.position > 0)[:, None]
        if starts is not None:
            change = change | starts
        return Marks(run + change.cumsum(1), documents)

    def before(self, runs: Tensor, visible: Tensor | None) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """`(payload, runs, visible)`: the payload of the `reach` positions before the next tokens, oldest first, and
        runs and visible [B, reach + T] of them and of the tokens (visible None: all of those are)."""
        behind = torch.arange(-self.reach, 0, device=runs.device)
        position = self.position[:, None] + behind
        slots = position % self.slots
        there = self.tensors["visible"].gather(1, slots) & (position >= 0)
        if visible is None:
            visible = there.new_ones(runs.shape)
        payload = {name: _gather(x, slots) for name, x in self.payload().items()}
        return payload, torch.cat([self.tensors["runs"].gather(1, slots), runs], 1), torch.cat([there, visible], 1)

    @torch.no_grad()
    def append(self, marks: Marks, visible: Tensor | None, lengths: Tensor | None, **payload: Tensor) -> None:
        """Append the next tokens: the first `lengths[b]` of each row, or all."""
        runs, documents = marks
        batch, tokens = runs.shape
        if lengths is None:
            lengths = self.position.new_full((batch,), tokens)
        lengths = lengths.to(self.position).clamp(0, tokens)
        if tokens:
            # The last tokens within each length; before the first one stands what is in the ring already.
            index = lengths[:, None] + torch.arange(-self.slots, 0, device=runs.device)
            new, source = index >= 0, index.clamp(min=0)
            slots = (self.position[:, None] + index) % self.slots
            if visible is None:
                visible = new.new_ones(()).expand(batch, tokens)
            for name, x in dict(payload, runs=runs, visible=visible, documents=documents).items():
                ring = self.tensors[name]
                trailing = (1,) * (ring.dim() - 2)
                values = torch.where(new.view(*new.shape, *trailing), _gather(x.detach(), source), _gather(ring, slots))
                ring.scatter_(1, slots.view(*slots.shape, *trailing).expand_as(values), values)
        self.position.add_(lengths)
        self.tensors["room"].add_(lengths).clamp_(max=self.max_rollback)

    @torch.no_grad()
    def rollback(self, count: Tensor | int) -> None:
        """Take the last `count` tokens (int or [B]) back. Checked by EngramState."""
        self.position.sub_(count)
        self.tensors["room"].sub_(count)

    @torch.no_grad()
    def select(self, index: Tensor) -> None:
        """Row b becomes what row `index[b]` was."""
        for tensor in self.tensors.values():
            tensor.copy_(tensor.index_select(0, index))

    @torch.no_grad()
    def reset(self, rows: Tensor | None) -> None:
        """Forget everything, in these batch rows or in all."""
        for name in (*self._ROWS, *self._SLOTS):
            if rows is None:
                self.tensors[name].zero_()
            else:
                self.tensors[name].index_fill_(0, rows, 0)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i], ...]"""
    trailing = (1,) * (x.dim() - 2)
    return x.gather(1, index.view(*index.shape, *trailing).expand(*index.shape, *x.shape[2:]))
