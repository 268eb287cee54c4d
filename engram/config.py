"""Configuration of the Engram layers of one model."""
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Mapping

import torch

from engram.tables import MAX_HASHED_VOCAB_SIZE

if TYPE_CHECKING:
    from engram.sizing import Sizes

QUANTIZED = (torch.float8_e4m3fn, torch.int8)  # table dtypes of frozen rows with scales
_TABLE_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, *QUANTIZED)
}
_MAX_TABLE_SIZE = 2**48  # row ids, sums over all heads, stay far inside int64
_FLAGS = (
    "bias", "conv_reset", "mask_blocks_hash", "residual", "shared_norms", "sparse_grad", "unique_primes",
    "zero_centred_norms",
)
_CHOICES = {
    "boundary": ("none", "eos"),
    "conv_init": ("zeros", "default"),
    "gate": ("context", "none"),
    "hash_input": ("tokens", "positions"),
    "layer_seed": ("id", "index", "none"),
    "layout": ("engram", "hybrid"),
    "multiplier_rule": ("pcg64", "splitmix64"),
    "reference_keys": ("demo", "deepseek-v4.1", "qwen3.8", "branch-gate"),
    "zero_rule": ("sign", "copysign"),
}

_PAPER = dict(
    hidden_size=2560, branches=4, vocab_size=129280, compressed_vocab_size=99092, embed_dim_per_head=80,
    layer_ids=(1, 14), conv_init="zeros",
)
_PRESETS: dict[str, dict[str, Any]] = {
    # `engram_demo_v1.py`: torch's own initialisation throughout, the convolution included.
    "demo": dict(hidden_size=1024, branches=4, vocab_size=129280, conv_init="default"),
    # arXiv 2601.07372, appendix A; the "vocab size" there is the lower bound of each head's table.
    "paper-27b": dict(_PAPER, table_size=2262400),
    "paper-40b": dict(_PAPER, table_size=7239680),
    # Its configuration file; layer ids count from 0.
    "deepseek-v4.1-flash": dict(
        hidden_size=5120, branches=4, vocab_size=129280, compressed_vocab_size=99092, max_ngram_size=4,
        embed_dim_per_head=256, table_size=16_000_000, layer_ids=(1, 14), kernel_size=0, bias=False, norm_eps=1e-20,
        zero_rule="copysign", residual=True, table_dtype=torch.float8_e4m3fn, reference_keys="deepseek-v4.1",
    ),
    # "PLE" of qwen4_exp: one layer, the hash knows it by its index, so any id may stand in `layer_ids`.
    "qwen3.8-flash-next": dict(
        hidden_size=2560, branches=4, vocab_size=248320, embed_dim_per_head=160, table_size=20_000_000, layer_ids=(1,),
        pad_id=248044, seed=1234, multiplier_rule="splitmix64", layer_seed="index", row_multiple=128, bias=False,
        norm_eps=1e-6, conv_norm_eps=1e-6, zero_centred_norms=True, boundary="eos", eos_id=248044, conv_reset=False,
        mask_blocks_hash=False, table_dtype=torch.bfloat16, reference_keys="qwen3.8",
    ),
    # Sizes of the model come from the caller; all layers share their hash constants.
    "hybrid-layer": dict(
        layout="hybrid", heads_per_ngram=4, embed_dim_per_head=32, table_size="vocab_size", layer_ids=(0,), pad_id=0,
        seed=42, layer_seed="none", unique_primes=False, bias=False, norm_eps=1e-5, conv_init="default",
    ),
    # The published model has 124M parameters: GPT-2's small one, whose sizes these are.
    "branch-gate": dict(
        hidden_size=768, branches=4, vocab_size=50257, layer_ids=(1,), kernel_size=0, shared_norms=True,
        reference_keys="branch-gate",
    ),
}


@dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Every number that decides what the Engram layers of a model compute. Checked once, when built.

    What tells the published Engrams apart is here too, as fields (`preset` sets them); docs/presets.md compares them.

    Letters: N = `max_ngram_size`, H = `heads_per_ngram`, C = (N - 1) * H hash columns, d = `embed_dim_per_head`,
    E = C * d, G = `branches`, D = `hidden_size`, K = `kernel_size`, L = number of layers.

    Args:
        hidden_size: D.
        vocab_size: V, raw token ids are in [0, V).
        branches: G, residual streams with a gate of their own.
        compressed_vocab_size: V', size of the token map: its hash constants are drawn with it and a map of another
            size is refused. None: taken from the map; without a map raw ids are hashed and V' = V.
        max_ngram_size: N, n-grams of 2..N tokens are looked up.
        heads_per_ngram: H, hash heads per n-gram order.
        embed_dim_per_head: d, width of a table row.
        table_size: lower bound of the (prime) row count of each head's table; one integer, or one per order 2..N.
        row_multiple: the table of a layer gets unread rows at its end, up to a multiple of this.
        unique_primes: whether no table size comes twice in all layers, or only not twice in one layer (then all
            layers have the same sizes).
        layer_ids: the decoder layers that carry an Engram, in the order in which table sizes are given out.
        pad_id: raw id (it goes through the token map) read in place of every token that an n-gram may not see.
        seed: of the hash multipliers.
        multiplier_rule: generator of the multipliers, "pcg64" (numpy's) or "splitmix64".
        layer_seed: what of a layer enters its multipliers: its "id", its "index" in `layer_ids`, or "none" (the same
            multipliers for all layers).
        hash_input: "tokens". Research control "positions": rows are those of the position in place of the tokens (the
            n-gram of t, t - 1, ..., no documents), so that as many rows are read from the same table, but they tell
            nothing about what was written.
        kernel_size: K, taps of the short convolution; 0: none.
        dilation: of the short convolution; None: N.
        bias: whether the key and value projections have one.
        gate: "context". Research control "none": every branch gets the value as it is; no key projection, no norms.
        shared_norms: one weight [D] for all branches in each of the two gate norms, rather than [G, D].
        zero_centred_norms: norm weights (gate and convolution) are kept as their distance from one: the norm
            multiplies with 1 + w, summed in float32 (float64 for float64), initially w = 0.
        norm_eps: of the two gate norms. None: torch's rule, 1.1920929e-07 for float32 and below, the epsilon of
            float64 for float64.
        conv_norm_eps: of the norm before the convolution.
        residual: whether a layer returns `hidden` plus its result where the caller does not say.
        zero_rule: gate at score zero: "sign" gives 0.5, "copysign" follows the sign of the zero.
        boundary: "eos": a document ends with each `eos_id`, n-grams (and with `conv_reset` the convolution) never
            reach across. "none": only the `document_ids` of a call bound documents. They are obeyed either way.
        eos_id: raw id that ends a document; required by, and only allowed with, boundary "eos".
        conv_reset: whether the convolution, too, stops at documents.
        mask_blocks_hash: whether a masked position also hides itself and everything older from n-grams. If False its
            id is hashed like any other, the mask then only silences lookup, gate and convolution.
        conv_init: "zeros" (the convolution adds nothing at first) or "default" (torch's own for Conv1d).
        table_std: standard deviation of the initial table rows.
        table_dtype: dtype of the table, or its name; None: that of the other parameters. torch.float8_e4m3fn and
            torch.int8: quantised rows with scales, frozen (`nn.QuantizedMultiHeadEmbedding`).
        sparse_grad: sparse gradients for the table.
        moduli: explicit table sizes, L rows of C integers, in place of the primes from `table_size`. All ones is a
            research control: one row a head, whatever the n-gram.
        layout: "engram" (`nn.Engram`), or "hybrid", the variant with the convolution before the gate
            (`engram.models.hybrid.EngramLayer`).
        reference_keys: whose key names `nn.Engram.load_reference_state_dict` reads, one of "demo", "deepseek-v4.1",
            "qwen3.8" and "branch-gate".

    Raises:
        ValueError: a wrong value; the message names field, value and rule.
    """

    hidden_size: int
    vocab_size: int
    branches: int = 1
    compressed_vocab_size: int | None = None
    max_ngram_size: int = 3
    heads_per_ngram: int = 8
    embed_dim_per_head: int = 64
    table_size: int | tuple[int, ...] = 646400
    row_multiple: int = 1
    unique_primes: bool = True
    layer_ids: tuple[int, ...] = (1, 15)
    pad_id: int = 2
    seed: int = 0
    multiplier_rule: str = "pcg64"
    layer_seed: str = "id"
    hash_input: str = "tokens"
    kernel_size: int = 4
    dilation: int | None = None
    bias: bool = True
    gate: str = "context"
    shared_norms: bool = False
    zero_centred_norms: bool = False
    norm_eps: float | None = None
    conv_norm_eps: float = 1e-5
    residual: bool = False
    zero_rule: str = "sign"
    boundary: str = "none"
    eos_id: int | None = None
    conv_reset: bool = True
    mask_blocks_hash: bool = True
    conv_init: str = "zeros"
    table_std: float = 1.0
    table_dtype: torch.dtype | None = None
    sparse_grad: bool = False
    moduli: tuple[tuple[int, ...], ...] | None = None
    layout: str = "engram"
    reference_keys: str = "demo"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "branches", "heads_per_ngram", "embed_dim_per_head", "row_multiple"):
            self._integer(name, 1)
        self._integer("vocab_size", 1, MAX_HASHED_VOCAB_SIZE)
        self._integer("compressed_vocab_size", 1, self.vocab_size, "vocab_size", optional=True)
        self._integer("max_ngram_size", 2)
        self._integer("pad_id", 0, self.vocab_size - 1, "vocab_size - 1")
        self._integer("seed", 0)
        self._integer("kernel_size", 0)
        self._integer("dilation", 1, optional=True)
        self._integer("eos_id", 0, self.vocab_size - 1, "vocab_size - 1", optional=True)
        self._number("norm_eps", positive=True, optional=True)
        self._number("conv_norm_eps", positive=True)
        self._number("table_std", positive=False)
        for name in _FLAGS:
            self._require(name, isinstance(getattr(self, name), bool), "be True or False")
        for name, choices in _CHOICES.items():
            self._require(name, getattr(self, name) in choices, f"be one of {', '.join(map(repr, choices))}")
        needs_eos = self.boundary == "eos"
        self._require("eos_id", needs_eos == (self.eos_id is not None),
                      "be set" if needs_eos else "be None unless boundary is 'eos'")

        layer_ids = self._integers("layer_ids", self.layer_ids, 0)
        self._require("layer_ids", len(layer_ids) > 0 and len(set(layer_ids)) == len(layer_ids),
                      "name at least one layer and none twice")
        self._set("layer_ids", layer_ids)

        orders = self.max_ngram_size - 1
        if isinstance(self.table_size, (list, tuple)):
            sizes = self._integers("table_size", self.table_size, 1)
            self._require("table_size", len(sizes) == orders,
                          f"be one integer or one per order 2..{self.max_ngram_size}")
            self._set("table_size", sizes)
        else:
            self._integer("table_size", 1, _MAX_TABLE_SIZE)

        if self.moduli is not None:
            shape = (len(layer_ids), self.hash_columns)
            self._require("moduli", isinstance(self.moduli, (list, tuple)), f"be {shape[0]} rows of {shape[1]}")
            rows = tuple(self._integers("moduli", row, 1) for row in self.moduli)
            self._require("moduli", len(rows) == shape[0] and all(len(row) == shape[1] for row in rows),
                          f"be {shape[0]} rows (layers) of {shape[1]} integers (orders x heads)")
            self._set("moduli", rows)

        dtype = self.table_dtype
        if isinstance(dtype, str):
            dtype = _TABLE_DTYPES.get(dtype.removeprefix("torch."), dtype)
        self._require("table_dtype", dtype is None or dtype in _TABLE_DTYPES.values(),
                      f"be None or one of {', '.join(_TABLE_DTYPES)}")
        self._set("table_dtype", dtype)
        self._require("sparse_grad", not (self.sparse_grad and dtype in QUANTIZED),
                      "be False with a quantised table_dtype, whose rows are frozen")

    @property
    def hash_columns(self) -> int:
        """C = (N - 1) * H: table rows fetched per token."""
        return (self.max_ngram_size - 1) * self.heads_per_ngram

    @property
    def memory_width(self) -> int:
        """E = C * d: width of the fetched rows side by side."""
        return self.hash_columns * self.embed_dim_per_head

    @property
    def conv_dilation(self) -> int:
        """`dilation`, None resolved."""
        return self.max_ngram_size if self.dilation is None else self.dilation

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON types; `from_dict` gives back an equal configuration."""
        values = asdict(self)
        if self.table_dtype is not None:
            values["table_dtype"] = str(self.table_dtype).removeprefix("torch.")
        for name in ("layer_ids", "table_size", "moduli"):
            values[name] = _lists(values[name])
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngramConfig":
        """The inverse of `to_dict`, also after a trip through JSON.

        Raises:
            ValueError: a key that is no field, a required one missing, or a wrong value.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(map(str, set(values) - known)):
            raise ValueError(f"EngramConfig has no field {', '.join(unknown)}; fields: {', '.join(sorted(known))}")
        if missing := sorted({"hidden_size", "vocab_size"} - set(values)):
            raise ValueError(f"EngramConfig needs {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "EngramConfig":
        """A published configuration, single fields replaced by `overrides`.

        Args:
            name: "demo", "paper-27b", "paper-40b", "deepseek-v4.1-flash", "qwen3.8-flash-next", "hybrid-layer" (needs
                `hidden_size` and `vocab_size`, which is the `table_size` too) or "branch-gate".

        Raises:
            ValueError: an unknown name, an override that is no field, a missing size, or a wrong value.
        """
        if name not in _PRESETS:
            raise ValueError(f"preset must be one of {', '.join(_PRESETS)}, got {name!r}")
        values = {**_PRESETS[name], **overrides}
        if values.get("table_size") == "vocab_size":
            values["table_size"] = values.get("vocab_size")
        return cls.from_dict(values)

    def describe(self, dtype: torch.dtype | None = None) -> "Sizes":
        """Rows, parameters, bytes and bytes read per token of all layers; see `engram.sizing.describe`."""
        from engram.sizing import describe

        return describe(self, dtype)

    @classmethod
    def suggest(cls, budget: int, **given: Any) -> "EngramConfig":
        """The configuration with the largest tables that fit a budget; see `engram.sizing.suggest`."""
        from engram.sizing import suggest

        return suggest(budget, **given)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name} must {rule}, got {getattr(self, name)!r}")

    def _integer(
        self, name: str, low: int, high: int | None = None, high_name: str = "", optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        number = _as_int(value)
        rule = f"be an integer >= {low}" if high is None else f"be an integer in [{low}, {high_name or high}]"
        if high_name:
            rule += f" = [{low}, {high}]"
        self._require(name, number is not None and low <= number and (high is None or number <= high), rule)
        self._set(name, number)

    def _integers(self, name: str, values: Any, low: int) -> tuple[int, ...]:
        rule = f"hold integers in [{low}, {_MAX_TABLE_SIZE}]"
        self._require(name, isinstance(values, (list, tuple)), rule)
        numbers = tuple(n for n in map(_as_int, values) if n is not None and low <= n <= _MAX_TABLE_SIZE)
        self._require(name, len(numbers) == len(values), rule)
        return numbers

    def _number(self, name: str, positive: bool, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        holds = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        holds = holds and (value > 0 if positive else value >= 0)
        self._require(name, holds, f"be a finite number {'> 0' if positive else '>= 0'}")
        self._set(name, float(value))


def _as_int(value: Any) -> int | None:
    """`value` as a plain int (numpy's integers included), None if it is not an integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        number: int = value.__index__()
    except TypeError:
        return None
    return number


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value
