"""Which rank owns which rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

SHARDINGS = ("rows", "heads", "strided-heads")


class Piece(NamedTuple):
    """Rows [begin, end) of the table, which their owner keeps from its row `local` on."""

    begin: int
    end: int
    owner: int
    local: int


@dataclass(frozen=True)
class Layout:
    """A table of one row range per hash head, cut up for so many ranks: each row has one owner.

    - "rows": rank r has one range of rows, by default an equal share, or `splits[r]` rows.
    - "heads": whole heads, neighbours together: rank r has heads [C r / W, C (r + 1) / W), or `splits[r]` of them.
    - "strided-heads": whole heads in turn, rank r has r, r + W, ...: neighbouring heads, which belong to the same order
      of n-grams, go to different ranks.

    Args:
        sizes: rows of each of the C heads.
        ranks: W.
        sharding: one of the three.
        splits: for "rows" rows, for "heads" heads of each rank, 0 allowed; None: equal shares.
        padding: rows at the end that belong to no head and are never read; whoever has the last head has them.

    Raises:
        ValueError: an unknown sharding, negative padding, or splits that do not add up to the table.
    """

    sizes: tuple[int, ...]
    ranks: int
    sharding: str = "rows"
    splits: tuple[int, ...] | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(map(int, self.sizes)))
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}, got {self.sharding!r}")
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0, got {self.padding}")
        if self.splits is None:
            return
        object.__setattr__(self, "splits", tuple(map(int, self.splits)))
        if self.sharding == "strided-heads":
            raise ValueError("splits must be None for strided-heads, which go to the ranks in turn")
        total = self.rows if self.sharding == "rows" else len(self.sizes)
        if len(self.splits) != self.ranks or min(self.splits) < 0 or sum(self.splits) != total:
            raise ValueError(f"splits must be {self.ranks} numbers that add up to the {total} {self.sharding}, "
                             f"got {list(self.splits)}")

    @property
    def rows(self) -> int:
        """R, rows of the whole table."""
        return sum(self.sizes) + self.padding

    @cached_property
    def head_begins(self) -> tuple[int, ...]:
        """The first row of each head, and where the last one ends."""
        return tuple(accumulate(self.sizes, initial=0))

    @cached_property
    def heads(self) -> tuple[range, ...]:
        """The heads of each rank, in the order it keeps them; none where "rows" cuts through heads."""
        count = len(self.sizes)
        if self.sharding == "rows":
            return (range(0),) * self.ranks
        if self.sharding == "strided-heads":
            return tuple(range(rank, count, self.ranks) for rank in range(self.ranks))
        bounds = self._bounds(count)
        return tuple(range(bounds[rank], bounds[rank + 1]) for rank in range(self.ranks))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces by owner, then by row; none is empty, and neighbours of one owner are one piece."""
        if self.sharding == "rows":
            bounds = self._bounds(self.rows)
            ranges = [[(bounds[rank], bounds[rank + 1])] for rank in range(self.ranks)]
        else:
            bounds = [*self.head_begins[:-1], self.rows]
            ranges = [[(bounds[head], bounds[head + 1]) for head in heads] for heads in self.heads]
        pieces: list[Piece] = []
        for rank, own in enumerate(ranges):
            local = 0
            for begin, end in own:
                if pieces and pieces[-1].owner == rank and pieces[-1].end == begin:
                    pieces[-1] = pieces[-1]._replace(end=end)
                elif end > begin:
                    pieces.append(Piece(begin, end, rank, local))
                local += end - begin
        return tuple(pieces)

    def of_rank(self, rank: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.owner == rank)

    @cached_property
    def local_rows(self) -> tuple[int, ...]:
        """How many rows each rank has."""
        return tuple(sum(p.end - p.begin for p in self.of_rank(rank)) for rank in range(self.ranks))

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """For what is made of the layout once: tensors of it on a device."""
        return {}

    def _bounds(self, count: int) -> list[int]:
        if self.splits is not None:
            return list(accumulate(self.splits, initial=0))
        return [count * rank // self.ranks for rank in range(self.ranks + 1)]
