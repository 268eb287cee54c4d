"""One list of inputs per op, for tests and benchmarks: SAMPLES[op] is a list of Sample.

`sample(device, dtype, seed)` gives the op's arguments by name, always the same ones: numbers are drawn in float64 on
the CPU and then cast, so devices and dtypes see the same values. `sample.at(tokens=4096, width=1024)` is the same case
at another size.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import engram
import torch
from engram import reference
from torch import Tensor

DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and engram.build_info()["cuda"] is not None)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALF_DTYPES = [torch.bfloat16, torch.float16]

# The inputs that get a gradient, in the order of the signature.
DIFFERENTIABLE = {
    "embedding": ("table",),
    "gate": ("hidden", "key", "value", "hidden_weight", "key_weight"),
    "short_conv": ("x", "weight", "norm_weight"),
    "gate_conv": (
        "hidden", "key", "value", "hidden_weight", "key_weight", "conv_weight", "conv_norm_weight",
    ),
}


# What an op writes in place: tensors, or lists of them.
WRITTEN = {"row_update": ("table", "first", "second"), "decode": ("history", "conv")}


@dataclass(frozen=True)
class Sample:
    name: str
    make: Callable[..., dict]

    def __call__(self, device="cpu", dtype=torch.float64, seed: int = 0) -> dict:
        return self.make(Draw(device, dtype, seed))

    def at(self, **sizes) -> "Sample":
        return Sample(self.name, partial(self.make, **sizes))

    def __str__(self) -> str:
        return self.name


class Draw:
    """Seeded tensors on one device, floats in one dtype."""

    def __init__(self, device, dtype: torch.dtype, seed: int):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, mean: float = 0.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64) + mean
        return x.to(dtype or self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.device)

    def any_int64(self, *shape: int) -> Tensor:
        bits = self.integers(-(2**31), 2**31, *shape) << 32
        return bits | self.integers(0, 2**32, *shape)

    def mask(self, *shape: int) -> Tensor:
        return self.integers(0, 4, *shape) > 0

    def documents(self, batch: int, tokens: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Runs of random length with two ids in turn, so that a document's id comes back: A B A."""
        starts = self.integers(0, 4, batch, tokens) == 0
        return (starts.cumsum(1) % 2 * 7 - 3).to(dtype)


def strided(x: Tensor, layout: str) -> Tensor:
    """The values of x in another memory layout; `expanded` repeats the first entry with stride 0."""
    if x.dim() == 0 or layout == "contiguous":
        return x
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        canary = torch.full_like(x, torch.nan) if x.is_floating_point() else torch.full_like(x, 1)
        return torch.stack([x, canary], -1)[..., 0]
    if layout == "expanded":
        return x[:1].expand(x.shape)
    raise ValueError(layout)


