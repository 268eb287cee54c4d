"""What one would write without engram. Same formulas as engram.reference, no masks and no documents.

Letters: B batch, T tokens, N largest n-gram, C hash columns, d row width, G branches, D hidden size, K taps.
"""
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram import reference

COMPILED = ("compile", "compiled demo", "smart")  # the groups of what torch.compile makes


def smart_gate_conv(
    hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor, key_weight: Tensor, conv_weight: Tensor,
    conv_norm_weight: Tensor, *, eps: float, conv_eps: float, dilation: int,
) -> Tensor:
    """gate_conv with the algebra of the fused kernel, in plain torch: what a good compiler could be given.

    A branch's gated value is a scalar alpha times the shared value, so the norm makes it beta times the value, with the
    scalar beta = alpha * rsqrt(alpha^2 * mean(value^2) + eps): a tap reads value [B, T, D] and a scalar per branch
    instead of a tensor [B, T, G, D].
    """
    batch, tokens, branches, width = hidden.shape
    taps = conv_weight.shape[-1]
    h, k, v = hidden.float(), key.float(), value.float()
    score = (h * k * (hidden_weight.float() * key_weight.float())).sum(-1)
    score = score * torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps) / width**0.5
    alpha = torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt())
    beta = alpha * torch.rsqrt(alpha.square() * v.square().mean(-1, keepdim=True) + conv_eps)

    reach = (taps - 1) * dilation
    past_v, past_beta = F.pad(v, (0, 0, reach, 0)), F.pad(beta, (0, 0, reach, 0))
    weights = (conv_weight.float() * conv_norm_weight.float()[..., None]).unbind(-1)
    z = 0
    for j, weight in enumerate(weights):
        at = slice(j * dilation, j * dilation + tokens)
        z = z + weight * past_beta[:, at, :, None] * past_v[:, at, None]
    return (alpha[..., None] * v[:, :, None] + F.silu(z)).to(hidden.dtype)


def demo_gate_conv(
    hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor, key_weight: Tensor, conv_weight: Tensor,
    conv_norm_weight: Tensor, *, eps: float, conv_eps: float, dilation: int,
) -> Tensor:
    """gate_conv as the layer's official demo does it: branch by branch, in the input's dtype, F.conv1d for the taps."""
    gated = demo_gate(hidden, key, value, hidden_weight, key_weight, eps=eps)
    return demo_short_conv(gated, conv_weight, conv_norm_weight, eps=conv_eps, dilation=dilation)


def demo_gate(
    hidden: Tensor, key: Tensor, value: Tensor, hidden_weight: Tensor, key_weight: Tensor, *, eps: float
) -> Tensor:
    width, gates = hidden.shape[-1], []
    for g in range(hidden.shape[2]):
        query = F.rms_norm(hidden[:, :, g], (width,), hidden_weight[g], eps)
        match = (F.rms_norm(key[:, :, g], (width,), key_weight[g], eps) * query).sum(-1) / width**0.5
        gates.append((match.abs().clamp_min(1e-6).sqrt() * match.sign()).sigmoid()[..., None])
    return torch.stack(gates, 2) * value[:, :, None]


def demo_short_conv(x: Tensor, weight: Tensor, norm_weight: Tensor, *, eps: float, dilation: int) -> Tensor:
    batch, tokens, branches, width = x.shape
    channels, taps = branches * width, weight.shape[-1]
    normed = [F.rms_norm(x[:, :, g], (width,), norm_weight[g], eps) for g in range(branches)]
    z = F.conv1d(torch.cat(normed, -1).transpose(1, 2), weight.reshape(channels, 1, taps),
                 padding=(taps - 1) * dilation, dilation=dilation, groups=channels)
    return x + F.silu(z[..., :tokens]).transpose(1, 2).reshape(x.shape)


class PlainEngram(nn.Module):
    """The whole layer over the weights of an engram.nn.Engram: reference hash, F.embedding, F.linear, and `tail`.

    `tail(memory, hidden, key_w, key_b, value_w, value_b, *gate and conv weights)` is everything after the lookup. To
    compile it leaves hash and lookup outside: torch.compile cannot trace a sparse gradient.
    """

    def __init__(self, layer: nn.Module, tail) -> None:
        super().__init__()
        self.layer, self.tail = layer, tail

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        layer = self.layer
        rows = torch_hash(token_ids, layer.hash, layer.config.pad_id)
        memory = F.embedding(rows, layer.embedding.weight, sparse=True).flatten(-2)
        return self.tail(
            memory, hidden, layer.key_proj.weight, layer.key_proj.bias, layer.value_proj.weight, layer.value_proj.bias,
            layer.gate.hidden_weight, layer.gate.key_weight, layer.conv.weight, layer.conv.norm_weight,
        )


