"""Tables that are bigger than one device, spread over the ranks of torch.distributed (gloo on CPUs, NCCL on GPUs).

Every rank owns rows that no other rank has. A lookup sends row ids to their owners and gets rows back, which are copied
and never summed, so the result is bit for bit that of the whole table, at any world size.
"""

from engram.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, shard_optimizer_state
from engram.distributed.embedding import ShardedMultiHeadEmbedding
from engram.distributed.layout import Layout
from engram.distributed.model import (
    clip_grad_norm_, discard_prefetched, prefetch, shard_tables, sharded_parameters,
)
from engram.distributed.quantized import ShardedQuantizedMultiHeadEmbedding

__all__ = [
    "CheckpointError", "Layout", "ShardedMultiHeadEmbedding", "ShardedQuantizedMultiHeadEmbedding", "clip_grad_norm_",
    "discard_prefetched", "load_checkpoint", "prefetch", "save_checkpoint", "shard_optimizer_state", "shard_tables",
    "sharded_parameters",
]