def ngram_hash(
    draw: Draw, *, batch=2, tokens=7, order=3, heads=2, layers=2, vocab_size: int | None = None, pad_id=2,
    documents=False, mask=False, history: str | None = None, id_dtype=torch.int64, constants="usual",
    layout="contiguous",
) -> dict:
    columns = (order - 1) * heads
    if constants == "usual":            # odd multipliers that do not wrap for ids below 2**16, moduli like primes
        multipliers = draw.integers(0, 2**45, layers, order) * 2 + 1
        moduli = draw.integers(100, 2000, layers, columns)
    elif constants == "extreme":        # everything wraps; moduli from 1 to the largest that int64 offsets allow
        multipliers = draw.any_int64(layers, order)
        moduli = 1 << draw.integers(0, 57, layers, columns)
    offsets = torch.cat([torch.zeros_like(moduli[:, :1]), moduli[:, :-1].cumsum(1)], 1)
    past = draw.integers(0, vocab_size or 1000, batch, order - 1)
    if history == "blocked":            # a negative entry hides what is older, which is then never read
        past[:, : order // 2] = torch.iinfo(torch.int64).max
        past[:, order // 2 - 1] = -1
    if vocab_size is not None:
        token_map = draw.integers(0, max(1, vocab_size // 2), vocab_size, dtype=torch.int32)
        ids = draw.integers(0, vocab_size, batch, tokens)
    elif id_dtype == torch.int64:
        token_map, ids = None, draw.any_int64(batch, tokens)
    else:
        token_map, ids = None, draw.integers(-(2**31), 2**31, batch, tokens)
    visible = draw.mask(batch, tokens) if mask else None
    if mask and vocab_size is not None:  # what is masked is never read
        ids = torch.where(visible, ids, torch.iinfo(id_dtype).min)
    return dict(
        token_ids=strided(ids.to(id_dtype), layout),
        multipliers=strided(multipliers, layout),
        moduli=strided(moduli, layout),
        offsets=strided(offsets, layout),
        pad_id=pad_id,
        token_map=token_map if token_map is None else strided(token_map, layout),
        document_ids=strided(draw.documents(batch, tokens, id_dtype), layout) if documents else None,
        mask=visible if visible is None else strided(visible, layout),
        history=strided(past, layout) if history else None,
    )


def row_plan(
    draw: Draw, *, shape=(2, 5), columns=4, table_rows=37, row_dtype=torch.int64, row_begin: int | None = None,
    mask=False, repeats=False, layout="contiguous",
) -> dict:
    if row_begin is None:
        rows = draw.integers(0, max(1, table_rows), *shape, columns)
    else:                               # a third of the rows lies below the shard, a third above
        rows = draw.integers(row_begin - table_rows - 1, row_begin + 2 * table_rows + 1, *shape, columns)
    if repeats:
        rows = rows.float().mul(draw.normal(*shape, columns, dtype=torch.float32).abs().clamp(max=1)).to(torch.int64)
    visible = draw.mask(*shape) if mask else None
    if mask:                            # what is masked is never read
        rows = torch.where(visible[..., None], rows, torch.iinfo(row_dtype).max)
    return dict(
        rows=strided(rows.to(row_dtype), layout),
        num_rows=table_rows,
        row_begin=row_begin,
        mask=visible if visible is None else strided(visible, layout),
    )


def embedding(draw: Draw, *, table_rows=37, width=16, layout="contiguous", **rows) -> dict:
    """`rows`: what `row_plan` takes beside these."""
    table = strided(draw.normal(table_rows, width), layout)
    inputs = dict(table=table, **row_plan(draw, table_rows=table_rows, layout=layout, **rows))
    del inputs["num_rows"]
    return inputs


def embedding_fp8(draw: Draw, *, table_rows=37, width=80, layout="contiguous", exponents=(-20, 12), **rows) -> dict:
    """Every number that e4m3 has, no NaN; `rows`: what `row_plan` takes beside these."""
    sign, magnitude = draw.integers(0, 2, table_rows, width), draw.integers(0, 127, table_rows, width)
    scales = draw.integers(127 + exponents[0], 128 + exponents[1], table_rows, -(-width // 32))
    inputs = dict(
        values=strided((128 * sign + magnitude).to(torch.uint8), layout).view(torch.float8_e4m3fn),
        scales=strided(scales.to(torch.uint8), layout).view(torch.float8_e8m0fnu),
        **row_plan(draw, table_rows=table_rows, layout=layout, **rows),
    )
    del inputs["num_rows"]
    return inputs | dict(dtype=draw.dtype)


def embedding_int8(draw: Draw, *, table_rows=37, width=80, layout="contiguous", **rows) -> dict:
    """`rows`: what `row_plan` takes beside these."""
    inputs = dict(
        values=strided(draw.integers(-128, 128, table_rows, width, dtype=torch.int8), layout),
        scales=strided(draw.normal(table_rows, dtype=torch.float32), layout),
        **row_plan(draw, table_rows=table_rows, layout=layout, **rows),
    )
    del inputs["num_rows"]
    return inputs | dict(dtype=draw.dtype)


def row_sum(draw: Draw, *, width=16, layout="contiguous", **sizes) -> dict:
    """`sizes`: what `row_plan` takes beside these."""
    plan = row_plan(draw, **sizes)
    keys, runs, count = reference.row_plan(**plan)
    values = draw.normal(*plan["rows"].shape, width)
    if layout != "expanded":            # a plan has no equal keys
        keys, runs = strided(keys, layout), strided(runs, layout)
    return dict(values=strided(values, layout), keys=keys, runs=runs, count=count)


def row_update(
    draw: Draw, *, rule="sgd", first=False, second: str | None = None, table_rows=37, width=16, planned=True, step=3,
    stochastic=False, maximize=False, **sizes,
) -> dict:
    """`sizes`: what `row_sum` takes beside these; second: None, "row" or "element"."""
    state_dtype = torch.float64 if draw.dtype == torch.float64 else torch.float32
    if planned:
        gradient = row_sum(draw, table_rows=table_rows, width=width, **sizes)
        grad, keys, runs, count = gradient.values()
    else:
        grad, keys, runs, count = draw.normal(table_rows, width), None, None, None
    shape = (table_rows, width)[: 1 if second == "row" else 2]
    return dict(
        table=draw.normal(table_rows, width),
        first=draw.normal(table_rows, width, dtype=state_dtype) if first else None,
        second=draw.normal(*shape, dtype=state_dtype).square() if second else None,
        grad=grad, keys=keys, runs=runs, count=count,
        step=torch.tensor([step], device=draw.device),
        rule=rule, lr=0.1, beta1=0.5 * first, beta2=0.75 * (rule == "adam"), eps=1e-3 * (rule != "sgd"),
        weight_decay=0.25, maximize=maximize, seed=11 if stochastic and draw.dtype == torch.bfloat16 else None,
    )


def gate(
    draw: Draw, *, shape=(2, 5), branches=4, width=16, hidden_weight=True, key_weight=True, eps=1e-6, zero_rule="sign",
    mask=False, residual=False, mixed=False, weight_dtype: torch.dtype | None = None, layout="contiguous",
) -> dict:
    hidden_dtype = torch.float32 if mixed and draw.dtype in HALF_DTYPES else draw.dtype
    weights = [draw.normal(branches, width, dtype=weight_dtype, mean=1.0) for _ in range(2)]
    visible = draw.mask(*shape) if mask else None
    return dict(
        hidden=strided(draw.normal(*shape, branches, width, dtype=hidden_dtype), layout),
        key=strided(draw.normal(*shape, branches, width), layout),
        value=strided(draw.normal(*shape, width), layout),
        hidden_weight=strided(weights[0], layout) if hidden_weight else None,
        key_weight=strided(weights[1], layout) if key_weight else None,
        eps=eps,
        zero_rule=zero_rule,
        mask=visible if visible is None else strided(visible, layout),
        residual=residual,
    )


def short_conv(
    draw: Draw, *, batch=2, tokens=11, branches=4, width=16, taps=4, dilation=3, norm=True, eps=1e-5,
    activation: str | None = "silu", residual=True, documents=False, mask=False, lengths=False,
    weight_dtype: torch.dtype | None = None, layout="contiguous",
) -> dict:
    visible = draw.mask(batch, tokens) if mask else None
    inputs = dict(
        x=strided(draw.normal(batch, tokens, branches, width), layout),
        weight=strided(draw.normal(branches, width, taps, dtype=weight_dtype), layout),
        norm_weight=strided(draw.normal(branches, width, dtype=weight_dtype, mean=1), layout) if norm else None,
        dilation=dilation,
        eps=eps,
        activation=activation,
        residual=residual,
        document_ids=strided(draw.documents(batch, tokens), layout) if documents else None,
        mask=visible if visible is None else strided(visible, layout),
    )
    if lengths:
        inputs["lengths"] = draw.integers(0, tokens + 1, batch)
    return inputs


def gate_conv(
    draw: Draw, *, batch=2, tokens=11, branches=4, width=16, eps=1e-6, conv_eps=1e-5, taps=4, dilation=3, norm=True,
    activation: str | None = "silu", documents=False, lengths=False, weight_dtype: torch.dtype | None = None,
    layout="contiguous", **gating,
) -> dict:
    """`gating`: what `gate` takes beside these."""
    inputs = gate(draw, shape=(batch, tokens), branches=branches, width=width, eps=eps, weight_dtype=weight_dtype,
                  layout=layout, **gating)
    conv = short_conv(draw, batch=batch, tokens=tokens, branches=branches, width=width, taps=taps, norm=norm,
                      documents=documents, lengths=lengths, weight_dtype=weight_dtype, layout=layout)
    inputs |= dict(
        conv_weight=conv["weight"],
        conv_norm_weight=conv["norm_weight"],
        conv_eps=conv_eps,
        dilation=dilation,
        activation=activation,
        document_ids=conv["document_ids"],
    )
    if lengths:
        inputs["lengths"] = conv["lengths"]
    return inputs


def decode(
    draw: Draw, *, batch=2, tokens=1, branches=2, width=16, order=3, heads=2, row_width=4, taps=4, dilation=3,
    max_rollback=0, past=5, vocab_size: int | None = 40, eos_id: int | None = None, mask_blocks_hash=True, conv_reset=True,
    bias=True, documents=False, mask=False, lengths=False, layout="contiguous", **gating,
) -> dict:
    """`past`: tokens in the state of the first row; the others have fewer. `gating`: what `gate_conv` takes."""
    hashing = ngram_hash(draw, batch=batch, tokens=tokens, order=order, heads=heads, layers=1, vocab_size=vocab_size,
                         id_dtype=torch.int64, documents=documents, layout=layout)
    mixing = gate_conv(draw, batch=batch, tokens=tokens, branches=branches, width=width, taps=taps, dilation=dilation,
                       mask=mask, lengths=lengths, layout=layout, **gating)
    columns = (order - 1) * heads
    # Room for the largest moduli: the same size for every seed.
    shapes = dict(table=(2000 * columns, row_width), key_proj=(branches * width, columns * row_width),
                  value_proj=(width, columns * row_width))
    floats = {name: strided(draw.normal(*shape) / shape[1] ** 0.5, layout) for name, shape in shapes.items()}
    for name, size in (("key_bias", branches * width), ("value_bias", width)):
        floats[name] = draw.normal(size) if bias else None
    positions = (past - torch.arange(batch) * 3).clamp(min=0).to(draw.device)

    def ring(reach: int, **payload: Tensor) -> list[Tensor]:
        slots = max(1, reach + max_rollback)
        runs = draw.integers(0, 3, batch, slots).sort(1).values
        marks = [positions.clone(), positions.clamp(max=max_rollback), draw.mask(batch, slots), runs, runs % 2]
        return [*marks, *payload.values()]

    if layout == "contiguous" and (mask or lengths):    # what is masked, or past the end, is never read
        read = torch.ones(batch, tokens, dtype=torch.bool, device=draw.device)
        if mask and mask_blocks_hash:
            read &= mixing["mask"]
        if lengths:
            read &= torch.arange(tokens, device=draw.device) < mixing["lengths"][:, None]
        hashing["token_ids"] = torch.where(read, hashing["token_ids"], torch.iinfo(torch.int64).min)

    reach = (taps - 1) * dilation
    slots = max(1, reach + max_rollback)
    state_dtype = torch.float64 if draw.dtype == torch.float64 else torch.float32
    history = ring(order - 1, ids=draw.integers(0, vocab_size or 100, batch, max(1, order - 1 + max_rollback)))
    value = draw.normal(batch, slots, width)
    scores = draw.normal(batch, slots, 3 * branches, dtype=state_dtype)
    stats = torch.cat([scores, value.to(state_dtype).square().mean(2, keepdim=True)], 2)
    conv = ring(reach, value=value, stats=stats)
    return {
        **{name: hashing[name] for name in ("token_ids", "multipliers", "moduli", "offsets", "pad_id", "token_map",
                                            "document_ids")},
        **floats,
        **{name: mixing[name] for name in ("hidden", "hidden_weight", "key_weight", "conv_weight", "conv_norm_weight",
                                           "eps", "conv_eps", "dilation", "zero_rule", "mask", "residual")},
        **dict(history=history, conv=conv, max_rollback=max_rollback, eos_id=eos_id, mask_blocks_hash=mask_blocks_hash,
               conv_reset=conv_reset, lengths=mixing.get("lengths")),
    }


def _list(make: Callable[..., dict], **cases: dict) -> list[Sample]:
    return [Sample(name, partial(make, **sizes)) for name, sizes in cases.items()]


LAYOUTS = ("transposed", "sliced", "expanded")
LOOKUPS = dict(  # what every lookup has to do, whatever its table consists of
    plain={},
    int32=dict(row_dtype=torch.int32),
    shard=dict(row_begin=100, shape=(4, 9)),
    shard_int32_mask=dict(row_begin=1000, row_dtype=torch.int32, mask=True),
    mask=dict(mask=True, shape=(3, 8)),
    rows_only=dict(shape=()),
    **{layout: dict(layout=layout, mask=True, row_begin=10) for layout in LAYOUTS},
    no_tokens=dict(shape=(2, 0), mask=True),
    no_columns=dict(columns=0),
    no_width=dict(width=0),
    no_table=dict(table_rows=0, shape=(0,)),
    no_shard=dict(table_rows=0, row_begin=5),
)

SAMPLES: dict[str, list[Sample]] = {
    "decode": _list(
        decode,
        plain={},
        raw_ids=dict(vocab_size=None),
        **{f"branches_{branches}": dict(branches=branches, width=33) for branches in (1, 3, 4)},
        **{f"width_{width}": dict(width=width, row_width=width) for width in (2, 7, 64, 130)},
        **{f"tokens_{tokens}": dict(tokens=tokens, batch=3) for tokens in (2, 3, 5, 12)},
        fourgrams=dict(order=4, heads=3, tokens=2),
        one_tap=dict(taps=1),
        five_taps=dict(taps=5, dilation=2, tokens=4),
        no_past=dict(past=0, tokens=3),
        long_past=dict(past=50),
        documents=dict(documents=True, tokens=6),
        conv_across_documents=dict(documents=True, tokens=6, conv_reset=False),
        eos=dict(eos_id=1, vocab_size=3, tokens=6),
        eos_everything=dict(eos_id=1, vocab_size=3, tokens=6, documents=True, mask=True, lengths=True),
        mask=dict(mask=True, tokens=6),
        mask_residual=dict(mask=True, tokens=6, residual=True),
        mask_hashed=dict(mask=True, tokens=6, mask_blocks_hash=False),
        lengths=dict(lengths=True, tokens=6, batch=5, mask_blocks_hash=False),
        rollback=dict(max_rollback=4, tokens=3),
        wraps=dict(tokens=25, documents=True, mask=True, max_rollback=1),
        no_bias=dict(bias=False),
        no_weights=dict(hidden_weight=False, key_weight=False, norm=False),
        copysign=dict(zero_rule="copysign"),
        mixed=dict(mixed=True, residual=True),
        weights_float64=dict(weight_dtype=torch.float64),
        **{layout: dict(layout=layout, mask=True, documents=True, tokens=3) for layout in LAYOUTS},
        no_tokens=dict(tokens=0, documents=True, mask=True),
        no_batch=dict(batch=0, documents=True, mask=True),
    ),
    "ngram_hash": _list(
        ngram_hash,
        plain={},
        map=dict(vocab_size=50, tokens=19),
        bigrams=dict(order=2, heads=1, layers=1),
        fourgrams=dict(order=4, heads=8, layers=3, vocab_size=300),
        fivegrams=dict(order=5, heads=3),
        long=dict(batch=3, tokens=1500, heads=4, vocab_size=1000, documents=True, mask=True),
        extreme=dict(order=5, heads=5, constants="extreme", tokens=64),
        int32=dict(id_dtype=torch.int32, documents=True, vocab_size=40),
        int32_raw=dict(id_dtype=torch.int32, constants="extreme"),
        documents=dict(documents=True, tokens=40, order=4),
        mask=dict(mask=True, tokens=40, order=4, vocab_size=30),
        everything=dict(documents=True, mask=True, history="usual", vocab_size=30, order=5, tokens=60),
        history=dict(history="usual", order=4),
        history_blocked=dict(history="blocked", order=5, vocab_size=100),
        history_longer_than_tokens=dict(history="usual", order=5, tokens=2, documents=True),
        one_token=dict(tokens=1, batch=1, layers=1),
        one_token_history=dict(tokens=1, history="usual", order=4, vocab_size=9, pad_id=0),
        shorter_than_window=dict(tokens=2, order=5),
        **{layout: dict(layout=layout, documents=True, mask=True, history="usual", vocab_size=9) for layout in LAYOUTS},
        no_tokens=dict(tokens=0, documents=True, mask=True, history="usual", vocab_size=5),
        no_batch=dict(batch=0, documents=True, mask=True, history="usual"),
        no_layers=dict(layers=0),
        no_columns=dict(heads=0),
    ),
    "embedding": _list(
        embedding,
        **LOOKUPS,
        **{f"width_{width}": dict(width=width) for width in (1, 3, 7, 64, 65, 80, 130, 257, 1025, 2048)},
        many=dict(shape=(3, 700), columns=8, table_rows=900, width=9),
        repeats=dict(shape=(2, 300), repeats=True, table_rows=20),
        shard_from_zero=dict(row_begin=0),
        one_row=dict(table_rows=1),
        layers_first=dict(shape=(2, 3, 4), columns=3),
    ),
    "embedding_fp8": _list(
        embedding_fp8,
        **LOOKUPS,
        **{f"width_{width}": dict(width=width) for width in (1, 2, 4, 7, 16, 31, 32, 33, 64, 100, 256, 1025)},
        many=dict(shape=(3, 700), columns=8, table_rows=900, width=48),
        small_scales=dict(exponents=(-127, -115)),
        large_scales=dict(exponents=(110, 127)),
    ),
    "embedding_int8": _list(
        embedding_int8,
        **LOOKUPS,
        **{f"width_{width}": dict(width=width) for width in (1, 2, 4, 7, 16, 33, 64, 100, 256, 1025)},
        many=dict(shape=(3, 700), columns=8, table_rows=900, width=48),
    ),
    "row_plan": _list(
        row_plan,
        plain={},
        mask=dict(mask=True, shape=(3, 8)),
        shard_int32_mask=dict(row_begin=1000, row_dtype=torch.int32, mask=True, shape=(4, 9)),
        nothing_touched=dict(row_begin=10**6),
        one_row=dict(table_rows=1, shape=(30,)),
        sorted=dict(table_rows=1, shape=(9,), columns=1),
        runs=dict(shape=(40, 100), table_rows=20, columns=1),
        one_chunk=dict(shape=(4, 1024), columns=1, table_rows=9000),
        many=dict(shape=(3, 1700), columns=8, table_rows=10**12, mask=True),
        huge_shard=dict(shape=(3, 700), columns=8, table_rows=2**40, row_begin=2**40),
        rows_only=dict(shape=()),
        **{layout: dict(layout=layout, mask=True, row_begin=10) for layout in LAYOUTS},
        no_tokens=dict(shape=(2, 0), mask=True),
        no_table=dict(table_rows=0, shape=(0,)),
        no_shard=dict(table_rows=0, row_begin=5),
    ),
    "row_sum": _list(
        row_sum,
        plain={},
        **{f"width_{width}": dict(width=width) for width in (1, 7, 65, 257, 2048)},
        mask=dict(mask=True, shape=(3, 8), row_begin=5),
        repeats=dict(shape=(2, 300), repeats=True, table_rows=20),
        one_row=dict(table_rows=1, shape=(700,)),
        nothing_touched=dict(row_begin=10**6),
        **{layout: dict(layout=layout, mask=True) for layout in LAYOUTS},
        no_tokens=dict(shape=(2, 0)),
        no_width=dict(width=0),
    ),
    "row_update": _list(
        row_update,
        plain={},
        momentum=dict(first=True, maximize=True),
        adagrad=dict(rule="adagrad", second="row", repeats=True),
        adam=dict(rule="adam", first=True, second="element", mask=True),
        adam_rows=dict(rule="adam", first=True, second="row"),
        adam_rows_alone=dict(rule="adam", second="row", maximize=True),
        adam_elements_alone=dict(rule="adam", second="element", step=10**6),
        stochastic=dict(rule="adam", first=True, second="row", stochastic=True, width=70),
        stochastic_dense=dict(stochastic=True, planned=False, width=257),
        dense=dict(rule="adagrad", second="row", planned=False),
        dense_adam=dict(rule="adam", first=True, second="element", planned=False, table_rows=300),
        shard=dict(row_begin=100, shape=(4, 9), rule="adagrad", second="row"),
        one_row=dict(table_rows=1, shape=(700,), rule="adagrad", second="row"),
        many=dict(shape=(3, 700), columns=8, table_rows=900, width=24, rule="adam", first=True, second="element"),
        **{f"width_{width}": dict(width=width, rule="adam", first=True, second="row")
           for width in (1, 3, 65, 130, 1025, 2048)},
        nothing_touched=dict(row_begin=10**6, rule="adagrad", second="row"),
        no_tokens=dict(shape=(2, 0), rule="adagrad", second="row"),
        no_table=dict(table_rows=0, planned=False),
        no_width=dict(width=0, rule="adagrad", second="row"),
    ),
    "gate": _list(
        gate,
        plain={},
        **{f"branches_{branches}": dict(branches=branches, width=33) for branches in (1, 2, 3, 8)},
        # Of width 1 the norm leaves the sign alone: with a small eps its gradient is all cancellation.
        width_1=dict(width=1, eps=0.1),
        **{f"width_{width}": dict(width=width) for width in (2, 15, 64, 130, 257, 1024)},
        many=dict(shape=(3, 150), width=24, residual=True),
        no_weights=dict(hidden_weight=False, key_weight=False),
        hidden_weight=dict(key_weight=False),
        key_weight=dict(hidden_weight=False, residual=True),
        residual=dict(residual=True),
        copysign=dict(zero_rule="copysign", residual=True),
        mask=dict(mask=True, shape=(3, 7)),
        mask_residual=dict(mask=True, residual=True, shape=(3, 7)),
        mixed=dict(mixed=True, residual=True),
        mixed_mask=dict(mixed=True, mask=True, weight_dtype=torch.float32),
        weights_float32=dict(weight_dtype=torch.float32),
        weights_bfloat16=dict(weight_dtype=torch.bfloat16),
        weights_float64=dict(weight_dtype=torch.float64),
        big_eps=dict(eps=0.5),
        tiny_eps=dict(eps=1e-20),
        one_token=dict(shape=(1,)),
        no_batch_dimension=dict(shape=(), branches=2),
        three_dimensions=dict(shape=(2, 2, 3), mask=True),
        **{layout: dict(layout=layout, mask=True, residual=True) for layout in LAYOUTS},
        no_tokens=dict(shape=(2, 0), mask=True),
        no_batch=dict(shape=(0, 3)),
        no_branches=dict(branches=0),
        no_width=dict(width=0),
    ),
    "short_conv": _list(
        short_conv,
        plain={},
        **{f"taps_{taps}_dilation_{dilation}": dict(taps=taps, dilation=dilation, width=5)
           for taps, dilation in ((1, 1), (2, 4), (3, 2), (4, 1), (5, 3))},
        **{f"branches_{branches}": dict(branches=branches, width=33) for branches in (1, 2, 3, 8)},
        **{f"width_{width}": dict(width=width) for width in (1, 2, 15, 64, 130, 257)},
        long=dict(batch=3, tokens=150, width=20, documents=True, mask=True),
        wide=dict(tokens=3, branches=2, width=1024),
        documents=dict(documents=True, tokens=40),
        mask=dict(mask=True, tokens=30),
        everything=dict(mask=True, documents=True, lengths=True, tokens=40),
        lengths=dict(lengths=True, batch=4),
        no_norm=dict(norm=False),
        no_activation=dict(activation=None),
        no_residual=dict(residual=False, mask=True),
        bare=dict(residual=False, activation=None, norm=False),
        weights_float32=dict(weight_dtype=torch.float32),
        weights_bfloat16=dict(weight_dtype=torch.bfloat16),
        weights_float64=dict(weight_dtype=torch.float64),
        big_eps=dict(eps=0.5),
        one_token=dict(tokens=1, batch=1),
        two_tokens=dict(tokens=2, documents=True),
        shorter_than_reach=dict(tokens=5, taps=5, dilation=4),
        **{layout: dict(layout=layout, mask=True, documents=True) for layout in LAYOUTS},
        no_tokens=dict(tokens=0, documents=True, mask=True),
        no_batch=dict(batch=0, documents=True, mask=True),
        no_branches=dict(branches=0),
        no_width=dict(width=0),
    ),
    "gate_conv": _list(
        gate_conv,
        plain={},
        **{f"taps_{taps}_dilation_{dilation}": dict(taps=taps, dilation=dilation, width=5)
           for taps, dilation in ((1, 1), (2, 4), (3, 2), (5, 3))},
        **{f"branches_{branches}": dict(branches=branches, width=33) for branches in (1, 2, 3, 8)},
        width_1=dict(width=1, eps=0.1),
        **{f"width_{width}": dict(width=width) for width in (2, 15, 64, 130, 257)},
        long=dict(batch=3, tokens=150, width=20, documents=True, mask=True),
        documents=dict(documents=True, tokens=40),
        mask=dict(mask=True, tokens=30),
        mask_residual=dict(mask=True, residual=True, tokens=30),
        everything=dict(mask=True, documents=True, lengths=True, residual=True, tokens=40),
        residual=dict(residual=True),
        copysign=dict(zero_rule="copysign"),
        no_weights=dict(hidden_weight=False, key_weight=False),
        hidden_weight=dict(key_weight=False),
        key_weight=dict(hidden_weight=False),
        no_norm=dict(norm=False),
        no_activation=dict(activation=None),
        bare=dict(activation=None, norm=False, hidden_weight=False, key_weight=False),
        mixed=dict(mixed=True, residual=True),
        mixed_mask=dict(mixed=True, mask=True, weight_dtype=torch.float32),
        weights_float64=dict(weight_dtype=torch.float64),
        weights_bfloat16=dict(weight_dtype=torch.bfloat16),
        big_conv_eps=dict(conv_eps=0.5),
        one_token=dict(tokens=1, batch=1),
        shorter_than_reach=dict(tokens=5, taps=5, dilation=4),
        **{layout: dict(layout=layout, mask=True, documents=True, residual=True) for layout in LAYOUTS},
        no_tokens=dict(tokens=0, documents=True, mask=True),
        no_batch=dict(batch=0, documents=True, mask=True),
        no_branches=dict(branches=0),
        no_width=dict(width=0),
    ),
}


def named(op: str, *names: str) -> list[Sample]:
    """The samples of an op with these names."""
    by_name = {sample.name: sample for sample in SAMPLES[op]}
    return [by_name[name] for name in names]


def each_sample(*ops: str) -> list[tuple[str, Sample]]:
    return [(op, sample) for op in ops or SAMPLES for sample in SAMPLES[op]]


def results_of(op: str, function: Callable, inputs: dict) -> list[Tensor]:
    """What a call gives, in a list; of an op that works in place what it has written, into copies."""
    written = {name: _cloned(inputs[name]) for name in WRITTEN.get(op, ()) if inputs[name] is not None}
    result = function(**inputs | written)
    if op == "row_update":
        assert result is None
    found = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    return found + [x for value in written.values() for x in (value if isinstance(value, list) else [value])]


def _cloned(value):
    return [x.clone() for x in value] if isinstance(value, list) else value.clone()


def bits(x: Tensor) -> Tensor:
    """The bits of a float tensor as integers: -0 is not 0, and a NaN, of which there are many, is one number."""
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.dtype.itemsize]
    return torch.where(x.isnan(), torch.tensor(float("nan")).to(x), x).view(kind)


def to_double(inputs: dict) -> dict:
    """The same numbers in float64: what the oracle computes on."""
    def double(value):
        if isinstance(value, list):
            return [double(x) for x in value]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: double(value) for name, value in inputs.items()}


def backward_inputs(op: str, inputs: dict) -> dict:
    """The arguments of `torch.ops.engram.<op>_backward` that belong to a forward call with these inputs."""
    outputs = getattr(torch.ops.engram, op)(**inputs)
    if op == "embedding":
        out, num_rows = outputs, inputs["table"].shape[0]
        plan = reference.row_plan(inputs["rows"], num_rows, row_begin=inputs["row_begin"], mask=inputs["mask"])
        kept, saved = dict(zip(("keys", "runs", "count"), plan)), dict(num_rows=num_rows)
    else:
        kept = {k: v for k, v in inputs.items() if k != "eps"}
        out, saved = outputs[0], {"rstd" if op == "short_conv" else "stats": outputs[1]}
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dict(grad_out=grad_out.to(out), **kept, **saved)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm-wise over the tensor; against an expected zero any difference counts as infinite."""
    assert actual.shape == expected.shape, f"{actual.shape} instead of {expected.shape}"
    difference, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return 0.0 if difference == 0 else difference / size if size else torch.inf
