"""The hybrid-layer variant of Engram: a sequence mixer of its own rather than an addition before the attention.

    memory = table[hash(ids)]                             raw ids; what lies before the start reads as 0
    memory = memory + silu(layer_norm(conv(memory)))      conv before the gate, norm after conv
    alpha  = sigmoid(signed_sqrt(<layer_norm(key_proj(memory)), layer_norm(x)> / sqrt(D)))
    out    = out_proj(alpha * value_proj(memory))                              no residual: the block adds it

Letters: B batch, T tokens, D hidden size, N largest n-gram, H heads per order, C = (N - 1) * H hash columns, d row
width, E = C * d, K conv taps, V vocabulary. Source: `EngramLayer` of frankenstein-transformer, whose weights load as
they are.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engram import ops, tables
from engram.boundaries import check_tokenwise, describe, visible_tokens
from engram.config import EngramConfig
from engram.nn import MultiHeadEmbedding, project
from engram.ops import Ring
from engram.reference_keys import ReferenceTensor, faults
from engram.state import EngramState

__all__ = ["EngramLayer", "NgramHasher"]

PAD_ID = 0  # what an n-gram reads where there is no token


class NgramHasher:
    """The hash of raw ids: one set of multipliers for all layers, prime moduli from the vocabulary size on.

    Args:
        max_ngram_size: N, at least 2.
        n_heads_per_ngram: H, at least 1.
        base_vocab_size: V, in [1, 2**30); also the lower bound of every modulus.
        seed: of the multipliers, at least 0.

    Attributes:
        multipliers: int64 numpy array [N], newest token first.
        moduli: N - 1 lists (orders 2..N) of H primes.

    Raises:
        ValueError: a value outside these bounds.
    """

    def __init__(self, max_ngram_size: int, n_heads_per_ngram: int, base_vocab_size: int, seed: int = 42) -> None:
        for name, size, low in (("max_ngram_size", max_ngram_size, 2), ("n_heads_per_ngram", n_heads_per_ngram, 1)):
            if size < low:
                raise ValueError(f"NgramHasher: {name} must be at least {low}, got {size}")
        self.max_ngram_size, self.n_heads_per_ngram = max_ngram_size, n_heads_per_ngram
        self.base_vocab_size, self.seed = base_vocab_size, seed
        self.multipliers = np.array(tables.layer_multipliers(0, max_ngram_size, base_vocab_size, seed), dtype=np.int64)
        self.sizes = tables.prime_moduli(1, n_heads_per_ngram, (base_vocab_size,) * (max_ngram_size - 1))[0]

    @property
    def moduli(self) -> list[list[int]]:
        heads = self.n_heads_per_ngram
        return [list(self.sizes[begin : begin + heads]) for begin in range(0, len(self.sizes), heads)]

    def constants(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """`multipliers` [1, N], `moduli` and `offsets` [1, C] as `ops.ngram_hash` takes them, int64."""
        values = dict(multipliers=self.multipliers.tolist(), moduli=self.sizes, offsets=tables.row_offsets(self.sizes))
        return {name: torch.tensor([row], dtype=torch.int64, device=device) for name, row in values.items()}

    def hash(self, ids: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """Row of each n-gram inside its own head's table (no offset).

        Args:
            ids: int32 or int64 [B, T]; numpy array or tensor. Any value is hashed.

        Returns:
            int64 [B, T, C], order-major, then head; a tensor for a tensor, a numpy array else.

        Raises:
            ValueError: another shape or dtype.
        """
        tensor = ids if isinstance(ids, Tensor) else torch.from_numpy(np.ascontiguousarray(ids))
        constants = self.constants(tensor.device)
        constants["offsets"] = torch.zeros_like(constants["offsets"])
        rows = ops.ngram_hash(tensor, **constants, pad_id=PAD_ID)[0]
        return rows if isinstance(ids, Tensor) else rows.numpy()


class HeadTables(nn.Module):
    """All heads' tables in one, `embedding.weight` [R, d], and the first row of each, buffer `offsets` int64 [C]."""

    offsets: Tensor

    def __init__(self, sizes: tuple[int, ...], dim: int, **like: Any) -> None:
        super().__init__()
        self.embedding = MultiHeadEmbedding(sizes, dim, **like)
        self.register_buffer("offsets", self._offsets(like["device"]))

    def _offsets(self, device: torch.device | str | None) -> Tensor:
        return torch.tensor(tables.row_offsets(self.embedding.sizes), dtype=torch.int64, device=device)

    def reset_parameters(self) -> None:
        """Give `offsets` its values again, as needed after `to_empty()`; the table resets itself."""
        self.offsets = self._offsets(self.offsets.device)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:
        loaded, own = state_dict.get(prefix + "offsets"), self._offsets("cpu")
        if loaded is not None and not loaded.is_meta and not torch.equal(loaded.cpu(), own):
            errors.append(f"{prefix}offsets: must be {own.tolist()}, got {loaded.tolist()} (another vocab_size, "
                          "other orders or heads?)")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