def project(memory: Tensor, key_w: Tensor, key_b: Tensor, value_w: Tensor, value_b: Tensor) -> tuple[Tensor, Tensor]:
    """key [..., G * D] and value [..., D]: the layer's two matrix products and nothing else."""
    return F.linear(memory, key_w, key_b), F.linear(memory, value_w, value_b)


def torch_hash(token_ids: Tensor, constants: nn.Module, pad_id: int) -> Tensor:
    """Row ids [B, T, C] of one layer, vectorised over heads; `constants` is an engram.nn.NgramHash of that layer."""
    multipliers, moduli, offsets = constants.multipliers[0], constants.moduli[0], constants.offsets[0]
    order, tokens = multipliers.shape[0], token_ids.shape[1]
    ids = F.pad(token_ids, (order - 1, 0), value=pad_id)
    if constants.token_map.numel():
        ids = constants.token_map[ids].long()
    mix, mixes = ids[:, order - 1 :] * multipliers[0], []
    for shift in range(1, order):
        begin = order - 1 - shift
        mix = mix ^ ids[:, begin : begin + tokens] * multipliers[shift]
        mixes.append(mix)
    heads = moduli.shape[0] // (order - 1)
    return torch.stack(mixes, -1).repeat_interleave(heads, -1) % moduli + offsets


class NumpyHash:
    """Row ids of one layer as the official demo computes them: numpy, head by head."""

    def __init__(self, constants: nn.Module, pad_id: int) -> None:
        self.token_map = constants.token_map.numpy().astype(np.int64)
        self.multipliers, self.moduli = constants.multipliers[0].numpy(), constants.moduli[0].tolist()
        self.offsets = constants.offsets[0]
        self.pad_id = int(self.token_map[pad_id]) if self.token_map.size else pad_id

    def __call__(self, token_ids: Tensor) -> Tensor:
        ids = token_ids.numpy()
        if self.token_map.size:
            ids = self.token_map[ids]
        tokens, order = ids.shape[1], len(self.multipliers)
        shifted = [np.pad(ids, ((0, 0), (s, 0)), constant_values=self.pad_id)[:, :tokens] for s in range(order)]
        heads, columns = len(self.moduli) // (order - 1), []
        for n in range(2, order + 1):
            mix = shifted[0] * self.multipliers[0]
            for s in range(1, n):
                mix = np.bitwise_xor(mix, shifted[s] * self.multipliers[s])
            columns += [mix % self.moduli[(n - 2) * heads + head] for head in range(heads)]
        return torch.from_numpy(np.stack(columns, -1)) + self.offsets


def dequantized_lookup(values: Tensor, scales: Tensor, dtype: torch.dtype):
    """Rows of a quantised table by torch's own operators, which gather bytes but no float8."""
    def lookup(rows: Tensor) -> Tensor:
        found = F.embedding(rows, values.view(torch.uint8)).view(values.dtype).float()
        if values.dtype == torch.int8:
            return (found * scales[rows][..., None]).to(dtype)
        factor = F.embedding(rows, scales.view(torch.uint8)).view(scales.dtype).float()
        return (found * factor.repeat_interleave(32, -1)[..., : found.shape[-1]]).to(dtype)

    return lookup


def compiled(function):
    """torch.compile for fixed shapes, the sizes of the run being known."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def compiled_apart(gate, short_conv, *, eps: float, conv_eps: float, dilation: int):
    """gate_conv as two graphs: inductor does much better on the demo's way so, and sometimes on the reference."""
    gate = compiled(bind(gate, eps=eps))
    short_conv = compiled(bind(short_conv, eps=conv_eps, dilation=dilation))

    def gate_conv(hidden, key, value, hidden_weight, key_weight, conv_weight, conv_norm_weight):
        return short_conv(gate(hidden, key, value, hidden_weight, key_weight), conv_weight, conv_norm_weight)

    return gate_conv


def gate_convs(around, compiler: bool, **options) -> list[tuple[str, str, object]]:
    """Name, group and function of every way to do gate_conv without engram.

    `around(gate_conv)` is the function to measure, which calls gate_conv(*tensors); it is compiled together with it.
    """
    plain, demo, smart = (bind(way, **options) for way in (reference.gate_conv, demo_gate_conv, smart_gate_conv))
    ways = [("eager", "eager", around(plain)), ("demo", "demo", around(demo))]
    if compiler:
        apart = compiled_apart(reference.gate, reference.short_conv, **options)
        demo_apart = compiled_apart(demo_gate, demo_short_conv, **options)
        ways += [
            ("compile, one graph", "compile", compiled(around(plain))),
            ("compile, gate and conv apart", "compile", around(apart)),
            ("compiled demo", "compiled demo", around(demo_apart)),
            ("smart, compiled", "smart", compiled(around(smart))),
        ]
    return ways


def bind(function, **options):
    """`function` of tensors alone, with these keyword arguments."""

    def bound(*tensors):
        return function(*tensors, **options)

    bound.__code__ = bound.__code__.replace()  # torch.compile keeps its graphs by code object: one each, or they add up
    return bound
