"""What a decoding step of one layer costs: ours, the layer in plain torch with its caches, and the bare matrix products.

Every call is of another layer, of as many as the caches do not hold: between two steps of one layer a model has read all
its other weights. The layers share one table.
"""
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.shapes import config, token_map, token_sets
from benchmarks.timing import Contender
from engram import nn, reference

COLD_BYTES = 2**27  # of weights, all layers together


def contenders(work, table_bytes: int, compiler: bool, options: dict) -> Iterator[Contender]:
    """`options`: eps, conv_eps and dilation, as the layer has them."""
    shape, dtype = work.sizes, work.dtype
    settings = config(shape, table_bytes, dtype)
    weights = (shape.branches + 1) * shape.width * settings.memory_width * dtype.itemsize
    torch.manual_seed(0)
    layers = [nn.Engram(settings, 1, token_map=token_map(), device="meta", dtype=dtype) for _ in range(
        max(1, COLD_BYTES // weights))]
    table = nn.MultiHeadEmbedding(layers[0].embedding.sizes, shape.row_width, dtype=dtype, device=work.device)
    for layer in layers:
        layer.embedding = table
        _materialise(layer, work.device)
    hidden = torch.randn(shape.batch, shape.tokens, shape.branches, shape.width).to(work.device, dtype)
    memory = torch.randn(shape.batch, shape.tokens, settings.memory_width).to(work.device, dtype)
    sets = [ids.to(work.device) for ids in token_sets(shape, 64)]

    def contender(name: str, steps: list, group: str = "") -> Contender:
        def call(i):
            with torch.no_grad():
                return [steps[i % len(steps)](hidden, sets[i % len(sets)])]

        return Contender(name, call, group, compare=list)

    def ours(layer):
        state = layer.init_state(shape.batch)
        return lambda x, ids: layer(x, ids, state=state)

    def products(i):
        with torch.no_grad():
            key, value = layers[i % len(layers)].key_proj, layers[i % len(layers)].value_proj
            return peers.project(memory, key.weight, key.bias, value.weight, value.bias)

    yield contender("ours", [ours(layer) for layer in layers])
    yield Contender("matrix products", products)
    reach = (settings.kernel_size - 1) * options["dilation"]
    tail = _tail(reach, options)
    yield contender("eager", [PlainStep(layer, tail, shape.batch, reach) for layer in layers])
    if compiler:
        compiled = peers.compiled(tail)
        yield contender("compile", [PlainStep(layer, compiled, shape.batch, reach) for layer in layers])


def _materialise(layer: nn.Engram, device: str) -> None:
    """Everything but the table gets memory and values."""
    for module in layer.modules():
        if module is not layer.embedding and module is not layer:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()


class PlainStep:
    """One layer in plain torch with what decoding needs to keep: the last ids, and the last inputs of the convolution."""

    def __init__(self, layer: nn.Engram, tail, batch: int, reach: int) -> None:
        self.layer, self.tail, weight = layer, tail, layer.key_proj.weight
        config = layer.config
        self.ids = torch.full((batch, config.max_ngram_size - 1), config.pad_id, device=weight.device)
        self.past = weight.new_zeros(batch, reach, config.branches, config.hidden_size)

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        layer, kept = self.layer, self.ids.shape[1]
        window = torch.cat([self.ids, token_ids], 1)
        self.ids = window[:, -kept:]
        rows = peers.torch_hash(window, layer.hash, layer.config.pad_id)[:, kept:]
        memory = F.embedding(rows, layer.embedding.weight).flatten(-2)
        out, self.past = self.tail(
            memory, hidden, self.past, layer.key_proj.weight, layer.key_proj.bias, layer.value_proj.weight,
            layer.value_proj.bias, layer.gate.hidden_weight, layer.gate.key_weight, layer.conv.weight,
            layer.conv.norm_weight,
        )
        return out


def _tail(reach: int, options: dict):
    """Everything after the lookup; also gives what the next step needs of the convolution's inputs."""

    def tail(memory, hidden, past, key_w, key_b, value_w, value_b, hidden_weight, key_weight, conv_weight, norm_weight):
        key, value = peers.project(memory, key_w, key_b, value_w, value_b)
        gated = reference.gate(hidden, key.view(hidden.shape), value, hidden_weight, key_weight, eps=options["eps"])
        x = torch.cat([past, gated], 1)
        out = reference.short_conv(x, conv_weight, norm_weight, dilation=options["dilation"], eps=options["conv_eps"])
        return out[:, reach:], x[:, x.shape[1] - reach :]

    return tail
