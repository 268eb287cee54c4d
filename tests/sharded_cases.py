"""What the ranks of tests/test_distributed.py do: each function is called on every rank of a group, with the same
options, and checks its own rank's part against the unsharded module."""
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engram import EngramConfig, distributed, nn, ops, optim
from engram.distributed import ShardedMultiHeadEmbedding
from torch import Tensor

PREFETCH_GROUPS = {}    # another group of the same ranks, by group


def draw_rows(sizes, tokens: int, generator: torch.Generator, hot: bool, dtype=torch.int64) -> Tensor:
    """Rows [1, tokens, C] in the heads of their columns; hot: few of them, so many repeats."""
    begins = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    high = torch.tensor(sizes).clamp(max=3) if hot else torch.tensor(sizes)
    draw = torch.rand(1, tokens, len(sizes), generator=generator, dtype=torch.float64)
    return ((draw * high).long().clamp(max=high - 1) + begins).to(dtype)


def lookup(group, *, cases: list[dict[str, Any]]) -> int:
    for number, case in enumerate(cases):
        try:
            one_lookup(group, **case)
        except Exception as error:
            raise AssertionError(f"case {number}: {case}") from error
    return len(cases)


def one_lookup(
    group, *, sizes, dim, sharding, tokens, splits=None, dtype=torch.float32, sparse=False, equal=False, masked=False,
    hot=False, scale=1.0, seed=0, index=torch.int64, prefetch=False,
) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    whole = nn.MultiHeadEmbedding(sizes, dim, std=0.5, dtype=dtype)
    after = torch.rand(())
    torch.manual_seed(seed)
    mine = ShardedMultiHeadEmbedding(
        sizes, dim, group=group, sharding=sharding, splits=splits, sparse=sparse, equal_tokens=equal,
        gradient_scale=scale, std=0.5, dtype=dtype,
        prefetch_group=PREFETCH_GROUPS[group])
    assert torch.equal(after, torch.rand(()))
    pieces = mine.layout.of_rank(rank)
    rows_here = torch.cat([torch.arange(p.begin, p.end) for p in pieces] or [torch.arange(0)])
    assert torch.equal(mine.weight, whole.weight[rows_here])

    generator = torch.Generator().manual_seed(seed)
    lookups = []
    for count in tokens[:world]:
        rows = draw_rows(sizes, count, generator, hot, index)
        if not equal:       # any row may stand in any column then
            rows = rows.flatten()[torch.randperm(rows.numel(), generator=generator)].view(rows.shape)
        mask = torch.rand(1, count, generator=generator) < 0.6 if masked else None
        if mask is not None:
            rows[~mask] = torch.iinfo(index).max        # never read
        values = torch.randn(*rows.shape, dim, generator=generator)
        lookups.append((rows, mask, values))
    rows, mask, values = lookups[rank]
    for exact in (True, False):     # small integers: sums are exact, so their order does not show
        whole.weight.grad = None
        if prefetch:
            mine.prefetch(rows, mask)
        out, expected = mine(rows, mask), whole(rows, mask)
        assert out.dtype == dtype and torch.equal(out, expected)
        grad, = torch.autograd.grad(out, mine.weight, (values.mul(4).round() if exact else values).to(dtype))
        every = torch.cat([r.flatten(0, 1) for r, _, _ in lookups])
        seen = None if mask is None else torch.cat([m.flatten() for _, m, _ in lookups])
        grads = torch.cat([v.flatten(0, 1) for _, _, v in lookups])
        whole(every, seen).backward((grads.mul(4).round() if exact else grads).to(dtype))
        assert grad.dtype == dtype and grad.shape == mine.weight.shape
        if sparse:
            assert grad.layout == torch.sparse_coo and grad.is_coalesced()
            assert bool((grad.indices()[0].diff() > 0).all())
            read = every.long() if seen is None else every[seen].long()
            assert torch.equal(grad.indices()[0], torch.isin(rows_here, read).nonzero()[:, 0])
            grad = grad.to_dense()
        wanted = whole.weight.grad[rows_here] * scale
        if exact or (world == 1 and scale == 1):
            assert torch.equal(grad, wanted)
        else:
            tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 2e-2)
            assert (grad.double() - wanted.double()).norm() <= tolerance * wanted.double().norm()


