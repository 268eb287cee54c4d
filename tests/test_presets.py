"""Each published Engram from its preset: built at full size, trained, decoded, saved and loaded under its own names.

The values are checked against the published implementations in test_golden.py.
"""
import json
import subprocess
import sys

import pytest
import torch

from engram import EngramConfig, TokenMap, nn, ops, reference, reference_keys

MAP = TokenMap([i * 7 % 30 for i in range(50)])
SIZES = dict(hidden_size=12, vocab_size=50, heads_per_ngram=2, embed_dim_per_head=4, table_size=37)
COMPRESSED = dict(SIZES, compressed_vocab_size=30)

# Preset and what makes it small.
DIALECTS = {
    "demo": ("demo", SIZES),
    "paper": ("paper-27b", COMPRESSED),
    "v41": ("deepseek-v4.1-flash", dict(COMPRESSED, embed_dim_per_head=64)),
    "v41-float": ("deepseek-v4.1-flash", dict(COMPRESSED, table_dtype=None)),
    "qwen": ("qwen3.8-flash-next", dict(SIZES, pad_id=7, eos_id=7, layer_ids=(2, 1), table_dtype=None)),
    "branch-gate": ("branch-gate", SIZES),
    "no-gate": ("demo", dict(SIZES, gate="none")),
    "no-gate-no-conv": ("branch-gate", dict(SIZES, gate="none")),
    "positions": ("demo", dict(SIZES, hash_input="positions")),
    "one-row": ("demo", dict(SIZES, moduli=((1,) * 4,) * 2)),
    "int8": ("qwen3.8-flash-next", dict(SIZES, pad_id=7, eos_id=7, table_dtype=torch.int8)),
}
REFERENCES = ["demo", "paper", "v41", "v41-float", "qwen", "branch-gate"]


def configure(name, **values):
    preset, small = DIALECTS[name]
    return EngramConfig.preset(preset, **(small | values))


def build(name, seed=0, dtype=torch.float64, **values):
    """A layer whose weights are all random, rows and norms included."""
    generator = torch.Generator().manual_seed(seed)
    config = configure(name, **values)
    layer = nn.Engram(config, 1, token_map=MAP if config.compressed_vocab_size else None, dtype=dtype)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            centre = 1 if "norm" in key or "gate" in key else 0
            centre -= centre * config.zero_centred_norms
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if config.table_dtype in (torch.float8_e4m3fn, torch.int8):
        rows = torch.randn(layer.embedding.values.shape, generator=generator)
        layer.embedding.load_float_rows(0, rows)
    return layer


def draw(layer, batch=2, tokens=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    config, dtype = layer.config, layer.value_proj.weight.dtype
    shape = (batch, tokens, config.branches, config.hidden_size)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, config.vocab_size, (batch, tokens), generator=generator)
    ids[0, 3] = ids[1, 6] = 7  # ends of documents, in Qwen
    return hidden, ids


