"""A small GPT with optional Engram layers: the example to read first.

Pre-norm blocks of causal attention (rotary positions) and a SwiGLU, tied embeddings. An Engram layer stands before the
attention of the chosen blocks and adds to the residual stream:

    h = h + engram(h, token_ids, document_ids=document_ids)

Attention, too, stays inside a document. With `branches` G > 1 the residual stream is G streams wide, [B, T, G, D], and
every sub-layer is wrapped by a hyper-connection, static (arXiv 2409.19606) or manifold-constrained (mHC, arXiv
2512.24880); Engram then has one gate per stream.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.config import EngramConfig
from engram.nn import Engram
from engram.state import EngramState
from engram.vocab import TokenMap

MIXINGS = ("static", "manifold")
SINKHORN_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of the model: `branches` residual streams, `layers` blocks; `engram` None: the plain backbone.

    `mixing` says how several streams are read, written and mixed, out of MIXINGS: "static" is `Residual`, "manifold"
    `ManifoldResidual`. `mlp_size` None: 8/3 of `hidden_size`, rounded up to a multiple of 32.

    Raises ValueError where the sizes do not fit each other, or `engram` has another vocabulary, width or branch count.
    """

    vocab_size: int
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    branches: int = 1
    engram: EngramConfig | None = None
    mixing: str = "static"
    mlp_size: int | None = None

    def __post_init__(self) -> None:
        if self.mixing not in MIXINGS:
            raise ValueError(f"mixing must be one of {', '.join(MIXINGS)}, got {self.mixing!r}")
        if self.mlp_size is not None and self.mlp_size < 1:
            raise ValueError(f"mlp_size must be at least 1, got {self.mlp_size}")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 * heads = {2 * self.heads}")
        if self.engram is not None:
            for name in ("hidden_size", "vocab_size", "branches"):
                own, other = getattr(self, name), getattr(self.engram, name)
                if own != other:
                    raise ValueError(f"engram.{name} is {other}, the model's {own}")
            if not all(0 <= i < self.layers for i in self.engram.layer_ids):
                raise ValueError(f"engram.layer_ids {self.engram.layer_ids} must lie in [0, layers = {self.layers})")


