"""How big the layers of a configuration are, and how big their tables can be for a budget.

Everything is counted on layers built on the meta device, so it is what the modules have, whatever the dialect.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from engram.config import EngramConfig
from engram.nn import Engram, layer_moduli

UNITS = ("bytes", "parameters")
ROW_STEP = 32  # a suggested row width is a multiple of it: whole 64-byte lines of memory for half types


@dataclass(frozen=True)
class LayerSizes:
    """Of one Engram layer; "table" is the memory table, "other" projections, gate and convolution.

    Attributes:
        layer_id: as in the configuration; None for the sum over all layers.
        rows: of the table, all heads together, unread ones at its end (`row_multiple`) included.
        table_parameters, other_parameters: numbers, scales and hash constants not counted.
        table_bytes: with the scales of a quantised table.
        other_bytes: of the other parameters.
        read_bytes_per_token: table rows fetched for one token, scales included.
    """

    layer_id: int | None
    rows: int
    table_parameters: int
    other_parameters: int
    table_bytes: int
    other_bytes: int
    read_bytes_per_token: int


@dataclass(frozen=True, repr=False)
class Sizes:
    """Of all Engram layers of a configuration: one `LayerSizes` a layer, and their sum. `str()` is a table."""

    layers: tuple[LayerSizes, ...]

    @property
    def total(self) -> LayerSizes:
        names = [field.name for field in fields(LayerSizes)][1:]
        return LayerSizes(None, *(sum(getattr(layer, name) for layer in self.layers) for name in names))

    def __str__(self) -> str:
        names = ("layer", "rows", "table parameters", "other parameters", "table bytes", "other bytes", "read a token")
        lines = [names] + [
            ("all" if size.layer_id is None else str(size.layer_id), f"{size.rows:,}", f"{size.table_parameters:,}",
             f"{size.other_parameters:,}", f"{size.table_bytes:,} ({binary_unit(size.table_bytes)})",
             f"{size.other_bytes:,} ({binary_unit(size.other_bytes)})", f"{size.read_bytes_per_token:,} B")
            for size in (*self.layers, self.total)
        ]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """`{"layers": [...], "total": {...}}` of plain JSON types."""
        return {"layers": [vars(layer).copy() for layer in self.layers], "total": vars(self.total).copy()}


def describe(config: EngramConfig, dtype: torch.dtype | None = None) -> Sizes:
    """Sizes of the layers as `engram.nn.Engram` builds them.

    Args:
        config: of all layers.
        dtype: of the parameters; None: torch's default dtype. `config.table_dtype` wins for the table.
    """
    return Sizes(tuple(_layer_sizes(config, layer, dtype) for layer in config.layer_ids))


def suggest(
    budget: int,
    *,
    unit: str = "bytes",
    dtype: torch.dtype | None = None,
    hidden_size: int,
    vocab_size: int,
    **given: Any,
) -> EngramConfig:
    """The configuration with the largest tables that fit a budget.

    All heads of all layers get tables of about the same size: `table_size` is the largest lower bound whose primes
    together fit. A row width that is not given is `hidden_size / C`, to the nearest multiple of 32 (at least 32), so
    that the memory is about as wide as the model, as in the released models (E / D is 0.5 in the paper's, 1.0 in the
    demo and Qwen3.8-Flash-Next, 1.2 in DeepSeek-V4.1-Flash). Everything else is `EngramConfig`'s default. The paper
    finds the best share of memory at 20 to 25 % of a model's sparse parameters (experts and tables together).

    Args:
        budget: for the tables of all layers together, at least 1.
        unit: "bytes" (scales of quantised tables included) or "parameters".
        dtype: of the parameters; None: torch's default dtype. A `table_dtype` that is given wins for the tables.
        hidden_size, vocab_size, **given: fields of EngramConfig; all but `table_size` and `moduli`.

    Raises:
        ValueError: a wrong field, a wrong budget or unit, or a budget too small for tables of a row or two.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(map(repr, UNITS))}, got {unit!r}")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 1 <= budget < math.inf:
        raise ValueError(f"budget must be a number of {unit} >= 1, got {budget!r}")
    if taken := [name for name in ("table_size", "moduli") if name in given]:
        raise ValueError(f"{taken[0]} must not be given: it is what suggest looks for")
    given |= dict(hidden_size=hidden_size, vocab_size=vocab_size)
    smallest = EngramConfig.from_dict({**given, "table_size": 1})
    if "embed_dim_per_head" not in given:
        width = ROW_STEP * max(1, round(hidden_size / smallest.hash_columns / ROW_STEP))
        smallest = EngramConfig.from_dict({**smallest.to_dict(), "embed_dim_per_head": width})

    least = describe(smallest, dtype).layers[0]
    per_row = (least.table_bytes if unit == "bytes" else least.table_parameters) / least.rows
    heads = len(smallest.layer_ids) * smallest.hash_columns

    def with_size(size: int) -> EngramConfig:
        return EngramConfig.from_dict({**smallest.to_dict(), "table_size": size})

    def fits(size: int) -> bool:
        return _rows(with_size(size)) * per_row <= budget

    if not fits(1):
        raise ValueError(f"budget must be at least {math.ceil(_rows(smallest) * per_row):,} {unit} for {heads} tables "
                         f"of these sizes, got {budget:,}")
    low, high = 1, int(budget / per_row / heads) + 1  # primes are no smaller than their bound
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return with_size(low)


def binary_unit(size: float) -> str:
    """Bytes to three digits or so: "94.4 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _rows(config: EngramConfig) -> int:
    multiple = config.row_multiple
    return sum(-(-sum(layer_moduli(config, layer)) // multiple) * multiple for layer in config.layer_ids)


def _layer_sizes(config: EngramConfig, layer_id: int, dtype: torch.dtype | None) -> LayerSizes:
    layer: nn.Module
    embedding: nn.Module
    if config.layout == "hybrid":
        from engram.models.hybrid import EngramLayer

        layer = EngramLayer.from_config(config, device="meta", dtype=dtype)
        embedding = layer.multi_head_emb.embedding
    else:
        layer = Engram(config, layer_id, device="meta", dtype=dtype)
        embedding = layer.embedding
    table = [*embedding.parameters(), *embedding.buffers()]
    inside = set(map(id, table))
    other = [parameter for parameter in layer.parameters() if id(parameter) not in inside]
    rows, table_bytes = table[0].shape[0], sum(tensor.nbytes for tensor in table)
    return LayerSizes(
        layer_id=layer_id,
        rows=rows,
        table_parameters=rows * config.embed_dim_per_head,
        other_parameters=sum(parameter.numel() for parameter in other),
        table_bytes=table_bytes,
        other_bytes=sum(parameter.nbytes for parameter in other),
        read_bytes_per_token=config.hash_columns * table_bytes // rows,
    )
