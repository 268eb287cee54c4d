"""What the ranks of tests/test_distributed.py do: each function is called on every rank of a group, with the same
options, and checks its own rank's part against the unsharded module."""
import copy
import os
import pickle
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engram import EngramConfig, distributed, nn, ops, optim
from engram.distributed import ShardedMultiHeadEmbedding, ShardedQuantizedMultiHeadEmbedding
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
    hot=False, scale=1.0, seed=0, index=torch.int64, prefetch=False, multiple=1, format=None,
) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    whole = nn.MultiHeadEmbedding(sizes, dim, std=0.5, row_multiple=multiple, dtype=dtype)
    after = torch.rand(())
    torch.manual_seed(seed)
    mine = ShardedMultiHeadEmbedding(
        sizes, dim, group=group, sharding=sharding, splits=splits, sparse=sparse, equal_tokens=equal,
        gradient_scale=scale, std=0.5, row_multiple=multiple, dtype=dtype,
        prefetch_group=PREFETCH_GROUPS[group])
    assert torch.equal(after, torch.rand(()))
    rows_here = own_rows(mine)
    assert torch.equal(mine.weight, whole.weight[rows_here])
    lookups = draw_lookups(dim, sizes, tokens[:world], equal, masked, hot, seed, index)
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


def own_rows(table: distributed.table.ShardedTable) -> Tensor:
    pieces = table.layout.of_rank(table.peers.rank)
    return torch.cat([torch.arange(p.begin, p.end) for p in pieces] or [torch.arange(0)])


