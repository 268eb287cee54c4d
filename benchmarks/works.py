"""What is measured: each work is ours, its peers and its limits, built for the current number of threads.

Letters: B batch, T tokens, G branches, D hidden size, C hash columns, d row width, E = C * d, R table rows.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import decode, limits, peers, steps
from benchmarks.shapes import (
    SHAPES, TABLES, Shape, config, huge_page_share, make_table, token_map, token_sets,
)
from benchmarks.timing import Contender
from engram import empty_table, nn, ops, quantize, reference
from samples import DIFFERENTIABLE, named

FORWARD, BOTH, BACKWARD = "forward", "forward + backward", "backward"
# Norm-wise, between two ways to compute the same in one dtype. Gradients of the gate are as ill-conditioned as its
# slope of up to 500 (one token with a score beside the clamp decides: in float32 either way is off by 2e-5 to 2e-3 from
# float64, depending on the draw; `accuracy` compares both with float64). The demo's way rounds to the dtype before it:
# bfloat16 gradients of one branch can be off by more than their size.
TOLERANCE = {
    (torch.float32, FORWARD): 1e-5, (torch.float32, BOTH): 5e-3,
    (torch.bfloat16, FORWARD): 2e-2, (torch.bfloat16, BOTH): 3e-2,
}
DEMO_TOLERANCE = {torch.float32: 2e-2, torch.bfloat16: 2.0}
OPTIONS = dict(eps=torch.finfo(torch.float32).eps, conv_eps=1e-5, dilation=3)
MODULE_TABLE_BYTES = TABLES["64MB"]
# Fresh rows for every call: enough sets that those of earlier calls have left the caches, within reason.
TOUCHED_BYTES, MOST_SETS = 2**30, 64


@dataclass
class Work:
    """One line of the results; `contenders` yields the ways to do it, ours first, while what they need is alive."""

    op: str
    direction: str
    shape: str
    sizes: Shape
    dtype: torch.dtype
    contenders: Callable[["Work"], Iterator[Contender]]
    bytes: int | None = None        # necessary ones: every input read once, every output written once
    table: str = ""
    ids: str = ""
    notes: list[str] = field(default_factory=list)
    device: str = "cpu"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype, FORWARD if self.direction == FORWARD else BOTH]

    def __str__(self) -> str:
        parts = [self.op, self.direction, self.shape, str(self.dtype).removeprefix("torch."), self.table, self.ids]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Choice:
    """What to build works for; None stands for the default of the op."""

    ops: tuple[str, ...]
    shapes: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]
    tables: tuple[str, ...]
    ids: tuple[str, ...]
    directions: tuple[str, ...]
    compiler: bool                  # torch.compile and limits.cpp may be used
    device: str = "cpu"


DEFAULT_SHAPES = {
    "ngram_hash": ("A", "H"),
    "embedding": ("A64", "B", "A", "L"),
    "embedding_fp8": ("W", "A"),
    "embedding_int8": ("W", "A"),
    "gate": ("A",),
    "short_conv": ("A",),
    "gate_conv": ("A", "B", "P", "A1", "A64"),
    "module": ("A", "B", "A1", "A64"),
    "decode": ("A1", "Ax8", "Ax64", "B1", "Bx8", "Bx64"),
    "table_step": ("S2K", "S32K"),
}
# A GPU needs many tokens to fill.
GPU_SHAPES = {"embedding": ("H", "S"), "gate_conv": ("H", "S"), "module": ("H", "A1"),
              "decode": ("A1", "Ax8", "Ax64"), "table_step": ("S32K",)}


def works(choice: Choice) -> Iterator[Work]:
    """All works of a choice, in the order of the ops."""
    for op in choice.ops:
        for name in choice.shapes or default_shapes(op, choice.device):
            shape = SHAPES[name]
            if op == "ngram_hash":
                if FORWARD in choice.directions:
                    yield _hash_work(name, shape, choice)
                continue
            for dtype in choice.dtypes:
                if op == "table_step":
                    yield from _step_works(name, shape, dtype, choice)
                    continue
                if op == "decode":
                    if FORWARD in choice.directions:
                        yield Work(op, FORWARD, name, shape, dtype, partial(_decode_contenders, choice=choice),
                                   device=choice.device)
                    continue
                if op == "embedding":
                    yield from _embedding_works(name, shape, dtype, choice)
                    continue
                if op in ("embedding_fp8", "embedding_int8"):
                    yield from _quantized_works(op, name, shape, dtype, choice)
                    continue
                build = _module_contenders if op == "module" else _gate_contenders
                for direction in (FORWARD, BOTH):
                    if direction in choice.directions:
                        yield Work(op, direction, name, shape, dtype, partial(build, choice=choice),
                                   bytes=_gate_bytes(op, direction, shape, dtype), device=choice.device)


def default_shapes(op: str, device: str) -> tuple[str, ...]:
    return DEFAULT_SHAPES[op] if device == "cpu" else GPU_SHAPES.get(op, ("H",))


def _gate_bytes(op: str, direction: str, shape: Shape, dtype: torch.dtype) -> int | None:
    """Necessary bytes: elements per channel and token, forward and backward, times the number of both."""
    G = shape.branches
    # gate_conv reads value twice: the norm needs the whole row before the first tap.
    elements = {"gate": (3 * G + 1, 5 * G + 2), "short_conv": (2 * G, 3 * G), "gate_conv": (3 * G + 2, 5 * G + 2)}
    if op not in elements:
        return None
    forward, backward = elements[op]
    per_channel = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction]
    return per_channel * shape.width * shape.count * dtype.itemsize


# gate, short_conv, gate_conv

def _gate_contenders(work: Work, choice: Choice) -> Iterator[Contender]:
    op, shape, dtype = work.op, work.sizes, work.dtype
    leading = dict(batch=shape.batch, tokens=shape.tokens) if op != "gate" else dict(shape=(shape.batch, shape.tokens))
    inputs = named(op, "plain")[0].at(**leading, branches=shape.branches, width=shape.width)(work.device, dtype)
    leaves = [inputs[name].requires_grad_() for name in DIFFERENTIABLE[op]]
    grad = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(leaves[0])
    conv = dict(eps=OPTIONS["conv_eps"], dilation=OPTIONS["dilation"])
    options = {"gate": dict(eps=OPTIONS["eps"]), "short_conv": conv, "gate_conv": OPTIONS}[op]

    def contender(name: str, function, group: str = "", tolerance: float | None = None) -> Contender:
        call = _forward(function, leaves) if work.direction == FORWARD else _both(function, leaves, grad)
        return Contender(name, call, group, tolerance, list, compiled=group in peers.COMPILED)

    yield contender("ours", peers.bind(getattr(ops, op), **options))
    if op == "gate_conv" and work.direction == FORWARD:
        packed = peers.bind(ops.gate_conv, **options, document_ids=_documents(shape, work.device))
        yield Contender("ours, packed", _forward(packed, leaves))
    if work.direction == BOTH:
        yield _backward_alone(op, leaves, grad, options, work)
    if op == "gate_conv":
        for name, group, function in peers.gate_convs(lambda way: way, choice.compiler, **OPTIONS):
            yield contender(name, function, group, DEMO_TOLERANCE[dtype] if "demo" in name else None)
        return
    plain = peers.bind(getattr(reference, op), **options)
    yield contender("eager", plain)
    if choice.compiler:
        yield contender("compile", peers.compiled(plain))


def _documents(shape: Shape, device: str) -> Tensor:
    """int64 [B, T]: documents of 100 tokens, so that in each block some tap is cut off."""
    return torch.arange(shape.tokens, device=device).div(100, rounding_mode="floor").repeat(shape.batch, 1)


def _forward(function, leaves: list[Tensor]) -> Callable[[int], Tensor]:
    def call(_):
        with torch.no_grad():
            return [function(*leaves)]

    return call


def _both(function, leaves: list[Tensor], grad: Tensor) -> Callable[[int], tuple]:
    return lambda _: torch.autograd.grad(function(*leaves), leaves, grad)


def _backward_alone(op: str, leaves: list[Tensor], grad: Tensor, options: dict, work: Work) -> Contender:
    """Our backward op by itself, for its share of the copy bandwidth."""
    tensors = [leaf.detach() for leaf in leaves]
    _, saved = getattr(torch.ops.engram, op)(*tensors, **options)
    kept = {name: value for name, value in options.items() if name != "eps"}
    backward = getattr(torch.ops.engram, f"{op}_backward")
    return Contender("ours, backward alone", lambda _: backward(grad, *tensors, saved, **kept),
                     compare=list, bytes=_gate_bytes(op, BACKWARD, work.sizes, work.dtype))


# ngram_hash

def _hash_work(name: str, shape: Shape, choice: Choice) -> Work:
    written = shape.count * (1 + shape.columns) * 8
    return Work("ngram_hash", FORWARD, name, shape, torch.float32, partial(_hash_contenders, choice=choice),
                bytes=written, ids="stream", device=choice.device)


def _hash_contenders(work: Work, choice: Choice) -> Iterator[Contender]:
    settings = config(work.sizes, TABLES["1GB"], torch.float32)
    constants = nn.NgramHash(settings, token_map(), device=work.device)
    sets = [ids.to(work.device) for ids in token_sets(work.sizes, 8)]
    pad_id = settings.pad_id

    def contender(name: str, function) -> Contender:
        return Contender(name, lambda i: function(sets[i % len(sets)]), compare=lambda rows: [rows], tolerance=0)

    yield contender("ours", lambda ids: constants(ids)[0])
    documents = _documents(work.sizes, work.device)
    yield Contender("ours, packed", lambda i: constants(sets[i % len(sets)], document_ids=documents)[0])
    if work.device == "cpu":
        yield contender("numpy demo", peers.NumpyHash(constants, pad_id))
    plain = peers.bind(peers.torch_hash, constants=constants, pad_id=pad_id)
    yield contender("torch", plain)
    if choice.compiler:
        yield contender("torch, compiled", peers.compiled(plain))


# embedding

def _embedding_works(name: str, shape: Shape, dtype: torch.dtype, choice: Choice) -> Iterator[Work]:
    memory = shape.count * shape.columns * shape.row_width * dtype.itemsize
    rows = shape.count * shape.columns * 8
    for table in choice.tables:
        for ids in choice.ids:
            if FORWARD in choice.directions:
                build = partial(_lookup_contenders, choice=choice)
                yield Work("embedding", FORWARD, name, shape, dtype, build, 2 * memory + rows, table, ids,
                           device=choice.device)


def _step_works(name: str, shape: Shape, dtype: torch.dtype, choice: Choice) -> Iterator[Work]:
    if dtype != torch.float32 or BOTH not in choice.directions:
        return
    for direction in steps.directions(choice.device):
        for table in steps.tables_of(direction, choice.tables):
            for ids in choice.ids if table else ("",):
                build = partial(steps.build(direction), row_sets=row_sets)
                yield Work("table_step", direction, name, shape, dtype, build, None, table, ids,
                           device=choice.device)


def row_sets(work: Work, settings) -> list[Tensor]:
    """Different int64 [B * T, C] sets of rows: of the token stream's n-grams, or uniform inside each column's rows."""
    shape = work.sizes
    touched = shape.count * shape.columns * shape.row_width * work.dtype.itemsize
    sets = max(4, min(MOST_SETS, TOUCHED_BYTES // touched))
    constants = nn.NgramHash(settings, token_map())
    if work.ids == "zipf":
        return [constants(ids)[0].flatten(0, 1).to(work.device) for ids in token_sets(shape, sets)]
    generator = torch.Generator().manual_seed(0)
    moduli, offsets = constants.moduli[0], constants.offsets[0]
    uniform = torch.rand(sets, shape.count, shape.columns, generator=generator, dtype=torch.float64)
    return [rows.to(work.device) for rows in (uniform * moduli).long() + offsets]


def _lookup_contenders(work: Work, choice: Choice) -> Iterator[Contender]:
    settings = config(work.sizes, TABLES[work.table], work.dtype)
    width, number = settings.embed_dim_per_head, sum(nn.layer_moduli(settings, 1))
    sets = row_sets(work, settings)
    bags = torch.arange(sets[0].numel(), device=work.device)
    if work.device == "cpu":
        small, huge = (make_table(0, width, work.dtype, huge=pages, rows=number) for pages in (False, True))
        if (share := huge_page_share(huge)) < 0.95:
            work.notes.append(f"only {share:.0%} of the table for 2 MiB pages is on such pages")
    else:
        small = torch.empty(number, width, dtype=work.dtype, device=work.device).uniform_(-1, 1)

    def contender(name: str, function, group: str = "") -> Contender:
        def call(i):
            with torch.no_grad():
                return function(sets[i % len(sets)])

        return Contender(name, call, group, 0, lambda out: [out.reshape(-1)])

    yield contender("ours", lambda rows: ops.embedding(small, rows))
    yield contender("F.embedding", lambda rows: F.embedding(rows, small))
    yield contender("index_select", lambda rows: small.index_select(0, rows.view(-1)), "index_select")
    yield contender("EmbeddingBag", lambda rows: F.embedding_bag(rows.view(-1), small, bags, mode="sum"))
    if work.device != "cpu":
        return
    fbgemm = steps.fbgemm_table(small, "EXACT_SGD", "NONE", work.dtype)
    if fbgemm is not None:
        offsets = torch.arange(sets[0].numel() + 1)
        yield contender("FBGEMM", lambda rows: fbgemm(rows.view(-1), offsets))
    yield contender("ours, 2 MiB pages", lambda rows: ops.embedding(huge, rows))
    yield contender("F.embedding, 2 MiB pages", lambda rows: F.embedding(rows, huge))
    if choice.compiler and limits.loops() is not None:
        yield contender("gather loop", lambda rows: limits.gather(small, rows))
        yield contender("gather loop, 2 MiB pages", lambda rows: limits.gather(huge, rows))


# embedding_fp8, embedding_int8

def _quantized_works(op: str, name: str, shape: Shape, dtype: torch.dtype, choice: Choice) -> Iterator[Work]:
    scales = -(-shape.row_width // 32) if op == "embedding_fp8" else 4
    row = shape.row_width * (1 + dtype.itemsize) + scales + 8       # with its id
    for table in choice.tables:
        for ids in choice.ids:
            if FORWARD in choice.directions:
                build = partial(_quantized_contenders, choice=choice)
                yield Work(op, FORWARD, name, shape, dtype, build, shape.count * shape.columns * row, table, ids,
                           device=choice.device)


def _quantized_contenders(work: Work, choice: Choice) -> Iterator[Contender]:
    """`work.table` is the size of the values; all tables lie on 2 MiB pages, as those of the modules do."""
    settings = config(work.sizes, TABLES[work.table], torch.int8)
    width, number = settings.embed_dim_per_head, sum(nn.layer_moduli(settings, 1))
    sets, lookup = row_sets(work, settings), getattr(ops, work.op)
    values, scales = quantize.zero_table(number, width, work.op.removeprefix("embedding_"), device=work.device)
    values.view(torch.int8).random_(0, 127)
    scales.view(torch.uint8).fill_(120) if work.op == "embedding_fp8" else scales.uniform_()
    plain = peers.dequantized_lookup(values, scales, work.dtype)

    def contender(name: str, function, compared: bool = True) -> Contender:
        def call(i):
            with torch.no_grad():
                return function(sets[i % len(sets)])

        return Contender(name, call, compare=(lambda out: [out.reshape(-1)]) if compared else None)

    yield contender("ours", lambda rows: lookup(values, scales, rows, dtype=work.dtype))
    yield contender("eager", plain)
    if choice.compiler:
        yield contender("compile", peers.compiled(plain))
    if work.device == "cpu":
        floats = empty_table(number, width, dtype=work.dtype)
        floats.view(torch.uint8).fill_(1)
        yield contender("a float table", lambda rows: ops.embedding(floats, rows), compared=False)
        if choice.compiler and limits.loops() is not None:
            yield contender("gather loop of the values", lambda rows: limits.gather(values, rows), compared=False)


# the whole layer

def _module_contenders(work: Work, choice: Choice) -> Iterator[Contender]:
    shape, dtype = work.sizes, work.dtype
    table_bytes = MODULE_TABLE_BYTES if work.device == "cpu" else TABLES["1GB"]
    settings = config(shape, table_bytes, dtype, sparse_grad=True)
    torch.manual_seed(0)
    layer = nn.Engram(settings, 1, token_map=token_map(), device=work.device, dtype=dtype)
    hidden = torch.randn(shape.batch, shape.tokens, shape.branches, shape.width).to(work.device, dtype).requires_grad_()
    grad = torch.randn(hidden.shape).to(hidden)
    sets = [ids.to(work.device) for ids in token_sets(shape, 8)]
    leaves = [hidden, *layer.parameters()]

    def contender(name: str, function, group: str = "", tolerance: float | None = None) -> Contender:
        if work.direction == FORWARD:
            def call(i):
                with torch.no_grad():
                    return [function(hidden, sets[i % len(sets)])]
        else:
            def call(i):
                return torch.autograd.grad(function(hidden, sets[i % len(sets)]), leaves, grad)

        return Contender(name, call, group, tolerance,
                         lambda results: [x.to_dense() if x.is_sparse else x for x in results],
                         compiled=group in peers.COMPILED)

    yield contender("ours", layer)
    yield _bare_products(layer, work)
    for name, group, tail in peers.gate_convs(_tail, choice.compiler, **OPTIONS):
        tolerance = DEMO_TOLERANCE[dtype] if "demo" in name else None
        yield contender(name, peers.PlainEngram(layer, tail), group, tolerance)


def _decode_contenders(work: Work, choice: Choice) -> Iterator[Contender]:
    return decode.contenders(work, MODULE_TABLE_BYTES, choice.compiler, OPTIONS)


def _tail(gate_conv):
    """Everything after the lookup, around this gate_conv."""

    def tail(memory, hidden, key_w, key_b, value_w, value_b, hidden_weight, key_weight, conv_weight, norm_weight):
        key, value = peers.project(memory, key_w, key_b, value_w, value_b)
        return gate_conv(hidden, key.view(hidden.shape), value, hidden_weight, key_weight, conv_weight, norm_weight)

    return tail


def _bare_products(layer: nn.Engram, work: Work) -> Contender:
    """The layer's matrix products and nothing else."""
    shape = work.sizes
    memory = torch.randn(shape.batch, shape.tokens, layer.config.memory_width).to(work.device, work.dtype)
    memory.requires_grad_()
    key, value = layer.key_proj, layer.value_proj
    leaves = [memory, key.weight, key.bias, value.weight, value.bias]
    grads = [torch.randn_like(product) for product in peers.project(*leaves)]

    def forward(_):
        with torch.no_grad():
            return peers.project(*leaves)

    def both(_):
        return torch.autograd.grad(peers.project(*leaves), leaves, grads)

    return Contender("matrix products", forward if work.direction == FORWARD else both)
