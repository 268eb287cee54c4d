"""The Engram layer and its parts as modules: shapes, buffers and configuration here, all arithmetic in `engram.ops`.

Letters: B batch, T tokens, N largest n-gram, H heads per order, C = (N - 1) * H hash columns (order-major, then head),
d row width, E = C * d, G residual branches, D hidden size, K conv taps, L Engram layers, V vocabulary, R table rows.

Source: Engram (arXiv 2601.07372) and its official demo (deepseek-ai/Engram, `engram_demo_v1.py`).
"""
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from engram import _C, ops, quantize, reference_keys, tables
from engram.boundaries import check_lengths, check_tokenwise, describe, document_runs, is_integer, visible_tokens
from engram.config import QUANTIZED, EngramConfig
from engram.ops import Marks, Ring
from engram.profiling import stage
from engram.progress import Progress
from engram.state import EngramState
from engram.storage import empty_table, fill_normal_, huge_page_share
from engram.vocab import TokenMap

_HALF = (torch.bfloat16, torch.float16)
_SLOW_HALF = [dtype for dtype in _HALF if not _C.half_products(str(dtype).removeprefix("torch."))]

_DECODED_TOKENS = 64  # B * T up to which one call of ops.decode beats the ops one after another

__all__ = ["NgramHash", "MultiHeadEmbedding", "QuantizedMultiHeadEmbedding", "ContextGate", "ShortConv", "Engram"]


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

    token_map: Tensor
    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor

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
        stands_for = {
            "id": config.layer_ids, "index": range(len(config.layer_ids)), "none": [0] * len(config.layer_ids)
        }[config.layer_seed]
        multipliers = [
            tables.layer_multipliers(
                stands_for[config.layer_ids.index(layer)], config.max_ngram_size, hashed, config.seed,
                config.multiplier_rule,
            )
            for layer in self.layer_ids
        ]
        moduli = [layer_moduli(config, layer) for layer in self.layer_ids]
        ids = () if token_map is None else token_map.ids
        int64: dict[str, Any] = dict(dtype=torch.int64, device=device)
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
        first_position: Tensor | None = None,
    ) -> Tensor:
        """Rows of the n-grams that end at each token.

        Args:
            token_ids: int32 or int64 [B, T], raw.
            document_ids: integer [B, T]; an n-gram never reaches across a change.
            mask: bool [B, T], False = not a token: it and all before it read as `config.pad_id`
                (nothing does where `config.mask_blocks_hash` is False).
            history: integer [B, N - 1], raw ids before `token_ids[:, 0]`, oldest first, negative = none.
            first_position: integer [B], how many tokens of the sequence came before; None: none. Only with
                `config.hash_input` "positions", where nothing else decides the rows.

        Returns:
            int64 [L, B, T, C], rows of each layer's own table, head offsets included.

        Raises:
            RuntimeError: `config.compressed_vocab_size` is set and no map was given or loaded.
            IndexError: with a map, an id outside [0, V) that is not masked (CPU).
            ValueError: a wrong shape, dtype or device.
        """
        config = self.config
        if config.hash_input == "positions":
            return self._rows_of_positions(token_ids, first_position)
        if first_position is not None:
            raise ValueError("NgramHash: first_position must be None unless hash_input is 'positions', "
                             f"got {describe(first_position)}")
        self.check_map()
        if not config.mask_blocks_hash:
            mask = None
        if config.eos_id is not None:
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

    def _rows_of_positions(self, token_ids: Tensor, first_position: Tensor | None) -> Tensor:
        """The hash of t, t - 1, ... where that of token t, t - 1, ... would be; negative positions read as the pad."""
        if token_ids.dim() != 2:
            raise ValueError(f"NgramHash: token_ids must be int32 or int64 [B, T], got {describe(token_ids)}")
        batch, tokens = token_ids.shape
        if first_position is None:
            first_position = token_ids.new_zeros(batch)
        elif not is_integer(first_position) or tuple(first_position.shape) != (batch,):
            raise ValueError(f"NgramHash: first_position must be integer [{batch}], got {describe(first_position)}")
        first = first_position.long()[:, None]
        around = first + torch.arange(1 - self.config.max_ngram_size, tokens, device=token_ids.device)
        history, positions = around.split([self.config.max_ngram_size - 1, tokens], 1)
        return ops.ngram_hash(
            positions, self.multipliers, self.moduli, self.offsets, pad_id=self.config.pad_id, history=history
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:
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
        for name in ("multipliers", "moduli", "offsets"):
            loaded = state_dict.get(prefix + name)
            if loaded is None or loaded.shape != expected[name].shape:
                continue  # torch's own message
            if loaded.dtype != torch.int64:
                return f"{name}: must be int64, got {describe(loaded)}"
            if loaded.is_meta:
                continue
            if name == "multipliers":
                if ((loaded < 1) | (loaded % 2 == 0)).any():
                    return f"multipliers: must be odd and positive, got {loaded.tolist()}"
            elif not torch.equal(loaded.cpu(), expected[name]):
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
    """One table for all hash heads, one row range a head. Parameter: `weight` [R, dim], R = sum(sizes), rounded up to a
    multiple of `row_multiple` by rows that are never read.

    Args:
        sizes: rows of each of the C heads.
        dim: d, width of a row.
        sparse: the gradient of `weight` is a coalesced sparse tensor of the rows that were read (for `engram.optim`).
        std: standard deviation of the initial rows.
        row_multiple: see above.

    Raises:
        ValueError: no head, or a size, width or multiple below 1.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        sparse: bool = False,
        *,
        std: float = 1.0,
        row_multiple: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sparse = sparse
        self.sizes = tuple(int(size) for size in sizes)
        self.dim = dim
        self.std = std
        if not self.sizes or min(*self.sizes, dim, row_multiple) < 1:
            raise ValueError("MultiHeadEmbedding: needs sizes, dim and row_multiple >= 1, got "
                             f"{list(self.sizes)}, {dim} and {row_multiple}")
        self.weight = nn.Parameter(empty_weight(_table_rows(self.sizes, row_multiple), dim, device, dtype))
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
        return f"{self.weight.shape[0]}, {self.dim}, heads={len(self.sizes)}, std={self.std}{sparse}{pages}"


class QuantizedMultiHeadEmbedding(nn.Module):
    """`MultiHeadEmbedding` over a quantised table, which is frozen: its tensors are buffers, zeros until rows are loaded.

    Buffers: `values` and `scales`, for "fp8" float8_e4m3fn [R, d] and float8_e8m0fnu [R, ceil(d / 32)], for "int8"
    int8 [R, d] and float32 [R], R as there (`engram.quantize` has formulas and error bounds). They keep their dtype
    where a module is converted (`half()`, `to(torch.bfloat16)`), and a state dict with others is refused. On the CPU
    they lie on huge pages where the system gives them.

    Args:
        sizes: rows of each of the C heads.
        dim: d, width of a row.
        format: "fp8" or "int8".
        out_dtype: of the looked up rows: float64, float32, bfloat16 or float16; None: bfloat16.
        row_multiple: as of `MultiHeadEmbedding`.
        device: of the buffers.

    Raises:
        ValueError: no head, a size, width or multiple below 1, an unknown format or a wrong out_dtype.
    """

    values: Tensor
    scales: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        *,
        format: str,
        out_dtype: torch.dtype | None = None,
        row_multiple: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sizes = tuple(int(size) for size in sizes)
        self.dim = dim
        self.format = format
        self.out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        if not self.sizes or min(*self.sizes, dim, row_multiple) < 1:
            raise ValueError("QuantizedMultiHeadEmbedding: needs sizes, dim and row_multiple >= 1, got "
                             f"{list(self.sizes)}, {dim} and {row_multiple}")
        if fault := self._kind_fault():
            raise ValueError(f"QuantizedMultiHeadEmbedding: {fault}")
        values, scales = quantize.zero_table(_table_rows(self.sizes, row_multiple), dim, format, device=device)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)

    def reset_parameters(self) -> None:
        """Set all rows to zero, as needed after `to_empty()`."""
        for buffer in (self.values, self.scales):
            buffer.view(torch.uint8).zero_()

    def _kind_fault(self) -> str:
        """What is wrong with format or out_dtype; empty if nothing."""
        if self.format not in quantize.FORMATS:
            return f"format must be 'fp8' or 'int8', got {self.format!r}"
        if self.out_dtype not in (torch.float64, torch.float32, *_HALF):
            return f"out_dtype must be float64, float32, bfloat16 or float16, got {self.out_dtype}"
        return ""

    def load_float_rows(self, begin: int, rows: Tensor, *, progress: Progress = False) -> None:
        """Quantise float rows into rows [begin, begin + n) of the table, chunk by chunk.

        Args:
            begin: first row to write.
            rows: float [n, d] on any device, as of `quantize.quantize_table`.
            progress: likewise.

        Raises:
            ValueError: rows of another width, outside the table or of another dtype than float; NaN, inf or too large.
        """
        end = self._check_float_rows(begin, rows, len(self.values))
        out = self.values[begin:end], self.scales[begin:end]
        quantize.quantize_table(rows, self.format, out=out, progress=progress)

    def _check_float_rows(self, begin: int, rows: Tensor, total: int) -> int:
        """Where rows of a table of so many end that is to get them from `begin` on."""
        if rows.dim() != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"QuantizedMultiHeadEmbedding: rows must be [n, {self.dim}], got {describe(rows)}")
        end = begin + len(rows)
        if begin < 0 or end > total:
            raise ValueError(f"QuantizedMultiHeadEmbedding: rows must lie within [0, {total}), got [{begin}, {end})")
        return end

    def forward(self, rows: Tensor, mask: Tensor | None = None, plan: ops.RowPlan | None = None) -> Tensor:
        """Look rows up.

        Args:
            rows: int32 or int64 [..., C], global rows: head offsets are already in.
            mask: bool [...], False = zeros.
            plan: there is no gradient that could use one; taken so that a caller need not know what table this is.

        Returns:
            [..., C, d] in `out_dtype`, without a gradient.

        Raises:
            IndexError: a row outside the table (CPU).
            ValueError: a wrong shape, dtype or device.
        """
        if rows.dim() == 0 or rows.shape[-1] != len(self.sizes):
            raise ValueError(f"QuantizedMultiHeadEmbedding: rows must be [..., {len(self.sizes)}], "
                             f"got {describe(rows)}")
        return self._look_up(self.values, self.scales, rows, mask=mask)

    def _look_up(self, values: Tensor, scales: Tensor, rows: Tensor, **options: Any) -> Tensor:
        lookup = ops.embedding_fp8 if self.format == "fp8" else ops.embedding_int8
        return lookup(values, scales, rows, dtype=self.out_dtype, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def same_dtype(buffer: Tensor) -> Tensor:
            probe = fn(buffer.new_empty(0))
            return fn(buffer) if probe.dtype == buffer.dtype else buffer.to(probe.device)

        return super()._apply(same_dtype, recurse)  # type: ignore[no-untyped-call]  # torch's

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:
        for name, own in (("values", self.values), ("scales", self.scales)):
            loaded = state_dict.get(prefix + name)
            if loaded is not None and loaded.dtype != own.dtype:
                errors.append(f"{prefix}{name}: must be {own.dtype}, got {loaded.dtype}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        huge = huge_page_share(self.values)
        pages = f", huge pages={huge:.0%}" if huge else ""
        return f"{self.values.shape[0]}, {self.dim}, heads={len(self.sizes)}, format={self.format!r}, " \
               f"out_dtype={self.out_dtype}{pages}"


class ContextGate(nn.Module):
    """How much of the looked up value each branch lets in, decided by how well the key fits its hidden state.

    `out = sigmoid(signed_sqrt(<rms(hidden) * hidden_weight, rms(key) * key_weight> / sqrt(D))) * value`.
    Parameters: `hidden_weight`, `key_weight` [G, D], or [D] for all branches with `config.shared_norms`. With
    `config.zero_centred_norms` the norms multiply with one plus the parameter.

    Raises:
        ValueError: `config.gate` is "none".
    """

    def __init__(
        self, config: EngramConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if config.gate == "none":
            raise ValueError("ContextGate: gate must be 'context', got 'none' (a configuration without gate)")
        self.config = config
        shape = (config.hidden_size,) if config.shared_norms else (config.branches, config.hidden_size)
        self.hidden_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norms that multiply with one."""
        for weight in (self.hidden_weight, self.key_weight):
            nn.init.constant_(weight, 0.0 if self.config.zero_centred_norms else 1.0)

    def norm_weights(self) -> tuple[Tensor, Tensor]:
        """What the norms of hidden and key multiply with, [G, D] each."""
        return norm_weight(self.config, self.hidden_weight), norm_weight(self.config, self.key_weight)

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
            hidden, key, value, *self.norm_weights(),
            eps=norm_eps(self.config, hidden), zero_rule=self.config.zero_rule, mask=mask, residual=residual,
        )

    def extra_repr(self) -> str:
        config = self.config
        return f"branches={config.branches}, hidden_size={config.hidden_size}, eps={config.norm_eps}, " \
               f"zero_rule={config.zero_rule!r}"


