"""Sharded tables in a model: swapping them in, clipping, and starting lookups before the model gets to them."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engram import optim
from engram.boundaries import visible_tokens
from engram.distributed.embedding import ShardedMultiHeadEmbedding
from engram.distributed.peers import Peers
from engram.distributed.quantized import ShardedQuantizedMultiHeadEmbedding
from engram.distributed.table import ShardedTable
from engram.nn import Engram, MultiHeadEmbedding, QuantizedMultiHeadEmbedding, empty_weight

_TABLES = (MultiHeadEmbedding, QuantizedMultiHeadEmbedding)

Model = TypeVar("Model", bound=nn.Module)


def shard_tables(
    model: Model,
    group: dist.ProcessGroup | None = None,
    *,
    sharding: str = "rows",
    equal_tokens: bool = False,
    gradient_scale: float = 1.0,
    prefetch_group: dist.ProcessGroup | None = None,
) -> Model:
    """Replace every `nn.MultiHeadEmbedding` and `nn.QuantizedMultiHeadEmbedding` of a model, those of `nn.Engram` above
    all, by a sharded one, in place.

    A table on the meta device gets a shard on the meta device; else each rank keeps its rows of its own table, so all
    ranks must have built or loaded the same one. Do it before the optimizer is built and before the model is wrapped:
    DistributedDataParallel of this very model then leaves the tables alone; for FSDP pass
    `fully_shard(model, ignored_params=set(sharded_parameters(model)))`.

    Args:
        model: with or without Engram layers in it.
        group: the ranks that share the tables; None: all.
        sharding, equal_tokens, gradient_scale, prefetch_group: of `ShardedMultiHeadEmbedding`; quantised tables are
            frozen and have no gradient.

    Returns:
        model.

    Raises:
        ValueError: `model` is itself a table, or ranks differ in their tables.
    """
    if isinstance(model, _TABLES):
        raise ValueError("shard_tables: model must contain the tables, got a table; build a sharded one in its place")
    peers = Peers(group, prefetch_group)
    homes = [
        (name, parent, key, child) for name, parent in model.named_modules() for key, child in parent._modules.items()
        if isinstance(child, _TABLES) and not isinstance(child, ShardedTable)
    ]
    peers.agree("shard_tables", tables=[
        (name, key, child.sizes, {own: (tuple(x.shape), x.dtype) for own, x in child.state_dict().items()})
        for name, _, key, child in homes
    ])
    options = dict(sharding=sharding, equal_tokens=equal_tokens, peers=peers)
    made: dict[int, ShardedTable] = {}  # by table, which several layers may share
    for _, parent, key, table in homes:
        if id(table) not in made:
            made[id(table)] = _sharded_table(table, gradient_scale, options)
        setattr(parent, key, made[id(table)])
    names = [f"{name}.{own}" for name, module in model.named_modules(remove_duplicate=False)
             if isinstance(module, ShardedTable) for own in module.TENSORS]
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted({*ignored, *names}))
    return model


def _sharded_table(
    table: MultiHeadEmbedding | QuantizedMultiHeadEmbedding, gradient_scale: float, options: dict[str, Any]
) -> ShardedTable:
    if isinstance(table, QuantizedMultiHeadEmbedding):
        device = table.values.device
        options = options | dict(row_multiple=len(table.values))  # as long as this one, whatever made it so
        quantized = ShardedQuantizedMultiHeadEmbedding(
            table.sizes, table.dim, format=table.format, out_dtype=table.out_dtype, device=device, **options)
        if device.type != "meta":
            quantized.load_full_table((table.values, table.scales))
        return quantized.train(table.training)
    device = table.weight.device
    sharded = ShardedMultiHeadEmbedding(
        table.sizes, table.dim, sparse=table.sparse, gradient_scale=gradient_scale, std=table.std, device="meta",
        dtype=table.weight.dtype, row_multiple=len(table.weight), **options)
    if device.type != "meta":
        weight = empty_weight(len(sharded.weight), table.dim, device, table.weight.dtype)  # on huge pages, if there are
        sharded.weight = nn.Parameter(weight)
        sharded.load_full_weight(table.weight.detach())
    return sharded.train(table.training).requires_grad_(table.weight.requires_grad)


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The sharded tables' weights: what data parallelism must neither average nor shard again. (Quantised tables have
    no parameters.)"""
    return [module.weight for module in _sharded(model)]


def _sharded(model: nn.Module) -> list[ShardedMultiHeadEmbedding]:
    return [module for module in model.modules() if isinstance(module, ShardedMultiHeadEmbedding)]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`engram.optim.clip_grad_norm_` for a model with sharded tables: the norm is that of all rows of all ranks.

    The other gradients must be the same on all ranks already (as DistributedDataParallel leaves them), or DTensors (as
    `fully_shard` makes them).

    Args:
        model: all of whose gradients are clipped together.
        max_norm: what the norm is brought down to.
        norm_type: p of the norm; may be infinite.

    Returns:
        The norm before clipping, a scalar, the same bits on every rank.
    """
    tables = _sharded(model)
    own = {id(table.weight) for table in tables}
    rest = optim.total_norm([p for p in model.parameters() if id(p) not in own], norm_type)
    norms = [rest.full_tensor() if isinstance(rest, DTensor) else rest]
    for table in tables:
        norm = optim.total_norm(table.weight, norm_type)
        norms += table.peers.gather(norm.double().to(table.weight.device))
    device = norms[-1].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.double().to(device) for norm in norms]), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for param in model.parameters():
        if param.grad is not None:
            values = param.grad._values() if param.grad.layout == torch.sparse_coo else param.grad
            values.mul_(factor.to(values.device, values.dtype))
    return total.float()


def prefetch(
    layers: nn.Module | Iterable[Engram],
    token_ids: Tensor,
    *,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Hash, and start the lookups of all Engram layers with sharded tables, before the model gets to them.

    Call it where the forward that follows has the same arguments; layers that decode with a state must not be
    prefetched. Of layers that share a table the first one's lookup runs ahead.

    Args:
        layers: a model, or Engram layers in the order in which they run.
        token_ids, document_ids, mask: as of `nn.Engram.forward`.

    Raises:
        RuntimeError: an earlier lookup that was prefetched has not been used.
    """
    if isinstance(layers, nn.Module):
        layers = [module for module in layers.modules() if isinstance(module, Engram)]
    visible = visible_tokens("prefetch", token_ids.shape[:2], mask, None)
    begun: set[int] = set()
    for layer in layers:
        if isinstance(layer.embedding, ShardedTable) and id(layer.embedding) not in begun:
            begun.add(id(layer.embedding))
            rows = layer.hash(token_ids, document_ids=document_ids, mask=visible)[0]
            layer.embedding.prefetch(rows, visible)


def discard_prefetched(model: nn.Module) -> None:
    """Forget all lookups that were prefetched and not used, where an error came between; on all ranks."""
    for module in model.modules():
        if isinstance(module, ShardedTable):
            module.discard_prefetched()


def reduce_gradients(params: Iterable[nn.Parameter], peers: Peers) -> None:
    """Sum the dense gradients over the ranks, in one collective a dtype; every rank gets the same bits."""
    groups: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.requires_grad:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            groups.setdefault(param.grad.dtype, []).append(param.grad)
    for grads in groups.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=peers.group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))