def draw_lookups(dim, sizes, tokens, equal, masked, hot, seed, index) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Rows, mask and a gradient for each rank; rows are not contiguous where there are several columns."""
    generator = torch.Generator().manual_seed(seed)
    lookups = []
    for count in tokens:
        rows = draw_rows(sizes, count, generator, hot, index)
        if not equal:       # any row may stand in any column then
            rows = rows.flatten()[torch.randperm(rows.numel(), generator=generator)].view(rows.shape)
        mask = torch.rand(1, count, generator=generator) < 0.6 if masked else None
        if mask is not None:
            rows[~mask] = torch.iinfo(index).max        # never read
        values = torch.randn(*rows.shape, dim, generator=generator)
        lookups.append((rows.transpose(1, 2).contiguous().transpose(1, 2), mask, values))
    return lookups


def quantized_lookup(group, *, cases: list[dict[str, Any]]) -> int:
    for number, case in enumerate(cases):
        try:
            one_quantized_lookup(group, **case)
        except Exception as error:
            raise AssertionError(f"case {number}: {case}") from error
    return len(cases)


def one_quantized_lookup(
    group, *, sizes, dim, sharding, tokens, splits, dtype, equal, masked, hot, seed, index, prefetch, multiple, format,
    sparse, scale,
) -> None:
    """Without `sparse` and `scale`, which are about gradients."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    kind = dict(format=format, out_dtype=dtype, row_multiple=multiple)
    whole = random_table(nn.QuantizedMultiHeadEmbedding(sizes, dim, **kind), seed)
    mine = ShardedQuantizedMultiHeadEmbedding(
        sizes, dim, group=group, sharding=sharding, splits=splits, equal_tokens=equal,
        prefetch_group=PREFETCH_GROUPS[group], **kind)
    assert not mine.values.view(torch.uint8).any() and not mine.scales.view(torch.uint8).any()
    mine.load_full_table((whole.values, whole.scales))
    same_bytes(mine, whole)
    lookups = draw_lookups(1, sizes, tokens[:world], equal, masked, hot, seed, index)
    rows, mask, _ = lookups[rank]
    if prefetch:
        mine.prefetch(rows, mask)
    out, expected = mine(rows, mask), whole(rows, mask)
    assert out.dtype == dtype and out.shape == expected.shape and not out.requires_grad
    assert out.view(torch.uint8).equal(expected.view(torch.uint8))      # NaN included
    if equal and sharding != "rows":
        heads = [len(heads) for heads in mine.layout.heads]
        per_row = dim + (-(-dim // 32) if format == "fp8" else 4)
        away = tokens[0] * (len(sizes) - heads[rank]) * 4 + (world - 1) * tokens[0] * heads[rank] * per_row
        assert mine.peers.bytes_sent == away


def random_table(whole: nn.QuantizedMultiHeadEmbedding, seed: int) -> nn.QuantizedMultiHeadEmbedding:
    """Any bytes at all as values, and as E8M0 scales; float32 scales are numbers."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in (whole.values, whole.scales):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(256, raw.shape, generator=generator, dtype=torch.uint8))
    if whole.format == "int8":
        whole.scales.normal_(generator=generator)
    return whole


def same_bytes(mine: ShardedQuantizedMultiHeadEmbedding, whole: nn.QuantizedMultiHeadEmbedding) -> None:
    here = own_rows(mine)
    for name in ("values", "scales"):
        own, full = (getattr(table, name) for table in (mine, whole))
        assert own.dtype == full.dtype and own.contiguous().view(torch.uint8).equal(full[here].view(torch.uint8)), name


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
    raises(ValueError, "needs sizes, dim and row_multiple >= 1, got [5, 0], 4 and 1", make, (5, 0))
    raises(ValueError, "all ranks must have the same sizes, got (5, 7) on rank 0 and (5, 'x') on rank 1", make,
           (5, 7) if rank == 0 else (5, "x"))
    raises(TypeError, "'NoneType' object is not iterable", make, None)
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
    raises(ValueError, "source must be [12, 4], float64, ", table.load_full_weight, torch.zeros(11, 4))
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
            rows_here = own_rows(table)
            assert torch.equal(table.weight, full[rows_here])
            table.load_full_weight(full.double() + 1)
            assert torch.equal(table.weight, full[rows_here] + 1)
            table.load_state_dict({"weight": full})         # a state dict of the unsharded module
            assert torch.equal(table.weight, full[rows_here])
            table.load_state_dict(table.state_dict())
            assert torch.equal(table.weight, full[rows_here])
            raises(RuntimeError, "weight must have 23 rows", table.load_state_dict, {"weight": full[:-1]})
            table.load_state_dict({"weight": full}, assign=True)
            assert torch.equal(table.weight, full[rows_here])
            assert table.weight.untyped_storage().nbytes() == table.weight.nbytes       # not a view of the whole
    raises(ValueError, "source must be [23, 6], float64, ", table.load_full_weight, full.long())
    raises(ValueError, "must have one tensor for weight of shape [23, 6], ", table.load_full_weight, save_twice(full, path))
    table.load_full_weight(path, "b")
    raises(ValueError, "must have c of shape [23, 6], ", table.load_full_weight, path, "c")


def save_twice(full: Tensor, path: Path) -> Path:
    from safetensors.torch import save_file

    save_file({"a": full, "b": full + 1}, path)
    return path


def full_tables(group, *, folder: str, format: str) -> None:
    """Every way for the rows of a quantised table to come in: tensors, files, floats, state dicts."""
    from safetensors.torch import save_file

    sizes, dim, rank = [4, 8, 11], 40, dist.get_rank(group)
    whole = random_table(nn.QuantizedMultiHeadEmbedding(sizes, dim, format=format, row_multiple=8), 3)
    assert len(whole.values) == 24
    tensors = {"layer.embed.weight": whole.values, "layer.embed.scale": whole.scales, "other": torch.zeros(24, dim)}
    path = Path(folder) / f"{format}-{rank}.safetensors"
    save_file(tensors, path)
    names = ("layer.embed.weight", "layer.embed.scale")
    for sharding in ("rows", "heads", "strided-heads"):
        def make(**options):
            return ShardedQuantizedMultiHeadEmbedding(
                sizes, dim, format=format, row_multiple=8, group=group, sharding=sharding, **options)

        for source, given in (((whole.values, whole.scales), None), (path, None), (str(path), names)):
            table = make(device="meta").to_empty(device="cpu")
            table.reset_parameters()
            assert not table.values.view(torch.uint8).any() and not table.scales.view(torch.uint8).any()
            table.load_full_table(source, given)
            same_bytes(table, whole)
        for state in (whole.state_dict(), table.state_dict()):
            for assign in (False, True):
                other = make()
                other.load_state_dict(state, assign=assign)
                same_bytes(other, whole)
        table.half()
        same_bytes(copy.deepcopy(table), whole)
        floats = torch.randn(24, dim, generator=torch.Generator().manual_seed(4))
        quantised = nn.QuantizedMultiHeadEmbedding(sizes, dim, format=format, row_multiple=8)
        quantised.load_float_rows(0, floats)
        table.load_float_rows(0, floats[:10])
        table.load_float_rows(10, floats[10:])
        same_bytes(table, quantised)
    kind = str(whole.values.dtype)
    raises(ValueError, f"values must be {kind} [24, 40], got ", table.load_full_table, (whole.values[1:], whole.scales))
    raises(ValueError, "scales must be torch.float", table.load_full_table, (whole.values, whole.values))
    raises(ValueError, "must have other of shape [24, 40], ", table.load_full_table, path, ("other", names[1]))
    raises(ValueError, "rows must lie within [0, 24), got [20, 44)", table.load_float_rows, 20, floats)
    raises(RuntimeError, "values must have 24 rows, got [23, 40]", table.load_state_dict,
           {"values": whole.values[1:], "scales": whole.scales})
    raises(RuntimeError, "values: must be", table.load_state_dict, {"values": floats, "scales": whole.scales})
    raises(RuntimeError, 'Missing key(s) in state_dict: "scales"', table.load_state_dict, {"values": quantised.values})
    save_file(tensors | {"again": whole.values.view(torch.uint8).clone().view(whole.values.dtype)}, path)
    raises(ValueError, "must have one tensor for values of shape [24, 40], ", table.load_full_table, path)
    same_bytes(table, quantised)
    raises(FileNotFoundError, "no file at", table.load_full_table, Path(folder) / "none.safetensors")
    meta = make(device="meta")
    raises(RuntimeError, "values is on the meta device", meta.load_full_table, path)
    raises(RuntimeError, "values is on the meta device", meta, torch.zeros(1, 3, dtype=torch.int64))
    raises(ValueError, "format must be 'fp8' or 'int8', got 'fp4'", ShardedQuantizedMultiHeadEmbedding, sizes, dim,
           format="fp4", group=group)
    raises(ValueError, "out_dtype must be float64, ", ShardedQuantizedMultiHeadEmbedding, sizes, dim, format=format,
           out_dtype=torch.int8, group=group)
    if dist.get_world_size(group) > 1:
        raises(ValueError, "all ranks must have the same format, got 'fp8' on rank 0 and 'int8' on rank 1",
               ShardedQuantizedMultiHeadEmbedding, sizes, dim, format="int8" if rank else "fp8", group=group)


def quantized_memory_from_meta(group, *, folder: str) -> int:
    """As `memory_from_meta`, values and scales."""
    from safetensors.torch import save_file

    rank, rows, dim = dist.get_rank(group), 1 << 19, 256
    path = Path(folder) / "quantized.safetensors"
    if rank == 0:
        save_file({"v": torch.ones(rows, dim).to(torch.float8_e4m3fn), "s": torch.ones(rows, 8).to(torch.float8_e8m0fnu)}, path)
    dist.barrier(group)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmHWM")
    table = ShardedQuantizedMultiHeadEmbedding([rows // 2] * 2, dim, format="fp8", group=group, device="meta")
    table.to_empty(device="cpu")
    table.load_full_table(path)
    taken = status("VmHWM") - before
    assert bool((table(torch.full((1, 2), rows - 1)) == 1).all())
    return taken


def full_size(group) -> tuple[int, int]:
    """Both layers of DeepSeek-V4.1-Flash on meta, spread: bytes of the tables here, and of memory that was taken."""
    before = status("VmRSS")
    config = EngramConfig.preset("deepseek-v4.1-flash")
    layers = torch.nn.ModuleList(
        nn.Engram(config, layer, device="meta", dtype=torch.bfloat16) for layer in config.layer_ids)
    distributed.shard_tables(layers, group, sharding="strided-heads")
    assert all(isinstance(layer.embedding, ShardedQuantizedMultiHeadEmbedding) for layer in layers)
    state = layers.state_dict()
    assert state["0.embedding.values"].shape == (384_006_168, 256) and state["1.embedding.scales"].shape[1] == 8
    tables = [tensor for layer in layers for tensor in layer.embedding.buffers()]
    assert all(tensor.is_meta for tensor in tables)
    return sum(tensor.nbytes for tensor in tables), status("VmRSS") - before


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


CONFIG = EngramConfig(
    hidden_size=8, vocab_size=50, layer_ids=(0, 2), max_ngram_size=3, heads_per_ngram=2, embed_dim_per_head=4,
    table_size=40, conv_init="default", sparse_grad=True, pad_id=0)


class Model(torch.nn.Module):
    """Two Engram layers around a projection, in float64, where the order of sums is far below what is compared."""

    def __init__(self, device=None, sparse: bool = True, **fields: Any) -> None:
        super().__init__()
        config = EngramConfig.from_dict(CONFIG.to_dict() | dict(sparse_grad=sparse) | fields)
        like = dict(device=device, dtype=torch.float64)
        self.first, self.second = nn.Engram(config, 0, **like), nn.Engram(config, 2, **like)
        self.middle, self.head = torch.nn.Linear(8, 8, **like), torch.nn.Linear(8, 3, **like)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = torch.nn.functional.one_hot(token_ids % 8, 8).double()
        hidden = hidden + self.first(hidden, token_ids)
        hidden = torch.tanh(self.middle(hidden))
        hidden = hidden + self.second(hidden, token_ids)
        return self.head(hidden)


def optimizers(model, kind: str = "RowWiseAdam") -> list[torch.optim.Optimizer]:
    tables = [m.weight for m in model.modules() if isinstance(m, nn.MultiHeadEmbedding)]
    own = {id(table) for table in tables}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in own], lr=1e-2, foreach=False)
    if kind == "AdamW":
        return [rest, torch.optim.AdamW(tables, lr=1e-2, foreach=False)]
    return [rest, getattr(optim, kind)(tables, lr=1e-2)]


def same_rows(table: ShardedMultiHeadEmbedding, mine: Tensor, whole: Tensor, rank: int, tolerance: float) -> None:
    for piece in table.layout.of_rank(rank):
        found, wanted = mine[piece.local : piece.local + piece.end - piece.begin], whole[piece.begin : piece.end]
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance), (found - wanted).abs().max()


def training(group, *, beside: str, loss: str, sharding: str = "rows", optimizer: str = "RowWiseAdam", steps: int = 20) -> None:
    """As many steps with sharded tables, data-parallel, as one process makes with all the data."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(5)
    whole = Model(sparse=optimizer != "AdamW")
    torch.manual_seed(5)
    model = Model(sparse=optimizer != "AdamW")
    # DDP and FSDP average; where all ranks see the same tokens (beside "tensor") each brings the whole gradient.
    scale = 1.0 if beside == "nothing" else 1 / world
    assert distributed.shard_tables(model, group, sharding=sharding, gradient_scale=scale) is model
    tables = distributed.sharded_parameters(model)
    assert len(tables) == 2 and all(len(table) < 200 or world == 1 for table in tables)
    module = model
    if beside == "ddp":
        module = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        assert {"first.embedding.weight", "second.embedding.weight"} <= module.parameters_to_ignore
    elif beside == "fsdp":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), ignored_params=set(tables))
    elif beside == "tensor":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, parallel

        whole_in = dict(input_layouts=Replicate())
        parallel.parallelize_module(model, DeviceMesh.from_group(group, "cpu"), {
            "middle": parallel.ColwiseParallel(output_layouts=Replicate()),
            "head": parallel.RowwiseParallel(**whole_in)})
    theirs, mine = optimizers(whole, optimizer), optimizers(model, optimizer)
    for step in range(steps):
        batch = torch.randint(50, (4 * world, 5), generator=torch.Generator().manual_seed(step))
        part = batch if beside == "tensor" else batch[4 * rank : 4 * rank + 4]
        total = whole(batch).square().mean() if loss == "mean" else whole(batch).square().sum()
        out = module(part).square()
        own = out.mean() if loss == "mean" else out.sum()
        if beside == "nothing" and loss == "mean":
            own = own / world
        if beside in ("ddp", "fsdp") and loss == "sum":
            own = own * world
        for optimizer_ in theirs + mine:
            optimizer_.zero_grad()
        total.backward()
        own.backward()
        if beside == "nothing":
            sharded = {id(table) for table in tables}
            distributed.model.reduce_gradients([p for p in model.parameters() if id(p) not in sharded],
                                               model.first.embedding.peers)
        if beside in ("nothing", "ddp", "fsdp"):
            norm = optim.clip_grad_norm_(whole.parameters(), 0.5)
            assert torch.allclose(norm.float(), distributed.clip_grad_norm_(model, 0.5), rtol=1e-5)
        for optimizer_ in theirs + mine:
            optimizer_.step()
    for name, layer in (("first", model.first), ("second", model.second)):
        same_rows(layer.embedding, layer.embedding.weight, getattr(whole, name).embedding.weight, rank, 1e-9)
    head = model.head.weight
    head = head.full_tensor() if hasattr(head, "full_tensor") else head
    assert torch.allclose(head, whole.head.weight, rtol=1e-9, atol=1e-9)


