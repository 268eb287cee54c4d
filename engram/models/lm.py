"""A small GPT with optional Engram layers: the example to read first.

Pre-norm blocks of causal attention (rotary positions) and a SwiGLU, tied embeddings. An Engram layer stands before the
attention of the chosen blocks and adds to the residual stream:

    h = h + engram(h, token_ids, document_ids=document_ids)

Attention, too, stays inside a document. With `branches` G > 1 the residual stream is G streams wide, [B, T, G, D], and
every sub-layer is wrapped by a static hyper-connection (arXiv 2409.19606); Engram then has one gate per stream.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.config import EngramConfig
from engram.nn import Engram
from engram.vocab import TokenMap


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of the model: `branches` residual streams, `layers` blocks; `engram` None: the plain backbone.

    Raises ValueError where the sizes do not fit each other, or `engram` has another vocabulary, width or branch count.
    """

    vocab_size: int
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    branches: int = 1
    engram: EngramConfig | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 * heads = {2 * self.heads}")
        if self.engram is not None:
            for name in ("hidden_size", "vocab_size", "branches"):
                own, other = getattr(self, name), getattr(self.engram, name)
                if own != other:
                    raise ValueError(f"engram.{name} is {other}, the model's {own}")
            if not all(0 <= i < self.layers for i in self.engram.layer_ids):
                raise ValueError(f"engram.layer_ids {self.engram.layer_ids} must lie in [0, layers = {self.layers})")


class Attention(nn.Module):
    """Multi-head attention with rotary positions: x [B, T, D], mask bool [B, 1, T, T] (True = may look)."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(z, rotation).to(v.dtype) for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(-2))


def rotation_table(length: int, size: int, like: Tensor) -> Tensor:
    """Cosines and sines [2, length, size / 2] of the rotary positions."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float64) / size)
    angle = torch.arange(length, device=like.device, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()]).to(like.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (i, i + size / 2) of x [..., length, size] by the angles of their positions."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class SwiGLU(nn.Module):
    """down(silu(gate) * value), x [B, T, D]."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        width = -(-8 * config.hidden_size // (3 * 32)) * 32  # 8/3 D: as many weights as a plain MLP of 4 D
        self.up = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Residual(nn.Module):
    """How a sub-layer f reads from and writes to the residual stream: plain, or a static hyper-connection.

    One stream, h [B, T, D]: h + f(h). G streams, h [B, T, G, D]: h'_g = sum_j mix_gj h_j + write_g f(sum_j read_j h_j).
    At the start each sub-layer reads one stream (they take turns), writes to all, and mixes nothing.
    """

    def __init__(self, branches: int, index: int) -> None:
        super().__init__()
        self.branches = branches
        if branches > 1:
            self.read = nn.Parameter(torch.eye(branches)[index % branches].clone())
            self.mix = nn.Parameter(torch.eye(branches))
            self.write = nn.Parameter(torch.ones(branches))

    def forward(self, h: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        if self.branches == 1:
            return h + f(h)
        y = f(torch.einsum("g,btgd->btd", self.read, h))
        return torch.einsum("gj,btjd->btgd", self.mix, h) + self.write[:, None] * y[:, :, None, :]


class Block(nn.Module):
    """Attention, then MLP, each behind a norm and around a Residual."""

    def __init__(self, config: LanguageModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.attention_residual = Residual(config.branches, 2 * index)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = SwiGLU(config)
        self.mlp_residual = Residual(config.branches, 2 * index + 1)

    def forward(self, h: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        h = self.attention_residual(h, lambda x: self.attention(self.attention_norm(x), rotation, mask))
        return self.mlp_residual(h, lambda x: self.mlp(self.mlp_norm(x)))


class LanguageModel(nn.Module):
    """token_map: that of the tokenizer, shared by all Engram layers (None: raw ids).

    The backbone is drawn before the Engram layers: with the same seed, the models with and without them start alike.
    """

    def __init__(self, config: LanguageModelConfig, token_map: TokenMap | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.reset_parameters()
        self.engrams = nn.ModuleDict()
        if config.engram is not None:
            for index in config.engram.layer_ids:
                self.engrams[str(index)] = Engram(config.engram, index, token_map=token_map)

    def reset_parameters(self) -> None:
        """Draw the backbone from N(0, 0.02)."""
        for module in (self.embedding, *self.blocks.modules()):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # the sums that grow the residual stream start smaller the deeper the model
            for linear in (block.attention.out, block.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / (2 * len(self.blocks)) ** 0.5)

    def forward(self, token_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """token_ids int64 [B, T], document_ids int64 [B, T] or None (one document a row) -> logits [B, T, V]."""
        h = self.embedding(token_ids)
        rotation = rotation_table(h.shape[1], self.config.hidden_size // self.config.heads, h)
        mask = None
        if document_ids is not None:
            mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
        if self.config.branches > 1:
            h = h[:, :, None, :].repeat(1, 1, self.config.branches, 1)
        for index, block in enumerate(self.blocks):
            if str(index) in self.engrams:
                h = h + self.engrams[str(index)](h, token_ids, document_ids=document_ids)
            h = block(h, rotation, mask)
        if self.config.branches > 1:
            h = h.mean(dim=2)
        return F.linear(self.norm(h), self.embedding.weight)

    def loss(self, token_ids: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats, float32 or wider; targets int64 [B, T], -100 = not counted."""
        logits = self(token_ids, document_ids).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten())
