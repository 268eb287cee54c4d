"""What a sharded lookup costs, on paper: rows and bytes of each rank, and the time on links of a stated speed.

The hash spreads the slots of a head evenly over its rows, so a rank with the share f of the slots' rows is asked for
that share by every rank. With T tokens a rank, C columns, u the share of slots that is left once row ids are unique,
and `away` = T C u (1 - f), `asked` = (W - 1) T C u f, a rank sends, a layer:

    forward     ids    away  * (4 or 8)              rows        asked * (bytes of a row)
    backward    sums   away  * d * 4                 (8 for float64)

(the scales of a quantised row included; such a table is frozen and has no backward), and receives the other of the two.
With whole heads and equal token counts u is 1 and gradients travel in the table's dtype. The slowest rank decides the
time: bytes over the bandwidth of its link, sent and received at once, one latency a collective, and what the owner
reads, writes and sums over the bandwidth of its memory.
"""

from dataclasses import dataclass

import torch

from engram import quantize
from engram.config import QUANTIZED, EngramConfig
from engram.distributed.layout import Layout
from engram.nn import layer_moduli

# Floats of optimizer state a row of width d: (a row, an element).
OPTIMIZER_STATE = {
    "none": (0, 0), "sgd": (0, 0), "row-wise-adagrad": (1, 0), "row-wise-adam": (1, 1), "lazy-adamw": (0, 2),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of a rank: its link, in each direction, and its memory, bytes a second; seconds for a collective to start."""

    bandwidth: float = 50e9
    latency: float = 30e-6
    memory: float = 2e12

    def __post_init__(self) -> None:
        for name in ("bandwidth", "latency", "memory"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Of all Engram layers of a model, a step. Lists have one number a rank."""

    sharding: str
    rows: list[int]
    table_bytes: list[int]
    optimizer_bytes: list[int]
    sent_forward: list[float]
    received_forward: list[float]
    sent_backward: list[float]
    received_backward: list[float]
    forward_seconds: float
    backward_seconds: float

    @property
    def memory_balance(self) -> float:
        """Rows of the largest shard over those of the mean one."""
        return max(self.rows) * len(self.rows) / sum(self.rows)

    @property
    def traffic_balance(self) -> float:
        """Bytes of the busiest link, sent or received in the forward, over the mean of all links."""
        busiest = max(map(max, self.sent_forward, self.received_forward))
        mean = sum(self.sent_forward) / len(self.sent_forward)
        return busiest / mean if mean else 1.0


def make_plan(
    config: EngramConfig,
    *,
    ranks: int,
    tokens: int,
    sharding: str = "rows",
    dtype: torch.dtype | None = None,
    unique: float = 1.0,
    equal_tokens: bool = False,
    optimizer: str = "row-wise-adam",
    machine: Machine = Machine(),
) -> Plan:
    """Plan the tables of a configuration.

    Args:
        config: of all layers.
        ranks: W.
        tokens: T, that each rank looks up in a step.
        sharding: of `ShardedMultiHeadEmbedding`.
        dtype: of the table, float8_e4m3fn and int8 with scales; None: `config.table_dtype`, or bfloat16.
        unique: u, the share of slots that is left once a rank's row ids are unique; 1 is the worst case.
        equal_tokens: of `ShardedMultiHeadEmbedding`.
        optimizer: one of OPTIMIZER_STATE; a quantised table has none whatever is said here.
        machine: speeds.

    Raises:
        ValueError: a number out of its range, or an unknown name.
    """
    for name, value in (("ranks", ranks), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 < unique <= 1:
        raise ValueError(f"unique must be in (0, 1], got {unique}")
    if optimizer not in OPTIMIZER_STATE:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZER_STATE)}, got {optimizer!r}")
    every = equal_tokens and sharding != "rows"
    dtype = table_dtype(config, dtype)
    frozen, columns, width = dtype in QUANTIZED, config.hash_columns, config.embed_dim_per_head
    slots = tokens * columns * (1.0 if every else unique)
    row_bytes, wide = bytes_of_row(width, dtype), max(4, dtype.itemsize)
    out_bytes = width * (2 if frozen else dtype.itemsize)  # that are read are bfloat16 then
    sum_bytes = 0 if frozen else width * (dtype.itemsize if every else wide)
    a_row, an_element = (0, 0) if frozen else OPTIMIZER_STATE[optimizer]
    state_bytes = (a_row + an_element * width) * wide

    rows = [0] * ranks
    totals = {name: [0.0] * ranks for name in ("sent_forward", "received_forward", "sent_backward", "received_backward")}
    forward = backward = 0.0
    for layer in config.layer_ids:
        sizes = layer_moduli(config, layer)
        layout = Layout(sizes, ranks, sharding, padding=-sum(sizes) % config.row_multiple)
        id_bytes = 4 if max(layout.local_rows) < 2**31 else 8
        away, asked = [], []
        for rank, share in enumerate(shares(layout)):
            rows[rank] += layout.local_rows[rank]
            away.append(slots * (1 - share))
            asked.append((ranks - 1) * slots * share)
            for name, size in (
                ("sent_forward", away[rank] * id_bytes + asked[rank] * row_bytes),
                ("received_forward", asked[rank] * id_bytes + away[rank] * row_bytes),
                ("sent_backward", away[rank] * sum_bytes),
                ("received_backward", asked[rank] * sum_bytes),
            ):
                totals[name][rank] += size
        busiest = max(*away, *asked)
        owned = max(asked) + slots * max(shares(layout))  # rows that an owner reads, its own rank's among them
        collectives = (2 if every else 3) if ranks > 1 else 0
        forward += collectives * machine.latency + busiest * (id_bytes + row_bytes) / machine.bandwidth
        forward += (2 * owned * row_bytes + tokens * columns * (row_bytes + out_bytes)) / machine.memory
        if frozen:
            continue
        backward += (1 if ranks > 1 else 0) * machine.latency + busiest * sum_bytes / machine.bandwidth
        backward += 2 * (owned + tokens * columns) * sum_bytes / machine.memory
    return Plan(
        sharding=sharding, rows=rows,
        table_bytes=[count * row_bytes for count in rows],
        optimizer_bytes=[count * state_bytes for count in rows],
        forward_seconds=forward, backward_seconds=backward, **totals,
    )


def table_dtype(config: EngramConfig, dtype: torch.dtype | None = None) -> torch.dtype:
    """What `make_plan` plans with."""
    return dtype or config.table_dtype or torch.bfloat16


def bytes_of_row(width: int, dtype: torch.dtype) -> int:
    """Of one row, with the scales of a quantised one: in memory and on the wire."""
    if dtype not in QUANTIZED:
        return width * dtype.itemsize
    format = "int8" if dtype == torch.int8 else "fp8"
    return sum(tensor.nbytes for tensor in quantize.zero_table(1, width, format, device="meta"))


def shares(layout: Layout) -> list[float]:
    """The share of all slots whose row each rank has, with every head as often and every row of a head as often."""
    found = [0.0] * layout.ranks
    begins, heads = layout.head_begins, len(layout.sizes)
    for piece in layout.pieces:
        for head, size in enumerate(layout.sizes):
            overlap = min(piece.end, begins[head + 1]) - max(piece.begin, begins[head])
            if overlap > 0:
                found[piece.owner] += overlap / size / heads
    return found