def swapped(group) -> None:
    """What shard_tables does to a model: shared tables stay shared, frozen ones frozen, meta ones on meta."""
    rank = dist.get_rank(group)
    model = Model()
    model.second.embedding = model.first.embedding
    model.first.embedding.weight.requires_grad_(False)
    whole = model.first.embedding.weight.clone()
    model.eval()
    distributed.shard_tables(model, group, sharding="strided-heads")
    table = model.first.embedding
    assert table is model.second.embedding and isinstance(table, ShardedMultiHeadEmbedding)
    assert not table.weight.requires_grad and not table.training and table.sparse and table.weight.dtype == torch.float64
    same_rows(table, table.weight, whole, rank, 0.0)
    assert sorted(model._ddp_params_and_buffers_to_ignore) == ["first.embedding.weight", "second.embedding.weight"]
    distributed.shard_tables(model, group)      # nothing is left to do
    assert model.first.embedding is table and distributed.sharded_parameters(model) == [table.weight]
    raises(RuntimeError, "this one is spread over ranks", model.first.to_reference_state_dict)
    meta = distributed.shard_tables(Model("meta"), group)
    assert all(table.is_meta for table in distributed.sharded_parameters(meta))
    raises(ValueError, "model must contain the tables, got a table", distributed.shard_tables, table, group)
    raises(ValueError, "all ranks must have the same tables", distributed.shard_tables,
           Model() if rank == 0 else torch.nn.Sequential(Model()), group)
    groups = optim.param_groups(model.requires_grad_(), 1e-3, 0.1)
    assert [id(p) for p in groups[1]["params"]] == [id(table.weight)]

    two = torch.nn.Module()     # one table under two names, and rows at its end that no head has
    two.one = two.other = nn.MultiHeadEmbedding([5, 7], 4, row_multiple=8)
    two.frozen = random_table(nn.QuantizedMultiHeadEmbedding([5, 7], 4, format="int8", row_multiple=16), 0)
    whole, frozen = two.one.weight.detach().clone(), two.frozen
    distributed.shard_tables(two, group, sharding="heads")
    assert two.one is two.other and isinstance(two.one, ShardedMultiHeadEmbedding) and two.one.layout.rows == 16
    same_rows(two.one, two.one.weight, whole, rank, 0.0)
    same_bytes(two.frozen, frozen)
    assert sorted(two._ddp_params_and_buffers_to_ignore) == [
        "frozen.scales", "frozen.values", "one.weight", "other.weight"]
    raises(ValueError, "model must contain the tables, got a table", distributed.shard_tables, frozen, group)


