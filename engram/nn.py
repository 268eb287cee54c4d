"""The Engram layer and its parts as modules: shapes, buffers and configuration here, all arithmetic in `engram.ops`.

Letters: B batch, T tokens, N largest n-gram, H heads per order, C = (N - 1) * H hash columns (order-major, then head),
d row width, E = C * d, G residual branches, D hidden size, K conv taps, L Engram layers, V vocabulary, R table rows.

Source: Engram (arXiv 2601.07372) and its official demo (deepseek-ai/Engram, `engram_demo_v1.py`).
"""
import math
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from engram import _C, ops, tables
from engram.boundaries import check_lengths, check_tokenwise, describe, document_runs, visible_tokens
from engram.config import EngramConfig
from engram.ops import Marks, Ring
from engram.profiling import stage
from engram.state import EngramState
from engram.storage import empty_table, fill_normal_, huge_page_share
from engram.vocab import TokenMap

_HALF = (torch.bfloat16, torch.float16)
_SLOW_HALF = [dtype for dtype in _HALF if not _C.half_products(str(dtype).removeprefix("torch."))]

_DECODED_TOKENS = 64  # B * T up to which one call of ops.decode beats the ops one after another

__all__ = ["NgramHash", "MultiHeadEmbedding", "ContextGate", "ShortConv", "Engram"]


