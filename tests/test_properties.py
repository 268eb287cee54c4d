"""What must hold for any input, tried on many: hypothesis draws the shapes, the ids and the documents."""
import pytest
import torch
from engram import ops, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DIFFERENTIABLE, Draw, gate, gate_conv, ngram_hash, short_conv

INT64 = st.integers(-(2**63), 2**63 - 1)
SEEDS = st.integers(0, 2**31)


def hash_inputs(seed: int, batch: int, tokens: int, **sizes) -> dict:
    return ngram_hash(Draw("cpu", torch.float64, seed), batch=batch, tokens=tokens, **sizes)


def conv_inputs(seed: int, batch: int, tokens: int, **sizes) -> dict:
    sizes = dict(branches=2, width=5) | sizes
    return short_conv(Draw("cpu", torch.float32, seed), batch=batch, tokens=tokens, **sizes)


def gate_inputs(seed: int, batch: int, tokens: int, **sizes) -> dict:
    return gate(Draw("cpu", torch.float32, seed), shape=(batch, tokens), branches=2, width=21, **sizes)


def gate_conv_inputs(seed: int, batch: int, tokens: int, **sizes) -> dict:
    return gate_conv(Draw("cpu", torch.float32, seed), batch=batch, tokens=tokens, branches=2, width=5, **sizes)


# Per op the inputs that have a token dimension, and where it is in the result.
BY_TOKEN = {
    "ngram_hash": ("token_ids", "document_ids", "mask"),
    "gate": ("hidden", "key", "value", "mask"),
    "short_conv": ("x", "document_ids", "mask"),
    "gate_conv": ("hidden", "key", "value", "document_ids", "mask"),
}
MAKE = {"ngram_hash": hash_inputs, "gate": gate_inputs, "short_conv": conv_inputs, "gate_conv": gate_conv_inputs}


def batch_first(op: str, out: torch.Tensor) -> torch.Tensor:
    return out.permute(1, 2, 0, 3) if op == "ngram_hash" else out


def at_tokens(op: str, inputs: dict, part: slice) -> dict:
    cut = {name: inputs[name][:, part] for name in BY_TOKEN[op] if inputs[name] is not None}
    return {**inputs, **cut}


def call(op: str, inputs: dict) -> torch.Tensor:
    return batch_first(op, getattr(ops, op)(**inputs))


@given(
    ids=st.lists(INT64, min_size=1, max_size=12), pad_id=INT64, order=st.integers(2, 5), heads=st.integers(1, 4),
    data=st.data(),
)
def test_rows_stay_inside_their_own_table(ids, pad_id, order, heads, data):
    """Any int64 ids, multipliers and moduli."""
    columns = (order - 1) * heads
    multipliers = torch.tensor([data.draw(st.lists(INT64, min_size=order, max_size=order))])
    moduli = torch.tensor([data.draw(st.lists(st.integers(1, 2**63 - 1), min_size=columns, max_size=columns))])
    inputs = dict(token_ids=torch.tensor([ids]), multipliers=multipliers, moduli=moduli,
                  offsets=torch.zeros_like(moduli), pad_id=pad_id)
    rows = ops.ngram_hash(**inputs)
    assert ((rows >= 0) & (rows < moduli)).all()
    assert torch.equal(rows, reference.ngram_hash(**inputs))
    # Python's integers are the third opinion: floored, unbounded, wrapped by hand.
    mix, t = 0, len(ids) - 1
    for s in range(order):
        mix ^= (ids[t - s] if t >= s else pad_id) * multipliers[0, s].item() % 2**64
        signed = mix - 2**64 if mix >= 2**63 else mix
        if s:
            expected = [signed % m for m in moduli[0, (s - 1) * heads:s * heads].tolist()]
            assert rows[0, 0, t, (s - 1) * heads:s * heads].tolist() == expected


