"""Checkpoints of the published Engrams: the names of their tensors, and where in `nn.Engram` each one belongs.

A checkpoint is read and written through `ReferenceTensor`s, views of the module's own tensors in the checkpoint's
shapes, so a table can be copied row range by row range from wherever it lies.

Source: state dicts of the official demo, of DeepSeek-V4.1-Flash (`layers.{i}.engram.*`), of qwen4_exp in transformers
(`layers.{i}.ple.*`), and of the branch-gate module.
"""
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, TypeVar

import torch
from torch import Tensor

from engram.boundaries import describe, is_integer

if TYPE_CHECKING:
    from engram.nn import Engram

Stored = TypeVar("Stored")  # whatever a checkpoint keeps its tensors as

_STEP = 1 << 16  # rows dequantised at a time; a multiple of every block
_RAW = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8)  # copied byte for byte, never converted


class Key(NamedTuple):
    """One name, or with `{g}` in it G of them, one a branch.

    Attributes:
        own: names in `nn.Engram`, space-separated: their rows, one after the other, are those of the tensor. What the
            module does not have (a bias, a convolution) the checkpoint does not have either.
        shape: in the letters of `nn.Engram` (R table rows; -1: as many as there are), without the branch of `{g}`.
        scale: name of the E8M0 scales that stand beside an e4m3 tensor, one a block of `block` = (rows, columns).
        shards: name of the i-th row range where the tensor comes in pieces.
        optional: may be missing, and is left as it is then.
    """

    own: str
    shape: str
    scale: str | None = None
    block: tuple[int, int] = (1, 1)
    shards: str | None = None
    optional: bool = False


REFERENCE_KEYS: dict[str, dict[str, Key]] = {
    "demo": {
        "multi_head_embedding.offsets": Key("hash.offsets", "C"),
        "multi_head_embedding.embedding.weight": Key("embedding.weight", "R d"),
        "short_conv.conv.weight": Key("conv.weight", "G*D 1 K"),
        "short_conv.norms.{g}.weight": Key("conv.norm_weight", "D"),
        "value_proj.weight": Key("value_proj.weight", "D E"),
        "value_proj.bias": Key("value_proj.bias", "D"),
        "key_projs.{g}.weight": Key("key_proj.weight", "D E"),
        "key_projs.{g}.bias": Key("key_proj.bias", "D"),
        "norm1.{g}.weight": Key("gate.key_weight", "D"),
        "norm2.{g}.weight": Key("gate.hidden_weight", "D"),
    },
    "deepseek-v4.1": {
        "embed.weight": Key("embedding.weight", "R d", scale="embed.scale", block=(1, 32)),
        "wkv.weight": Key("key_proj.weight value_proj.weight", "-1 E", scale="wkv.scale", block=(32, 32)),
        "q_weight": Key("gate.hidden_weight", "G D"),
        "k_weight": Key("gate.key_weight", "G D"),
    },
    "qwen3.8": {
        "ple_embedding.layer_multipliers": Key("hash.multipliers", "N"),
        "ple_embedding.ngram_heads_vocab_sizes": Key("hash.moduli", "C"),
        "ple_embedding.ngram_heads_offsets": Key("hash.offsets", "C"),
        "ple_embedding.ngram_embedding.weight": Key(
            "embedding.weight", "R d", shards="ple_embedding.ngram_embedding.shard_{}.weight"
        ),
        "key_proj.weight": Key("key_proj.weight", "G*D E"),
        "value_proj.weight": Key("value_proj.weight", "D E"),
        "norm_key.weight": Key("gate.key_weight", "G*D"),
        "norm_query.weight": Key("gate.hidden_weight", "G*D"),
        "norm_conv.weight": Key("conv.norm_weight", "G*D"),
        "conv1d.weight": Key("conv.weight", "G*D 1 K"),
    },
    # The published module begins after the lookup: a table is known under the demo's name, where there is one.
    "branch-gate": {
        "multi_head_embedding.embedding.weight": Key("embedding.weight", "R d", optional=True),
        "W_V.weight": Key("value_proj.weight", "D E"),
        "W_V.bias": Key("value_proj.bias", "D"),
        "W_K.{g}.weight": Key("key_proj.weight", "D E"),
        "W_K.{g}.bias": Key("key_proj.bias", "D"),
        "norm_h.weight": Key("gate.hidden_weight", "D"),
        "norm_k.weight": Key("gate.key_weight", "D"),
    },
}
_ZERO_CENTRED = ("qwen3.8",)  # whose norm weights are distances from one


