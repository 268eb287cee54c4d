"""Sharded lookups over loopback: bytes with and without repeats, time beside what `engram plan` expects.

    python -m benchmarks.sharded --ranks 2 --tokens 4096

Then the bytes of a forward by what the rows are kept as: quantised ones travel as they are.

Streams: Python's own standard library (real text), and independent tokens by Zipf's law of three exponents, which have
far fewer repeated n-grams than text of the same token counts. The link's speed is measured first, with blocks of the
size that the lookup sends, so that what is compared is the model of the lookup and not that of the link.
"""
import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.shapes import VOCAB_SIZE, token_stream
from engram import EngramConfig, nn
from engram.distributed import ShardedMultiHeadEmbedding, ShardedQuantizedMultiHeadEmbedding
from engram.distributed.layout import SHARDINGS
from engram.distributed.plan import Machine, make_plan

CONFIG = EngramConfig(hidden_size=8, vocab_size=VOCAB_SIZE, layer_ids=(0,), embed_dim_per_head=32, table_size=50_000)
EXPONENTS = (1.0, 1.2, 1.5)
KEPT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def stream(name: str, rank: int, tokens: int) -> Tensor:
    """int64 [1, tokens]; "text" or the exponent of Zipf's law. Each rank has its own part."""
    if name == "text":
        return token_stream((rank + 1) * tokens)[None, rank * tokens :]
    weights = torch.arange(1, VOCAB_SIZE + 1, dtype=torch.float64) ** -float(name)
    return torch.multinomial(weights, tokens, replacement=True, generator=torch.Generator().manual_seed(rank))[None]


def median(call: Callable[[], object], runs: int) -> float:
    """Seconds of a call that all ranks make, the slowest rank's median."""
    times = []
    for _ in range(runs + 1):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    found = torch.tensor([float(np.median(times[1:]))], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def loopback(ranks: int, entries: int) -> Machine:
    """Speeds of this machine with so many ranks on it."""
    small, large = torch.zeros(ranks), torch.zeros(ranks * max(1, entries // ranks))
    latency = median(lambda: dist.all_to_all_single(torch.empty_like(small), small), 20)
    seconds = median(lambda: dist.all_to_all_single(torch.empty_like(large), large), 7)
    sent = large.numel() * 4 * (ranks - 1) / ranks
    copy = median(lambda: large.clone(), 7)
    return Machine(bandwidth=max(1.0, sent) / max(1e-9, seconds - latency), latency=latency, memory=8 * large.numel() / copy)


def forward_bytes(sizes: list[int], rows: Tensor, kept: str) -> int:
    """That this rank sends for one lookup in a table of a kind."""
    width, dtype = CONFIG.embed_dim_per_head, KEPT[kept]
    if dtype.is_floating_point and dtype.itemsize > 1:
        table = ShardedMultiHeadEmbedding(sizes, width, dtype=dtype)
    else:
        table = ShardedQuantizedMultiHeadEmbedding(sizes, width, format=kept)
    with torch.no_grad():
        table(rows)
    return table.peers.bytes_sent


def measure(rank: int, options: argparse.Namespace, store: str, out: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    hashing, records = nn.NgramHash(CONFIG), []
    machine = loopback(options.ranks, options.tokens * CONFIG.hash_columns * CONFIG.embed_dim_per_head)
    for name in ("text", *map(str, EXPONENTS)):
        rows = hashing(stream(name, rank, options.tokens))[0]
        unique = rows.unique().numel() / rows.numel()
        for sharding, equal in [*((sharding, False) for sharding in SHARDINGS), ("strided-heads", True)]:
            table = ShardedMultiHeadEmbedding(
                hashing.moduli[0].tolist(), CONFIG.embed_dim_per_head, sharding=sharding, sparse=True, equal_tokens=equal)
            out_rows = table(rows)
            forward = table.peers.bytes_sent
            grad = torch.ones_like(out_rows)
            out_rows.backward(grad)
            sent = table.peers.bytes_sent
            plan = make_plan(CONFIG, ranks=options.ranks, tokens=options.tokens, sharding=sharding, dtype=torch.float32,
                             unique=unique, equal_tokens=equal, machine=machine)
            ahead = median(lambda: table(rows), options.runs)
            both = median(lambda: torch.autograd.grad(table(rows), table.weight, grad), options.runs)
            records.append(dict(
                stream=name, sharding=sharding, equal_tokens=equal, ranks=options.ranks, tokens=options.tokens,
                unique=unique, sent_forward=forward, sent=sent, planned=plan.sent_forward[rank] + plan.sent_backward[rank],
                forward_ms=1e3 * ahead, backward_ms=1e3 * (both - ahead),
                planned_forward_ms=1e3 * plan.forward_seconds, planned_backward_ms=1e3 * plan.backward_seconds))
        records.append(dict(stream=name, ranks=options.ranks, tokens=options.tokens, unique=unique, sent_forward_of={
            kept: forward_bytes(hashing.moduli[0].tolist(), rows, kept) for kept in KEPT}))
    if rank == 0:
        Path(out).write_text("\n".join(map(json.dumps, records)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sharded", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records, one a line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records"
        multiprocessing.spawn(measure, (options, str(Path(folder) / "store"), str(out)), options.ranks)
        records = [json.loads(line) for line in out.read_text().splitlines()]
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    print(f"{options.ranks} ranks, {options.tokens:,} tokens each; MB that rank 0 sends in forward and backward, ms (planned)")
    print(f"{'stream':>8} {'sharding':>22} {'unique':>7} {'MB':>14} {'fewer':>6} {'forward':>16} {'backward':>16}")
    lookups = [record for record in records if "sharding" in record]
    for record in lookups:
        every = next(r["sent"] for r in lookups if r["stream"] == record["stream"] and r["equal_tokens"])
        kind = record["sharding"] + (", every slot" if record["equal_tokens"] else "")
        print(f"{record['stream']:>8} {kind:>22} {record['unique']:7.0%} {record['sent'] / 1e6:6.2f} "
              f"({record['planned'] / 1e6:5.2f}) {1 - record['sent'] / every:6.0%} "
              f"{record['forward_ms']:7.2f} ({record['planned_forward_ms']:6.2f}) "
              f"{record['backward_ms']:7.2f} ({record['planned_backward_ms']:6.2f})")

    print(f"\nMB that rank 0 sends in a forward, of rows of {CONFIG.embed_dim_per_head} kept as")
    print(f"{'stream':>8}" + "".join(f"{kept:>10}" for kept in KEPT))
    for record in records:
        if "sent_forward_of" in record:
            sent = record["sent_forward_of"]
            print(f"{record['stream']:>8}" + "".join(f"{sent[kept] / 1e6:10.2f}" for kept in KEPT))


if __name__ == "__main__":
    main()
