"""What this machine can do, measured where and when the ops are: copy, read, random rows on small and huge pages."""
import ctypes
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.shapes import make_table
from benchmarks.timing import Contender, interleave, summary, timer_of

COPY_BYTES = 256 * 2**20


@lru_cache
def loops() -> ctypes.CDLL | None:
    """limits.cpp, compiled for this processor; None without g++."""
    if shutil.which("g++") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        source = Path(__file__).with_name("limits.cpp")
        command = ["g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))  # stays mapped after the file is gone
    loaded.read_words.restype = ctypes.c_uint64
    return loaded


def gather(table: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """table[rows] by the plainest loop; needs `loops()`."""
    out = torch.empty(*rows.shape, table.shape[1], dtype=table.dtype) if out is None else out
    row_bytes = table.shape[1] * table.element_size()
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, table, rows)]
    loops().gather_rows(
        *pointers, ctypes.c_int64(rows.numel()), ctypes.c_int64(row_bytes), ctypes.c_int(torch.get_num_threads())
    )
    return out


def bf16_instructions() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Copy:
    """Copy bandwidth of two buffers far larger than the caches, bytes read plus bytes written."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.source = torch.ones(COPY_BYTES // 4, device=device)
        self.target = torch.empty_like(self.source).fill_(0)

    def gbs(self, runs: int = 3) -> float:
        """GB/s, median of `runs`."""
        copy, timer = Contender("copy", lambda i: self.target.copy_(self.source)), timer_of(self.device)
        times = interleave([copy], 0, least=runs, timer=timer)["copy"]
        return 2 * COPY_BYTES / summary(times)["median_ms"] / 1e6


def measure(
    copy: Copy, seconds: float, table_bytes: int, *, compiler: bool, row_bytes: tuple[int, ...] = (64, 128, 256, 640)
) -> dict:
    """Copy and read bandwidth in GB/s; nanoseconds per random row of a table, by page size and row width.

    On a GPU the copy bandwidth alone.

    Args:
        copy: its buffers are read, too.
        seconds: for each kind of limit.
        table_bytes: size of the table that rows are drawn from.
        compiler: whether limits.cpp may be used; without it only copies are measured.
        row_bytes: widths to try.
    """
    threads = torch.get_num_threads()
    limits = dict(kind="limits", device=copy.device, threads=threads, copy_gbs=round(copy.gbs(7), 2),
                  table_bytes=table_bytes)
    if copy.device != "cpu" or not compiler or loops() is None:
        return limits

    words = copy.source.numel() // 2
    read = Contender("read", lambda i: loops().read_words(
        ctypes.c_void_p(copy.source.data_ptr()), ctypes.c_int64(words), ctypes.c_int(threads)))
    read.call(0)
    median = summary(interleave([read], seconds, most=30)["read"])["median_ms"]
    limits["read_gbs"] = round(COPY_BYTES / median / 1e6, 2)

    generator, count, sets = torch.Generator().manual_seed(0), 32768, 8
    limits["gather_ns_per_row"] = {}
    for width in row_bytes:
        tables = {pages: make_table(table_bytes, width // 4, torch.float32, huge=pages == "2 MiB")
                  for pages in ("4 KiB", "2 MiB")}
        number = tables["4 KiB"].shape[0]
        rows = [torch.randint(number, (count,), generator=generator) for _ in range(sets)]
        out = torch.empty(count, width // 4).fill_(0)
        contenders = [Contender(pages, lambda i, table=table: gather(table, rows[i % sets], out))
                      for pages, table in tables.items()]
        for contender in contenders:
            contender.call(0)
        times = interleave(contenders, seconds, most=60)
        limits["gather_ns_per_row"][width] = {
            pages: round(summary(times[pages])["median_ms"] * 1e6 / count, 1) for pages in tables}
    return limits
