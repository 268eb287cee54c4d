"""Memory for tables on the CPU, and its first filling: a random row of a big table misses the page-table cache, unless
pages are huge; a big table takes minutes to draw, unless all cores do it."""

import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

DRAW_BLOCK = 1 << 20  # elements
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
    memory = _claim(rows * dim, torch.get_default_dtype() if dtype is None else dtype)
    return torch.empty(rows, dim, dtype=dtype, device="cpu") if memory is None else memory.view(rows, dim)


def zeros_where_touched(shape: torch.Size | tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros for what belongs to the rows of a table: on the CPU in memory as of ``empty_table``, which the system
    hands out as zeros, so what is never written is never real."""
    memory = _claim(math.prod(shape), dtype) if torch.device(device).type == "cpu" else None
    return torch.zeros(shape, dtype=dtype, device=device) if memory is None else memory.view(shape)


def _claim(elements: int, dtype: torch.dtype) -> Tensor | None:
    """Zeros on a 2 MiB boundary that are claimed as they are written; None for less than a huge page."""
    size = elements * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    # mmap aligns to small pages only: one huge page more than needed leaves room to move the start up to a boundary.
    length = math.ceil(size / HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    try:
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"not enough memory for a table of {size:,} bytes ({error})") from None
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages
        pass
    return torch.frombuffer(memory, dtype=dtype, count=elements, offset=begin)


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


@torch.no_grad()
def fill_normal_(table: Tensor, std: float = 1.0) -> Tensor:
    """Draw every element from N(0, std), in parallel on the CPU and with the same bits for any thread count.

    The elements are cut into blocks of 2**20, each with a generator of its own whose seed comes from torch's default
    generator, so `torch.manual_seed` decides the numbers. Tensors of one block or less, and those on other devices, are
    drawn as `torch.nn.init.normal_` does.

    Args:
        table: float tensor of any shape; written in place.
        std: standard deviation, at least 0.

    Returns:
        table.
    """
    plain = type(table.data) is Tensor and table.device.type == "cpu" and table.is_contiguous()
    if not plain or table.numel() <= DRAW_BLOCK:
        return torch.nn.init.normal_(table, std=std)
    return fill_normal_pieces_(table, std, [(0, table.numel())], table.numel())


@torch.no_grad()
def fill_normal_pieces_(shard: Tensor, std: float, pieces: Sequence[tuple[int, int]], total: int) -> Tensor:
    """What ``fill_normal_`` draws for a table on the CPU, of which `shard` holds only some pieces; nothing else is kept.

    Afterwards torch's default generator is where it is after ``fill_normal_``. On another device the numbers come from
    that device's generators, the same ones for any pieces.

    Args:
        shard: float tensor, contiguous; the elements of the pieces, one piece after the other; written in place.
        std: standard deviation, at least 0.
        pieces: ranges ``[begin, end)`` of the elements of the whole table.
        total: elements of the whole table.

    Returns:
        shard.
    """
    flat, device = shard.detach().view(-1), shard.device
    if total <= DRAW_BLOCK and device.type == "cpu":
        whole = torch.nn.init.normal_(flat.new_empty(total), std=std)
        return _keep(shard, [whole[begin:end] for begin, end in pieces])
    seed = int(torch.randint(2**62, ()))

    def draw(job: tuple[int, int, Tensor]) -> None:
        index, begin, kept = job
        size = min(DRAW_BLOCK, total - index * DRAW_BLOCK)
        block = kept if kept.numel() == size else kept.new_empty(size)
        block.normal_(0, std, generator=torch.Generator(device).manual_seed(seed + index))
        if block is not kept:
            kept.copy_(block[begin : begin + kept.numel()])

    jobs, at = [], 0
    for begin, end in pieces:
        while begin < end:
            index, within = divmod(begin, DRAW_BLOCK)
            count = min(DRAW_BLOCK - within, end - begin)
            jobs.append((index, within, flat[at : at + count]))
            begin, at = begin + count, at + count
    if device.type == "cpu":
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, jobs))
    else:
        for job in jobs:
            draw(job)
    return shard


def _keep(shard: Tensor, parts: list[Tensor]) -> Tensor:
    if parts:
        shard.copy_(torch.cat(parts).view(shard.shape))
    return shard