def refused_by_one(group) -> None:
    """What rank 1 refuses is an error on all, at once, here and ahead; afterwards they go on."""
    rank, good = dist.get_rank(group), torch.tensor([[1, 6]])
    like = dict(group=group, prefetch_group=PREFETCH_GROUPS[group])
    quantized = ShardedQuantizedMultiHeadEmbedding([5, 7], 4, format="int8", **like)
    quantized.load_float_rows(0, torch.randn(12, 4, generator=torch.Generator().manual_seed(0)))
    for table in (ShardedMultiHeadEmbedding([5, 7], 4, **like), quantized):
        expected = table(good)
        for wrong, kind in ((good + 6, IndexError), (good.float(), ValueError), (good[:, :1], ValueError),
                            (good.to("meta"), ValueError), ("rows", AttributeError)):
            for ahead in (False, True):
                def call():
                    rows = wrong if rank == 1 else good
                    if ahead:
                        table.prefetch(rows)
                    table(rows)

                raises(*(kind, "") if rank == 1 else (RuntimeError, "rank 1 has refused its part of a lookup"), call)
                assert torch.equal(table(good), expected)


def lanes(group) -> None:
    """Tables of one group prefetch in one thread and one further group, which has the timeout of the first."""
    from crew import SECONDS

    peers = distributed.peers
    tables = [ShardedMultiHeadEmbedding([5, 7], 4, sharding=sharding) for sharding in ("rows", "heads") for _ in range(3)]
    rows = torch.tensor([[1, 6], [4, 11]])
    expected = [table(rows) for table in tables]
    threads = threading.active_count()
    for _ in range(10):
        for table in tables:
            table.prefetch(rows)
        for table, wanted in reversed(list(zip(tables, expected))):
            assert torch.equal(table(rows), wanted)
    named = [thread for thread in threading.enumerate() if thread.name.startswith("engram-prefetch")]
    assert len(named) <= len(peers._LANES) and threading.active_count() <= threads + 1
    sides = {table.peers._side.group for table in tables}
    assert len(sides) == 1 and peers._timeout(sides.pop()) == timedelta(seconds=SECONDS)
    assert peers._timeout(group) != timedelta(seconds=SECONDS)  # new_group's own default: what would be waited for else


