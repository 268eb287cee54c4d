"""What hash and gate do on real text: collisions and use of the rows, and how far the gates open.

    usage = hash_statistics(layer.hash, token_ids)          # of the hash alone: needs no weights
    with record_gates(model) as gates:                      # of any model with Engram layers
        model(token_ids)
    print(usage, gates, sep="\\n")

Nothing of it keeps a tensor of the model's, or its autograd graph, alive.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engram.nn import ContextGate, NgramHash

__all__ = ["GateRecord", "GateStatistics", "HashStatistics", "HeadUsage", "OrderUsage", "hash_statistics",
           "record_gates"]

MAX_LOAD = 8  # rows with that many n-grams or more are counted together
GATE_BINS = 50
_NO_MODULUS = 2**63 - 1


@dataclass(frozen=True)
class HeadUsage:
    """One hash head: what the distinct n-grams of a text do to its table.

    Attributes:
        layer_id, order, head: which one; order 2..N, head 0..H-1.
        rows: of the head's table.
        touched: rows that were read at all.
        loads: how many rows 1, 2, ..., MAX_LOAD - 1 and at least MAX_LOAD distinct n-grams fall into.
        reads: how many rows were read 1, 2-3, 4-7, ... times.
        collided: share of the distinct n-grams that do not have their row for themselves.
        expected: the same of an ideal hash.
        busiest: share of all lookups that the most read row gets.
    """

    layer_id: int
    order: int
    head: int
    rows: int
    touched: int
    loads: tuple[int, ...]
    reads: tuple[int, ...]
    collided: float
    expected: float
    busiest: float


@dataclass(frozen=True)
class OrderUsage:
    """All heads of one n-gram order in one layer.

    Attributes:
        layer_id, order: which one.
        lookups: tokens.
        ngrams: distinct n-grams among them, told apart by their 63-bit hash.
        unique: ngrams / lookups.
        alone: share of the distinct n-grams that have a row for themselves in at least one head.
        heads: one a head.
    """

    layer_id: int
    order: int
    lookups: int
    ngrams: int
    unique: float
    alone: float
    heads: tuple[HeadUsage, ...]


@dataclass(frozen=True)
class HashStatistics:
    """Usage of every order of every layer. `str()` is a table."""

    orders: tuple[OrderUsage, ...]

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [
            ("layer", "order", "head", "rows", "lookups", "n-grams", "unique", "rows touched", "collided", "ideal",
             "busiest row")
        ]
        for order in self.orders:
            for head in order.heads:
                lines.append((
                    str(order.layer_id), str(order.order), str(head.head), f"{head.rows:,}", f"{order.lookups:,}",
                    f"{order.ngrams:,}", f"{order.unique:.1%}", f"{head.touched:,} ({head.touched / head.rows:.2%})",
                    f"{head.collided:.2%}", f"{head.expected:.2%}", f"{head.busiest:.2%}",
                ))
        return _table(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@torch.no_grad()
def hash_statistics(
    hash: NgramHash, token_ids: Tensor, *, document_ids: Tensor | None = None, mask: Tensor | None = None
) -> HashStatistics:
    """Collisions and row usage of the n-grams of a text, per layer, order and head.

    Memory is proportional to the text, whatever the size of the tables.

    Args:
        hash: for one or more layers.
        token_ids: int32 or int64 [B, T], raw.
        document_ids: integer [B, T]; n-grams never reach across a change.
        mask: bool [B, T], False = not a token, and not counted.

    Raises:
        ValueError: what `hash` does not take either.
    """
    rows = hash(token_ids, document_ids=document_ids, mask=mask)
    whole = copy.deepcopy(hash)  # the same n-grams before they are reduced to a table
    orders = whole.multipliers.shape[1] - 1
    whole.moduli = torch.full_like(whole.moduli[:, :orders], _NO_MODULUS)
    whole.offsets = torch.zeros_like(whole.moduli)
    ngrams = whole(token_ids, document_ids=document_ids, mask=mask)
    keep = slice(None) if mask is None else mask.flatten()
    heads = rows.shape[-1] // orders
    usages = []
    for index, layer_id in enumerate(hash.layer_ids):
        sizes, offsets = hash.moduli[index].tolist(), hash.offsets[index].tolist()
        layer_rows = rows[index].flatten(0, 1)[keep].cpu().numpy()
        layer_ngrams = ngrams[index].flatten(0, 1)[keep].cpu().numpy()
        for order in range(orders):
            distinct, first, counts = np.unique(layer_ngrams[:, order], return_index=True, return_counts=True)
            usages.append(_order_usage(
                layer_id, order + 2, first, counts,
                [(layer_rows[:, c] - offsets[c], sizes[c]) for c in range(order * heads, (order + 1) * heads)],
            ))
    return HashStatistics(tuple(usages))


def _order_usage(
    layer_id: int, order: int, first: np.ndarray, counts: np.ndarray, columns: list[tuple[np.ndarray, int]]
) -> OrderUsage:
    """first, counts [n]: where each distinct n-gram is seen first, and how often; columns: per head rows and size."""
    lookups, ngrams = int(counts.sum()), len(counts)
    alone, heads = np.zeros(ngrams, dtype=bool), []
    for head, (rows, size) in enumerate(columns):
        touched, which, load = np.unique(rows[first], return_inverse=True, return_counts=True)
        reads = np.bincount(which, weights=counts, minlength=len(touched))
        alone |= load[which] == 1
        heads.append(HeadUsage(
            layer_id=layer_id, order=order, head=head, rows=size, touched=len(touched),
            loads=tuple(np.bincount(np.minimum(load, MAX_LOAD), minlength=MAX_LOAD + 1)[1:].tolist()),
            reads=tuple(np.bincount(np.log2(reads).astype(int)).tolist()) if lookups else (),
            collided=float(load[load > 1].sum() / ngrams) if ngrams else 0.0,
            expected=1.0 - (1.0 - 1.0 / size) ** (ngrams - 1) if ngrams else 0.0,
            busiest=float(reads.max() / lookups) if lookups else 0.0,
        ))
    return OrderUsage(
        layer_id=layer_id, order=order, lookups=lookups, ngrams=ngrams, unique=ngrams / lookups if lookups else 0.0,
        alone=float(alone.mean()) if ngrams else 0.0, heads=tuple(heads),
    )


class GateStatistics:
    """Gates of one layer over everything it has been called with; tokens that were masked do not count.

    Attributes, a value for each of the G branches:
        count: int64, gates seen.
        mean, std, minimum, maximum: float64 of the gate, in (0, 1); NaN where nothing was seen.
        clamped: float64, share of the gates whose score lies below the clamp: no gradient passes through those.
        histogram: int64 [G, GATE_BINS] over equal parts of [0, 1].
    """

    def __init__(self, branches: int) -> None:
        self.count = torch.zeros(branches, dtype=torch.int64)
        self._sum, self._squares, self._clamped = (torch.zeros(branches, dtype=torch.float64) for _ in range(3))
        self.minimum = torch.full((branches,), torch.nan, dtype=torch.float64)
        self.maximum = torch.full((branches,), torch.nan, dtype=torch.float64)
        self.histogram = torch.zeros(branches, GATE_BINS, dtype=torch.int64)

    @property
    def mean(self) -> Tensor:
        return self._sum / self.count

    @property
    def std(self) -> Tensor:
        return (self._squares / self.count - self.mean.square()).clamp_min(0).sqrt()

    @property
    def clamped(self) -> Tensor:
        return self._clamped / self.count

    def add(self, gates: Tensor, clamped: Tensor) -> None:
        """Take in float64 gates [n, G], and bool [n, G] whether their score was clamped."""
        if len(gates) == 0:
            return
        self.count += len(gates)
        self._sum += gates.sum(0)
        self._squares += gates.square().sum(0)
        self._clamped += clamped.double().sum(0)
        low, high = gates.aminmax(dim=0)
        self.minimum, self.maximum = torch.fmin(self.minimum, low), torch.fmax(self.maximum, high)
        bins = (gates.nan_to_num(-1) * GATE_BINS).floor().long().clamp(max=GATE_BINS - 1)
        for branch, row in enumerate(bins.T):
            self.histogram[branch] += torch.bincount(row[row >= 0], minlength=GATE_BINS)

    def to_dict(self) -> dict[str, list[Any]]:
        """Plain JSON types; None where nothing was seen."""
        values = {name: getattr(self, name).tolist() for name in ("count", "histogram")}
        for name in ("mean", "std", "minimum", "maximum", "clamped"):
            values[name] = [None if value != value else value for value in getattr(self, name).tolist()]
        return values


class GateRecord:
    """`layers`: GateStatistics by the name of the module inside the model. `str()` is a table."""

    def __init__(self) -> None:
        self.layers: dict[str, GateStatistics] = {}

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("layer", "branch", "gates", "mean", "std", "least", "most", "clamped")]
        for name, layer in self.layers.items():
            for branch, count in enumerate(layer.count.tolist()):
                values = (layer.mean, layer.std, layer.minimum, layer.maximum)
                lines.append((name, str(branch), f"{count:,}", *(f"{value[branch]:.3f}" for value in values),
                              f"{layer.clamped[branch]:.2%}"))
        return _table(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {name: layer.to_dict() for name, layer in self.layers.items()}


@contextlib.contextmanager
def record_gates(model: nn.Module) -> Iterator[GateRecord]:
    """Within this context every gate that modules of `model` compute is added to the record, forward passes only.

    It sees the calls of the gate operators, with or without gradients, with a state or without, and costs one more pass
    of the gate where that is fused with the convolution. For eager mode: a compiled graph has no modules to tell apart.

    Args:
        model: any module with `nn.Engram` (or another module that calls `ops.gate` or `ops.gate_conv`) inside, or one
            itself.

    Yields:
        GateRecord; complete when the context is left, and good to read within it.
    """
    record, handles = GateRecord(), []
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ContextGate):  # a part of the layer, not a layer
            name = name.rpartition(".")[0]
        label = name or type(module).__name__

        def enter(_module: nn.Module, _args: Any, label: str = label) -> None:
            inside.append(label)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            inside.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _GateCalls(record, inside):
            yield record
    finally:
        for handle in handles:
            handle.remove()


class _GateCalls(TorchDispatchMode):
    """Hands the scores of every gate to the record; `inside`: names of the modules that are running, innermost last.

    It stands below autograd: what it sees has no graph."""

    def __init__(self, record: GateRecord, inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.record, self.inside = record, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        gate = torch.ops.engram.gate.default
        if self.inside and func in (gate, torch.ops.engram.gate_conv.default):
            given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
            stats = out[1]
            if func is not gate:  # its own stats lie otherwise, and with a state its mask begins with the past's
                shared = {argument.name for argument in gate._schema.arguments} - {"residual"}
                given = {name: value for name, value in given.items() if name in shared}
                if given.get("mask") is not None:
                    given["mask"] = given["mask"][:, given["mask"].shape[1] - stats.shape[1] :]
                stats = gate(**given)[1]
            self._add(stats[..., 0], given)
        return out

    def _add(self, scores: Tensor, given: dict[str, Any]) -> None:
        """scores [..., G]."""
        if given.get("mask") is not None:
            scores = scores[given["mask"]]
        scores, clamp = scores.flatten(0, -2).double().cpu(), given.get("clamp", 1e-6)
        size = scores.abs()
        root = size.clamp_min(clamp).sqrt()
        signed = root.copysign(scores) if given.get("zero_rule") == "copysign" else root * scores.sign()
        layer = self.record.layers.setdefault(self.inside[-1], GateStatistics(scores.shape[-1]))
        layer.add(torch.sigmoid(signed), size < clamp)


def _table(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)
