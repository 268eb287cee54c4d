"""decode: against the reference, against the ops it stands for, through nn.Engram; its errors."""
import re

import pytest
import torch
from engram import EngramConfig, TokenMap, nn, ops, reference
from samples import DEVICES, DTYPES, SAMPLES, named, relative_error, results_of, to_double

# key, value and the output are rounded to a half dtype each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
V = 50
MAP = TokenMap([i * 7 % 30 for i in range(V)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", SAMPLES["decode"], ids=str)
def test_against_the_reference(sample, dtype, device):
    """Output and state: numbers to their rounding, marks and ids exactly."""
    inputs = sample(device, dtype)
    actual = results_of("decode", ops.decode, inputs)
    expected = results_of("decode", reference.decode, to_double(inputs))
    assert actual[0].dtype == inputs["hidden"].dtype and actual[0].is_contiguous()
    seen = actual[3]
    for i, (out, wanted) in enumerate(zip(actual, expected, strict=True)):
        if out.is_floating_point():
            assert relative_error(out, wanted) <= TOLERANCE[dtype], i
        elif i == 6:        # ids that the hash does not see are anything
            assert torch.equal(torch.where(seen, out, 0), torch.where(seen, wanted, 0))
        else:
            assert torch.equal(out, wanted), i


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_see_the_batch(dtype, device):
    inputs = named("decode", "tokens_3")[0].at(batch=7, width=40)(device, dtype)
    together = results_of("decode", ops.decode, inputs)
    for b in range(7):
        row = dict(inputs, **{name: inputs[name][b : b + 1] for name in ("hidden", "token_ids")})
        row |= {name: [x[b : b + 1] for x in inputs[name]] for name in ("history", "conv")}
        alone = results_of("decode", ops.decode, row)
        assert all(torch.equal(x, y[b : b + 1]) for x, y in zip(alone, together))


# ---------------------------------------------------------------------------------------------------- through nn.Engram


def build(dtype=torch.float64, token_map=None, **values):
    torch.manual_seed(0)
    config = EngramConfig(**dict(dict(
        hidden_size=20, vocab_size=V, heads_per_ngram=2, embed_dim_per_head=4, table_size=40, layer_ids=(1, 3),
        conv_init="default"), **values))
    layer = nn.Engram(config, 3, dtype=dtype, token_map=token_map).requires_grad_(False)
    for name, weight in layer.named_parameters():
        if name.endswith(("hidden_weight", "key_weight", "norm_weight")):
            torch.nn.init.normal_(weight, 1, 0.2)
    return layer


def draw(layer, batch=2, tokens=20, eos=7):
    generator = torch.Generator().manual_seed(1)
    config, dtype = layer.config, layer.value_proj.weight.dtype
    shape = (batch, tokens, config.branches, config.hidden_size)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, V, (batch, tokens), generator=generator)
    ids[:, ::5] = eos
    documents = torch.randint(0, 3, (batch, tokens), generator=generator).sort(1).values
    mask = torch.rand(batch, tokens, generator=generator) < 0.7
    return hidden, ids, documents, mask


def in_chunks(layer, hidden, ids, sizes, max_rollback=2, **tokenwise):
    state, at, outs = layer.init_state(hidden.shape[0], max_rollback), 0, []
    for size in sizes:
        here = slice(at, at + size)
        residual = tokenwise.pop("residual", None)
        outs.append(layer(hidden[:, here], ids[:, here], state=state, residual=residual,
                          **{name: x[:, here] for name, x in tokenwise.items()}))
        at += size
    return torch.cat(outs, 1), state


@pytest.fixture
def decoded(monkeypatch):
    """The steps that the op has done, which takes at most 16 tokens here."""
    calls = []

    def counting(*args, **options):
        calls.append(args[0].shape)
        return op(*args, **options)

    op = ops.decode
    monkeypatch.setattr(ops, "decode", counting)
    monkeypatch.setattr(nn, "_DECODED_TOKENS", 16)
    return calls


CONFIGS = {
    "plain": {}, "branches": dict(branches=4), "no_bias": dict(bias=False), "eos": dict(boundary="eos", eos_id=7),
    "mask_hashed": dict(mask_blocks_hash=False), "conv_across": dict(conv_reset=False),
    "eos_across": dict(boundary="eos", eos_id=7, conv_reset=False, mask_blocks_hash=False),
    "shared_norms": dict(branches=2, shared_norms=True), "zero_centred": dict(zero_centred_norms=True, residual=True),
    "taps": dict(kernel_size=3, dilation=2), "fourgrams": dict(max_ngram_size=4, zero_rule="copysign"),
}
CHUNKS = ([1] * 20, [9, *[1] * 11], [3, 2, 1, 4, 1, 1, 8], [12, 2, 1, 5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_map", [None, MAP], ids=["raw", "map"])
@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_steps_equal_one_forward(values, token_map, dtype, decoded):
    """Token by token, and steps between chunks of prefill, which the op does not do."""
    layer = build(dtype, token_map, **values)
    hidden, ids, documents, mask = draw(layer)
    for tokenwise in ({}, dict(document_ids=documents), dict(mask=mask), dict(mask=mask, document_ids=documents)):
        whole = layer(hidden, ids, **tokenwise)
        for sizes in CHUNKS:
            decoded.clear()
            out, state = in_chunks(layer, hidden, ids, sizes, **tokenwise)
            assert len(decoded) == sum(2 * size <= 16 for size in sizes)
            assert relative_error(out, whole) <= TOLERANCE[dtype]
            assert state.position.tolist() == [20, 20]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_the_bits_of_the_ops(values, device, monkeypatch):
    """With products that have no rounding, output and state are those of the ops one after another, bit for bit."""
    layer = build(torch.float32, MAP, **values).to(device)
    for weight in (layer.embedding.weight, *layer.key_proj.parameters(), *layer.value_proj.parameters()):
        weight.copy_(weight.mul(4).round())
    hidden, ids, documents, mask = (x.to(device) for x in draw(layer))
    for tokenwise in ({}, dict(document_ids=documents), dict(mask=mask, document_ids=documents)):
        for sizes in CHUNKS:
            out, state = in_chunks(layer, hidden, ids, sizes, **tokenwise)
            with monkeypatch.context() as without:
                without.setattr(nn, "_DECODED_TOKENS", 0)
                expected, other = in_chunks(layer, hidden, ids, sizes, **tokenwise)
            assert torch.equal(out, expected)
            for name, ring in state.rings.items():
                for kind, tensor in ring.tensors.items():
                    wanted, seen = other.rings[name].tensors[kind], ring.tensors["visible"]
                    if kind in ("ids", "value", "stats"):   # what is not visible is never read
                        tensor, wanted = (x[seen] for x in (tensor, wanted))
                    assert torch.equal(tensor, wanted), (name, kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", [{}, dict(mask_blocks_hash=False), dict(boundary="eos", eos_id=7)])
@pytest.mark.parametrize("residual", [False, True])
def test_lengths(values, residual, device, decoded):
    """Ragged steps: what is past a length is zero, is never read and leaves no trace."""
    layer = build(token_map=MAP, **values).to(device)
    hidden, ids, _, _ = (x.to(device) for x in draw(layer, batch=3))
    whole, state, taken = layer(hidden, ids, residual=residual), layer.init_state(3), [0, 0, 0]
    for step in range(6):
        lengths = [(step + b) % 4 for b in range(3)]
        x, tokens = torch.full_like(hidden[:, :3], torch.nan), torch.full_like(ids[:, :3], -5)
        for b, n in enumerate(lengths):
            lengths[b] = n = min(n, 3)
            x[b, :n], tokens[b, :n] = hidden[b, taken[b] : taken[b] + n], ids[b, taken[b] : taken[b] + n]
        out = layer(x, tokens, state=state, lengths=torch.tensor(lengths, device=device), residual=residual)
        for b, n in enumerate(lengths):
            assert torch.allclose(out[b, :n], whole[b, taken[b] : taken[b] + n], rtol=1e-12, atol=1e-12)
            assert out[b, n:].isnan().all() if residual else not out[b, n:].any()
            taken[b] += n
    assert len(decoded) == 6 and state.position.tolist() == taken


def test_rollback(decoded):
    layer = build(branches=2)
    hidden, ids, _, _ = draw(layer)
    whole, state = layer(hidden, ids), layer.init_state(2, max_rollback=3)
    layer(hidden[:, :10], ids[:, :10], state=state)
    layer(torch.randn_like(hidden[:, :3]), ids[:, 3:6], state=state)
    state.rollback(3)
    for t in range(10, 20):
        out = layer(hidden[:, t : t + 1], ids[:, t : t + 1], state=state)
        assert torch.allclose(out, whole[:, t : t + 1], rtol=1e-12, atol=1e-12)
    assert len(decoded) == 11


def test_float32_hidden_beside_half_weights(decoded):
    layer = build(torch.bfloat16)
    hidden, ids, _, _ = draw(layer)
    hidden = hidden.float()
    out, _ = in_chunks(layer, hidden, ids, [1] * 20)
    assert len(decoded) == 20 and out.dtype == torch.float32
    assert relative_error(out, layer(hidden, ids)) <= TOLERANCE[torch.bfloat16]


UNDECODED = {
    "table": dict(table_dtype=torch.bfloat16), "int8": dict(table_dtype=torch.int8), "no_conv": dict(kernel_size=0),
    "no_gate": dict(gate="none"), "positions": dict(hash_input="positions"),
}


@pytest.mark.parametrize(
    "what", [*UNDECODED, "gradient", "autocast", "tokens", "rows", "no_state", "hook", "linear"])
def test_what_the_op_does_not_do(what, decoded):
    layer = build(torch.float32, **UNDECODED.get(what, {}))
    tokens = 17 if what == "tokens" else 1
    hidden, ids, _, _ = draw(layer, batch=1, tokens=tokens)
    dtype = torch.bfloat16 if what == "autocast" else None
    options = {} if what == "no_state" else dict(state=layer.init_state(1, dtype=dtype))
    if what == "rows":
        options["rows"] = nn.NgramHash(layer.config)(ids)
    if what == "gradient":
        layer.key_proj.requires_grad_()
    if what == "hook":
        layer.gate.register_forward_hook(lambda *_: None)
    if what == "linear":        # what adapters and quantisers put in its place
        layer.key_proj = type("Other", (torch.nn.Linear,), {})(layer.config.memory_width, 20).requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        out = layer(hidden, ids, **options)
    assert out.shape == hidden.shape and not decoded
    if what == "gradient":
        out.sum().backward()
        with torch.no_grad():
            layer(hidden, ids, **options)
        assert len(decoded) == 1


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bad", [40, -1, 2**40])
def test_an_unknown_id_leaves_the_state_alone(bad):
    inputs = named("decode", "tokens_3")[0]()
    inputs["token_ids"][1, 2] = bad
    before = [x.clone() for x in inputs["history"] + inputs["conv"]]
    with pytest.raises(IndexError, match=re.escape(f"decode: token_ids must be in [0, 40), the ids of token_map, got {bad}")):
        ops.decode(**inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs["history"] + inputs["conv"], before))


def test_a_row_outside_the_table():
    inputs = named("decode", "plain")[0]()
    inputs["offsets"] += inputs["table"].shape[0]
    before = [x.clone() for x in inputs["history"] + inputs["conv"]]
    with pytest.raises(IndexError, match="^decode: rows must be in"):
        ops.decode(**inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs["history"] + inputs["conv"], before))


def wrong_ring(ring, i, change):
    return [change(x) if i == j else x for j, x in enumerate(ring)]


@pytest.mark.parametrize("argument, change, message", [
    ("hidden", lambda x: x[0], "[B, T, G, D]"),
    ("token_ids", lambda x: x[:1], "[B, T] = [2, 1]"),
    ("token_ids", lambda x: x.short(), "int64 or int32"),
    ("multipliers", lambda x: x.repeat(2, 1), "[1, N] with N >= 2"),
    ("moduli", lambda x: x[:, :3], "[1, C], C a multiple of N - 1"),
    ("moduli", lambda x: x * 0, "positive, got 0"),
    ("offsets", lambda x: x[:, :2], "[1, C] = [1, 4]"),
    ("table", lambda x: x[0], "[R, d]"),
    ("table", lambda x: x.long(), "float64, float32, bfloat16 or float16"),
    ("key_proj", lambda x: x[:5], "[G * D, C * d] = [32, 16]"),
    ("key_proj", lambda x: x.float(), "float64 like table"),
    ("key_bias", lambda x: x[:5], "[G * D] = [32]"),
    ("value_proj", lambda x: x[:5], "[D, C * d] = [16, 16]"),
    ("value_bias", lambda x: x.half(), "float64 like table"),
    ("hidden_weight", lambda x: x[:1], "[G, D] = [2, 16]"),
    ("key_weight", lambda x: x.long(), "float64, float32, bfloat16 or float16"),
    ("conv_weight", lambda x: x[0], "[G, D, K] with K >= 1"),
    ("conv_norm_weight", lambda x: x[:1], "[G, D] = [2, 16]"),
    ("history", lambda x: x[:5], "the 6 tensors of a ring, got 5"),
    ("history", lambda x: wrong_ring(x, 0, lambda t: t.int()), "a state whose position is contiguous int64 [2]"),
    ("history", lambda x: wrong_ring(x, 5, lambda t: t[:, :1]), "a state whose ids is contiguous int64 [2, 2]"),
    ("conv", lambda x: x[:6], "the 7 tensors of a ring, got 6"),
    ("conv", lambda x: wrong_ring(x, 2, lambda t: t.T.contiguous().T), "a state whose visible is contiguous bool [2, 9]"),
    ("conv", lambda x: wrong_ring(x, 5, lambda t: t.float()), "a state whose value is contiguous float64 [2, 9, 16]"),
    ("conv", lambda x: wrong_ring(x, 6, lambda t: t.float()), "a state whose stats is contiguous float64 [2, 9, 7]"),
    ("pad_id", lambda x: 40, "in [0, 40), the ids of token_map, got 40"),
    ("max_rollback", lambda x: -1, "at least 0, got -1"),
    ("eps", lambda x: -1.0, "at least 0"),
    ("conv_eps", lambda x: -1.0, "at least 0"),
    ("dilation", lambda x: 0, "at least 1, got 0"),
    ("zero_rule", lambda x: "none", "'sign' or 'copysign', got 'none'"),
    ("token_map", lambda x: x.long(), "int32 [V]"),
    ("document_ids", lambda x: torch.zeros(2, 2, dtype=torch.int64), "[B, T] = [2, 1]"),
    ("mask", lambda x: torch.zeros(2, 1), "bool"),
    ("lengths", lambda x: torch.zeros(3, dtype=torch.int64), "[B] = [2]"),
])
def test_errors(argument, change, message):
    inputs = named("decode", "plain")[0]()
    inputs[argument] = change(inputs[argument])
    with pytest.raises(ValueError, match=rf"^decode: {argument} must be .*{re.escape(message)}"):
        ops.decode(**inputs)


def test_another_state_size():
    inputs = named("decode", "plain")[0]() | dict(max_rollback=1)
    with pytest.raises(ValueError, match=re.escape("decode: history must be a state whose visible is contiguous bool [2, 3]")):
        ops.decode(**inputs)
