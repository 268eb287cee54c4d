"""The operators of the Engram layer; ``engram.reference`` has the same functions in plain PyTorch."""

from engram.ops._state import Marks as Marks, Ring as Ring  # what state= of the convolutions takes
from engram.ops.decode import decode
from engram.ops.embedding import embedding
from engram.ops.embedding_fp8 import embedding_fp8
from engram.ops.embedding_int8 import embedding_int8
from engram.ops.gate import gate
from engram.ops.gate_conv import gate_conv
from engram.ops.ngram_hash import ngram_hash
from engram.ops.row_plan import RowPlan as RowPlan, row_plan
from engram.ops.row_sum import row_sum
from engram.ops.row_update import row_update
from engram.ops.short_conv import short_conv

__all__ = [
    "decode", "embedding", "embedding_fp8", "embedding_int8", "gate", "gate_conv", "ngram_hash", "row_plan", "row_sum",
    "row_update", "short_conv",
]
