"""QuantizedMultiHeadEmbedding whose table is spread over the ranks of a process group."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram import quantize
from engram.boundaries import describe
from engram.distributed.exchange import Route
from engram.distributed.peers import Peers
from engram.distributed.table import ShardedTable
from engram.nn import QuantizedMultiHeadEmbedding
from engram.progress import Progress, reporting


class ShardedQuantizedMultiHeadEmbedding(ShardedTable, QuantizedMultiHeadEmbedding):
    """`nn.QuantizedMultiHeadEmbedding` bit for bit, with a table that is larger than one device; frozen as that is.

    Buffers: `values` and `scales` of the rows that this rank owns (`layout`), zeros until rows are loaded. Values and
    scales travel as they are and become floats where they are read: d + ceil(d / 32) bytes a row for "fp8", d + 4 for
    "int8", and on the owner no arithmetic. Everything else is as in `ShardedMultiHeadEmbedding`: every method that
    communicates (the constructor, `forward`, `prefetch`) must be called by all ranks of the group, in the same order.

    Args:
        sizes: rows of each of the C heads.
        dim: d, width of a row.
        format: "fp8" or "int8".
        group, sharding, splits, equal_tokens, prefetch_group, peers: as of `ShardedMultiHeadEmbedding`.
        out_dtype: of the looked up rows: float64, float32, bfloat16 or float16; None: bfloat16.
        row_multiple: as of `nn.MultiHeadEmbedding`.
        device: of the buffers; on "meta" no memory is taken, then `to_empty` takes that of the own rows, which
            `reset_parameters` makes zeros.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: no head, a size, width or multiple below 1, a wrong sharding, split, format or out_dtype, or ranks
            that differ in an argument.
        TypeError: sizes or splits that are no integers.
    """

    NAME = "ShardedQuantizedMultiHeadEmbedding"
    TENSORS = ("values", "scales")

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        *,
        format: str,
        group: torch.distributed.ProcessGroup | None = None,
        sharding: str = "rows",
        splits: Sequence[int] | None = None,
        equal_tokens: bool = False,
        prefetch_group: torch.distributed.ProcessGroup | None = None,
        out_dtype: torch.dtype | None = None,
        row_multiple: int = 1,
        device: torch.device | str | None = None,
        peers: Peers | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.format, self.out_dtype = format, out_dtype or torch.bfloat16
        rows = self._share(
            sizes, dim, peers or Peers(group, prefetch_group), self._kind_fault(), sharding=sharding, splits=splits,
            equal_tokens=equal_tokens, row_multiple=row_multiple, format=format, out_dtype=self.out_dtype)
        values, scales = quantize.zero_table(rows, dim, format, device=device)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)

    def _row_bytes(self) -> list[int]:
        return [buffer.shape[1:].numel() * buffer.element_size() for buffer in (self.values, self.scales)]

    def _pick(self, ids: Tensor) -> Tensor:
        """uint8 [n, bytes of a row], the values, then the scales, so that one exchange takes both."""
        ids, sizes = ids.clamp(min=0), self._row_bytes()
        parts = [buffer.view(torch.uint8).view(len(buffer), size).index_select(0, ids)
                 for buffer, size in zip((self.values, self.scales), sizes)]
        return torch.cat(parts, 1)

    def _read(self, route: Route, fetched: Tensor) -> Tensor:
        # Copies, as a float32 scale cannot be read where it came, at any byte.
        parts = fetched.split(self._row_bytes(), 1)
        values, scales = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        scales = scales.view(self.scales.dtype).view(len(fetched), *self.scales.shape[1:])
        return self._look_up(values.view(self.values.dtype), scales, route.index, row_begin=0)

    def load_full_table(
        self, source: tuple[Tensor, Tensor] | str | os.PathLike[str], names: tuple[str, str] | None = None, *,
        progress: Progress = False,
    ) -> None:
        """Copy the own rows out of a whole quantised table. No rank ever holds more than its shard and 64 MiB.

        Args:
            source: values and scales as `nn.QuantizedMultiHeadEmbedding` of this format has them, on any device, or
                where safetensors files have them: a file, or the index or folder of several.
            names: of values and scales in the files; None: the only ones of these shapes and dtypes.
            progress: see `engram.progress`; counts the own rows.

        Raises:
            FileNotFoundError: no such file.
            RuntimeError: the table is on the meta device.
            ValueError: another shape or dtype, no or several such tensors in the files, or a malformed file. No row has
                been written then, unless a file became shorter meanwhile.
        """
        op = "load_full_table"
        self._refuse_meta(op)
        if isinstance(source, (str, os.PathLike)):
            return self._copy_rows([
                self._stored(op, source, tensor, (getattr(self, tensor).dtype,), name)
                for tensor, name in zip(self.TENSORS, names or (None, None))
            ], progress)
        for name, given in zip(self.TENSORS, source):
            shape, dtype = self._whole_shape(name), getattr(self, name).dtype
            if list(given.shape) != shape or given.dtype != dtype:
                raise ValueError(f"{self.NAME}.{op}: {name} must be {dtype} {shape}, got {describe(given)}")
        self._copy_rows(source, progress)

    def load_float_rows(self, begin: int, rows: Tensor, *, progress: Progress = False) -> None:
        """Quantise float rows into those of rows [begin, begin + n) of the whole table that are here.

        Args and raises as `nn.QuantizedMultiHeadEmbedding.load_float_rows`; ranks need not call it together, nor with
        the same rows.
        """
        end, done = self._check_float_rows(begin, rows, self.layout.rows), 0
        parts = [(max(begin, p.begin), min(end, p.end), p.local - p.begin) for p in self._pieces]
        total = sum(max(0, high - low) for low, high, _ in parts)
        with reporting(progress, "quantising", " rows") as report:
            for low, high, shift in parts:
                if low < high:
                    out = self.values[low + shift : high + shift], self.scales[low + shift : high + shift]
                    quantize.quantize_table(rows[low - begin : high - begin], self.format, out=out,
                                            progress=lambda some, _: report(done + some, total))
                    done += high - low