class NgramHash(nn.Module):
    """Token ids to the table rows of their n-grams, for one or more layers in one pass.

    Everything that decides a row is a buffer, so a checkpoint needs neither tokenizer nor seed: `token_map` int32 [V]
    (empty: raw ids are hashed), `multipliers` int64 [L, N], `moduli` and `offsets` int64 [L, C].

    A module built without a map takes the one in the state dict. A state dict with another map than the module's, or
    with other table sizes than the configuration's, is refused.

    Args:
        config: configuration of all layers; constants are drawn from its whole list, whatever `layer_ids` picks.
        token_map: its size must be `config.vocab_size`, and `config.compressed_vocab_size` where that is set.
        layer_ids: the layers to hash for, out of `config.layer_ids`; None: all of them.
        device: of the buffers.

    Raises:
        TypeError: `token_map` is not a TokenMap.
        ValueError: a map of another size, or a layer that is not in the configuration.
    """

    def __init__(
        self,
        config: EngramConfig,
        token_map: TokenMap | None = None,
        layer_ids: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_ids = config.layer_ids if layer_ids is None else tuple(layer_ids)
        if unknown := [layer for layer in self.layer_ids if layer not in config.layer_ids]:
            raise ValueError(f"NgramHash: layer_ids must be out of {list(config.layer_ids)}, got {unknown[0]}")
        if token_map is not None:
            if not isinstance(token_map, TokenMap):
                raise TypeError(f"NgramHash: token_map must be an engram.TokenMap, got {type(token_map).__name__}")
            self._refuse(_map_fault(config, token_map.vocab_size, token_map.compressed_vocab_size))
        self._initial_map = token_map
        for name, tensor in self._initial_buffers(device).items():
            self.register_buffer(name, tensor)

    def _initial_buffers(self, device: torch.device | str | None) -> dict[str, Tensor]:
        config, token_map = self.config, self._initial_map
        hashed = config.compressed_vocab_size
        if hashed is None:
            hashed = config.vocab_size if token_map is None else token_map.compressed_vocab_size
        multipliers = [
            tables.layer_multipliers(layer, config.max_ngram_size, hashed, config.seed) for layer in self.layer_ids
        ]
        moduli = [layer_moduli(config, layer) for layer in self.layer_ids]
        ids = () if token_map is None else token_map.ids
        int64 = dict(dtype=torch.int64, device=device)
        return {
            "token_map": torch.tensor(ids, dtype=torch.int32, device=device),
            "multipliers": torch.tensor(multipliers, **int64),
            "moduli": torch.tensor(moduli, **int64),
            "offsets": torch.tensor([tables.row_offsets(row) for row in moduli], **int64),
        }

    def reset_parameters(self) -> None:
        """Give the buffers the values they were built with, as needed after `to_empty()`."""
        for name, tensor in self._initial_buffers(self.multipliers.device).items():
            setattr(self, name, tensor)

    def forward(
        self,
        token_ids: Tensor,
        *,
        document_ids: Tensor | None = None,
        mask: Tensor | None = None,
        history: Tensor | None = None,
    ) -> Tensor:
        """Rows of the n-grams that end at each token.

        Args:
            token_ids: int32 or int64 [B, T], raw.
            document_ids: integer [B, T]; an n-gram never reaches across a change.
            mask: bool [B, T], False = not a token: it and all before it read as `config.pad_id`
                (nothing does where `config.mask_blocks_hash` is False).
            history: integer [B, N - 1], raw ids before `token_ids[:, 0]`, oldest first, negative = none.

        Returns:
            int64 [L, B, T, C], rows of each layer's own table, head offsets included.

        Raises:
            RuntimeError: `config.compressed_vocab_size` is set and no map was given or loaded.
            IndexError: with a map, an id outside [0, V) that is not masked (CPU).
            ValueError: a wrong shape, dtype or device.
        """
        config = self.config
        self.check_map()
        if not config.mask_blocks_hash:
            mask = None
        if config.boundary == "eos":
            if token_ids.dim() != 2:
                raise ValueError(f"NgramHash: token_ids must be int32 or int64 [B, T], got {describe(token_ids)}")
            check_tokenwise("NgramHash", token_ids.shape, token_ids=token_ids, mask=mask, document_ids=document_ids)
            document_ids = document_runs(token_ids, config.eos_id, document_ids, mask)
            if history is not None:  # a negative entry hides itself and everything older
                history = history.masked_fill(history == config.eos_id, -1)
        return ops.ngram_hash(
            token_ids,
            self.multipliers,
            self.moduli,
            self.offsets,
            pad_id=config.pad_id,
            token_map=self.token_map if self.token_map.numel() else None,
            document_ids=document_ids,
            mask=mask,
            history=history,
        )

    def check_map(self) -> None:
        """Raise RuntimeError while the token map that the configuration speaks of is missing."""
        if self.config.compressed_vocab_size is not None and self.token_map.numel() == 0:
            raise RuntimeError(
                f"NgramHash: compressed_vocab_size is {self.config.compressed_vocab_size} but there is no token map yet; "
                "pass token_map= or load a state dict that has one"
            )

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        token_map = state_dict.get(prefix + "token_map")
        fault = self._constants_fault(state_dict, prefix) or self._loaded_map_fault(token_map)
        if fault:
            errors.append(f"{prefix}{fault}")
            return
        if token_map is not None and token_map.shape != self.token_map.shape:
            self.token_map = self.token_map.new_empty(token_map.shape)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _constants_fault(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        # The multipliers are the checkpoint's; the layout of the table is the configuration's.
        expected = self._initial_buffers("cpu")
        for name in ("moduli", "offsets"):
            loaded = state_dict.get(prefix + name)
            if loaded is None or loaded.is_meta or loaded.shape != expected[name].shape:
                continue
            if not torch.equal(loaded.cpu(), expected[name]):
                return f"{name}: other table sizes than the configuration's (another layer, layer list or table_size?)"
        return ""

    def _loaded_map_fault(self, token_map: Tensor | None) -> str:
        if token_map is None:
            return ""
        if token_map.dtype != torch.int32 or token_map.dim() != 1:
            return f"token_map: must be int32 [V], got {describe(token_map)}"
        if token_map.numel() == 0:
            wanted = self.token_map.numel() > 0 or self.config.compressed_vocab_size is not None
            return "token_map: empty, the checkpoint hashes raw ids and this module has a token map" if wanted else ""
        if token_map.is_meta:
            return ""
        own = self.token_map
        if own.numel() > 0 and not own.is_meta and not torch.equal(own.cpu(), token_map.cpu()):
            return "token_map: differs from the module's own; build the module without one to take the checkpoint's"
        if int(token_map.min()) < 0:
            return f"token_map: values must be >= 0, got {int(token_map.min())}"
        return _map_fault(self.config, token_map.numel(), int(token_map.max()) + 1)

    @staticmethod
    def _refuse(fault: str) -> None:
        if fault:
            raise ValueError(f"NgramHash: {fault}")

    def extra_repr(self) -> str:
        config = self.config
        hashed = "raw ids" if self.token_map.numel() == 0 else f"token map of {self.token_map.numel()}"
        return f"layer_ids={list(self.layer_ids)}, max_ngram_size={config.max_ngram_size}, " \
               f"heads_per_ngram={config.heads_per_ngram}, {hashed}"


class MultiHeadEmbedding(nn.Module):
    """One table for all hash heads, one row range a head. Parameter: `weight` [sum(sizes), dim].

    Args:
        sizes: rows of each of the C heads.
        dim: d, width of a row.
        sparse: the gradient of `weight` is a coalesced sparse tensor of the rows that were read (for `engram.optim`).
        std: standard deviation of the initial rows.

    Raises:
        ValueError: no head, or a size or width below 1.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        sparse: bool = False,
        *,
        std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sparse = sparse
        self.sizes = tuple(int(size) for size in sizes)
        self.dim = dim
        self.std = std
        if not self.sizes or min(self.sizes) < 1 or dim < 1:
            raise ValueError(f"MultiHeadEmbedding: needs sizes >= 1 and dim >= 1, got {list(self.sizes)} and {dim}")
        self.weight = nn.Parameter(_empty_weight(sum(self.sizes), dim, device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the rows from N(0, std), on all cores; the same rows for any thread count."""
        fill_normal_(self.weight, self.std)

    def forward(self, rows: Tensor, mask: Tensor | None = None, plan: ops.RowPlan | None = None) -> Tensor:
        """Look rows up.

        Args:
            rows: int32 or int64 [..., C], global rows: head offsets are already in.
            mask: bool [...], False = zeros, no gradient.
            plan: `ops.row_plan(rows, R, mask=mask)` where several lookups share one; None: made when it is needed.

        Returns:
            [..., C, d] in the dtype of `weight`.

        Raises:
            IndexError: a row outside the table (CPU).
            ValueError: a wrong shape, dtype or device.
        """
        if rows.dim() == 0 or rows.shape[-1] != len(self.sizes):
            raise ValueError(f"MultiHeadEmbedding: rows must be [..., {len(self.sizes)}], got {describe(rows)}")
        return ops.embedding(self.weight, rows, sparse_grad=self.sparse, mask=mask, plan=plan)

    def extra_repr(self) -> str:
        huge = huge_page_share(self.weight)
        pages = f", huge pages={huge:.0%}" if huge else ""
        sparse = ", sparse=True" if self.sparse else ""
        return f"{sum(self.sizes)}, {self.dim}, heads={len(self.sizes)}, std={self.std}{sparse}{pages}"


class ContextGate(nn.Module):
    """How much of the looked up value each branch lets in, decided by how well the key fits its hidden state.

    `out = sigmoid(signed_sqrt(<rms(hidden) * hidden_weight, rms(key) * key_weight> / sqrt(D))) * value`.
    Parameters: `hidden_weight`, `key_weight` [G, D].
    """

    def __init__(
        self, config: EngramConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.branches, config.hidden_size)
        self.hidden_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both norm weights to one."""
        nn.init.ones_(self.hidden_weight)
        nn.init.ones_(self.key_weight)

    def forward(
        self, hidden: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, residual: bool = False
    ) -> Tensor:
        """Gate `value` once per branch.

        Args:
            hidden: [..., G, D].
            key: [..., G, D], dtype of `hidden`, or half precision beside float32 `hidden`.
            value: [..., D], dtype of `key`.
            mask: bool [...], False = zero (with `residual`: `hidden` as it is).
            residual: add `hidden`, rounded once.

        Returns:
            [..., G, D] in the dtype of `hidden`.

        Raises:
            ValueError: a wrong shape, dtype or device.
        """
        return ops.gate(
            hidden, key, value, self.hidden_weight, self.key_weight,
            eps=norm_eps(self.config, hidden), zero_rule=self.config.zero_rule, mask=mask, residual=residual,
        )

    def extra_repr(self) -> str:
        config = self.config
        return f"branches={config.branches}, hidden_size={config.hidden_size}, eps={config.norm_eps}, " \
               f"zero_rule={config.zero_rule!r}"


class ShortConv(nn.Module):
    """Norm, causal dilated depthwise convolution over the tokens, SiLU, residual.

    `y = x + silu(conv(rms(x) * norm_weight))`. Parameters: `weight` [G, D, K], tap K - 1 is the current token;
    `norm_weight` [G, D].

    Raises:
        ValueError: `config.kernel_size` is 0.
    """

    def __init__(
        self, config: EngramConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if config.kernel_size == 0:
            raise ValueError("ShortConv: kernel_size must be >= 1, got 0 (a configuration without convolution)")
        self.config = config
        shape = (config.branches, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(*shape, config.kernel_size, device=device, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norm weights one; taps zero or, with `conv_init="default"`, as torch draws those of a depthwise Conv1d."""
        nn.init.ones_(self.norm_weight)
        if self.config.conv_init == "zeros":
            nn.init.zeros_(self.weight)
        else:
            bound = 1 / math.sqrt(self.config.kernel_size)
            nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        *,
        residual: bool = True,
        document_ids: Tensor | None = None,
        mask: Tensor | None = None,
        state: Ring | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Mix each token with the ones `dilation`, ..., `(K - 1) * dilation` before it.

        Args:
            x: [B, T, G, D].
            residual: add `x`.
            document_ids: integer [B, T], taps never reach across a change (where `config.conv_reset` is True).
            mask: bool [B, T], False = contributes nothing and gives zero (with `residual`: `x` as it is).
            state: `Ring` of x, see `ops.short_conv`.
            lengths: integer [B], tokens past it count as masked.

        Returns:
            [B, T, G, D] in the dtype of `x`.

        Raises:
            ValueError: a wrong shape, dtype or device.
        """
        config = self.config
        return ops.short_conv(
            x, self.weight, self.norm_weight,
            dilation=config.conv_dilation, eps=config.conv_norm_eps, residual=residual,
            document_ids=document_ids if config.conv_reset else None, mask=mask, state=state, lengths=lengths,
        )

    def extra_repr(self) -> str:
        config = self.config
        return f"branches={config.branches}, hidden_size={config.hidden_size}, kernel_size={config.kernel_size}, " \
               f"dilation={config.conv_dilation}, eps={config.conv_norm_eps}"


# What `ops.decode` stands for.
_PARTS = dict(hash=NgramHash, embedding=MultiHeadEmbedding, key_proj=nn.Linear, value_proj=nn.Linear, gate=ContextGate,
              conv=ShortConv)


class Engram(nn.Module):
    """One Engram layer: hash the last tokens, look the rows up, let each branch gate them in, mix along the sequence.

    rows = hash(ids) -> memory = table[rows] -> key, value = projections -> gate against hidden -> short convolution

    Parameters: `embedding.weight` [R, d]; `key_proj.weight` [G * D, E] and `.bias`; `value_proj.weight` [D, E] and
    `.bias`; `gate.hidden_weight`, `gate.key_weight` [G, D]; `conv.weight` [G, D, K], `conv.norm_weight` [G, D] (no
    `conv` where `kernel_size` is 0). Buffers: those of `hash`.

    Args:
        config: of all Engram layers of the model.
        layer_id: which of `config.layer_ids` this one is.
        token_map: see NgramHash. None: raw ids, or the map comes with `load_state_dict`.
        device, dtype: of the parameters; the table follows `config.table_dtype` where that is set.

    Raises:
        ValueError: a layer that is not in the configuration, or a map of another size.
    """

    def __init__(
        self,
        config: EngramConfig,
        layer_id: int,
        *,
        token_map: TokenMap | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if layer_id not in config.layer_ids:
            raise ValueError(f"Engram: layer_id must be one of {list(config.layer_ids)}, got {layer_id}")
        self.config = config
        self.layer_id = layer_id
        like = dict(device=device, dtype=dtype)
        width, out = config.memory_width, config.hidden_size
        self.hash = NgramHash(config, token_map, (layer_id,), device=device)
        self.embedding = MultiHeadEmbedding(
            layer_moduli(config, layer_id), config.embed_dim_per_head, config.sparse_grad,
            std=config.table_std, device=device, dtype=config.table_dtype or dtype,
        )
        self.key_proj = nn.Linear(width, config.branches * out, config.bias, **like)
        self.value_proj = nn.Linear(width, out, config.bias, **like)
        self.gate = ContextGate(config, **like)
        self.conv = ShortConv(config, **like) if config.kernel_size else None

    def forward(
        self,
        hidden: Tensor,
        token_ids: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        mask: Tensor | None = None,
        state: EngramState | None = None,
        lengths: Tensor | None = None,
        rows: Tensor | None = None,
        residual: bool = False,
    ) -> Tensor:
        """What the layer adds to the residual streams.

        Args:
            hidden: [B, T, G, D], or [B, T, D] with one branch.
            token_ids: int32 or int64 [B, T], raw. Needed unless `rows` is given; with `rows` it only tells where
                documents end (boundary "eos").
            document_ids: integer [B, T]; neither n-grams nor (with `conv_reset`) the convolution cross a change.
            mask: bool [B, T], False = not a token: no other position sees it, its output is zero.
            state: of `init_state`: these tokens go on where it stands, and are appended to it. With `rows` the caller
                owns the n-gram history, and the state only advances the convolution.
            lengths: integer [B], positions past it count as masked, their ids are never read, and they are not appended
                to the state.
            rows: int64 [L, B, T, C] of a NgramHash over all layers of the configuration, shared between modules.
            residual: return `hidden` plus the result; `hidden` bit for bit at masked positions.

        Returns:
            As `hidden`: shape and dtype.

        Raises:
            IndexError: with a token map, an id outside [0, V) that is not masked (CPU).
            RuntimeError: the token map is still missing.
            TypeError: an argument that is no tensor, or a state that is no EngramState.
            ValueError: a wrong shape, dtype or device, neither `token_ids` nor `rows`, or a state of other sizes.
        """
        if state is not None and rows is None and self._decodes(hidden, token_ids, state):
            with stage("decode"):
                return self._decode(hidden, token_ids, document_ids, mask, state, lengths, residual)
        config = self.config
        self._check_tensors(
            hidden=hidden, token_ids=token_ids, document_ids=document_ids, mask=mask, lengths=lengths, rows=rows
        )
        streams = self._streams(hidden)
        batch, tokens = shape = streams.shape[:2]
        check_tokenwise("Engram", shape, token_ids=token_ids, document_ids=document_ids)
        visible = visible_tokens("Engram", shape, mask, lengths)
        if state is not None:
            self._check_state(state, batch)
        if token_ids is not None and lengths is not None and not config.mask_blocks_hash:
            # Masked ids are hashed here, those past the end still must not be read.
            within = visible_tokens("Engram", shape, None, lengths)
            token_ids = torch.where(within, token_ids, config.pad_id)
        blocking = visible if config.mask_blocks_hash else None
        reads_ends = config.boundary == "eos" and self.conv is not None and config.conv_reset
        if reads_ends and token_ids is None:
            raise ValueError("Engram: token_ids is needed beside rows, boundary 'eos' with conv_reset reads them")
        if rows is None and token_ids is None:
            raise ValueError("Engram: token_ids or rows must be given")
        marks = history = None
        if state is not None:
            if rows is None or reads_ends:
                marks, history = self._recall(state.history, token_ids, document_ids, blocking)
                if document_ids is not None or config.boundary == "eos":
                    document_ids = marks.runs
        elif reads_ends:
            document_ids = document_runs(token_ids, config.eos_id, document_ids, blocking)

        if rows is None:
            with stage("hash"):
                rows = self.hash(token_ids, document_ids=document_ids, mask=visible, history=history)[0]
        else:
            expected = [len(config.layer_ids), batch, tokens, config.hash_columns]
            if list(rows.shape) != expected:
                raise ValueError(f"Engram: rows must be {expected}, got {describe(rows)}")
            rows = rows[config.layer_ids.index(self.layer_id)]

        with stage("lookup"):
            memory = self.embedding(rows, visible).flatten(-2).to(self.key_proj.weight.dtype)
        with stage("projections"):
            key = project(self.key_proj, memory).unflatten(-1, (config.branches, config.hidden_size))
            value = project(self.value_proj, memory)
        with stage("gate_conv"):
            if self.conv is None:
                out = self.gate(streams, key, value, mask=visible, residual=residual)
            else:
                out = ops.gate_conv(
                    streams, key, value, self.gate.hidden_weight, self.gate.key_weight,
                    self.conv.weight, self.conv.norm_weight,
                    eps=norm_eps(config, streams), conv_eps=config.conv_norm_eps, dilation=config.conv_dilation,
                    zero_rule=config.zero_rule, document_ids=document_ids if config.conv_reset else None, mask=visible,
                    residual=residual, state=None if state is None else state.conv, lengths=lengths,
                )
        if marks is not None:
            state.history.append(marks, blocking, lengths, ids=token_ids.long())
        return out.view(hidden.shape)

    def _decodes(self, hidden: Any, token_ids: Any, state: Any) -> bool:
        """Whether `ops.decode` does this step: few tokens, no gradient, one dtype for all that it streams, and parts that
        are as they were built, unhooked. It runs for every token, so parameters are taken out of their dictionaries, ten
        times as fast as by attribute. False, too, for arguments that `forward` refuses."""
        if not isinstance(hidden, Tensor) or not isinstance(token_ids, Tensor) or not isinstance(state, EngramState):
            return False
        shape, config = hidden.shape, self.config
        streams = (config.branches, config.hidden_size)
        if len(shape) < 3 or shape[2:] != (streams if len(shape) == 4 else streams[1:] if streams[0] == 1 else ()):
            return False
        if state.conv is None or token_ids.shape != shape[:2] or state.history.reach != config.max_ngram_size - 1:
            return False
        if hidden.device.type not in ("cpu", "cuda"):
            return False
        # Where lengths are symbols, a graph for all of them does without: it must not be for few tokens only.
        tokens = shape[0] * shape[1]
        if not (statically_known_true(tokens > 0) and statically_known_true(tokens <= _DECODED_TOKENS)):
            return False
        parts = self._modules
        for name, kind in _PARTS.items():
            part = parts[name]
            if type(part) is not kind or part._forward_hooks or part._forward_pre_hooks:
                return False
        dtype = parts["embedding"]._parameters["weight"].dtype
        if parts["key_proj"]._parameters["weight"].dtype != dtype or state.conv.tensors["value"].dtype != dtype:
            return False
        if hidden.dtype != dtype and (hidden.dtype != torch.float32 or dtype not in _HALF):
            return False
        if torch.is_autocast_enabled(hidden.device.type):
            return False
        return not torch.is_grad_enabled() or not any(x.requires_grad for x in (hidden, *self.parameters()))

    def _decode(
        self, hidden: Tensor, token_ids: Tensor, document_ids: Tensor | None, mask: Tensor | None, state: EngramState,
        lengths: Tensor | None, residual: bool,
    ) -> Tensor:
        config, parts, shape = self.config, self._modules, hidden.shape
        if not (document_ids is None and mask is None and lengths is None):
            self._check_tensors(hidden=hidden, document_ids=document_ids, mask=mask, lengths=lengths)
            if lengths is not None:
                check_lengths("Engram", shape[:2], lengths)
        parts["hash"].check_map()
        constants = parts["hash"]._buffers
        table, key_proj, value_proj, gate, conv = (
            parts[name]._parameters for name in ("embedding", "key_proj", "value_proj", "gate", "conv"))
        token_map = constants["token_map"]
        out = ops.decode(
            hidden if len(shape) == 4 else hidden.unsqueeze(2), token_ids, constants["multipliers"],
            constants["moduli"], constants["offsets"], table["weight"],
            key_proj["weight"], key_proj["bias"], value_proj["weight"], value_proj["bias"],
            gate["hidden_weight"], gate["key_weight"], conv["weight"], conv["norm_weight"],
            list(state.history.tensors.values()), list(state.conv.tensors.values()),
            pad_id=config.pad_id, max_rollback=state.max_rollback, eps=norm_eps(config, hidden),
            conv_eps=config.conv_norm_eps, dilation=config.conv_dilation, zero_rule=config.zero_rule,
            eos_id=config.eos_id if config.boundary == "eos" else None, mask_blocks_hash=config.mask_blocks_hash,
            conv_reset=config.conv_reset, token_map=token_map if token_map.numel() else None,
            document_ids=document_ids, mask=mask, lengths=lengths, residual=residual,
        )
        return out if len(shape) == 4 else out.view(shape)

    def _recall(
        self, ring: Ring, token_ids: Tensor, document_ids: Tensor | None, blocking: Tensor | None
    ) -> tuple[Marks, Tensor | None]:
        """Which document runs the tokens belong to, counted on from those before; and `history` int64 [B, N - 1] for
        the hash: the ids before the first token, -1 where another document, a masked token or nothing was."""
        starts, size = None, self.config.max_ngram_size - 1
        if self.config.boundary == "eos":
            ends = token_ids == self.config.eos_id
            if blocking is not None:
                ends = ends & blocking
            past, _, there = ring.before(token_ids[:, :0].long(), None)
            last = (past["ids"][:, -1:] == self.config.eos_id) & there[:, -1:]
            starts = torch.cat([last, ends[:, :-1]], 1)[:, : token_ids.shape[1]]
        marks = ring.marks(document_ids, token_ids, starts)
        if token_ids.shape[1] == 0:
            return marks, None
        past, runs, there = ring.before(marks.runs, None)
        same = there[:, :size] & (runs[:, :size] == marks.runs[:, :1])
        return marks, torch.where(same, past["ids"], -1)

    def _check_state(self, state: EngramState, batch: int) -> None:
        if not isinstance(state, EngramState):
            raise TypeError(f"Engram: state must be an EngramState, got {type(state).__name__}")
        if (state.conv is None) != (self.conv is None) or state.history.reach != self.config.max_ngram_size - 1:
            raise ValueError("Engram: state must come from this layer's init_state, got that of another configuration")
        if state.batch_size != batch or state.device != self.key_proj.weight.device:
            raise ValueError(f"Engram: state must be of batch size {batch} on {self.key_proj.weight.device}, got "
                             f"{state.batch_size} on {state.device}")

    def _streams(self, hidden: Tensor) -> Tensor:
        branches, size = self.config.branches, self.config.hidden_size
        if hidden.dim() == 4 and tuple(hidden.shape[2:]) == (branches, size):
            return hidden
        if branches == 1 and hidden.dim() == 3 and hidden.shape[2] == size:
            return hidden.unsqueeze(2)
        wanted = f"[B, T, {branches}, {size}]" + (f" or [B, T, {size}]" if branches == 1 else "")
        raise ValueError(f"Engram: hidden must be {wanted}, got {describe(hidden)}")

    def _check_tensors(self, **tensors: Tensor | None) -> None:
        home = self.key_proj.weight.device
        for name, tensor in tensors.items():
            if tensor is None and name != "hidden":
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"Engram: {name} must be a tensor, got {type(tensor).__name__}")
            if tensor.device != home:
                raise ValueError(f"Engram: {name} must be on {home} like the parameters, got {tensor.device}")

    def init_state(
        self,
        batch_size: int,
        max_rollback: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> EngramState:
        """A fresh state for decoding and chunked prefill of `batch_size` sequences.

        Args:
            batch_size: B.
            max_rollback: how many tokens can be taken back at a time (`EngramState.rollback`), for speculation.
            device: of the state; None: the parameters'.
            dtype: of key and value (under autocast, that of autocast); None: the parameters'.

        Raises:
            ValueError: a size below 0.
        """
        config, weight = self.config, self.value_proj.weight
        for name, size in (("batch_size", batch_size), ("max_rollback", max_rollback)):
            if size < 0:
                raise ValueError(f"init_state: {name} must be at least 0, got {size}")
        device = weight.device if device is None else torch.device(device)
        dtype = dtype or weight.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        reach = 0 if self.conv is None else (config.kernel_size - 1) * config.conv_dilation
        ids = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        history = Ring({"ids": ids}, config.max_ngram_size - 1, max_rollback)
        if self.conv is None:
            return EngramState(history, None)
        payload = {
            "value": torch.zeros(batch_size, 0, config.hidden_size, dtype=dtype, device=device),
            "stats": torch.zeros(batch_size, 0, 3 * config.branches + 1, dtype=wide, device=device),
        }
        return EngramState(history, Ring(payload, reach, max_rollback))

    def load_reference_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy the weights of the official demo's layer into this one.

        Args:
            state_dict: the demo's own keys, without a leading "engram.": `multi_head_embedding.{offsets,
                embedding.weight}`, `value_proj.*`, `key_projs.{g}.*`, `norm1.{g}.weight` (key), `norm2.{g}.weight`
                (hidden), `short_conv.conv.weight` [G * D, 1, K], `short_conv.norms.{g}.weight`.

        Raises:
            ValueError: names every key that is missing, unexpected or of another shape, and offsets that are not this
                layer's. Nothing is copied then.
            RuntimeError: the module is on the meta device.
        """
        own = self.to_reference_state_dict()
        faults = [f"missing {name}" for name in own if name not in state_dict]
        faults += [f"unexpected {name}" for name in state_dict if name not in own]
        faults += [
            f"{name} must be {list(own[name].shape)}, got {list(tensor.shape)}"
            for name, tensor in state_dict.items() if name in own and own[name].shape != tensor.shape
        ]
        if faults:
            raise ValueError("load_reference_state_dict: " + "; ".join(faults))
        if self.embedding.weight.is_meta:
            raise RuntimeError("load_reference_state_dict: the module is on the meta device; call to_empty() first")
        offsets = own.pop("multi_head_embedding.offsets")
        given = state_dict["multi_head_embedding.offsets"].to(offsets)
        if not torch.equal(given, offsets):
            raise ValueError(f"load_reference_state_dict: multi_head_embedding.offsets must be {offsets.tolist()} "
                             f"(layer {self.layer_id} of {list(self.config.layer_ids)}), got {given.tolist()}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state_dict[name])

    def to_reference_state_dict(self) -> dict[str, Tensor]:
        """The weights under the official demo's keys and in its shapes; like `state_dict()` they share memory."""
        branches, size = self.config.branches, self.config.hidden_size
        own = {
            "multi_head_embedding.offsets": self.hash.offsets[0],
            "multi_head_embedding.embedding.weight": self.embedding.weight,
        }
        if self.conv is not None:
            own["short_conv.conv.weight"] = self.conv.weight.view(branches * size, 1, -1)
            own |= {f"short_conv.norms.{g}.weight": self.conv.norm_weight[g] for g in range(branches)}
        own |= {f"value_proj.{name}": parameter for name, parameter in self.value_proj.named_parameters()}
        for name, parameter in self.key_proj.named_parameters():
            own |= {f"key_projs.{g}.{name}": part for g, part in enumerate(parameter.chunk(branches))}
        own |= {f"norm1.{g}.weight": self.gate.key_weight[g] for g in range(branches)}
        own |= {f"norm2.{g}.weight": self.gate.hidden_weight[g] for g in range(branches)}
        return {name: tensor.detach() for name, tensor in own.items()}

    def extra_repr(self) -> str:
        return f"layer_id={self.layer_id}, hidden_size={self.config.hidden_size}, branches={self.config.branches}"


def _empty_weight(rows: int, dim: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """An uninitialised table: on the CPU in memory for tables, anywhere else (meta, fake tensors) as torch does."""
    like = torch.empty(0, device=device, dtype=dtype)
    if type(like) is Tensor and like.device.type == "cpu":
        return empty_table(rows, dim, dtype=like.dtype)
    return like.new_empty(rows, dim)


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """`linear(x)`; half types in float32, rounded once, on a CPU that has no instructions for their products."""
    if x.device.type != "cpu" or x.dtype not in _SLOW_HALF or torch.is_autocast_enabled("cpu"):
        return linear(x)
    bias = None if linear.bias is None else linear.bias.float()
    return nn.functional.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


def norm_eps(config: EngramConfig, hidden: Tensor) -> float:
    """Epsilon of the gate's norms; None in the configuration is the rule of torch.nn.RMSNorm(eps=None)."""
    if config.norm_eps is not None:
        return config.norm_eps
    return torch.finfo(torch.float64 if hidden.dtype == torch.float64 else torch.float32).eps


def layer_moduli(config: EngramConfig, layer_id: int) -> tuple[int, ...]:
    """Table sizes of one layer, C integers, order-major, then head."""
    index = config.layer_ids.index(layer_id)
    if config.moduli is not None:
        return config.moduli[index]
    bases = config.table_size
    if isinstance(bases, int):
        bases = (bases,) * (config.max_ngram_size - 1)
    return tables.prime_moduli(len(config.layer_ids), config.heads_per_ngram, bases)[index]


def _map_fault(config: EngramConfig, vocab_size: int, compressed_vocab_size: int) -> str:
    """Why a token map of these sizes does not fit the configuration; empty if it does."""
    if vocab_size != config.vocab_size:
        return f"token_map must map vocab_size = {config.vocab_size} ids, got {vocab_size}"
    if config.compressed_vocab_size not in (None, compressed_vocab_size):
        return f"token_map must map to compressed_vocab_size = {config.compressed_vocab_size} ids, " \
               f"got {compressed_vocab_size}"
    return ""
