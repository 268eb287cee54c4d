"""What a training step costs on a table: gradient alone, forward + backward + optimizer step, and their growth with it.

Shapes S2K and S32K: 2048 and 32768 tokens of 16 columns, 32 wide. The ways to step share one table where they can;
each has its own state. Float32 only, which all peers have.
"""
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import limits
from benchmarks.shapes import TABLES, Shape, config, make_table
from benchmarks.timing import Contender
from engram import nn, ops, optim

GRADIENT, FLATNESS = "gradient", "flatness"
RULES = {
    "sgd": (lambda p: optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1), "torch sparse", "EXACT_SGD"),
    "adagrad": (lambda p: optim.RowWiseAdagrad(p, 0.1), lambda p: torch.optim.Adagrad(p, 0.1), "torch sparse",
                "EXACT_ROWWISE_ADAGRAD"),
    "adam": (lambda p: optim.LazyAdamW(p, 0.1, weight_decay=0), lambda p: torch.optim.SparseAdam(p, 0.1), "SparseAdam",
             None),
}
FLAT_ROWS = (4_000_000, 10_000_000, 20_000_000)
DENSE_BYTES = TABLES["1GB"]  # of a dense gradient at most: two of them are alive at a time


def directions(device: str) -> tuple[str, ...]:
    """What is measured on a device; the plain gather that flatness is held against is a CPU loop."""
    return (GRADIENT, *RULES, *((FLATNESS,) if device == "cpu" else ()))


def _table(work, width: int, number: int) -> Tensor:
    if work.device == "cpu":
        return make_table(0, width, work.dtype, huge=False, rows=number)
    return torch.empty(number, width, dtype=work.dtype, device=work.device).uniform_(-1, 1)


def tables_of(direction: str, tables: tuple[str, ...]) -> tuple[str, ...]:
    """The tables a direction is measured on: Adam's moments, twice, are four more of them."""
    if direction == FLATNESS:
        return ("",)
    return tuple(table for table in tables if direction != "adam" or TABLES[table] <= TABLES["1GB"])


def build(direction: str) -> Callable:
    """What builds a work's contenders."""
    if direction == GRADIENT:
        return _gradient
    return _flatness if direction == FLATNESS else partial(_steps, rule=direction)


def _gradient(work, row_sets) -> Iterator[Contender]:
    settings = config(work.sizes, TABLES[work.table], work.dtype)
    width, number = settings.embed_dim_per_head, sum(nn.layer_moduli(settings, 1))
    shape, sets = (number, width), row_sets(work, settings)
    grad = torch.randn(*sets[0].shape, width, generator=torch.Generator().manual_seed(1)).to(work.device)

    def ours(rows):
        plan = ops.row_plan(rows, number)
        touched, sums = ops.row_sum(grad, *plan)
        return torch.sparse_coo_tensor(touched[None], sums, shape, check_invariants=False, is_coalesced=True)

    def theirs(rows):
        return torch.sparse_coo_tensor(rows.view(1, -1), grad.view(-1, width), shape,
                                       check_invariants=False).coalesce()

    def contender(name: str, function, compare=None) -> Contender:
        return Contender(name, lambda i: function(sets[i % len(sets)]), compare=compare)

    yield contender("ours", ours, lambda found: [found.values()])
    yield contender("torch sparse", theirs, lambda found: [found.values()])
    if number * width * 4 <= DENSE_BYTES * 1.1:
        yield contender("torch dense", lambda rows: torch.ops.aten.embedding_dense_backward(
            grad, rows, number, -1, False))


def _steps(work, row_sets, rule: str) -> Iterator[Contender]:
    settings = config(work.sizes, TABLES[work.table], work.dtype)
    width, number = settings.embed_dim_per_head, sum(nn.layer_moduli(settings, 1))
    weight = _table(work, width, number)
    sets = row_sets(work, settings)
    grad = torch.randn(*sets[0].shape, width, generator=torch.Generator().manual_seed(1)).to(work.device) / 1e3
    ours, theirs, group, fbgemm_rule = RULES[rule]

    def contender(name: str, lookup, make, group: str = "") -> Contender:
        parameter = torch.nn.Parameter(weight)                  # the same memory, a gradient of its own
        optimizer = make([parameter])

        def call(i):
            lookup(sets[i % len(sets)], parameter).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

        return Contender(name, call, group)

    yield contender("ours", lambda rows, w: ops.embedding(w, rows, sparse_grad=True), ours)
    yield contender(group, lambda rows, w: F.embedding(rows, w, sparse=True), theirs)
    for mode in ("SUM", "NONE") if work.device == "cpu" else ():
        table = fbgemm_table(weight, fbgemm_rule, mode) if fbgemm_rule else None
        if table is not None:
            offsets, flat = torch.arange(sets[0].numel() + 1), grad.view(-1, width)
            call = lambda i, t=table: t(sets[i % len(sets)].view(-1), offsets).backward(flat)         # noqa: E731
            yield Contender(f"FBGEMM, {mode}", call, "FBGEMM")


def _flatness(work, row_sets) -> Iterator[Contender]:
    shape, width = work.sizes, work.sizes.row_width
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(shape.count, shape.columns, width, generator=generator) / 1e3
    gathers = []
    for number in FLAT_ROWS:
        weight = torch.nn.Parameter(_table(work, width, number))
        optimizer = optim.RowWiseAdagrad([weight], 0.1)
        sets = [torch.randint(number, (shape.count, shape.columns), generator=generator) for _ in range(32)]

        def step(i, weight=weight, optimizer=optimizer, sets=sets):
            ops.embedding(weight, sets[i % len(sets)], sparse_grad=True).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

        millions = f"{number // 10**6} M rows"
        yield Contender("ours" if number == FLAT_ROWS[0] else f"ours, {millions}", step)
        out = torch.empty(shape.count, shape.columns, width)
        gathers.append(Contender(
            f"gather, {millions}", lambda i, w=weight.detach(), s=sets, o=out: limits.gather(w, s[i % len(s)], o)))
    if limits.loops() is not None:
        yield from gathers


def fbgemm_table(table: Tensor, rule: str, mode: str, dtype: torch.dtype = torch.float32):
    """FBGEMM's CPU table over a copy of these rows, one output row per id; None where the package is missing."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen,
        )
    except (ImportError, OSError):
        return None
    if dtype != torch.float32:
        return None                 # the CPU table holds float32 and float16
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(*table.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType[rule],
        learning_rate=0.1, eps=1e-10, pooling_mode=PoolingMode[mode], weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32, device=torch.device("cpu"),
    )
    module.split_embedding_weights()[0].copy_(table)
    return module