def raises(kind, text: str, function, *args, **options) -> None:
    try:
        function(*args, **options)
    except kind as error:
        assert text in str(error), f"{error} does not say {text!r}"
    else:
        raise AssertionError(f"{function} did not raise {kind.__name__}")


def refusals(group) -> None:
    """Errors that every rank sees, so that the group goes on working afterwards."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    def make(sizes=(5, 7), dim=4, **options):
        return ShardedMultiHeadEmbedding(sizes, dim, group=group, **options)

    raises(ValueError, "all ranks must have the same sizes, got (5, 7) on rank 0 and (5, 9) on rank 1", make,
           (5, 7 if rank == 0 else 9))
    raises(ValueError, "all ranks must have the same sharding", make, sharding="rows" if rank else "heads")
    raises(ValueError, "all ranks must have the same dtype", make, dtype=torch.float32 if rank else torch.bfloat16)
    raises(ValueError, "all ranks must have the same dim", make, dim=0 if rank else 3)      # wrong on one rank only
    raises(ValueError, "needs sizes >= 1 and dim >= 1, got [5, 0] and 4", make, (5, 0))
    raises(ValueError, "sharding must be one of rows, heads, strided-heads, got 'columns'", make, sharding="columns")
    raises(ValueError, f"splits must be {world} numbers that add up to the 12 rows", make, splits=[1] * world)
    raises(ValueError, f"splits must be {world} numbers that add up to the 2 heads", make, sharding="heads", splits=[0] * world)
    raises(ValueError, "splits must be None for strided-heads", make, sharding="strided-heads", splits=[1] * world)
    raises(ValueError, "prefetch_group must be another group", make, prefetch_group=group)

    table, rows = make(), torch.tensor([[1, 6]])
    for wrong in (rows[:, :1], rows.float(), torch.tensor(1)):
        raises(ValueError, "rows must be int32 or int64 [..., 2], got ", table, wrong)
    raises(ValueError, "mask must be bool [1], got ", table, rows, torch.ones(2, dtype=torch.bool))
    raises(ValueError, "rows must be on cpu like weight, got meta", table, rows.to("meta"))
    raises(ValueError, "plan must be None", table, rows, None, ops.row_plan(rows, 12))
    raises(IndexError, "rows must be in [0, 12)", table, rows + 6)
    raises(RuntimeError, "weight is on the meta device", make(device="meta"), rows)
    raises(RuntimeError, "weight is on the meta device", make(device="meta").load_full_weight, torch.zeros(12, 4))
    raises(ValueError, "source must be [12, 4], got ", table.load_full_weight, torch.zeros(11, 4))
    raises(ValueError, "prefetch needs a prefetch_group", table.prefetch, rows)
    heads = make(sharding="heads", equal_tokens=True)
    raises(IndexError, "rows of column 0 must be in [0, 5), its head, got 5", heads, torch.tensor([[5, 6]]))
    assert torch.equal(heads(torch.tensor([[4, 6]])), table.__class__.forward(heads, torch.tensor([[4, 6]])))
    os.environ["ENGRAM_DEBUG"] = "1"
    raises(ValueError, "all ranks must have the same tokens, got 1 on rank 0 and 2 on rank 1", heads,
           torch.tensor([[1, 6]] * (1 + (rank > 0))))
    del os.environ["ENGRAM_DEBUG"]


def prefetch_misuse(group) -> None:
    table = ShardedMultiHeadEmbedding([5, 7], 4, group=group, prefetch_group=PREFETCH_GROUPS[group])
    rows = torch.tensor([[1, 6], [2, 7]])
    expected = table(rows)
    table.prefetch(rows)
    raises(RuntimeError, "the last one was not used", table.prefetch, rows)
    assert torch.equal(table(rows.clone()), expected)       # equal rows will do
    table.prefetch(rows)
    raises(RuntimeError, "rows must be what was prefetched", table, rows.flip(0))
    table.prefetch(rows, torch.tensor([True, False]))
    raises(RuntimeError, "mask must be what was prefetched", table, rows)
    assert torch.equal(table(rows), expected)               # a refused lookup is forgotten
    table.prefetch(rows)
    with torch.no_grad():
        table.weight.mul_(2)
    raises(RuntimeError, "weight has changed since", table, rows)
    table.prefetch(rows)
    table.discard_prefetched()
    assert torch.equal(table(rows), 2 * expected)
    table.prefetch(rows + 9)                                # an error on the thread arrives with the forward
    raises(IndexError, "rows must be in [0, 12)", table, rows + 9)
    assert torch.equal(table(rows), 2 * expected)


def full_weights(group, *, folder: str) -> None:
    from safetensors.torch import save_file

    rank = dist.get_rank(group)
    full = torch.randn(23, 6, generator=torch.Generator().manual_seed(3))
    path = Path(folder) / f"table-{rank}.safetensors"
    save_file({"table": full, "other": torch.zeros(2, 2), "twice": full.T.contiguous()}, path)
    for sharding in ("rows", "heads", "strided-heads"):
        for source in (full, path, str(path)):
            table = ShardedMultiHeadEmbedding([4, 8, 11], 6, group=group, sharding=sharding, device="meta")
            assert table.weight.is_meta
            table.to_empty(device="cpu")
            table.load_full_weight(source)
            rows_here = torch.cat([torch.arange(p.begin, p.end) for p in table.layout.of_rank(rank)] or [torch.arange(0)])
            assert torch.equal(table.weight, full[rows_here])
            table.load_full_weight(full.double() + 1)
            assert torch.equal(table.weight, full[rows_here] + 1)
            table.load_state_dict({"weight": full})         # a state dict of the unsharded module
            assert torch.equal(table.weight, full[rows_here])
            table.load_state_dict(table.state_dict())
            assert torch.equal(table.weight, full[rows_here])
            raises(RuntimeError, "weight must have 23 rows", table.load_state_dict, {"weight": full[:-1]})
    raises(ValueError, "must have one tensor of shape [23, 6], got ", table.load_full_weight, save_twice(full, path))
    table.load_full_weight(path, "b")
    raises(ValueError, "must have c of shape [23, 6], got ", table.load_full_weight, path, "c")


def save_twice(full: Tensor, path: Path) -> Path:
    from safetensors.torch import save_file

    save_file({"a": full, "b": full + 1}, path)
    return path


def memory_from_meta(group, *, folder: str) -> int:
    """Bytes of memory at its peak, beyond what was there, for a shard of a table in a file: from meta to loaded."""
    from safetensors.torch import save_file

    rank, world, rows, dim = dist.get_rank(group), dist.get_world_size(group), 1 << 19, 64
    path = Path(folder) / "table.safetensors"
    if rank == 0:
        whole = torch.arange(rows, dtype=torch.float32)[:, None].repeat(1, dim)
        save_file({"weight": whole}, path)
        del whole
    dist.barrier(group)
    Path("/proc/self/clear_refs").write_text("5")       # starts the peak anew
    before = status("VmHWM")
    table = ShardedMultiHeadEmbedding([rows // 2] * 2, dim, group=group, device="meta")
    table.to_empty(device="cpu")
    table.load_full_weight(path)
    taken = status("VmHWM") - before
    assert torch.equal(table.weight[:, 0], torch.arange(rows * rank // world, rows * (rank + 1) // world).float())
    return taken


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