@dataclass(frozen=True)
class ReferenceTensor:
    """A tensor of a reference checkpoint, and the part of a module that holds it.

    Attributes:
        targets: views of the module's tensors; their rows (first dimension), one after the other, are the tensor's.
        scale, block, shards, optional: see `Key`.
        constant: a constant of the hash: compared, never written.
    """

    targets: tuple[Tensor, ...]
    scale: str | None = None
    block: tuple[int, int] = (1, 1)
    shards: str | None = None
    optional: bool = False
    constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(target.shape[0] for target in self.targets), *self.targets[0].shape[1:])

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the scales: one a block, the last block of a dimension may be smaller."""
        return tuple(-(-size // block) for size, block in zip(self.shape, self.block))

    def fault(self, name: str, pieces: list[Tensor], scales: Tensor | None) -> str:
        """What is wrong with shapes and dtypes of a tensor to be copied here; empty if nothing. Reads no values."""
        if any(piece.dim() != len(self.shape) or piece.shape[1:] != self.shape[1:] for piece in pieces) or \
                sum(piece.shape[0] for piece in pieces) != self.shape[0]:
            got = ", ".join(str(list(piece.shape)) for piece in pieces)
            return f"{name} must be {list(self.shape)}, got {got}"
        dtype, own = pieces[0].dtype, self.targets[0].dtype
        quantized = dtype == torch.float8_e4m3fn and own not in _RAW and self.scale is not None
        if own in _RAW:
            fits, wanted = dtype == own, str(own).removeprefix("torch.")
        elif self.constant:
            fits, wanted = is_integer(pieces[0]), "integer"
        else:
            fits = quantized or dtype.is_floating_point and dtype.itemsize > 1
            wanted = "floating point" + (f", or float8_e4m3fn beside {self.scale}" if self.scale else "")
        if not fits or any(piece.dtype != dtype for piece in pieces):
            return f"{name} must be {wanted}, got {', '.join(sorted({describe(piece) for piece in pieces}))}"
        if not quantized:
            return ""
        if scales is None:
            return f"missing {self.scale}, the scales of {name}"
        if scales.dtype != torch.float8_e8m0fnu or tuple(scales.shape) != self.scale_shape:
            return f"{self.scale} must be float8_e8m0fnu {list(self.scale_shape)}, got {describe(scales)}"
        return ""

    def constant_fault(self, name: str, values: Tensor) -> str:
        """How the values of a constant differ from the module's; empty if they do not."""
        own = self.targets[0]
        if torch.equal(values.to(own), own):
            return ""
        return f"{name} must be {own.tolist()}, got {values.tolist()}"

    @torch.no_grad()
    def copy_rows(self, begin: int, values: Tensor, scales: Tensor | None = None) -> None:
        """Copy rows [begin, begin + n) of the tensor into the module, converted to its dtypes.

        Args:
            begin: a multiple of `block[0]` with scales.
            values: [n, ...], any device.
            scales: of these rows, from `begin // block[0]` on; None: the values are not quantised.

        Raises:
            ValueError: rows outside the tensor, or a `begin` inside a block.
        """
        end = begin + values.shape[0]
        if not 0 <= begin <= end <= self.shape[0] or (scales is not None and begin % self.block[0]):
            raise ValueError(f"copy_rows: rows must be in [0, {self.shape[0]}) and begin with a block of "
                             f"{self.block[0]}, got [{begin}, {end})")
        step = len(values) if scales is None else _STEP
        for low in range(0, len(values), step or 1):
            part = values[low : low + step]
            if scales is not None:
                part = dequantize_blocks(part, scales[low // self.block[0] :], self.block)
            offset = begin + low
            for target in self.targets:
                first, last = max(0, offset), min(len(target), offset + len(part))
                if first < last:
                    target[first:last].copy_(part[first - offset : last - offset])
                offset -= len(target)

    def read(self) -> Tensor:
        """The tensor as it is in the module: the same memory, unless it is spread over several tensors."""
        return self.targets[0] if len(self.targets) == 1 else torch.cat(self.targets)


def reference_tensors(module: "Engram") -> dict[str, ReferenceTensor]:
    """Name to tensor, for every tensor of a checkpoint of `module.config.reference_keys`.

    Raises:
        ValueError: the checkpoint has no name for one of the module's parameters, or keeps it in another form.
    """
    config = module.config
    dialect = config.reference_keys
    if config.zero_centred_norms != (dialect in _ZERO_CENTRED):
        raise ValueError(f"reference_keys {dialect!r} has zero_centred_norms={not config.zero_centred_norms}, "
                         f"the module has {config.zero_centred_norms}")
    own = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    quantized = own.get("embedding.values")
    sizes = {
        "1": 1, "-1": -1, "G": config.branches, "D": config.hidden_size, "E": config.memory_width,
        "K": config.kernel_size, "C": config.hash_columns, "N": config.max_ngram_size, "d": config.embed_dim_per_head,
        "R": len(own["embedding.weight"] if quantized is None else quantized),
    }
    tensors: dict[str, ReferenceTensor] = {}
    named = set()
    for name, key in REFERENCE_KEYS[dialect].items():
        names = key.own.split()
        if key.own == "embedding.weight" and key.scale and quantized is not None and quantized.dtype in _RAW[:1]:
            for part, kept in ((name, "embedding.values"), (key.scale, "embedding.scales")):
                tensors[part] = ReferenceTensor((own[kept],))
                named.add(kept)
            continue
        if not own.keys() >= set(names):
            continue
        named |= set(names)
        shape = [math.prod(sizes[letter] for letter in size.split("*")) for size in key.shape.split()]
        options: dict[str, Any] = dict(scale=key.scale, block=key.block, shards=key.shards, optional=key.optional,
                                       constant=key.own.startswith("hash."))
        if "{g}" in name:
            parts = _view(own[key.own], key.own, [config.branches, *shape], dialect)
            tensors |= {name.format(g=g): ReferenceTensor((part,), **options) for g, part in enumerate(parts)}
        else:
            tensors[name] = ReferenceTensor(tuple(_view(own[n], n, shape, dialect) for n in names), **options)
    if unnamed := [name for name in own if name not in named and not name.startswith("hash.")]:
        raise ValueError(f"reference_keys {dialect!r} has no name for {', '.join(unnamed)}")
    return tensors


def _view(own: Tensor, name: str, shape: list[int], dialect: str) -> Tensor:
    if -1 not in shape and own.numel() != math.prod(shape):
        raise ValueError(f"reference_keys {dialect!r} keeps {name} as {shape}, the module has {list(own.shape)}")
    return own.view(shape)


def pieces_of(name: str, tensor: ReferenceTensor, given: Mapping[str, Stored]) -> dict[str, Stored]:
    """What of `given` makes up the tensor, by name: itself, or its shards in the order of their numbers."""
    if name in given or tensor.shards is None:
        return {name: given[name]} if name in given else {}
    numbered = (tensor.shards.format(number) for number in range(len(given)))
    return {shard: given[shard] for shard in numbered if shard in given}


def faults(tensors: Mapping[str, ReferenceTensor], given: Mapping[str, Tensor]) -> list[str]:
    """All that keeps `given` from being loaded: names that are missing or unexpected, shapes and dtypes. Looks at no
    values, so tensors on the meta device will do."""
    found, used = [], set()
    for name, tensor in tensors.items():
        pieces = pieces_of(name, tensor, given)
        used |= set(pieces)
        if not pieces:
            found += [] if tensor.optional else [f"missing {name}"]
            continue
        if tensor.scale is not None and next(iter(pieces.values())).dtype == torch.float8_e4m3fn:
            used.add(tensor.scale)
        scales = None if tensor.scale is None else given.get(tensor.scale)
        if fault := tensor.fault(name, list(pieces.values()), scales):
            found.append(fault)
    return found + [f"unexpected {name}" for name in given if name not in used]


def dequantize_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 `values * scale of the block`; values e4m3 [n, m], scales E8M0, one a block of (rows, columns)."""
    rows, columns = values.shape
    wide = scales[: -(-rows // block[0])].float()
    wide = wide.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return values.float() * wide


def quantize_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """e4m3 values and E8M0 scales of a matrix [n, m], one scale a block of (rows, columns).

    The rule of `engram.quantize` for blocks of any shape: the smallest power of two with max|x| <= 464 * scale, half a
    step above the largest e4m3 number. What came out of `dequantize_blocks` comes back exactly, all else is rounded to
    the nearest. Not checked: what is not finite comes back as NaN.
    """
    (rows, columns), (high, wide) = weight.shape, block
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
    largest = blocks.abs().amax((2, 3))
    fraction, exponent = torch.frexp(largest)  # 464 = 0.90625 * 2**9
    exponent = (exponent - 9 + (fraction > 0.90625).int()).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, 0)
    scaled = torch.ldexp(blocks, -exponent[..., None, None]).clamp(-448, 448)
    values = scaled.to(torch.float8_e4m3fn)
    scales = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return values.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales
