"""Sizes, token streams and tables.

Letters: B batch, T tokens, D hidden size, G branches, C hash columns, d row width.
"""
import mmap
import re
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram import EngramConfig, TokenMap

# The list of samples is shared with the tests, whose folder is no package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

VOCAB_SIZE, COMPRESSED_VOCAB_SIZE = 129280, 99092  # of the official demo's tokenizer, before and after merging
HUGE_PAGE = 2**21


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    width: int
    branches: int
    columns: int
    row_width: int

    def __str__(self) -> str:
        return f"B{self.batch} T{self.tokens} D{self.width} G{self.branches} C{self.columns} d{self.row_width}"

    @property
    def count(self) -> int:
        """Tokens of the whole batch."""
        return self.batch * self.tokens


SHAPES = {
    "A": Shape(1, 1024, 1024, 4, 16, 64),
    "B": Shape(2, 512, 768, 1, 16, 32),
    "P": Shape(1, 512, 2560, 4, 16, 80),      # the paper's 27B model
    "L": Shape(4, 2048, 1024, 4, 16, 64),     # A, 8192 tokens
    "H": Shape(8, 2048, 1024, 4, 16, 64),     # A, 16384 tokens: the hash
    "S2K": Shape(1, 2048, 512, 1, 16, 32),    # a step of the table alone
    "S32K": Shape(8, 4096, 512, 1, 16, 32),
    "W": Shape(1, 64, 5120, 4, 24, 256),      # the widest published one
    "S": Shape(8, 2048, 768, 1, 16, 32),      # one branch and short rows, 16384 tokens
    "A1": Shape(1, 1, 1024, 4, 16, 64),       # A, decoding
    "A64": Shape(1, 64, 1024, 4, 16, 64),
    "Ax8": Shape(8, 1, 1024, 4, 16, 64),      # A, decoding a batch
    "Ax64": Shape(64, 1, 1024, 4, 16, 64),
    "B1": Shape(1, 1, 768, 1, 16, 32),        # B, decoding
    "Bx8": Shape(8, 1, 768, 1, 16, 32),
    "Bx64": Shape(64, 1, 768, 1, 16, 32),
}
TABLES = {"64MB": 64 * 2**20, "1GB": 2**30, "4GB": 2**32}


def config(shape: Shape, table_bytes: int, dtype: torch.dtype, **options) -> EngramConfig:
    """One layer of this shape whose table has about `table_bytes`."""
    orders = shape.columns // 8
    rows = max(2, table_bytes // (shape.columns * shape.row_width * dtype.itemsize))
    return EngramConfig(
        hidden_size=shape.width, branches=shape.branches, vocab_size=VOCAB_SIZE,
        compressed_vocab_size=COMPRESSED_VOCAB_SIZE, max_ngram_size=orders + 1, embed_dim_per_head=shape.row_width,
        table_size=rows, layer_ids=(1,), conv_init="default", dilation=3, **options,
    )


@lru_cache
def token_map() -> TokenMap:
    """A map onto the compressed vocabulary that is as scattered as a tokenizer's."""
    generator = np.random.default_rng(0)
    ids = np.concatenate([np.arange(COMPRESSED_VOCAB_SIZE),
                          generator.integers(0, COMPRESSED_VOCAB_SIZE, VOCAB_SIZE - COMPRESSED_VOCAB_SIZE)])
    return TokenMap(generator.permutation(ids))


@lru_cache
def token_stream(count: int) -> Tensor:
    """int64 [count]: words and marks of Python's own standard library, each numbered by a checksum of its bytes.

    Real text, so ids and n-grams repeat as they do in training (close to Zipf's law), and every machine has it.
    """
    def words():
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            for word in re.finditer(rb"\w+|[^\w\s]|\n\s*", path.read_bytes()):
                yield zlib.crc32(word[0]) % VOCAB_SIZE

    ids = list(islice(words(), count))
    return torch.tensor(ids * -(-count // len(ids)))[:count]


def token_sets(shape: Shape, sets: int) -> list[Tensor]:
    """`sets` different int64 [B, T] out of the stream."""
    stream = token_stream(sets * shape.count)
    return list(stream.view(sets, shape.batch, shape.tokens))


def make_table(table_bytes: int, width: int, dtype: torch.dtype, *, huge: bool, rows: int | None = None) -> Tensor:
    """Random rows [R, width] in memory of their own, on 2 MiB pages if `huge` and the system agrees, else on small."""
    rows = table_bytes // (width * dtype.itemsize) if rows is None else rows
    size = rows * width * dtype.itemsize
    # Private, since shared memory has page rules of its own.
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)  # Linux alone has them
    if advice is not None:
        memory.madvise(advice)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -everything.data_ptr() % HUGE_PAGE
    table = everything[begin : begin + size].view(dtype).view(rows, width)
    return table.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))


def huge_page_share(table: Tensor) -> float:
    """Share of the table's memory that is on 2 MiB pages now."""
    address, found = table.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("AnonHugePages:"):
            return min(1.0, int(line.split()[1]) * 1024 / (table.numel() * table.element_size()))
    return 0.0