@given(
    seed=SEEDS, batch=st.integers(0, 3), tokens=st.integers(0, 30), order=st.integers(2, 5), heads=st.integers(1, 9),
    layers=st.integers(1, 3), vocab_size=st.sampled_from([None, 3, 100]), documents=st.booleans(), mask=st.booleans(),
    history=st.sampled_from([None, "usual", "blocked"]), constants=st.sampled_from(["usual", "extreme"]),
)
def test_ngram_hash_equals_the_reference(seed, batch, tokens, **sizes):
    inputs = hash_inputs(seed, batch, tokens, **sizes)
    assert torch.equal(ops.ngram_hash(**inputs), reference.ngram_hash(**inputs))


@pytest.mark.parametrize("op", MAKE)
@given(seed=SEEDS, tokens=st.integers(1, 40), cut=st.integers(0, 40),
       flags=st.booleans())
def test_prefix_of_result_is_result_of_prefix(op, seed, tokens, cut, flags):
    """Causality, to the bit: what comes later never shows."""
    inputs = MAKE[op](seed, 2, tokens, mask=flags, **(dict(documents=flags) if op != "gate" else {}))
    prefix = at_tokens(op, inputs, slice(0, min(cut, tokens)))
    assert torch.equal(call(op, prefix), call(op, inputs)[:, :min(cut, tokens)])


@pytest.mark.parametrize("op", MAKE)
@given(seed=SEEDS, batch=st.integers(1, 5), flags=st.booleans())
def test_batch_order_is_irrelevant(op, seed, batch, flags):
    inputs = MAKE[op](seed, batch, 17, mask=flags, **(dict(documents=flags) if op != "gate" else {}))
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    shuffled = {**inputs, **{name: inputs[name][order] for name in BY_TOKEN[op] if inputs[name] is not None}}
    assert torch.equal(call(op, shuffled), call(op, inputs)[order])
    one = {**inputs, **{name: inputs[name][:1] for name in BY_TOKEN[op] if inputs[name] is not None}}
    assert torch.equal(call(op, one), call(op, inputs)[:1])


@pytest.mark.parametrize("op", MAKE)
@given(seed=SEEDS, lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
       flags=st.booleans())
def test_packed_equals_separate(op, seed, lengths, flags):
    """Documents in one row give the bits that each gives in a row of its own; ids may come back, as in A B A."""
    inputs = MAKE[op](seed, 1, sum(lengths), mask=flags, **(dict(dilation=2) if "conv" in op else {}))
    packed = dict(inputs)
    if op != "gate":
        ids = [5 if i % 2 else 2**40 for i in range(len(lengths))]
        packed["document_ids"] = torch.tensor([[i for i, length in zip(ids, lengths) for _ in range(length)]])
    out, start = call(op, packed), 0
    for length in lengths:
        part = slice(start, start + length)
        assert torch.equal(call(op, at_tokens(op, inputs, part)), out[:, part])
        start += length


@given(seed=SEEDS, lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5), mask=st.booleans(), data=st.data())
def test_short_conv_gradient_never_crosses_documents(seed, lengths, mask, data):
    inputs = conv_inputs(seed, 1, sum(lengths), mask=mask)
    inputs["document_ids"] = torch.repeat_interleave(torch.arange(len(lengths)) % 2, torch.tensor(lengths))[None]
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    part = slice(sum(lengths[:chosen]), sum(lengths[:chosen + 1]))
    inputs["x"].requires_grad_()
    out = ops.short_conv(**inputs)
    grad, = torch.autograd.grad(out[:, part].square().sum(), inputs["x"])
    outside = torch.ones(sum(lengths), dtype=torch.bool)
    outside[part] = False
    assert not grad[:, outside].any()
    # ... and is what the document alone would get.
    alone = {**inputs, "x": inputs["x"].detach()[:, part].requires_grad_(), "document_ids": None,
             "mask": inputs["mask"][:, part] if mask else None}
    expected, = torch.autograd.grad(ops.short_conv(**alone).square().sum(), alone["x"])
    torch.testing.assert_close(grad[:, part], expected, rtol=1e-5, atol=1e-6)


