"""Which slots touch which rows of a table: public function, fake kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from engram.ops._fake import same_device


class RowPlan(NamedTuple):
    """What `row_plan` returns: three int64 tensors, and so a pytree. Treat them as one opaque thing."""

    keys: Tensor
    runs: Tensor
    count: Tensor  # type: ignore[assignment]  # of rows; nobody counts elements of a plan, as of a tuple

    @property
    def _slot_bits(self) -> int:  # a key is (row << slot_bits) | slot, see csrc/kernels/row_plan.h
        return self.keys.numel().bit_length()

    def rows_before(self, rows: Tensor) -> Tensor:
        """How many touched rows lie before each of `rows`, int64 ``[n]``, ascending. Waits for no device."""
        return torch.searchsorted(self.runs, torch.searchsorted(self.keys, rows << self._slot_bits))

    def rows(self, count: int) -> Tensor:
        """The first `count` touched rows, int64 ``[count]``, ascending."""
        return self.keys[self.runs[:count]] >> self._slot_bits

    def index(self, count: int) -> Tensor:  # type: ignore[override]  # likewise
        """Which of the `count` touched rows each slot reads, int64 ``[slots]``; `count` for slots that are skipped."""
        changes = torch.zeros_like(self.runs)
        changes[self.runs[1 : count + 1]] = 1
        numbers = changes[:-1].cumsum(0)
        slots = self.keys & ((1 << self._slot_bits) - 1)
        return torch.empty_like(numbers).scatter_(0, slots, numbers)


def row_plan(rows: Tensor, num_rows: int, *, row_begin: int | None = None, mask: Tensor | None = None) -> RowPlan:
    """Sort the slots of a lookup by the row they read, once, for all that works row by row.

    `ops.embedding` makes its own plan in its backward. Give it one where several lookups of the same rows (layers that
    share a table, a recomputation) would sort the same thing again, or where an optimizer is to step over the plan
    (`engram.optim`), without a sparse gradient in between.

    Args:
        rows: int32 or int64 ``[..., C]``, global row ids.
        num_rows: R, rows of the table.
        row_begin: None, or k: the table is the shard ``[k, k + R)`` of a bigger one; rows outside it are skipped.
        mask: bool ``[...]``, the leading shape of rows; False = skipped, not read.

    Returns:
        RowPlan of ``keys`` int64 ``[slots]``, the slots in order of (row, slot), skipped ones last; ``runs`` int64
        ``[slots + 1]``, where in keys each touched row begins, and from ``[count]`` on where the last one ends;
        ``count`` int64 ``[1]``, the number of touched rows. slots is the number of elements of rows.

    The order is unique, and with it the bits of every sum along it. Nothing here waits for a CUDA device.

    Raises:
        IndexError: a row outside ``[0, R)`` without ``row_begin`` (on CUDA it is skipped).
        ValueError: a wrong dtype, shape or device.
    """
    return RowPlan(*torch.ops.engram.row_plan(rows, num_rows, row_begin=row_begin, mask=mask))


@torch.library.register_fake("engram::row_plan")
def _(
    rows: Tensor, num_rows: int, row_begin: int | None = None, mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    same_device("row_plan", rows=rows, mask=mask)
    slots = rows.numel()
    return tuple(rows.new_empty(size, dtype=torch.int64) for size in (slots, slots + 1, 1))