class ShortConv(nn.Module):
    """Norm, causal dilated depthwise convolution over the tokens, SiLU, residual.

    `y = x + silu(conv(rms(x) * norm_weight))`. Parameters: `weight` [G, D, K], tap K - 1 is the current token;
    `norm_weight` [G, D] (with `config.zero_centred_norms` the norm multiplies with one plus it).

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
        """A norm that multiplies with one; taps zero or, with `conv_init="default"`, as torch draws those of a
        depthwise Conv1d."""
        nn.init.constant_(self.norm_weight, 0.0 if self.config.zero_centred_norms else 1.0)
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
            x, self.weight, norm_weight(self.config, self.norm_weight),
            dilation=config.conv_dilation, eps=config.conv_norm_eps, residual=residual,
            document_ids=document_ids if config.conv_reset else None, mask=mask, state=state, lengths=lengths,
        )

    def extra_repr(self) -> str:
        config = self.config
        return f"branches={config.branches}, hidden_size={config.hidden_size}, kernel_size={config.kernel_size}, " \
               f"dilation={config.conv_dilation}, eps={config.conv_norm_eps}"


# What `ops.decode` stands for.
_PARTS: dict[str, type[nn.Module]] = dict(
    hash=NgramHash, embedding=MultiHeadEmbedding, key_proj=nn.Linear, value_proj=nn.Linear, gate=ContextGate,
    conv=ShortConv,
)


class Engram(nn.Module):
    """One Engram layer: hash the last tokens, look the rows up, let each branch gate them in, mix along the sequence.

    rows = hash(ids) -> memory = table[rows] -> key, value = projections -> gate against hidden -> short convolution

    Parameters: `embedding.weight` [R, d]; `key_proj.weight` [G * D, E] and `.bias`; `value_proj.weight` [D, E] and
    `.bias`; `gate.hidden_weight`, `gate.key_weight` [G, D] ([D] with `shared_norms`; no `gate` and `key_proj` where
    `gate` is "none"); `conv.weight` [G, D, K], `conv.norm_weight` [G, D] (no `conv` where `kernel_size` is 0).
    Buffers: those of `hash`; with a quantised `table_dtype` `embedding.values` and `embedding.scales` in place of the
    weight, see QuantizedMultiHeadEmbedding.

    Args:
        config: of all Engram layers of the model.
        layer_id: which of `config.layer_ids` this one is.
        token_map: see NgramHash. None: raw ids, or the map comes with `load_state_dict`.
        device, dtype: of the parameters; the table follows `config.table_dtype` where that is set.

    Raises:
        ValueError: a layer that is not in the configuration, a map of another size, or `config.layout` "hybrid".
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
        if config.layout != "engram":
            raise ValueError(f"Engram: layout must be 'engram', got {config.layout!r}: another topology, which "
                             "engram.models.hybrid.EngramLayer has")
        self.config = config
        self.layer_id = layer_id
        like: dict[str, Any] = dict(device=device, dtype=dtype)
        width, out = config.memory_width, config.hidden_size
        self.hash = NgramHash(config, token_map, (layer_id,), device=device)
        sizes, dim, multiple = layer_moduli(config, layer_id), config.embed_dim_per_head, config.row_multiple
        self.embedding: MultiHeadEmbedding | QuantizedMultiHeadEmbedding
        if config.table_dtype in QUANTIZED:
            self.embedding = QuantizedMultiHeadEmbedding(
                sizes, dim, format="int8" if config.table_dtype == torch.int8 else "fp8",
                out_dtype=dtype or torch.get_default_dtype(), row_multiple=multiple, device=device,
            )
        else:
            self.embedding = MultiHeadEmbedding(
                sizes, dim, config.sparse_grad,
                std=config.table_std, row_multiple=multiple, device=device, dtype=config.table_dtype or dtype,
            )
        gated = config.gate == "context"
        self.key_proj = nn.Linear(width, config.branches * out, config.bias, **like) if gated else None
        self.value_proj = nn.Linear(width, out, config.bias, **like)
        self.gate = ContextGate(config, **like) if gated else None
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
        residual: bool | None = None,
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
            residual: return `hidden` plus the result, rounded once; `hidden` bit for bit at masked positions. None: as
                `config.residual` says.

        Returns:
            As `hidden`: shape and dtype.

        Raises:
            IndexError: with a token map, an id outside [0, V) that is not masked (CPU).
            RuntimeError: the token map is still missing.
            TypeError: an argument that is no tensor, or a state that is no EngramState.
            ValueError: a wrong shape, dtype or device, neither `token_ids` nor `rows`, or a state of other sizes.
        """
        decodes = state is not None and rows is None and self._decodes(hidden, token_ids, state)
        if decodes and state is not None and state.conv is not None and token_ids is not None:
            with stage("decode"):
                return self._decode(hidden, token_ids, document_ids, mask, state.history, state.conv, lengths, residual)
        config = self.config
        residual = config.residual if residual is None else residual
        self._check_tensors(
            hidden=hidden, token_ids=token_ids, document_ids=document_ids, mask=mask, lengths=lengths, rows=rows
        )
        streams = self._streams(hidden)
        batch, tokens = shape = streams.shape[:2]
        check_tokenwise("Engram", shape, token_ids=token_ids, document_ids=document_ids)
        visible = visible_tokens("Engram", shape, mask, lengths)
        if token_ids is not None and lengths is not None and not config.mask_blocks_hash:
            # Masked ids are hashed here, those past the end still must not be read.
            within = torch.arange(tokens, device=lengths.device) < lengths[:, None]
            token_ids = torch.where(within, token_ids, config.pad_id)
        blocking = visible if config.mask_blocks_hash else None
        eos_id = config.eos_id if self.conv is not None and config.conv_reset else None  # what the convolution stops at
        if eos_id is not None and token_ids is None:
            raise ValueError("Engram: token_ids is needed beside rows, boundary 'eos' with conv_reset reads them")
        if rows is None and token_ids is None:
            raise ValueError("Engram: token_ids or rows must be given")
        marks = history = None
        if state is not None:
            self._check_state(state, batch)
            if token_ids is not None and (rows is None or eos_id is not None):
                marks, history = self._recall(state.history, token_ids, document_ids, blocking)
                if document_ids is not None or config.boundary == "eos":
                    document_ids = marks.runs
        elif token_ids is not None and eos_id is not None:
            document_ids = document_runs(token_ids, eos_id, document_ids, blocking)

        if rows is None:
            with stage("hash"):
                first = state.history.position if state is not None and config.hash_input == "positions" else None
                rows = self.hash(
                    token_ids, document_ids=document_ids, mask=visible, history=history, first_position=first
                )[0]
        else:
            expected = [len(config.layer_ids), batch, tokens, config.hash_columns]
            if list(rows.shape) != expected:
                raise ValueError(f"Engram: rows must be {expected}, got {describe(rows)}")
            rows = rows[config.layer_ids.index(self.layer_id)]

        with stage("lookup"):
            memory = self.embedding(rows, visible).flatten(-2).to(self.value_proj.weight.dtype)
        with stage("projections"):
            value = project(self.value_proj, memory)
            if self.key_proj is not None:
                key = project(self.key_proj, memory).unflatten(-1, (config.branches, config.hidden_size))
        with stage("gate_conv"):
            if self.gate is None:
                out = self._ungated(streams, value, document_ids, visible, residual, state, lengths)
            elif self.conv is None:
                out = self.gate(streams, key, value, mask=visible, residual=residual)
            else:
                out = ops.gate_conv(
                    streams, key, value, *self.gate.norm_weights(),
                    self.conv.weight, norm_weight(config, self.conv.norm_weight),
                    eps=norm_eps(config, streams), conv_eps=config.conv_norm_eps, dilation=config.conv_dilation,
                    zero_rule=config.zero_rule, document_ids=document_ids if config.conv_reset else None, mask=visible,
                    residual=residual, state=None if state is None else state.conv, lengths=lengths,
                )
        if state is not None and token_ids is not None and marks is not None:
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
        if config.hash_input != "tokens" or hidden.device.type not in ("cpu", "cuda"):
            return False
        # Where lengths are symbols, a graph for all of them does without: it must not be for few tokens only.
        tokens = shape[0] * shape[1]
        if not (statically_known_true(tokens > 0) and statically_known_true(tokens <= _DECODED_TOKENS)):
            return False
        parts: dict[str, Any] = self._modules
        for name, kind in _PARTS.items():
            part = parts.get(name)
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
        self, hidden: Tensor, token_ids: Tensor, document_ids: Tensor | None, mask: Tensor | None, history: Ring,
        kept: Ring, lengths: Tensor | None, residual: bool | None,
    ) -> Tensor:
        config, shape = self.config, hidden.shape
        parts: dict[str, Any] = self._modules
        if not (document_ids is None and mask is None and lengths is None):
            self._check_tensors(hidden=hidden, document_ids=document_ids, mask=mask, lengths=lengths)
            if lengths is not None:
                check_lengths("Engram", shape[:2], lengths)
        parts["hash"].check_map()
        constants = parts["hash"]._buffers
        table, key_proj, value_proj, gate, conv = (
            parts[name]._parameters for name in ("embedding", "key_proj", "value_proj", "gate", "conv"))
        hidden_weight, key_weight, conv_norm = gate["hidden_weight"], gate["key_weight"], conv["norm_weight"]
        if config.shared_norms or config.zero_centred_norms:
            hidden_weight, key_weight = parts["gate"].norm_weights()
            conv_norm = norm_weight(config, conv_norm)
        token_map = constants["token_map"]
        out = ops.decode(
            hidden if len(shape) == 4 else hidden.unsqueeze(2), token_ids, constants["multipliers"],
            constants["moduli"], constants["offsets"], table["weight"],
            key_proj["weight"], key_proj["bias"], value_proj["weight"], value_proj["bias"],
            hidden_weight, key_weight, conv["weight"], conv_norm,
            list(history.tensors.values()), list(kept.tensors.values()),
            pad_id=config.pad_id, max_rollback=history.max_rollback, eps=norm_eps(config, hidden),
            conv_eps=config.conv_norm_eps, dilation=config.conv_dilation, zero_rule=config.zero_rule,
            eos_id=config.eos_id if config.boundary == "eos" else None, mask_blocks_hash=config.mask_blocks_hash,
            conv_reset=config.conv_reset, token_map=token_map if token_map.numel() else None,
            document_ids=document_ids, mask=mask, lengths=lengths,
            residual=config.residual if residual is None else residual,
        )
        return out if len(shape) == 4 else out.view(shape)

    def _ungated(
        self,
        streams: Tensor,
        value: Tensor,
        document_ids: Tensor | None,
        visible: Tensor | None,
        residual: bool,
        state: EngramState | None,
        lengths: Tensor | None,
    ) -> Tensor:
        """`config.gate` "none": the value for every branch, then the convolution; [B, T, G, D], rounded once."""
        out = value.to(_wide(value.dtype))[:, :, None].expand(-1, -1, self.config.branches, -1)
        if self.conv is not None:
            kept = None if state is None else state.conv
            out = self.conv(out, document_ids=document_ids, mask=visible, state=kept, lengths=lengths)
        if residual:
            out = streams + out
        out = out.to(streams.dtype)
        if visible is None:
            return out
        # Selected, not multiplied: what is not finite at masked positions stays there.
        return torch.where(visible[:, :, None, None], out, streams if residual else streams.new_zeros(()))

    def _recall(
        self, ring: Ring, token_ids: Tensor, document_ids: Tensor | None, blocking: Tensor | None
    ) -> tuple[Marks, Tensor | None]:
        """Which document runs the tokens belong to, counted on from those before; and `history` int64 [B, N - 1] for
        the hash: the ids before the first token, -1 where another document, a masked token or nothing was."""
        starts, size, eos_id = None, self.config.max_ngram_size - 1, self.config.eos_id
        if eos_id is not None:
            ends = token_ids == eos_id
            if blocking is not None:
                ends = ends & blocking
            past, _, there = ring.before(token_ids[:, :0].long(), None)
            last = (past["ids"][:, -1:] == eos_id) & there[:, -1:]
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
        if state.batch_size != batch or state.device != self.value_proj.weight.device:
            raise ValueError(f"Engram: state must be of batch size {batch} on {self.value_proj.weight.device}, got "
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
        home = self.value_proj.weight.device
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
        wide = _wide(dtype)
        reach = 0 if self.conv is None else (config.kernel_size - 1) * config.conv_dilation
        ids = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        history = Ring({"ids": ids}, config.max_ngram_size - 1, max_rollback)
        if self.conv is None:
            return EngramState(history, None)
        if self.gate is None:
            payload = {
                "x": torch.zeros(batch_size, 0, config.branches, config.hidden_size, dtype=wide, device=device),
            }
        else:
            payload = {
                "value": torch.zeros(batch_size, 0, config.hidden_size, dtype=dtype, device=device),
                "stats": torch.zeros(batch_size, 0, 3 * config.branches + 1, dtype=wide, device=device),
            }
        return EngramState(history, Ring(payload, reach, max_rollback))

    def load_reference_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy the weights of a published Engram's layer into this one.

        Args:
            state_dict: its own keys, those of `config.reference_keys` in `engram.reference_keys`, without a leading
                "engram.", "ple." or the like. Float tensors of any width are converted. e4m3 tensors (DeepSeek-V4.1)
                need their E8M0 scales beside them: a quantised table takes both as they are, projections and a float
                table take the products, which float32 and (but for scales near its ends) bfloat16 hold exactly. A
                table may come in shards (Qwen3.8).

        Raises:
            ValueError: names every key that is missing, unexpected, of another shape or dtype, and hash constants that
                are not this layer's; or the names have no place for this configuration. Nothing is copied then.
            RuntimeError: the module is on the meta device.
        """
        tensors = self.reference_tensors()
        if found := reference_keys.faults(tensors, state_dict):
            raise ValueError("load_reference_state_dict: " + "; ".join(found))
        if self.value_proj.weight.is_meta:
            raise RuntimeError("load_reference_state_dict: the module is on the meta device; call to_empty() first")
        constants = [name for name, tensor in tensors.items() if tensor.constant]
        if found := [fault for name in constants if (fault := tensors[name].constant_fault(name, state_dict[name]))]:
            raise ValueError(f"load_reference_state_dict: {'; '.join(found)} (layer {self.layer_id} of "
                             f"{list(self.config.layer_ids)})")
        for name, tensor in tensors.items():
            begin = 0
            for values in () if tensor.constant else reference_keys.pieces_of(name, tensor, state_dict).values():
                quantized = values.dtype == torch.float8_e4m3fn
                scales = state_dict[tensor.scale] if tensor.scale is not None and quantized else None
                tensor.copy_rows(begin, values, scales)
                begin += len(values)

    def to_reference_state_dict(self) -> dict[str, Tensor]:
        """The weights under the keys of `config.reference_keys` and in their shapes; like `state_dict()` they share
        memory, except for tensors that the module keeps in several.

        With a table of e4m3 rows, the projections of DeepSeek-V4.1 are e4m3 with scales too (exactly those that were
        loaded, the nearest values after training); with a float table all is as wide as here, and there are no scales.

        Raises:
            ValueError: the names have no place for this configuration.
        """
        own = {}
        tensors = self.reference_tensors()
        for name, tensor in tensors.items():
            own[name] = tensor.read()
            if tensor.scale is not None and self.config.table_dtype in QUANTIZED:
                own[name], own[tensor.scale] = reference_keys.quantize_blocks(own[name], tensor.block)
        return own

    def reference_tensors(self) -> dict[str, "reference_keys.ReferenceTensor"]:
        """What a checkpoint of `config.reference_keys` consists of, by name: shapes, and `copy_rows`, which fills this
        module row range by row range. `engram.reference_keys.faults` tells what a checkpoint lacks.

        Raises:
            ValueError: the names have no place for this configuration.
            RuntimeError: the table is spread over ranks.
        """
        quantized = self.config.table_dtype in QUANTIZED
        if len(getattr(self.embedding, "values" if quantized else "weight")) < sum(self.embedding.sizes):
            how = "load_full_table" if quantized else "load_full_weight"
            raise RuntimeError(f"Engram: the reference has whole tables, this one is spread over ranks; see {how}")
        return reference_keys.reference_tensors(self)

    def extra_repr(self) -> str:
        return f"layer_id={self.layer_id}, hidden_size={self.config.hidden_size}, branches={self.config.branches}"