def copies(group) -> None:
    """A copy has not prefetched; a pickle is refused. Neither inference mode nor accumulation changes anything."""
    rows = torch.tensor([[1, 6], [4, 11]])
    like = dict(group=group, prefetch_group=PREFETCH_GROUPS[group])
    table = ShardedMultiHeadEmbedding([5, 7], 4, **like)
    with torch.inference_mode():
        first = table(rows)
        inside = ShardedQuantizedMultiHeadEmbedding([5, 7], 4, format="fp8", **like)
        inside.prefetch(rows)
        assert not inside(rows).any()
    expected = table(rows)
    assert torch.equal(first, expected) and expected.requires_grad
    table.prefetch(rows)
    another = copy.deepcopy(table)
    assert torch.equal(another(rows), expected) and another.peers is table.peers
    assert torch.equal(table(rows), expected) and table._prefetched is None
    raises(TypeError, "cannot be pickled; save its state_dict()", pickle.dumps, table)
    for sparse in (False, True):
        whole = nn.MultiHeadEmbedding([5, 7], 4)
        table = ShardedMultiHeadEmbedding([5, 7], 4, sparse=sparse, **like)
        for _ in range(2):                                      # as many as the ranks together
            for module, times in ((whole, dist.get_world_size(group)), (table, 1)):
                for _ in range(times):
                    (2 * module(rows).sum() + module(rows.flip(0)[:1]).sum()).backward()
        assert torch.equal(table.weight.grad.to_dense(), whole.weight.grad[own_rows(table)])