def relative(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


# ----------------------------------------------------------------------------------------------------- full size


@pytest.mark.parametrize("preset, rows", [
    ("demo", [10344164, 10348242]),
    ("paper-27b", [36199972, 36204260]),
    ("paper-40b", [115837464, 115841428]),
    ("deepseek-v4.1-flash", [384006168, 384016682]),
    ("qwen3.8-flash-next", [320001536]),
])
def test_full_size_on_the_meta_device(preset, rows):
    config = EngramConfig.preset(preset)
    layers = [nn.Engram(config, layer, device="meta", dtype=torch.bfloat16) for layer in config.layer_ids]
    tables = [getattr(layer.embedding, "weight", None) for layer in layers]
    tables = [layer.embedding.values if table is None else table for layer, table in zip(layers, tables)]
    assert [table.shape[0] for table in tables] == rows
    assert all(tensor.is_meta for layer in layers for tensor in layer.state_dict().values())
    wide = config.branches * config.hidden_size
    for layer in layers:
        shapes = {name: tensor.shape for name, tensor in layer.reference_tensors().items()}
        assert sum(wide == shape[0] or wide + config.hidden_size == shape[0] for shape in shapes.values()) >= 1
        assert tables[0].shape[1] == config.embed_dim_per_head


def test_bytes_of_deepseek_v41():
    config = EngramConfig.preset("deepseek-v4.1-flash")
    layers = [nn.Engram(config, layer, device="meta", dtype=torch.bfloat16) for layer in config.layer_ids]
    row = layers[0].embedding.values.shape[1] + layers[0].embedding.scales.shape[1]
    assert row == 264 and len(layers) * config.hash_columns * row == 12_672
    shapes = {name: tuple(tensor.shape) for name, tensor in layers[1].reference_tensors().items()}
    assert shapes == {
        "embed.weight": (384016682, 256), "embed.scale": (384016682, 8), "wkv.weight": (25600, 6144),
        "q_weight": (4, 5120), "k_weight": (4, 5120),
    }
    assert layers[0].reference_tensors()["wkv.weight"].scale_shape == (800, 192)


# ------------------------------------------------------------------------------------------- training and decoding


@pytest.mark.parametrize("name", DIALECTS)
def test_trains(name):
    layer = build(name, dtype=torch.float32)
    hidden, ids = draw(layer)
    target = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(8):
        loss = (layer(hidden, ids, residual=False) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    changed = {key for key, tensor in layer.state_dict().items() if not bits(tensor).equal(bits(before[key]))}
    # All that is trainable, and nothing else: quantised rows and the constants of the hash stay.
    assert changed == {key for key, _ in layer.named_parameters()}
    quantized = layer.config.table_dtype in (torch.float8_e4m3fn, torch.int8)
    assert ("embedding.weight" in changed) == (not quantized)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("residual", [None, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_decodes_as_one_forward(name, residual):
    layer = build(name)
    hidden, ids = draw(layer, tokens=17)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, :2] = mask[1, 9] = False
    whole = layer(hidden, ids, mask=mask, residual=residual)
    for sizes in ([1] * 17, [5, 1, 11], [0, 17]):
        state, parts, begin = layer.init_state(2, max_rollback=3), [], 0
        for size in sizes:
            part = slice(begin, begin + size)
            parts.append(layer(hidden[:, part], ids[:, part], mask=mask[:, part], state=state, residual=residual))
            begin += size
            if size == 1 and begin in (4, 9):  # a token drafted and taken back
                layer(hidden[:, :1], ids[:, :1], state=state)
                state.rollback(1)
        assert relative(torch.cat(parts, 1), whole) < 1e-12, sizes


@pytest.mark.parametrize("name", DIALECTS)
def test_ragged_chunks(name):
    layer = build(name)
    hidden, ids = draw(layer, tokens=9)
    lengths, state = torch.tensor([5, 3]), layer.init_state(2)
    first = layer(hidden[:, :5], ids[:, :5], state=state, lengths=lengths, residual=False)
    assert first[1, 3:].eq(0).all()
    rest = torch.stack([layer(hidden[:, n:n + 4], ids[:, n:n + 4], state=state.clone(), residual=False)[b]
                        for b, n in enumerate(lengths.tolist())])
    whole = layer(hidden, ids, residual=False)
    for b, n in enumerate(lengths.tolist()):
        assert relative(torch.cat([first[b, :n], rest[b]]), whole[b, :n + 4]) < 1e-12


# ----------------------------------------------------------------------------------------------------- the fields


def test_residual_of_the_configuration():
    layer = build("v41")
    hidden, ids = draw(layer)
    assert layer(hidden, ids).equal(layer(hidden, ids, residual=True))
    assert relative(layer(hidden, ids), hidden + layer(hidden, ids, residual=False)) < 1e-15
    assert build("demo")(hidden, ids).equal(build("demo")(hidden, ids, residual=False))


@pytest.mark.parametrize("name", ["demo", "branch-gate"])
def test_zero_centred_norms(name):
    """One plus the parameter is what the norms multiply with, so its gradient is theirs."""
    plain, centred = build(name), build(name, zero_centred_norms=True)
    state = plain.state_dict()
    norms = [key for key in state if key.startswith("gate") or key == "conv.norm_weight"]
    assert len(norms) == (3 if name == "demo" else 2)
    centred.load_state_dict(state | {key: state[key] - 1 for key in norms})
    hidden, ids = draw(plain)
    outs = [layer(hidden, ids) for layer in (plain, centred)]
    assert relative(*outs) < 1e-13
    for out in outs:
        out.square().sum().backward()
    for a, b in zip(plain.parameters(), centred.parameters()):
        assert relative(a.grad, b.grad) < 1e-12
    centred.gate.reset_parameters()
    assert centred.gate.norm_weights()[0].eq(1).all() and centred.gate.hidden_weight.eq(0).all()


def test_zero_centred_norms_in_half_precision():
    """The sum is float32: near one, bfloat16 has steps of 2**-7."""
    layer = build("qwen", dtype=torch.bfloat16)
    weight, _ = layer.gate.norm_weights()
    assert weight.dtype == torch.float32 and weight.equal((1 + layer.gate.hidden_weight.float()).view(4, 12))
    assert not weight.bfloat16().float().equal(weight)
    hidden, ids = draw(layer)
    assert layer(hidden, ids).isfinite().all()


def test_shared_norms():
    shared, own = build("branch-gate"), build("branch-gate", shared_norms=False)
    assert shared.gate.hidden_weight.shape == (12,) and own.gate.hidden_weight.shape == (4, 12)
    state = shared.state_dict()
    own.load_state_dict(state | {key: state[key].expand(4, -1) for key in ("gate.hidden_weight", "gate.key_weight")})
    hidden, ids = draw(shared)
    outs = [layer(hidden, ids) for layer in (shared, own)]
    assert outs[0].equal(outs[1])
    for out in outs:
        out.square().sum().backward()
    assert relative(shared.gate.key_weight.grad, own.gate.key_weight.grad.sum(0)) < 1e-12


def test_what_of_a_layer_enters_the_multipliers():
    def multipliers(**values):
        return nn.NgramHash(configure("demo", layer_ids=(5, 1, 0), **values)).multipliers.tolist()

    by_id, by_index, by_none = (multipliers(layer_seed=rule) for rule in ("id", "index", "none"))
    assert by_id[1] == by_index[1] and by_id[2] == by_index[0] == by_none[0]
    assert len({tuple(row) for row in by_id}) == len({tuple(row) for row in by_index}) == 3
    assert by_none == [by_none[0]] * 3
    # Alone, a layer has the constants it has among all.
    alone = nn.NgramHash(configure("demo", layer_ids=(5, 1, 0), layer_seed="index"), layer_ids=[0])
    assert alone.multipliers.tolist() == by_index[2:]
    assert multipliers(multiplier_rule="splitmix64")[0] != by_id[0]


def test_unique_primes():
    every = nn.NgramHash(configure("demo")).moduli
    assert len(set(every.flatten().tolist())) == 8
    own = nn.NgramHash(configure("demo", unique_primes=False)).moduli
    assert own[0].equal(own[1]) and own[0].equal(every[0])


def test_row_multiple():
    layer = build("qwen")
    sizes = layer.hash.moduli.sum().item()
    rows = layer.embedding.weight.shape[0]
    assert rows % 128 == 0 and 0 < rows - sizes < 128
    hidden, ids = draw(layer)
    layer(hidden, ids).sum().backward()
    assert layer.embedding.weight.grad[sizes:].eq(0).all()
    assert nn.MultiHeadEmbedding([3, 4], 2, row_multiple=7).weight.shape == (7, 2)
    assert nn.QuantizedMultiHeadEmbedding([3, 4], 2, format="int8", row_multiple=4).scales.shape == (8,)
    with pytest.raises(ValueError, match="row_multiple >= 1, got .* and 0"):
        nn.MultiHeadEmbedding([3], 2, row_multiple=0)


def test_hybrid_layout_is_another_module():
    config = EngramConfig.preset("hybrid-layer", hidden_size=12, vocab_size=50)
    with pytest.raises(ValueError, match="layout must be 'engram', got 'hybrid': .*hybrid.EngramLayer"):
        nn.Engram(config, 0)


# ------------------------------------------------------------------------------------------------------- controls


def test_one_row_a_head():
    layer = build("one-row")
    _, ids = draw(layer)
    assert layer.hash(ids)[0].eq(torch.arange(4)).all()
    assert layer.embedding.weight.shape == (4, 4)


def test_positions_in_place_of_tokens():
    layer = build("positions")
    _, ids = draw(layer)
    rows = layer.hash(ids)
    assert rows.equal(layer.hash(torch.zeros_like(ids)))
    assert rows.equal(layer.hash(ids, document_ids=ids, mask=ids > 20))
    buffers = {name: getattr(layer.hash, name) for name in ("multipliers", "moduli", "offsets")}
    assert rows.equal(ops.ngram_hash(torch.arange(11).expand(2, 11), **buffers, pad_id=layer.config.pad_id))
    # Every position has rows of its own, in the same tables.
    assert len({tuple(row) for row in rows[0, 0].tolist()}) == 11
    assert ((rows >= layer.hash.offsets[0]) & (rows < layer.hash.offsets[0] + layer.hash.moduli[0])).all()
    later = layer.hash(ids[:, :4], first_position=torch.tensor([7, 3]))
    assert later[0, 0].equal(rows[0, 0, 7:]) and later[0, 1].equal(rows[0, 1, 3:7])
    # No map is needed where no token is hashed.
    unmapped = nn.NgramHash(configure("paper", hash_input="positions"))
    assert unmapped(ids).shape == (2, 2, 11, 4)
    with pytest.raises(ValueError, match=r"first_position must be integer \[2\], got int64 \[3\]"):
        layer.hash(ids, first_position=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="first_position must be None unless hash_input is 'positions'"):
        build("demo").hash(ids, first_position=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"token_ids must be int32 or int64 \[B, T\]"):
        layer.hash(ids[0])


@pytest.mark.parametrize("name", ["no-gate", "no-gate-no-conv"])
def test_no_gate(name):
    layer = build(name)
    assert layer.gate is None and layer.key_proj is None
    assert not [key for key in layer.state_dict() if key.startswith(("gate", "key_proj"))]
    hidden, ids = draw(layer)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 4] = False
    documents = torch.tensor([[0] * 6 + [1] * 5] * 2)
    rows = layer.hash(ids, mask=mask, document_ids=documents)[0]
    memory = reference.embedding(layer.embedding.weight, rows, mask=mask).flatten(-2)
    expected = layer.value_proj(memory)[:, :, None].expand(-1, -1, 4, -1)
    if layer.conv is not None:
        expected = reference.short_conv(expected, layer.conv.weight, layer.conv.norm_weight, dilation=3,
                                        document_ids=documents, mask=mask)
    expected = expected * mask[..., None, None]
    assert relative(layer(hidden, ids, mask=mask, document_ids=documents), expected) < 1e-13
    # What stands at masked positions is passed on, and goes nowhere else.
    hidden[0, 4] = float("nan")
    out = layer(hidden.requires_grad_(), ids, mask=mask, document_ids=documents, residual=True)
    assert out[0, 4].isnan().all() and relative(out[mask], (hidden + expected)[mask]) < 1e-13
    out.backward(torch.ones_like(out).masked_fill(~mask[..., None, None], float("nan")))
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert hidden.grad[mask].eq(1).all()
    with pytest.raises(ValueError, match="gate must be 'context', got 'none'"):
        nn.ContextGate(layer.config)


def test_no_gate_rounds_once():
    layer = build("no-gate", dtype=torch.bfloat16)
    hidden, ids = draw(layer)
    exact = build("no-gate", dtype=torch.bfloat16)
    out = layer(hidden, ids, residual=True)
    assert out.dtype == torch.bfloat16 and layer(hidden, ids).dtype == torch.bfloat16
    value = nn.project(exact.value_proj, exact.embedding(exact.hash(ids)[0]).flatten(-2)).float()
    mixed = exact.conv(value[:, :, None].expand(-1, -1, 4, -1))
    assert out.equal((hidden.float() + mixed).bfloat16())


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_another_process_needs_no_tokenizer_and_no_generator(tmp_path):
    """Row ids come out of the state dict: no tokenizer, no numpy generator, and whatever seed the reader assumes."""
    ids = torch.arange(48).view(2, 24)
    expected = {}
    for name in DIALECTS:
        layer = build(name)
        config = dict(layer.config.to_dict(), seed=layer.config.seed + 1)
        torch.save(layer.state_dict(), tmp_path / f"{name}.pt")
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        expected[name] = layer.hash(ids)
    script = """
import sys, json, pathlib
import numpy
def refuse(*arguments, **options): raise AssertionError("numpy.random was used")
for name in dir(numpy.random):
    if callable(getattr(numpy.random, name)): setattr(numpy.random, name, refuse)
sys.modules["tokenizers"] = sys.modules["transformers"] = None
import torch, engram
folder, rows = pathlib.Path(sys.argv[1]), {}
for path in folder.glob("*.pt"):
    config = engram.EngramConfig.from_dict(json.loads(path.with_suffix(".json").read_text()))
    layer = engram.nn.Engram(config, 1, dtype=torch.float64)
    layer.load_state_dict(torch.load(path, weights_only=True))
    rows[path.stem] = layer.hash(torch.arange(48).view(2, 24))
torch.save(rows, folder / "rows")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=300)
    got = torch.load(tmp_path / "rows", weights_only=True)
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        assert got[name].equal(rows), name


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_names_round_trip(name):
    first, second = build(name, seed=1), build(name, seed=2)
    state = first.to_reference_state_dict()
    second.load_reference_state_dict(state)
    for key, tensor in first.state_dict().items():
        if name != "v41" or not key.endswith("proj.weight"):  # those are rounded to e4m3, see below
            assert bits(second.state_dict()[key]).equal(bits(tensor)), key
    again = second.to_reference_state_dict()
    assert again.keys() == state.keys()
    assert all(bits(again[key]).equal(bits(state[key])) for key in state)
    hidden, ids = draw(first)
    third = build(name, seed=3)
    third.load_reference_state_dict(again)
    assert third(hidden, ids).equal(second(hidden, ids))


def test_names_of_each_reference():
    branches = range(4)
    table = {"multi_head_embedding.embedding.weight"}
    assert build("demo").to_reference_state_dict().keys() == table | {
        "multi_head_embedding.offsets", "short_conv.conv.weight", "value_proj.weight", "value_proj.bias",
        *(f"key_projs.{g}.{part}" for g in branches for part in ("weight", "bias")),
        *(f"{norm}.{g}.weight" for g in branches for norm in ("norm1", "norm2", "short_conv.norms")),
    }
    wide = build("v41").to_reference_state_dict()
    assert wide.keys() == {"embed.weight", "embed.scale", "wkv.weight", "wkv.scale", "q_weight", "k_weight"}
    assert wide["wkv.weight"].dtype == wide["embed.weight"].dtype == torch.float8_e4m3fn
    assert wide["wkv.scale"].dtype == wide["embed.scale"].dtype == torch.float8_e8m0fnu
    assert build("v41-float").to_reference_state_dict().keys() == {"embed.weight", "wkv.weight", "q_weight", "k_weight"}
    assert build("qwen").to_reference_state_dict().keys() == {
        *(f"ple_embedding.{part}" for part in (
            "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets", "ngram_embedding.weight")),
        "key_proj.weight", "value_proj.weight", "norm_key.weight", "norm_query.weight", "norm_conv.weight",
        "conv1d.weight",
    }
    assert build("branch-gate").to_reference_state_dict().keys() == table | {
        "W_V.weight", "W_V.bias", "norm_h.weight", "norm_k.weight",
        *(f"W_K.{g}.{part}" for g in branches for part in ("weight", "bias")),
    }


def fp8_state(seed=0):
    """A checkpoint of DeepSeek-V4.1 for `build("v41")`, in the bytes that it is published in."""
    generator = torch.Generator().manual_seed(seed)
    layer = build("v41", dtype=torch.bfloat16)
    shapes = {name: tensor.shape for name, tensor in layer.reference_tensors().items()}

    def values(shape):
        code = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
        sign = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) * 128
        return (code + sign).view(torch.float8_e4m3fn)

    def scales(shape):
        return torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    wide, width = shapes["wkv.weight"]
    return layer, {
        "embed.weight": values(shapes["embed.weight"]), "embed.scale": scales(shapes["embed.scale"]),
        "wkv.weight": values((wide, width)), "wkv.scale": scales((-(-wide // 32), -(-width // 32))),
        "q_weight": torch.randn(4, 12, generator=generator).bfloat16(),
        "k_weight": torch.randn(4, 12, generator=generator).bfloat16(),
    }


def test_fp8_projections():
    layer, state = fp8_state()
    wide = state["wkv.scale"].float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    products = state["wkv.weight"].float() * wide[:60, :384]
    assert state["wkv.weight"].shape == (60, 384)
    layer.load_reference_state_dict(state)
    assert layer.key_proj.weight.float().equal(products[:48])
    assert layer.value_proj.weight.float().equal(products[48:])
    assert bits(layer.embedding.values).equal(bits(state["embed.weight"]))
    assert bits(layer.embedding.scales).equal(bits(state["embed.scale"]))
    # Written again they have perhaps other scales, and the same values.
    written = layer.to_reference_state_dict()
    other = nn.Engram(layer.config, 1, dtype=torch.float32)
    other.load_reference_state_dict(written)
    assert torch.cat([other.key_proj.weight, other.value_proj.weight]).equal(products)
    # Into a float table the rows come dequantised.
    floating = nn.Engram(configure("v41", table_dtype=torch.float32), 1, dtype=torch.float32)
    floating.load_reference_state_dict(state)
    scales = state["embed.scale"].float().repeat_interleave(32, 1)
    assert floating.embedding.weight.equal(state["embed.weight"].float() * scales)


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 70), (60, 384)])
@pytest.mark.parametrize("spread", [0, 30])
def test_quantize_blocks(shape, spread):
    generator = torch.Generator().manual_seed(3)
    power = torch.randint(-spread, spread + 1, shape, generator=generator)
    weight = torch.ldexp(torch.randn(shape, generator=generator), power)
    weight.view(-1)[:1] = 448 * 2.0**spread
    values, scales = reference_keys.quantize_blocks(weight, (32, 32))
    assert values.shape == shape and scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    back = reference_keys.dequantize_blocks(values, scales, (32, 32))
    step = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)[:shape[0], :shape[1]]
    # Half a unit in the last of four significant bits, or of the smallest number.
    assert ((back - weight).abs() <= torch.maximum(2.0**-4 * weight.abs(), 2.0**-10 * step)).all()
    assert back.view(-1)[0] == weight.view(-1)[0] and scales.float()[0, 0] <= 2.0**spread
    again = reference_keys.quantize_blocks(back, (32, 32))
    assert bits(again[0]).equal(bits(values)) and bits(again[1]).equal(bits(scales))


def test_quantize_blocks_of_zeros():
    values, scales = reference_keys.quantize_blocks(torch.zeros(40, 3), (32, 32))
    assert values.float().eq(0).all() and scales.float().eq(1).all()


def test_shards_of_qwen():
    first, second = build("qwen", seed=1), build("qwen", seed=2)
    state = first.to_reference_state_dict()
    table = state.pop("ple_embedding.ngram_embedding.weight")
    name = "ple_embedding.ngram_embedding.shard_{}.weight"
    state |= {name.format(i): part for i, part in enumerate(table.split(50))}
    state = dict(reversed(state.items()))  # their numbers count, not the order
    second.load_reference_state_dict(state)
    assert second.embedding.weight.equal(first.embedding.weight)
    del state[name.format(1)]
    with pytest.raises(ValueError, match=r"ngram_embedding.weight must be \[256, 4\], got \[50, 4\]"):
        second.load_reference_state_dict(state)


@pytest.mark.parametrize("name", ["v41", "v41-float", "qwen", "demo"])
@pytest.mark.parametrize("step", [32, 64])
def test_row_range_by_row_range(name, step):
    """What a loader that streams does: any source, so many rows at a time."""
    first, second = build(name, seed=1, dtype=torch.float32), build(name, seed=2, dtype=torch.float32)
    state = first.to_reference_state_dict()
    whole = build(name, seed=2, dtype=torch.float32)
    whole.load_reference_state_dict(state)
    tensors = second.reference_tensors()
    assert not reference_keys.faults(tensors, {key: tensor.to("meta") for key, tensor in state.items()})
    for key, tensor in tensors.items():
        scales = state.get(tensor.scale)
        for begin in () if tensor.constant else range(0, tensor.shape[0], step):
            part = None if scales is None else scales[begin // tensor.block[0]:(begin + step) // tensor.block[0]]
            tensor.copy_rows(begin, state[key][begin:begin + step], part)
    assert all(bits(a).equal(bits(b)) for a, b in zip(second.state_dict().values(), whole.state_dict().values()))


def test_row_ranges_that_cannot_be():
    tensors = build("v41").reference_tensors()
    with pytest.raises(ValueError, match=r"rows must be in \[0, 4\) .* got \[2, 5\)"):
        tensors["q_weight"].copy_rows(2, torch.zeros(3, 12))
    values, scales = reference_keys.quantize_blocks(torch.ones(32, 384), (32, 32))
    with pytest.raises(ValueError, match=r"begin with a block of 32, got \[8, 40\)"):
        tensors["wkv.weight"].copy_rows(8, values, scales)


def test_rows_cross_the_steps_of_dequantising(monkeypatch):
    layer, state = fp8_state()
    whole = nn.Engram(layer.config, 1, dtype=torch.float32)
    whole.load_reference_state_dict(state)
    monkeypatch.setattr(reference_keys, "_STEP", 32)
    steps = nn.Engram(layer.config, 1, dtype=torch.float32)
    steps.load_reference_state_dict(state)
    assert steps.key_proj.weight.equal(whole.key_proj.weight) and steps.value_proj.weight.equal(whole.value_proj.weight)


# ------------------------------------------------------------------------------------------------ malformed input


def e8m0(*shape):
    return torch.full(shape, 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


V41_SCALES = [
    (dict(), ["wkv.scale"], "missing wkv.scale, the scales of wkv.weight"),
    ({"wkv.scale": torch.ones(2, 12)}, [], r"wkv.scale must be float8_e8m0fnu \[2, 12\], got float32 \[2, 12\]"),
    ({"wkv.scale": e8m0(2, 11)}, [], r"wkv.scale must be float8_e8m0fnu \[2, 12\], got float8_e8m0fnu \[2, 11\]"),
    ({"wkv.weight": torch.ones(60, 384)}, [], "unexpected wkv.scale"),
    ({"wkv.weight": torch.ones(60, 384, dtype=torch.int8)}, [], "wkv.weight must be floating point, or float8_e4m3fn "
     r"beside wkv.scale, got int8 \[60, 384\]"),
    ({"embed.weight": torch.ones(280, 64)}, [], r"embed.weight must be float8_e4m3fn, got float32 \[280, 64\]"),
    ({"embed.scale": torch.ones(280, 2)}, [], r"embed.scale must be float8_e8m0fnu, got float32 \[280, 2\]"),
    ({"embed.scale": e8m0(280, 1)}, [], r"embed.scale must be \[280, 2\], got \[280, 1\]"),
    (dict(), ["embed.scale", "q_weight"], "missing embed.scale; missing q_weight"),
    ({"q_weight": torch.ones(4, 12).to(torch.float8_e4m3fn)}, [], "q_weight must be floating point, got float8_e4m3fn"),
    ({"bias": torch.ones(3)}, [], "unexpected bias"),
]
SIZES_NAME, OFFSETS_NAME, MULTIPLIERS_NAME = (
    f"ple_embedding.{name}" for name in ("ngram_heads_vocab_sizes", "ngram_heads_offsets", "layer_multipliers")
)
QWEN_CONSTANTS = [
    ({SIZES_NAME: torch.zeros(4, dtype=torch.int64)}, [],
     r"ngram_heads_vocab_sizes must be \[\d+, .*\], got \[0, 0, 0, 0\] \(layer 1 of \[2, 1\]\)"),
    ({OFFSETS_NAME: torch.tensor([59, 0, 120, 187])}, [],
     r"ngram_heads_offsets must be \[0, .* got \[59, 0, 120, 187\]"),
    ({MULTIPLIERS_NAME: torch.tensor([3, 5, 7])}, [], r"layer_multipliers must be .* got \[3, 5, 7\]"),
    ({MULTIPLIERS_NAME: torch.tensor([3, 5])}, [], r"layer_multipliers must be \[3\], got \[2\]"),
    ({OFFSETS_NAME: torch.zeros(4)}, [], r"ngram_heads_offsets must be integer, got float32 \[4\]"),
    (dict(), [MULTIPLIERS_NAME], "missing ple_embedding.layer_multipliers"),
    ({"conv1d.weight": torch.ones(48, 4)}, [], r"conv1d.weight must be \[48, 1, 4\], got \[48, 4\]"),
]


@pytest.mark.parametrize("name, added, left_out, message", [
    *(("v41", *case) for case in V41_SCALES), *(("qwen", *case) for case in QWEN_CONSTANTS),
])
def test_checkpoints_that_do_not_fit(name, added, left_out, message):
    layer = build(name)
    state = fp8_state()[1] if name == "v41" else build(name, seed=1).to_reference_state_dict()
    state = {key: tensor for key, tensor in (state | added).items() if key not in left_out}
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        layer.load_reference_state_dict(state)
    assert all(bits(tensor).equal(bits(before[key])) for key, tensor in layer.state_dict().items())


def test_a_table_of_the_branch_gate_may_be_missing():
    first, second = build("branch-gate", seed=1), build("branch-gate", seed=2)
    before = second.embedding.weight.clone()
    state = first.to_reference_state_dict()
    del state["multi_head_embedding.embedding.weight"]
    second.load_reference_state_dict(state)
    assert second.embedding.weight.equal(before) and second.key_proj.weight.equal(first.key_proj.weight)
    del state["W_V.bias"]
    with pytest.raises(ValueError, match="missing W_V.bias"):
        second.load_reference_state_dict(state)


@pytest.mark.parametrize("name, values, message", [
    ("demo", dict(reference_keys="deepseek-v4.1"), "'deepseek-v4.1' has no name for key_proj.bias, value_proj.bias, "
     "conv.weight, conv.norm_weight"),
    ("demo", dict(zero_centred_norms=True), "'demo' has zero_centred_norms=False, the module has True"),
    ("qwen", dict(zero_centred_norms=False), "'qwen3.8' has zero_centred_norms=True, the module has False"),
    ("demo", dict(shared_norms=True), r"'demo' keeps gate.key_weight as \[4, 12\], the module has \[12\]"),
    ("branch-gate", dict(shared_norms=False), r"'branch-gate' keeps gate.hidden_weight as \[12\], the module has "
     r"\[4, 12\]"),
    ("int8", dict(), "'qwen3.8' has no name for embedding.values, embedding.scales"),
    ("v41", dict(table_dtype="int8"), "'deepseek-v4.1' has no name for embedding.values, embedding.scales"),
    ("v41", dict(gate="none"), "'deepseek-v4.1' has no name for value_proj.weight"),
])
def test_configurations_the_names_have_no_place_for(name, values, message):
    layer = build(name, **values)
    for use in (layer.to_reference_state_dict, lambda: layer.load_reference_state_dict({})):
        with pytest.raises(ValueError, match=f"reference_keys {message}"):
            use()


def test_reference_on_the_meta_device():
    with pytest.raises(RuntimeError, match="on the meta device; call to_empty"):
        nn.Engram(configure("v41"), 1, device="meta").load_reference_state_dict(fp8_state()[1])


@pytest.mark.parametrize("wrong, message", [
    (dict(moduli=torch.zeros(1, 4, dtype=torch.int64)), "moduli: other table sizes than the configuration's"),
    (dict(moduli=torch.ones(1, 4)), r"moduli: must be int64, got float32 \[1, 4\]"),
    (dict(offsets=torch.tensor([[41, 0, 84, 131]])), "offsets: other table sizes than the configuration's"),
    (dict(multipliers=torch.tensor([[3, 4, 5]])), r"multipliers: must be odd and positive, got \[\[3, 4, 5\]\]"),
    (dict(multipliers=torch.tensor([[3, -1, 5]])), "multipliers: must be odd and positive"),
    (dict(token_map=torch.arange(50, dtype=torch.int32)), "token_map must map to compressed_vocab_size = 30 ids, "
     "got 50"),
])
def test_state_dicts_with_malformed_constants(wrong, message):
    layer = nn.Engram(configure("paper"), 1)
    state = build("paper", dtype=torch.float32).state_dict() | {f"hash.{key}": tensor for key, tensor in wrong.items()}
    before = {key: tensor.clone() for key, tensor in layer.hash.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert all(tensor.equal(before[key]) for key, tensor in layer.hash.state_dict().items())