class DecodingState:
    """What the model keeps of `batch_size` sequences between calls: keys and values of at most `capacity` tokens, which
    of those are no padding, and the state of every Engram layer.

    Args:
        model: whose state it is.
        batch_size: B.
        capacity: tokens of prompt and continuation together.
        max_rollback: how many tokens `rollback` can take back.
    """

    def __init__(self, model: "LanguageModel", batch_size: int, capacity: int, max_rollback: int = 0) -> None:
        config, like = model.config, model.embedding.weight
        shape = (config.layers, 2, batch_size, config.heads, capacity, config.hidden_size // config.heads)
        self.kv = like.new_zeros(shape)
        self.visible = torch.zeros(batch_size, capacity, dtype=torch.bool, device=like.device)
        self.length, self.capacity = 0, capacity
        self.engrams: dict[str, EngramState] = {
            name: layer.init_state(batch_size, max_rollback)  # type: ignore[operator]  # a ModuleDict has any modules
            for name, layer in model.engrams.items()
        }

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens of every sequence back."""
        for state in self.engrams.values():
            state.rollback(count)
        self.length -= count

    def select(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was."""
        self.kv.copy_(self.kv.index_select(2, index))
        self.visible.copy_(self.visible[index])
        for state in self.engrams.values():
            state.select(index)


class Attention(nn.Module):
    """Multi-head attention with rotary positions: x [B, T, D], mask bool [B, 1, T, S] (True = may look), where S counts
    the tokens kept in `kv` [2, B, H, S, D / H] from before, and those of x, whose keys and values are written there."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None, kv: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(z, rotation).to(v.dtype) for z in (q, k))
        if kv is not None:
            kv[:, :, :, kv.shape[3] - k.shape[2] :] = torch.stack([k, v])
            k, v = kv.to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


def rotation_table(positions: Tensor, size: int, like: Tensor) -> Tensor:
    """Cosines and sines [2, ..., size / 2] of rotary positions [...], in the dtype of `like`."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float64) / size)
    angle = positions.double()[..., None] * frequency
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
        # 8/3 D: as many weights as a plain MLP of 4 D
        width = config.mlp_size or -(-8 * config.hidden_size // (3 * 32)) * 32
        self.up = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


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
        with full_precision(h):
            x = torch.einsum("g,btgd->btd", self.read, h)
            h = torch.einsum("gj,btjd->btgd", self.mix, h)
        return h + self.write[:, None] * f(x)[:, :, None, :]


class ManifoldResidual(nn.Module):
    """A manifold-constrained hyper-connection (mHC, arXiv 2512.24880) of G > 1 streams around a sub-layer f.

    h [B, T, G, D]: h'_g = sum_j mix_gj h_j + write_g f(sum_j read_j h_j), the coefficients being each token's own. With
    x its streams as one vector of G D, divided by their root mean square:

        read = sigmoid(s_0 W_r x + b_r)     write = 2 sigmoid(s_1 W_w x + b_w)     mix = sinkhorn(s_2 W_m x + b_m)

    mix is doubly stochastic: it averages streams and keeps their sum, through any number of layers. At the start W is
    zero, what is read sums to 1 (most of it from one stream, they take turns) and write is 1, so that streams which
    begin alike stay alike and the model equals that of one stream.
    """

    def __init__(self, branches: int, hidden_size: int, index: int) -> None:
        super().__init__()
        self.branches = branches
        own = torch.eye(branches)
        share = 0.7 * own[index % branches] + 0.3 / (branches - 1) * (1 - own[index % branches])
        self.weight = nn.Parameter(torch.zeros(branches * (branches + 2), branches * hidden_size))
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        self.read = nn.Parameter(share.logit())
        self.write = nn.Parameter(torch.zeros(branches))
        self.mix = nn.Parameter(4 * own)  # a stream keeps 95 % of itself, and the others have a slope to begin with

    def coefficients(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(read [B, T, G], write [B, T, G], mix [B, T, G, G])` of the streams h [B, T, G, D]."""
        x, g = h.flatten(-2), self.branches
        # The norm divides the few results in place of the many inputs.
        y = F.linear(x, self.weight) * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        read, write, mix = y.split([g, g, g * g], dim=-1)
        read = torch.sigmoid(self.scale[0] * read + self.read)
        write = 2 * torch.sigmoid(self.scale[1] * write + self.write)
        return read, write, sinkhorn(self.scale[2] * mix.unflatten(-1, (g, g)) + self.mix)

    def forward(self, h: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        with full_precision(h):
            read, write, mix = self.coefficients(h)
            x, h = (torch.cat([read[..., None, :], mix], dim=-2) @ h).split([1, self.branches], dim=-2)
        return h + write[..., None] * f(x.squeeze(-2))[:, :, None, :]


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [..., G, G], its rows and columns divided by their sums in turn (Sinkhorn and Knopp), as often as in
    the paper. Rows come last and sum to 1; columns nearly do, to a percent where the matrix is almost a permutation."""
    m = logits.softmax(-1) + 1e-6  # no column of zeros, however far apart the logits are
    for _ in range(SINKHORN_STEPS):
        m = m / m.sum(-2, keepdim=True)
        m = m / m.sum(-1, keepdim=True)
    return m


def full_precision(h: Tensor) -> AbstractContextManager[None]:
    """Autocast off: it would round the residual streams each time they are mixed."""
    kind = h.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def residual(config: LanguageModelConfig, index: int) -> nn.Module:
    """What wraps the sub-layer number `index`."""
    if config.branches > 1 and config.mixing == "manifold":
        return ManifoldResidual(config.branches, config.hidden_size, index)
    return Residual(config.branches, index)


class Block(nn.Module):
    """Attention, then MLP, each behind a norm and inside a Residual or ManifoldResidual."""

    def __init__(self, config: LanguageModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.attention_residual = residual(config, 2 * index)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = SwiGLU(config)
        self.mlp_residual = residual(config, 2 * index + 1)

    def forward(self, h: Tensor, rotation: Tensor, mask: Tensor | None, kv: Tensor | None = None) -> Tensor:
        h = self.attention_residual(h, lambda x: self.attention(self.attention_norm(x), rotation, mask, kv))
        h = self.mlp_residual(h, lambda x: self.mlp(self.mlp_norm(x)))
        return h


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
        for module in self.blocks.modules():
            if isinstance(module, Block):  # the sums that grow the residual stream start smaller the deeper the model
                for linear in (module.attention.out, module.mlp.down):
                    nn.init.normal_(linear.weight, std=0.02 / (2 * len(self.blocks)) ** 0.5)

    def forward(
        self,
        token_ids: Tensor,
        document_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        state: DecodingState | None = None,
    ) -> Tensor:
        """Logits of the token after each.

        Args:
            token_ids: int64 [B, T].
            document_ids: int64 [B, T], or None: one document a row.
            mask: bool [B, T], False = padding, which no token sees.
            state: the tokens go on where it stands and are appended to it; one document a row then.

        Returns:
            [B, T, V].

        Raises:
            ValueError: document_ids beside a state, or more tokens than it has room for.
        """
        tokens, visible, before = token_ids.shape[1], mask, 0
        h = self.embedding(token_ids)
        if state is not None:
            if document_ids is not None:
                raise ValueError("a model with a state goes on with one document a row: document_ids must be None")
            before = state.length
            if before + tokens > state.capacity:
                raise ValueError(f"the state has room for {state.capacity} tokens, got {before} + {tokens}")
            state.visible[:, before : before + tokens] = True if mask is None else mask
            visible = state.visible[:, : before + tokens]
        look, positions = None, torch.arange(before, before + tokens, device=h.device)
        if visible is not None:  # positions count from the first token that is no padding
            positions = (visible.long().cumsum(1)[:, before:] - 1).clamp(min=0)[:, None]
            causal = torch.ones(tokens, before + tokens, dtype=torch.bool, device=h.device).tril(before)
            # A padding token sees itself, for a row without anything to look at has no softmax.
            itself = torch.eye(before + tokens, dtype=torch.bool, device=h.device)[before:]
            look = (causal & visible[:, None, :] | itself)[:, None]
        if document_ids is not None:
            same = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
            look = same if look is None else same & look
        rotation = rotation_table(positions, self.config.hidden_size // self.config.heads, h)
        if self.config.branches > 1:
            h = h[:, :, None, :].repeat(1, 1, self.config.branches, 1)
        for index, block in enumerate(self.blocks):
            if str(index) in self.engrams:
                kept = None if state is None else state.engrams[str(index)]
                h = h + self.engrams[str(index)](
                    h, token_ids, document_ids=document_ids, mask=mask, state=kept, residual=False
                )
            h = block(h, rotation, look, None if state is None else state.kv[index][:, :, :, : before + tokens])
        if state is not None:
            state.length += tokens
        if self.config.branches > 1:
            h = h.mean(dim=2)
        return F.linear(self.norm(h), self.embedding.weight)

    def loss(self, token_ids: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats, float32 or wider; targets int64 [B, T], -100 = not counted."""
        logits = self(token_ids, document_ids).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten())