def shared_and_discarded(group) -> None:
    """Prefetch of layers that share a table; lookups that are given up."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: nn.Engram(CONFIG, 0) for name in "ab"})
    model["b"].embedding = model["a"].embedding
    distributed.shard_tables(model, group, prefetch_group=PREFETCH_GROUPS[group])
    hidden, tokens = torch.randn(1, 5, 8), torch.randint(50, (1, 5))
    expected = [layer(hidden, tokens) for layer in model.values()]
    for given_up in (True, False):
        distributed.prefetch(model, tokens)
        if given_up:
            raises(RuntimeError, "the last one was not used", distributed.prefetch, model, tokens)
            distributed.discard_prefetched(model)
    assert all(torch.equal(layer(hidden, tokens), wanted) for layer, wanted in zip(model.values(), expected))
    table = model["a"].embedding
    table.prefetch(torch.full((1, 4), table.layout.rows))       # an error that nobody is told of
    distributed.discard_prefetched(model)
    assert all(torch.equal(layer(hidden, tokens), wanted) for layer, wanted in zip(model.values(), expected))


def clipped(group) -> None:
    """What is not finite comes out as from engram.optim, on whichever rank it is."""
    for bad in (float("inf"), float("nan")):
        whole = nn.MultiHeadEmbedding([5, 7], 2)
        table = ShardedMultiHeadEmbedding([5, 7], 2, group=group)
        here = own_rows(table)
        whole.weight.grad = torch.arange(24.0).view(12, 2)
        whole.weight.grad[11, 1] = bad
        table.weight.grad = whole.weight.grad[here].clone()
        norms = [optim.clip_grad_norm_(whole.weight, 1.0), distributed.clip_grad_norm_(table, 1.0)]
        for one, other in ((whole.weight.grad[here], table.weight.grad), norms):
            assert torch.allclose(one, other, equal_nan=True)


def frozen(group, *, beside: str) -> None:
    """A model with quantised tables, alone and beside data parallelism, which leaves the buffers of each rank alone."""
    for dtype in (torch.float8_e4m3fn, torch.int8):
        torch.manual_seed(5)
        whole = Model(sparse=False, table_dtype=dtype)
        for layer in (whole.first, whole.second):
            layer.embedding.load_float_rows(0, torch.randn(len(layer.embedding.values), 4))
        model = copy.deepcopy(whole)
        distributed.shard_tables(model, group, sharding="strided-heads", prefetch_group=PREFETCH_GROUPS[group])
        assert distributed.sharded_parameters(model) == [] and sum(p.numel() for p in model.parameters()) > 0
        module = model
        if beside == "ddp":
            module = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        elif beside == "fsdp":
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        for step in range(2):
            tokens = torch.randint(50, (2, 3 + dist.get_rank(group)))
            if step:
                distributed.prefetch(model, tokens)
            out = module(tokens)
            assert torch.equal(out, whole(tokens)) and out.any()
            out.sum().backward()
        for name in ("first", "second"):
            same_bytes(getattr(model, name).embedding, getattr(whole, name).embedding)
            assert getattr(model, name).value_proj.weight.grad is not None
        raises(RuntimeError, "spread over ranks; see load_full_table", model.first.to_reference_state_dict)


def frozen_checkpoint(group, *, folder: str, sharding: str, save: bool, format: str) -> None:
    whole = random_table(nn.QuantizedMultiHeadEmbedding([4, 8, 11], 40, format=format, row_multiple=8), 1)
    table = ShardedQuantizedMultiHeadEmbedding([4, 8, 11], 40, format=format, row_multiple=8, group=group, sharding=sharding)
    if save:
        table.load_full_table((whole.values, whole.scales))
        distributed.save_checkpoint({"table": table.state_dict()}, folder, 1, group)
        return
    state = {"table": table.state_dict()}
    assert distributed.load_checkpoint(state, folder, group) == 1
    table.load_state_dict(state["table"])
    same_bytes(table, whole)


def state_without_rows(group, *, folder: str) -> None:
    """A rank that owns nothing, with a table of half width: its state is none, of the right dtype."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    world = dist.get_world_size(group)
    for dtype in (torch.bfloat16, torch.float64):
        table = ShardedMultiHeadEmbedding([5, 7], 4, group=group, splits=[12] + [0] * (world - 1), sparse=True, dtype=dtype)
        optimizer = distributed.shard_optimizer_state(optim.RowWiseAdam(table.parameters(), lr=0.1), table)
        for _ in range(2):
            table(torch.tensor([[1, 6]])).sum().backward()
            optimizer.step()
            before = {name: entry.clone() for name, entry in optimizer.state[table.weight].items()}
            optimizer.load_state_dict(optimizer.state_dict())
            for name, entry in optimizer.state[table.weight].items():
                assert entry.dtype == before[name].dtype and torch.equal(entry, before[name]), name
        state = {"table": table.state_dict(), "optimizer": get_optimizer_state_dict(table, optimizer)}
        distributed.save_checkpoint(state, folder, 1, group)
        state = {"table": table.state_dict(), "optimizer": get_optimizer_state_dict(table, optimizer)}
        optimizer.state[table.weight]["exp_avg_sq"].zero_()
        distributed.load_checkpoint(state, folder, group)
        set_optimizer_state_dict(table, optimizer, state["optimizer"])
        for name, entry in optimizer.state[table.weight].items():
            assert torch.equal(entry, before[name]), name