def _table_rows(sizes: Sequence[int], row_multiple: int) -> int:
    return -(-sum(sizes) // row_multiple) * row_multiple


def empty_weight(rows: int, dim: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """An uninitialised table: on the CPU in memory for tables, anywhere else (meta, fake tensors) as torch does."""
    like = torch.empty(0, device=device, dtype=dtype)
    if type(like) is Tensor and like.device.type == "cpu":
        return empty_table(rows, dim, dtype=like.dtype)
    return like.new_empty(rows, dim)


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    """`linear(x)`; half types in float32, rounded once, on a CPU that has no instructions for their products."""
    if x.device.type != "cpu" or x.dtype not in _SLOW_HALF or torch.is_autocast_enabled("cpu"):
        out: Tensor = linear(x)
        return out
    bias = None if linear.bias is None else linear.bias.float()
    return nn.functional.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


def norm_weight(config: EngramConfig, weight: Tensor) -> Tensor:
    """What a norm multiplies with, [G, D], of its parameter [G, D] or [D]."""
    if config.zero_centred_norms:
        weight = 1 + weight.to(_wide(weight.dtype))
    return weight if weight.dim() == 2 else weight.expand(config.branches, -1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    return tables.prime_moduli(len(config.layer_ids), config.heads_per_ngram, bases, config.unique_primes)[index]


def _map_fault(config: EngramConfig, vocab_size: int, compressed_vocab_size: int) -> str:
    """Why a token map of these sizes does not fit the configuration; empty if it does."""
    if vocab_size != config.vocab_size:
        fault = f"token_map must map vocab_size = {config.vocab_size} ids, got {vocab_size}"
        # A model's embedding often has more rows than its tokenizer has tokens.
        more = f" (TokenMap.from_tokenizer(..., vocab_size={config.vocab_size}) fills it up)"
        return fault + (more if vocab_size < config.vocab_size else "")
    if config.compressed_vocab_size not in (None, compressed_vocab_size):
        return f"token_map must map to compressed_vocab_size = {config.compressed_vocab_size} ids, " \
               f"got {compressed_vocab_size}"
    return ""