@given(seed=SEEDS, bad=st.sampled_from([torch.nan, torch.inf]))
def test_short_conv_nan_stays_in_its_document(seed, bad):
    inputs = conv_inputs(seed, 1, 24)
    inputs["document_ids"] = torch.tensor([[0] * 10 + [1] * 14])
    names = ("x", "weight", "norm_weight")
    expected = [ops.short_conv(**inputs)[:, 10:]]
    second = {**inputs, **{n: inputs[n].detach().clone().requires_grad_() for n in names}}
    expected += torch.autograd.grad(ops.short_conv(**second)[:, 10:].sum(), second["x"])
    poisoned = {**inputs, "x": inputs["x"].clone()}
    poisoned["x"][:, :10] = bad
    poisoned["x"].requires_grad_()
    out = ops.short_conv(**poisoned)
    grad, = torch.autograd.grad(out[:, 10:].sum(), poisoned["x"])
    assert torch.equal(out[:, 10:], expected[0]) and torch.equal(grad[:, 10:], expected[1][:, 10:])


@pytest.mark.parametrize("op", MAKE)
@given(seed=SEEDS, tokens=st.integers(1, 15), left=st.integers(0, 12),
       right=st.integers(0, 12), garbage=st.sampled_from([0.0, 3.0, torch.nan]))
def test_padded_equals_unpadded(op, seed, tokens, left, right, garbage):
    """Whatever stands at the pads, left or right, masked it changes neither results nor gradients."""
    inputs = MAKE[op](seed, 2, tokens) | (dict(residual=False) if op != "ngram_hash" else {})
    padded = dict(inputs)
    for name in BY_TOKEN[op]:
        if inputs[name] is not None:
            x = inputs[name]
            pad = [torch.full_like(x[:, :1], garbage if x.is_floating_point() else -77).expand(-1, n, *x.shape[2:])
                   for n in (left, right)]
            padded[name] = torch.cat([pad[0], x, pad[1]], 1)
    padded["mask"] = torch.zeros(2, left + tokens + right, dtype=torch.bool)
    padded["mask"][:, left:left + tokens] = True
    part = slice(left, left + tokens)
    assert torch.equal(call(op, padded)[:, part], call(op, inputs))
    if op == "ngram_hash":
        return
    names = [n for n in BY_TOKEN[op] if n not in ("mask", "document_ids")]
    weights = [n for n in DIFFERENTIABLE[op] if n not in names]

    def gradients(arguments):
        wanted = {n: arguments[n].detach().requires_grad_() for n in names + weights}
        out = getattr(ops, op)(**{**arguments, **wanted})
        return dict(zip(wanted, torch.autograd.grad(out.square().sum(), list(wanted.values()))))

    found, expected = gradients(padded), gradients(inputs)
    for name in names:
        assert torch.equal(found[name][:, part], expected[name])
        assert not found[name][:, :left].any() and not found[name][:, left + tokens:].any()
    for name in weights:                # their sums are cut into blocks elsewhere
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@given(seed=SEEDS, tokens=st.integers(1, 20))
def test_lengths_are_a_mask(seed, tokens):
    inputs = conv_inputs(seed, 3, tokens, lengths=True, mask=True)
    lengths = inputs.pop("lengths")
    combined = inputs["mask"] & (torch.arange(tokens) < lengths[:, None])
    assert torch.equal(ops.short_conv(**inputs, lengths=lengths), ops.short_conv(**{**inputs, "mask": combined}))


@settings(max_examples=30)
@given(seed=SEEDS, table_rows=st.integers(1, 40), shards=st.integers(1, 5), width=st.integers(1, 9))
def test_shards_add_up_to_the_table(seed, table_rows, shards, width):
    draw = Draw("cpu", torch.float32, seed)
    table, rows = draw.normal(table_rows, width), draw.integers(0, table_rows, 3, 4, 2)
    cuts = [table_rows * i // shards for i in range(shards + 1)]
    parts = [table[a:b].clone().requires_grad_() for a, b in zip(cuts, cuts[1:])]
    looked_up = [ops.embedding(part, rows, row_begin=a) for part, a in zip(parts, cuts)]
    whole = table.clone().requires_grad_()
    out = ops.embedding(whole, rows)
    assert torch.equal(torch.stack(looked_up).sum(0), out)
    grad_out = draw.normal(*out.shape)
    out.backward(grad_out)
    torch.stack(looked_up).sum(0).backward(grad_out)
    assert torch.equal(torch.cat([part.grad for part in parts]), whole.grad)