def unnamed_backend(rank: int, size: int, store: str) -> None:
    """A process group whose backend torch has chosen."""
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=size)
    table = ShardedMultiHeadEmbedding([5, 7], 4)
    rows = torch.tensor([[1, 6]])
    expected = table(rows)
    table.prefetch(rows)
    assert torch.equal(table(rows), expected)
    assert table.state_dict()["weight"].device_mesh.device_type == "cpu"
    os._exit(7)


def ahead(group) -> None:
    """`prefetch` of a model: the same bits as without, forward and backward; and a compiled model."""
    torch.manual_seed(5)
    model = Model()
    distributed.shard_tables(model, group, prefetch_group=PREFETCH_GROUPS[group])
    rank = dist.get_rank(group)
    tokens = torch.randint(50, (2, 6 + rank), generator=torch.Generator().manual_seed(rank))
    results = []
    compiled = torch.compile(model, backend="aot_eager")
    for way in ("plain", "prefetched", "compiled"):
        model.zero_grad()
        if way == "prefetched":
            distributed.prefetch(model, tokens)
        out = (compiled if way == "compiled" else model)(tokens)
        out.square().sum().backward()
        results.append([out, *(p.grad.to_dense() for p in model.parameters())])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:1], result))
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(results[0], result))


def deduplicated(group, *, streams: list[Tensor]) -> tuple[int, int]:
    """Bytes that a rank sends for its stream of tokens in forward and backward: each row once, and one row a slot."""
    hashing = nn.NgramHash(EngramConfig(hidden_size=8, vocab_size=129_280, layer_ids=(0,), table_size=50_000))
    rows = hashing(torch.tensor([streams[dist.get_rank(group)]]))[0]
    sent = []
    for equal in (False, True):
        table = ShardedMultiHeadEmbedding(hashing.moduli[0].tolist(), 32, group=group, sharding="heads",
                                          equal_tokens=equal)
        table(rows).sum().backward()
        sent.append(table.peers.bytes_sent)
    return tuple(sent)


def whole_state(model, optimizers_) -> dict[str, Any]:
    """Everything that a checkpoint should bring back, tables and their state put together from all ranks."""
    state = {name: tensor for name, tensor in model.state_dict().items()}
    params = [(p, name) for name, p in model.named_parameters()]
    for number, optimizer in enumerate(optimizers_):
        for key, entries in optimizer.state_dict()["state"].items():
            state |= {f"{number}.{key}.{name}": tensor for name, tensor in entries.items()}
    del params
    found = {}
    for name, tensor in state.items():
        if type(tensor) is Tensor:
            found[name] = tensor.numpy().copy()
            continue
        shards = tensor._local_tensor
        parts = [None] * tensor.device_mesh.size()
        mine = [(offset[0], shard.numpy()) for offset, shard in zip(shards.local_offsets(), shards.local_shards())]
        dist.all_gather_object(parts, mine, group=tensor.device_mesh.get_group())
        whole = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype).numpy()
        for begin, part in (piece for rank in parts for piece in rank):
            whole[begin : begin + len(part)] = part
        found[name] = whole
    return found


def built(group, *, sharding: str, optimizer: str, seed: int, steps: int):
    torch.manual_seed(seed)
    model = Model(sparse=optimizer != "AdamW")
    distributed.shard_tables(model, group, sharding=sharding)
    both = [distributed.shard_optimizer_state(o, model) for o in optimizers(model, optimizer)]
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randint(50, (3, 5))).square().sum().backward()
        for each in both:
            each.step()
    return model, both


