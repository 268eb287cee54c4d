"""`engram plan`: what sharded tables will cost, before there is a machine to try it on."""

import argparse
from dataclasses import asdict
from typing import Any

import torch

from engram.cli.errors import UsageError
from engram.config import EngramConfig

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8")

DESCRIPTION = """\
Memory, traffic and time of the tables of a configuration, spread over ranks in each of the three ways. The formulas are
in engram/distributed/plan.py, what they do not know is an option: the share of row ids that are left once repeats are
sent once (--unique; 1 is the worst case, `python -m benchmarks.sharded` measures it), and the speeds of links and
memory."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", default="paper-27b", metavar="NAME", help="of EngramConfig (default: paper-27b)")
    add("--table-size", type=int, metavar="N", help="rows of each head's table instead of the preset's")
    add("--ranks", type=int, default=8, metavar="W", help="ranks that share the tables (default: 8)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens that each rank looks up in a step (default: 4096)")
    add("--dtype", choices=DTYPES, help="of the tables, the last two with scales (default: the preset's, or bfloat16)")
    add("--optimizer", default="row-wise-adam", metavar="NAME",
        help="of the tables: none, sgd, row-wise-adagrad, row-wise-adam or lazy-adamw (default: row-wise-adam); quantised "
             "tables are frozen and have none")
    add("--unique", type=float, default=1.0, metavar="U", help="share of a rank's row ids without repeats (default: 1)")
    add("--equal-tokens", action="store_true", help="whole heads with sizes known beforehand: nothing is made unique")
    add("--bandwidth", type=float, default=50, metavar="GB/S", help="of a rank's link, each direction (default: 50)")
    add("--latency", type=float, default=30, metavar="US", help="of a collective, microseconds (default: 30)")
    add("--memory-bandwidth", type=float, default=2000, metavar="GB/S", help="of a rank's memory (default: 2000)")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print the plans; returns exit status and record. Raises UsageError for a wrong value."""
    from engram.distributed.layout import SHARDINGS
    from engram.distributed.plan import Machine, make_plan, table_dtype

    try:
        overrides = {} if options.table_size is None else {"table_size": options.table_size}
        config = EngramConfig.preset(options.preset, **overrides)
        dtype = table_dtype(config, None if options.dtype is None else getattr(torch, options.dtype))
        machine = Machine(bandwidth=1e9 * options.bandwidth, latency=1e-6 * options.latency,
                          memory=1e9 * options.memory_bandwidth)
        plans = [
            make_plan(config, ranks=options.ranks, tokens=options.tokens, sharding=sharding,
                      dtype=dtype, unique=options.unique, equal_tokens=options.equal_tokens,
                      optimizer=options.optimizer, machine=machine)
            for sharding in SHARDINGS
        ]
    except ValueError as error:
        raise UsageError(error) from None
    total = sum(plans[0].rows)
    print(f"{options.preset}: layers {', '.join(map(str, config.layer_ids))}, {config.hash_columns} heads each, "
          f"{total:,} rows of {config.embed_dim_per_head} x {str(dtype).removeprefix('torch.')}, "
          f"{size(sum(plans[0].table_bytes))}")
    print(f"{options.ranks} ranks of {options.tokens:,} tokens a step, {options.unique:.0%} of the row ids unique; "
          f"links {options.bandwidth:g} GB/s, {options.latency:g} us; memory {options.memory_bandwidth:g} GB/s\n")
    names = ("", *SHARDINGS)
    lines = {
        "table, largest rank": [size(max(p.table_bytes)) for p in plans],
        "optimizer state": [size(max(p.optimizer_bytes)) for p in plans],
        "rows, largest / mean": [f"{p.memory_balance:.3f}" for p in plans],
        "forward, a rank sends": [size(max(p.sent_forward)) for p in plans],
        "forward, receives": [size(max(p.received_forward)) for p in plans],
        "backward, sends": [size(max(p.sent_backward)) for p in plans],
        "backward, receives": [size(max(p.received_backward)) for p in plans],
        "busiest link / mean": [f"{p.traffic_balance:.3f}" for p in plans],
        "forward, expected": [f"{1e3 * p.forward_seconds:.3f} ms" for p in plans],
        "backward, expected": [f"{1e3 * p.backward_seconds:.3f} ms" for p in plans],
    }
    print(f"{names[0]:24}" + "".join(f"{name:>16}" for name in names[1:]))
    for name, values in lines.items():
        print(f"{name:24}" + "".join(f"{value:>16}" for value in values))
    return 0, {"config": config.to_dict(), "plans": [asdict(plan) for plan in plans]}


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