class MemoryConv(nn.Module):
    """`e + silu(layer_norm(conv(e)))`, the convolution causal, depthwise and dilated.

    Parameters: `conv.weight` [E, 1, K], `norm.weight` and `norm.bias` [E].
    """

    def __init__(self, channels: int, kernel_size: int, dilation: int, **like: Any) -> None:
        super().__init__()
        # Holds and draws the weight; the product is ops.short_conv's.
        self.conv = nn.Conv1d(
            channels, channels, kernel_size, groups=channels, dilation=dilation, bias=False, **like
        )
        self.norm = nn.LayerNorm(channels, **like)

    def forward(self, memory: Tensor, **positions: Any) -> Tensor:
        """memory [B, T, E]; `positions`: document_ids, mask, state and lengths of `ops.short_conv`."""
        mixed = ops.short_conv(
            memory.unsqueeze(2), self.conv.weight.transpose(0, 1), dilation=self.conv.dilation[0], activation=None,
            residual=False, **positions,
        )
        return memory + nn.functional.silu(self.norm(mixed.squeeze(2)))


class EngramLayer(nn.Module):
    """Engram as a layer of a hybrid model: hash, lookup, convolution, gate against `x`, output projection.

    State dict: `multi_head_emb.{offsets, embedding.weight}`, `short_conv.{conv.weight, norm.weight, norm.bias}`,
    `{value,key,out}_proj.weight`, `norm_{key,query}.{weight, bias}`: that of the published module. What the hash needs
    beside it follows from `vocab_size` and `engram_seed` and is not saved; a state dict whose offsets are not those of
    this vocabulary is refused.

    Args:
        hidden_size: D.
        vocab_size: V; every head's table has the next unused prime from V on as its size.
        engram_max_ngram_size: N, at least 2; also the dilation of the convolution.
        engram_n_heads_per_ngram: H.
        engram_embed_dim_per_head: d.
        engram_kernel_size: K.
        engram_seed: of the hash multipliers, the same for all layers.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size below 1, N below 2, a negative seed, or V outside [1, 2**30).
    """

    multipliers: Tensor
    moduli: Tensor

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        engram_max_ngram_size: int = 3,
        engram_n_heads_per_ngram: int = 4,
        engram_embed_dim_per_head: int = 32,
        engram_kernel_size: int = 4,
        engram_seed: int = 42,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("engram_embed_dim_per_head", engram_embed_dim_per_head),
                           ("engram_kernel_size", engram_kernel_size)):
            if size < 1:
                raise ValueError(f"EngramLayer: {name} must be at least 1, got {size}")
        self.hidden_size = hidden_size
        self.hasher = NgramHasher(engram_max_ngram_size, engram_n_heads_per_ngram, vocab_size, engram_seed)
        like: dict[str, Any] = dict(device=device, dtype=dtype)
        width = len(self.hasher.sizes) * engram_embed_dim_per_head
        self.multi_head_emb = HeadTables(self.hasher.sizes, engram_embed_dim_per_head, **like)
        self.short_conv = MemoryConv(width, engram_kernel_size, engram_max_ngram_size, **like)
        self.value_proj = nn.Linear(width, hidden_size, bias=False, **like)
        self.key_proj = nn.Linear(width, hidden_size, bias=False, **like)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False, **like)
        self.norm_key = nn.LayerNorm(hidden_size, **like)
        self.norm_query = nn.LayerNorm(hidden_size, **like)
        for name in ("multipliers", "moduli"):
            self.register_buffer(name, self.hasher.constants(device)[name], persistent=False)
        self.register_load_state_dict_post_hook(_reset_constants)  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def from_config(
        cls, config: EngramConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "EngramLayer":
        """The layer of `EngramConfig.preset("hybrid-layer", ...)`, the same for all `layer_ids`.

        Raises:
            ValueError: a field that has another value than this layer can have.
        """
        sizes = ("max_ngram_size", "heads_per_ngram", "embed_dim_per_head", "kernel_size", "seed")
        given = {name: getattr(config, name) for name in ("hidden_size", "vocab_size", "layer_ids", *sizes)}
        possible = EngramConfig.preset("hybrid-layer", **given)
        for name in (field.name for field in fields(config)):
            value, only = getattr(config, name), getattr(possible, name)
            if value != only:
                raise ValueError(f"EngramLayer: {name} must be {only!r}, got {value!r}")
        knobs = {f"engram_{name.replace('heads', 'n_heads')}": given[name] for name in sizes}
        return cls(config.hidden_size, config.vocab_size, **knobs, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """`reset_constants`; parts reset themselves."""
        self.reset_constants()

    def reset_constants(self) -> None:
        """Give what the hash needs its values again, as needed after `to_empty()`; loading weights does it, too."""
        self.multi_head_emb.reset_parameters()
        constants = self.hasher.constants(self.multi_head_emb.offsets.device)
        self.multipliers, self.moduli = constants["multipliers"], constants["moduli"]

    def forward(
        self,
        x: Tensor,
        input_ids: Tensor | None = None,
        logical_layer_idx: int | None = None,
        *,
        document_ids: Tensor | None = None,
        mask: Tensor | None = None,
        state: EngramState | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """What the layer makes of the sequence.

        Args:
            x: [B, T, D].
            input_ids: int32 or int64 [B, T], raw. None: zeros of x's shape, whatever else is given.
            logical_layer_idx: what a hybrid block passes to any of its layers. Nothing here depends on it: all layers
                hash alike.
            document_ids: integer [B, T]; neither n-grams nor the convolution cross a change.
            mask: bool [B, T], False = not a token: no other position sees it, its output is zero.
            state: of `init_state`: these tokens go on where it stands, and are appended to it.
            lengths: integer [B], positions past it count as masked and are not appended to the state.

        Returns:
            As `x`: shape and dtype.

        Raises:
            TypeError: a state that is no EngramState.
            ValueError: a wrong shape, dtype or device, or a state of other sizes.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"EngramLayer: x must be [B, T, {self.hidden_size}], got {describe(x)}")
        if input_ids is None:
            return torch.zeros_like(x)
        shape = x.shape[:2]
        check_tokenwise("EngramLayer", shape, input_ids=input_ids, document_ids=document_ids)
        visible = visible_tokens("EngramLayer", shape, mask, lengths)
        marks = history = None
        if state is not None:
            self._check_state(state, x)
            marks, history = self._recall(state.history, input_ids, document_ids)
            if document_ids is not None:
                document_ids = marks.runs
        if visible is not None:  # a norm takes in what stands at masked positions, and its gradient would be NaN of NaN
            hidden = ~visible[..., None]
            x = x.masked_fill(hidden, 0)

        rows = ops.ngram_hash(
            input_ids, self.multipliers, self.moduli, self.multi_head_emb.offsets[None], pad_id=PAD_ID,
            document_ids=document_ids, mask=visible, history=history,
        )[0]
        memory = self.multi_head_emb.embedding(rows, visible).flatten(-2)
        ring = None if state is None else state.conv
        memory = self.short_conv(memory, document_ids=document_ids, mask=visible, state=ring, lengths=lengths)
        query = self.norm_query(x)
        key = self.norm_key(project(self.key_proj, memory)).to(query.dtype)
        value = project(self.value_proj, memory).to(query.dtype)
        gated = ops.gate(query.unsqueeze(-2), key.unsqueeze(-2), value, None, None, eps=0.0, mask=visible).squeeze(-2)
        out = project(self.out_proj, gated).to(x.dtype)
        if state is not None and marks is not None:
            state.history.append(marks, visible, lengths, ids=input_ids.long())
        return out if visible is None else out.masked_fill(hidden, 0)

    def _recall(self, ring: Ring, input_ids: Tensor, document_ids: Tensor | None) -> tuple[Any, Tensor | None]:
        """The tokens' marks, and `history` [B, N - 1] for the hash: -1 where another document, or nothing, was."""
        marks = ring.marks(document_ids, input_ids)
        if input_ids.shape[1] == 0:
            return marks, None
        past, runs, there = ring.before(marks.runs, None)
        same = there[:, : ring.reach] & (runs[:, : ring.reach] == marks.runs[:, :1])
        return marks, torch.where(same, past["ids"], -1)

    def _check_state(self, state: EngramState, x: Tensor) -> None:
        if not isinstance(state, EngramState):
            raise TypeError(f"EngramLayer: state must be an EngramState, got {type(state).__name__}")
        reaches = (state.history.reach, -1 if state.conv is None else state.conv.reach)
        if reaches != self._reaches() or state.batch_size != x.shape[0] or state.device != x.device:
            raise ValueError("EngramLayer: state must come from this layer's init_state, for a batch of "
                             f"{x.shape[0]} on {x.device}; got {state}")

    def _reaches(self) -> tuple[int, int]:
        """How many tokens before the first one hash and convolution read."""
        conv = self.short_conv.conv
        return self.hasher.max_ngram_size - 1, (conv.kernel_size[0] - 1) * conv.dilation[0]

    def init_state(self, batch_size: int, max_rollback: int = 0) -> EngramState:
        """A fresh state for decoding and chunked prefill of `batch_size` sequences, on the parameters' device.

        Args:
            batch_size: B.
            max_rollback: how many tokens can be taken back at a time.

        Raises:
            ValueError: a size below 0.
        """
        for name, size in (("batch_size", batch_size), ("max_rollback", max_rollback)):
            if size < 0:
                raise ValueError(f"init_state: {name} must be at least 0, got {size}")
        weight, (ids, taps) = self.multi_head_emb.embedding.weight, self._reaches()
        history = {"ids": torch.zeros(batch_size, 0, dtype=torch.int64, device=weight.device)}
        conv = {"x": weight.new_zeros(batch_size, 0, 1, self.key_proj.in_features)}
        return EngramState(Ring(history, ids, max_rollback), Ring(conv, taps, max_rollback))

    def reference_tensors(self) -> dict[str, ReferenceTensor]:
        """What a checkpoint of the published module consists of, for `load_reference_checkpoint`: its state dict."""
        return {name: ReferenceTensor((tensor.detach(),), constant=name.endswith(".offsets"))
                for name, tensor in self.state_dict().items()}

    def load_reference_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """`load_state_dict`, but nothing is copied where anything is wrong.

        Raises:
            ValueError: names every key that is missing, unexpected, of another shape or dtype, and other offsets.
            RuntimeError: the module is on the meta device.
        """
        op, tensors = "load_reference_state_dict", self.reference_tensors()
        if found := faults(tensors, state_dict):
            raise ValueError(f"{op}: {'; '.join(found)}")
        if self.key_proj.weight.is_meta:
            raise RuntimeError(f"{op}: the module is on the meta device; call to_empty() first")
        self.reset_constants()
        tensors = self.reference_tensors()
        for name, tensor in tensors.items():
            if tensor.constant and (fault := tensor.constant_fault(name, state_dict[name])):
                raise ValueError(f"{op}: {fault}")
        for name, tensor in tensors.items():
            if not tensor.constant:
                tensor.copy_rows(0, state_dict[name])

    def to_reference_state_dict(self) -> dict[str, Tensor]:
        """The weights under the published names, which are this module's own; they share memory."""
        return {name: tensor.read() for name, tensor in self.reference_tensors().items()}

    def extra_repr(self) -> str:
        hasher = self.hasher
        return f"hidden_size={self.hidden_size}, vocab_size={hasher.base_vocab_size}, " \
               f"max_ngram_size={hasher.max_ngram_size}, heads_per_ngram={hasher.n_heads_per_ngram}, seed={hasher.seed}"


def _reset_constants(layer: EngramLayer, incompatible_keys: Any) -> None:
    layer.reset_constants()