def saved(group, *, folder: str, sharding: str, optimizer: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, both = built(group, sharding=sharding, optimizer=optimizer, seed=1, steps=3)
    for step in (2, 3, 3):      # the last one takes the place of an equal step
        state = {"model": model.state_dict(), "optimizers": [get_optimizer_state_dict(model, o) for o in both]}
        distributed.save_checkpoint(state, folder, step, group)
        left = sorted(path.name for path in Path(folder).iterdir())
        assert len(left) == 2 and left[0] == "latest" and left[1].startswith(f"step-{step}"), left
    return whole_state(model, both)


def loaded(group, *, folder: str, sharding: str, optimizer: str, expected: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, both = built(group, sharding=sharding, optimizer=optimizer, seed=2, steps=0)
    state = {"model": model.state_dict(), "optimizers": [get_optimizer_state_dict(model, o) for o in both]}
    assert distributed.load_checkpoint(state, folder, group) == 3
    model.load_state_dict(state["model"])
    for each, entries in zip(both, state["optimizers"]):
        set_optimizer_state_dict(model, each, entries)
    found = whole_state(model, both)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
    model.zero_grad()
    model(torch.randint(50, (3, 5))).square().sum().backward()
    for each in both:
        each.step()             # the state is where its rows are


def damaged(group, *, folder: str) -> None:
    """Each kind of damage is an error on every rank, and leaves the model as it was."""
    rank = dist.get_rank(group)
    table = ShardedMultiHeadEmbedding([40, 50], 4, group=group)
    raises(distributed.CheckpointError, "no checkpoint in ", distributed.load_checkpoint, table.state_dict(), folder, group)
    distributed.save_checkpoint({"table": table.state_dict()}, folder, 7, group)
    whole = Path(folder) / "step-7"
    before = table.weight.detach().clone()
    state = {"table": table.state_dict()}

    def refused(text: str, state=state) -> None:
        raises(distributed.CheckpointError, text, distributed.load_checkpoint, state, folder, group)
        assert torch.equal(table.weight, before)

    file = sorted(whole.glob("*.distcp"))[-1]
    for change, text in (
        (lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], "is damaged"),
        (lambda data: data[:-5], "is damaged"),
        (None, "cannot be read: No such file or directory"),
    ):
        data = file.read_bytes()
        dist.barrier(group)
        if rank == 0:
            file.unlink() if change is None else file.write_bytes(change(data))
        dist.barrier(group)
        refused(text)
        dist.barrier(group)
        if rank == 0:
            file.write_bytes(data)
        dist.barrier(group)
    refused("another", {"another": table.state_dict()})
    bigger = ShardedMultiHeadEmbedding([40, 51], 4, group=group)
    refused("Size mismatch", {"table": bigger.state_dict()})
    assert distributed.load_checkpoint(state, folder, group) == 7
    raises(ValueError, "all ranks must have the same step", distributed.save_checkpoint, state, folder, rank, group)
    dist.barrier(group)
    if rank == 0:
        (Path(folder) / "latest").write_text("{")
    dist.barrier(group)
    refused("latest cannot be read")


def dying(rank: int, size: int, store: str, *, moment: str, folder: str) -> None:
    """Rank 1 dies at a moment of the second step; what the others then raise is left in a file each."""
    import crew

    crew.join(rank, size, store)
    model, both = built(None, sharding="rows", optimizer="RowWiseAdam", seed=1, steps=1)
    distributed.save_checkpoint({"model": model.state_dict()}, folder, 1)

    def die(*_: Any) -> None:
        os._exit(9)

    if rank == 1:
        if moment == "forward":
            model.first.register_forward_pre_hook(die)
        elif moment == "save":
            torch.distributed.checkpoint.FileSystemWriter.write_data = die
    try:
        loss = model(torch.randint(50, (3, 5))).square().sum()
        if rank == 1 and moment == "backward":
            die()
        loss.backward()
        distributed.save_checkpoint({"model": model.state_dict()}, folder, 2)
    except (RuntimeError, distributed.CheckpointError) as error:
        (Path(folder) / f"error-{rank}").write_text(f"{error}")
        os._exit(1)
    os._exit(0)



def first_checkpoint(group, *, folder: str) -> None:
    model, _ = built(group, sharding="heads", optimizer="RowWiseAdam", seed=9, steps=0)
    state = model.state_dict()
    assert distributed.load_checkpoint({"model": state}, folder, group) == 1
    distributed.save_checkpoint({"model": state}, folder, 2, group)     # the next save clears away what is left
    assert sorted(path.name for path in Path(folder).glob("step-*")) == ["step-2"]


def measured(group, *, tokens: int, sharding: str, equal: bool) -> list[tuple[int, float]]:
    """Bytes that a rank sends in forward and backward, and the share of its row ids that are unique."""
    torch.manual_seed(dist.get_rank(group))
    hashing = nn.NgramHash(CONFIG)
    found = []
    for layer in range(2):
        rows = hashing(torch.randint(50, (1, tokens)))[layer]
        table = ShardedMultiHeadEmbedding(hashing.moduli[layer].tolist(), 4, group=group, sharding=sharding,
                                          equal_tokens=equal)
        out = table(rows)
        forward = table.peers.bytes_sent
        out.sum().backward()
        found.append((forward, table.peers.bytes_sent - forward, rows.unique().numel() / rows.numel()))
    return found
