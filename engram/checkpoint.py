"""Reference checkpoints from and to safetensors files, a row range at a time: memory is that of one chunk, whatever the
size of the tables.

Files are read with ordinary reads rather than mapped, so that nothing of what has been read stays in memory; the format
is read and written here, and checked as strictly as by its own library (https://github.com/huggingface/safetensors).
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.config import QUANTIZED
from engram.nn import Engram, layer_moduli
from engram.progress import Progress, reporting
from engram.reference_keys import ReferenceTensor, faults, pieces_of, quantize_blocks

__all__ = ["load_reference_checkpoint", "save_reference_checkpoint"]

INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 1 << 23
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}


def load_reference_checkpoint(
    target: nn.Module,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    prefix: str = "",
    *,
    progress: Progress = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Load Engram layers from the files of a published checkpoint, as `load_reference_state_dict` does, without ever
    holding one of its tables.

    All headers, names, shapes, dtypes and hash constants are checked before the first weight is written. Only a file
    that is changed or cannot be read after that leaves the layers partly loaded.

    Args:
        target: an `nn.Engram` or `models.hybrid.EngramLayer`, or a model with some of them inside; all are loaded.
        path: a .safetensors file, several of them, a `model.safetensors.index.json`, or a folder with that index or
            with .safetensors files. With an index only the files that it names for the prefix are opened.
        prefix: what stands before the layer's own names; "{layer}" in it stands for the layer's id and "{name}" for the
            module's name in `target`, as in "model.layers.{layer}.engram.". Names without it are left alone.
        progress: see `engram.progress`; counts bytes, after every chunk.
        chunk_bytes: how much of a file is in memory at a time, about.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file that is malformed or cut, an index that does not fit its files, names that are missing or
            unexpected, wrong shapes and dtypes, or hash constants that are not the layer's. The message names file and
            key, and nothing has been written.
        RuntimeError: a layer is on the meta device, or its hash constants are not set after `to_empty()`.
    """
    op = "load_reference_checkpoint"
    layers = _layers(op, target, prefix)
    files, stored = find_tensors(op, path, [layer.prefix for layer in layers])
    found = [fault for layer in layers for fault in layer.faults(stored)]
    if found:
        raise ValueError(f"{op}: {'; '.join(found)}; in {', '.join(map(str, files))}")
    _refuse_meta(op, layers)
    _refuse_unset(op, layers)
    with ExitStack() as stack:
        handles = {file: stack.enter_context(open(file, "rb", buffering=0))
                   for file in {entry.file for entry in stored.values()}}
        for layer in layers:
            for name, tensor in layer.tensors.items():
                if tensor.constant and (entry := stored.get(layer.prefix + name)):
                    if fault := tensor.constant_fault(layer.prefix + name, entry.read(handles, 0, entry.rows)):
                        raise ValueError(f"{op}: {fault} in {entry.file}")
        report = stack.enter_context(reporting(progress, "loading", "B"))
        done, total = 0, sum(entry.nbytes for entry in stored.values())
        for layer in layers:
            own = layer.own(stored)
            for name, tensor in layer.tensors.items():
                for size in _copy(name, tensor, own, handles, chunk_bytes):
                    done += size
                    report(done, total)


