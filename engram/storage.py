"""Memory for tables on the CPU: a random row of a big table misses the page-table cache, unless pages are huge."""

import math
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes; the size that Linux calls transparent huge pages on x86-64 and most aarch64


def empty_table(rows: int, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised CPU tensor ``[rows, dim]`` on huge pages where the system gives them.

    The memory starts at a 2 MiB boundary and is marked for transparent huge pages before it is first touched. Where
    that is not possible (a table under 2 MiB, another system, huge pages switched off) it is ordinary memory:
    ``huge_page_share`` tells, once rows have been written. Pages are claimed as they are written, so a table may be
    larger than free memory as long as it is not filled.

    Args:
        rows, dim: sizes, at least 0.
        dtype: torch's default dtype if None.

    Raises:
        ValueError: a negative size.
    """
    if rows < 0 or dim < 0:
        raise ValueError(f"empty_table: rows and dim must be at least 0, got {rows} and {dim}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    size = rows * dim * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(rows, dim, dtype=dtype, device="cpu")
    # mmap aligns to small pages only: one huge page more than needed leaves room to move the start up to a boundary.
    length = math.ceil(size / HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages
        pass
    return torch.frombuffer(memory, dtype=dtype, count=rows * dim, offset=begin).view(rows, dim)


def huge_page_share(tensor: Tensor) -> float:
    """The share of a CPU tensor's memory that lies on huge pages right now, 0 to 1; 0 where the system does not tell.

    Only pages that have been written are counted as huge; ask after the table is filled.
    """
    size = tensor.numel() * tensor.element_size()
    smaps = Path(f"/proc/{os.getpid()}/smaps")
    if tensor.device.type != "cpu" or size == 0 or not smaps.exists():
        return 0.0
    begin, end = tensor.data_ptr(), tensor.data_ptr() + size
    huge, overlap = 0, 0
    for line in smaps.read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            overlap = max(0, min(high, end) - max(low, begin))
        elif overlap and first == "AnonHugePages:":
            huge += min(int(line.split()[1]) * 1024, overlap)
    return huge / size