def save_reference_checkpoint(
    target: nn.Module,
    path: str | os.PathLike[str],
    prefix: str = "",
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write what `to_reference_state_dict` gives to one .safetensors file, without a second copy of a table.

    The file appears under its name when all of it is on the disk; one that is there already is replaced only then.

    Args:
        target, prefix, progress, chunk_bytes: as in `load_reference_checkpoint`.
        path: of the file.
        metadata: strings by name to keep in the file's header.

    Raises:
        OSError: the file cannot be written.
        ValueError: a layer's configuration has no place in the names, two layers have the same names, or `metadata` is
            something else.
        RuntimeError: a layer is on the meta device.
    """
    op = "save_reference_checkpoint"
    layers = _layers(op, target, prefix)
    _refuse_meta(op, layers)
    sources: dict[str, tuple[ReferenceTensor, str | None]] = {}  # the tensor, and the name of the scales it needs
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for layer in layers:
        for name, tensor in layer.tensors.items():
            scale = layer.prefix + tensor.scale if tensor.scale is not None and layer.quantized else None
            sources[layer.prefix + name] = tensor, scale
            sizes[layer.prefix + name] = tensor.targets[0].dtype, tensor.shape
            if scale is not None:
                sizes[layer.prefix + name] = torch.float8_e4m3fn, tensor.shape
                sizes[scale] = torch.float8_e8m0fnu, tensor.scale_shape
    header, places, total = _layout(op, sizes, metadata)

    path, done = Path(path), 0
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", buffering=0) as file, reporting(progress, "saving", "B") as report:
            _write(file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            file.truncate(len(header) + total)
            for name, (tensor, scale) in sources.items():
                ends = [len(header) + places[key] for key in (name, scale) if key is not None]
                row_bytes = math.prod(tensor.shape[1:]) * tensor.targets[0].dtype.itemsize
                for begin, end in _ranges(tensor.shape[0], row_bytes, tensor.block[0], chunk_bytes):
                    values = _rows(tensor, begin, end)
                    for i, values in enumerate((values,) if scale is None else quantize_blocks(values, tensor.block)):
                        ends[i] += _write(file, ends[i], values)
                        done += values.nbytes
                    report(done, total)
            os.fsync(file.fileno())
        os.replace(part, path)
        _fsync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class _Layer:
    """prefix: of its names. quantized: whether it writes projections as e4m3 with scales, as its table is."""

    module: nn.Module
    prefix: str
    tensors: dict[str, ReferenceTensor]
    quantized: bool

    def own(self, stored: "Mapping[str, Stored]") -> "dict[str, Stored]":
        """What is stored of this layer, under its own names."""
        return {name.removeprefix(self.prefix): entry for name, entry in stored.items() if name.startswith(self.prefix)}

    def faults(self, stored: "Mapping[str, Stored]") -> list[str]:
        """What keeps it from being loaded, with full names and files."""
        own, found = self.own(stored), []
        known = {*own, *self.tensors, *(tensor.scale for tensor in self.tensors.values())}
        for fault in faults(self.tensors, {name: entry.meta() for name, entry in own.items()}):
            words = fault.split(" ")
            place = next((f" ({own[word].file})" for word in words if word in own), "")
            found.append(" ".join(self.prefix + word if word.rstrip(",") in known else word for word in words) + place)
        return found


def _layers(op: str, target: nn.Module, prefix: str) -> list[_Layer]:
    """All layers inside `target` that know their reference names."""
    found: dict[str, _Layer] = {}
    for name, module in target.named_modules():
        if not hasattr(module, "reference_tensors"):
            continue
        fields = {"name": name} | ({"layer": module.layer_id} if hasattr(module, "layer_id") else {})
        try:
            label = prefix.format(**fields)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{op}: prefix may have {' and '.join(f'{{{field}}}' for field in fields)} in it, "
                             f"got {prefix!r}") from error
        if label in found:
            raise ValueError(f"{op}: two layers have the prefix {label!r}; put {{layer}} or {{name}} into it")
        if hasattr(module, "reset_constants"):  # EngramLayer, whose hash depends on nothing but its own sizes
            module.reset_constants()
        quantized = getattr(getattr(module, "config", None), "table_dtype", None) in QUANTIZED
        found[label] = _Layer(module, label, module.reference_tensors(), quantized)
    if not found:
        raise ValueError(f"{op}: no Engram layer in {type(target).__name__}")
    return list(found.values())


def _refuse_meta(op: str, layers: list[_Layer]) -> None:
    tensors = (tensor for layer in layers for tensor in layer.tensors.values())
    if any(part.is_meta for tensor in tensors for part in tensor.targets):
        raise RuntimeError(f"{op}: the module is on the meta device; call to_empty() first")


def _refuse_unset(op: str, layers: list[_Layer]) -> None:
    """Not every checkpoint has the constants of the hash, and after to_empty() they are whatever lay in memory."""
    for module in (layer.module for layer in layers if isinstance(layer.module, Engram)):
        if module.hash.moduli.tolist() != [list(layer_moduli(module.config, module.layer_id))]:
            raise RuntimeError(f"{op}: the hash constants of layer {module.layer_id} are not set; call "
                               "hash.reset_parameters() after to_empty()")


def _copy(
    name: str, tensor: ReferenceTensor, own: "Mapping[str, Stored]", handles: Mapping[Path, FileIO], chunk_bytes: int
) -> Iterator[int]:
    """Copy all that is stored of a tensor; yields the bytes of each chunk."""
    start = 0
    for entry in pieces_of(name, tensor, own).values():
        if tensor.constant:
            yield entry.nbytes
            continue
        scale, block = None, 1
        if tensor.scale is not None and entry.dtype == "F8_E4M3":
            scale, block = own[tensor.scale], tensor.block[0]
        for begin, end in _ranges(entry.rows, entry.row_bytes, block, chunk_bytes):
            values = entry.read(handles, begin, end)
            scales = None if scale is None else scale.read(handles, begin // block, -(-end // block))
            tensor.copy_rows(start + begin, values, scales)
            yield values.nbytes + (0 if scales is None else scales.nbytes)
        start += entry.rows


def _rows(tensor: ReferenceTensor, begin: int, end: int) -> Tensor:
    """Rows [begin, end) of a reference tensor, on the CPU."""
    parts = []
    for part in tensor.targets:
        parts.append(part[max(0, begin) : max(0, end)])
        begin, end = begin - len(part), end - len(part)
    parts = [part for part in parts if len(part)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()


def _ranges(rows: int, row_bytes: int, block: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about `chunk_bytes`, each begins with a block of rows."""
    step = block * max(1, chunk_bytes // max(1, row_bytes * block))
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


# ------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `dtype` by the format's name, `begin` the place of its first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.nbytes // max(1, self.rows)

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")

    def read(self, handles: Mapping[Path, FileIO], begin: int, end: int) -> Tensor:
        """Rows [begin, end)."""
        buffer = torch.empty((end - begin) * self.row_bytes, dtype=torch.uint8)
        view, file, filled = buffer.numpy().data, handles[self.file], 0
        file.seek(self.begin + begin * self.row_bytes)
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise ValueError(f"{self.file} has become shorter while it was read")
            filled += count
        return buffer.view(DTYPES[self.dtype]).view(end - begin if self.shape else (), *self.shape[1:])


def find_tensors(
    op: str, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], prefixes: list[str]
) -> tuple[list[Path], dict[str, Stored]]:
    """The files to read, and all tensors in them whose names begin with one of the prefixes."""
    def wanted(name: str) -> bool:
        return name.startswith(tuple(prefixes))

    index = None
    if isinstance(path, (str, os.PathLike)):
        path = Path(path)
        if path.is_dir():
            inside = path / INDEX
            files = [inside] if inside.is_file() else sorted(path.glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"{op}: neither {INDEX} nor .safetensors files in {path}")
        else:
            files = [path]
        if files[0].suffix == ".json":
            index = {name: file for name, file in read_index(files[0]).items() if wanted(name)}
            files = sorted(set(index.values())) or files
    else:
        files = [Path(file) for file in path]
    found: dict[str, Stored] = {}
    if index is None or index:
        for file in files:
            for name, entry in read_header(file).items():
                if not wanted(name):
                    continue
                if name in found:
                    raise ValueError(f"{op}: {name} is in {found[name].file} and in {file}")
                if entry.dtype not in DTYPES:
                    raise ValueError(f"{op}: {name} has the unknown dtype {entry.dtype} in {file}")
                found[name] = entry
    if index is None:
        return files, found
    for name in {**index, **found}:
        if name not in found or index.get(name) != found[name].file:
            says = f"that {name} is in {index[name]}" if name in index else f"nothing of {name}"
            got = found[name].file if name in found else "none"
            raise ValueError(f"{op}: the index says {says}, found: {got}")
    return files, found


def read_index(path: Path) -> dict[str, Path]:
    """Name to file of a `model.safetensors.index.json`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: something else is in it, or a file outside its own folder.
    """
    try:
        values = json.loads(_existing(path).read_bytes())
        names = values["weight_map"]
        if not all(isinstance(name, str) for name in names.values()):
            raise TypeError("weight_map must map names to files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error!r}") from None
    if outside := next((name for name in names.values() if Path(name).name != name), None):
        raise ValueError(f"{path} names a file that is not in its folder: {outside!r}")
    return {name: path.parent / file for name, file in names.items()}


def read_header(path: Path) -> dict[str, Stored]:
    """All tensors of a safetensors file, whose size must be what its header says.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is cut, or malformed.
    """
    def malformed(what: str) -> ValueError:
        return ValueError(f"{path} is not a whole safetensors file: {what}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("a name comes twice")
        return values

    size = _existing(path).stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise malformed(f"a header of {length:,} bytes in a file of {size:,}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=unique)
            header.pop("__metadata__", None)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise malformed(f"its header is no JSON object ({error})") from None
    found, end, begin = {}, 0, 8 + length
    try:
        entries = sorted(((*map(int, value["data_offsets"]), name, value) for name, value in header.items()),
                         key=lambda entry: entry[:3])
        for low, high, name, value in entries:
            shape, dtype = tuple(map(int, value["shape"])), str(value["dtype"])
            found[name] = Stored(path, dtype, shape, begin + low, high - low)
            if low != end or high < low or min(shape, default=0) < 0:
                raise malformed(f"{name} lies at bytes {low:,} to {high:,}, expected from {end:,} on")
            if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != high - low:
                raise malformed(f"{name} is {dtype} {list(shape)} in {high - low:,} bytes")
            end = high
    except (TypeError, KeyError) as error:
        raise malformed(f"an entry of its header is no tensor ({error!r})") from None
    if begin + end != size:
        raise malformed(f"{begin + end:,} bytes by its header, {size:,} in the file")
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}")
    return path


def _layout(
    op: str, sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int], int]:
    """Header, where each tensor begins after it, and how many bytes they are. Widest dtypes first: all are aligned."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for item in metadata.items() for text in item):
            raise ValueError(f"{op}: metadata must map strings to strings, got {dict(metadata)}")
        header["__metadata__"] = dict(metadata)
    places, end = {}, 0
    for name, (dtype, shape) in sorted(sizes.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        places[name], begin = end, end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places, end


def _write(file: FileIO, place: int, values: Tensor) -> int:
    """Write a CPU tensor at a place of the file; returns its bytes."""
    view = values.contiguous().flatten().view(torch.uint8).numpy().data
    file.seek(place)
    while view:
        view = view[file.write(view) :]
    return values.nbytes


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
