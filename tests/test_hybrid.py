"""The hybrid-layer variant against the published module's vectors, a spelling of it in plain torch, and itself."""
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_golden import load, part, relative

from engram import EngramConfig, nn, tables
from engram.models.hybrid import EngramLayer, NgramHasher
from engram.nn import MultiHeadEmbedding

SMALL = dict(engram_n_heads_per_ngram=2, engram_embed_dim_per_head=4)


def golden_layer(golden, **like):
    layer = EngramLayer(24, 101, **SMALL, **like)
    layer.load_state_dict(part(golden, "sd."))
    return layer


def small_layer(dtype=torch.float64, **knobs):
    torch.manual_seed(0)
    layer = EngramLayer(6, 50, **{**SMALL, **knobs}, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return layer


def plain(layer, x, ids):
    """The published formulas, one by one, with numpy's generator and torch's own operators."""
    hasher = layer.hasher
    half = max(1, ((2**63 - 1) // hasher.base_vocab_size) // 2)
    draws = np.random.default_rng(hasher.seed).integers(0, half, size=hasher.max_ngram_size, dtype=np.int64)
    columns, mix, before = [], None, ids
    for order, multiplier in enumerate(draws * 2 + 1):
        if order:
            before = F.pad(before, (1, 0))[:, :-1]
        term = before * int(multiplier)
        mix = term if mix is None else mix ^ term
        if order:
            columns += [mix % modulus for modulus in hasher.moduli[order - 1]]
    rows = torch.stack(columns, -1) + layer.multi_head_emb.offsets
    memory = layer.multi_head_emb.embedding.weight[rows].flatten(-2)
    conv = layer.short_conv.conv
    reach = (conv.kernel_size[0] - 1) * conv.dilation[0]
    mixed = conv(F.pad(memory, (0, 0, reach, 0)).transpose(1, 2)).transpose(1, 2)
    memory = memory + F.silu(layer.short_conv.norm(mixed))
    score = (layer.norm_key(layer.key_proj(memory)) * layer.norm_query(x)).sum(-1, keepdim=True)
    score = score / x.shape[-1] ** 0.5
    alpha = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())
    return layer.out_proj(alpha * layer.value_proj(memory))


# ------------------------------------------------------------------------------------------------ the published module


def test_published_vectors():
    golden = load("frankenstein")
    layer = golden_layer(golden)
    assert relative(layer(golden["x"], golden["ids"]), golden["out"]) < 1e-5
    assert layer.state_dict().keys() == part(golden, "sd.").keys()
    assert layer.hasher.hash(golden["ids"]).equal(golden["hash"])
    assert torch.from_numpy(layer.hasher.multipliers).equal(golden["multipliers"])
    assert layer.hasher.moduli == golden["moduli"].tolist()


def test_published_knobs_are_the_defaults():
    layer = EngramLayer(16, 100)
    assert (layer.hasher.max_ngram_size, layer.hasher.n_heads_per_ngram, layer.hasher.seed) == (3, 4, 42)
    assert layer.multi_head_emb.embedding.weight.shape == (sum(layer.hasher.sizes), 32)
    conv = layer.short_conv.conv
    assert (conv.weight.shape, conv.dilation) == ((256, 1, 4), (3,))
    assert isinstance(layer.multi_head_emb.embedding, MultiHeadEmbedding)  # what engram.optim takes for a table


@pytest.mark.parametrize("knobs", [
    {}, dict(engram_max_ngram_size=2, engram_kernel_size=1), dict(engram_max_ngram_size=4, engram_seed=7),
    dict(engram_kernel_size=3, engram_n_heads_per_ngram=1, engram_embed_dim_per_head=3),
])
@pytest.mark.parametrize("shape", [(2, 11), (1, 1), (3, 2)])
def test_output_and_gradients_of_the_plain_spelling(knobs, shape):
    layer = small_layer(**knobs)
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(50, shape)
    grad = torch.randn(*shape, 6, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    out, expected = layer(x, ids), plain(layer, x, ids)
    assert relative(out, expected) < 1e-12
    for got, wanted in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        assert (got - wanted).norm() <= 1e-11 * wanted.norm() + 1e-13


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_other_dtypes(dtype, bound):
    layer = small_layer(dtype)
    x, ids = torch.randn(2, 9, 6, dtype=dtype), torch.randint(50, (2, 9))
    out = layer(x, ids)
    assert out.dtype == dtype
    assert relative(out, plain(copy.deepcopy(layer).double(), x.double(), ids)) < bound


def test_autocast_keeps_the_dtype_of_x():
    layer = small_layer(torch.float32)
    x, ids = torch.randn(2, 9, 6), torch.randint(50, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, ids)
    assert out.dtype == torch.float32 and relative(out, layer(x, ids)) < 0.05
    out.sum().backward()


def test_without_ids_zeros():
    x = torch.randn(2, 5, 6, dtype=torch.float64)[:, ::2]
    out = small_layer()(x)
    assert out.equal(torch.zeros(2, 3, 6, dtype=torch.float64))


def test_layer_index_does_not_matter():
    layer, x, ids = small_layer(), torch.randn(1, 4, 6, dtype=torch.float64), torch.randint(50, (1, 4))
    assert layer(x, ids, 7).equal(layer(x, ids)) and layer(x, input_ids=ids, logical_layer_idx=0).equal(layer(x, ids))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_empty(shape):
    layer = small_layer()
    x = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    out = layer(x, torch.zeros(shape, dtype=torch.int64))
    assert out.shape == (*shape, 6)
    out.sum().backward()
    assert x.grad.shape == x.shape and all(not p.grad.any() for p in layer.parameters() if p.grad is not None)


def test_strided_input_and_int32_ids():
    layer, ids = small_layer(), torch.randint(50, (7, 3), dtype=torch.int32).T
    x = torch.randn(6, 7, 3, dtype=torch.float64).permute(2, 1, 0)
    assert layer(x, ids).equal(layer(x.contiguous(), ids.long().contiguous()))


def test_compiles():
    layer = small_layer(torch.float32)
    x, ids = torch.randn(2, 9, 6), torch.randint(50, (2, 9))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tensors in ((x, ids), (x[:, :4], ids[:, :4])):
        assert relative(compiled(*tensors), layer(*tensors)) < 1e-6
    compiled(x, ids).sum().backward()


def test_trains():
    torch.manual_seed(0)
    layer = EngramLayer(6, 50, **SMALL)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    x, ids = torch.randn(2, 9, 6), torch.randint(50, (2, 9))
    target = torch.randn(2, 9, 6)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(layer(x, ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# --------------------------------------------------------------------------------------------- boundaries and decoding


def test_packed_documents_are_strangers():
    layer = small_layer()
    x, ids = torch.randn(1, 12, 6, dtype=torch.float64), torch.randint(50, (1, 12))
    document_ids = torch.tensor([[4] * 5 + [9] * 7])
    out = layer(x, ids, document_ids=document_ids)
    assert relative(out[:, :5], layer(x[:, :5], ids[:, :5])) < 1e-13
    assert relative(out[:, 5:], layer(x[:, 5:], ids[:, 5:])) < 1e-13
    assert relative(out[:, 5:], layer(x, ids)[:, 5:]) > 1e-3


def test_padding_contributes_nothing_even_if_it_is_nan():
    layer = small_layer()
    x, ids = torch.randn(2, 9, 6, dtype=torch.float64), torch.randint(50, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, :3] = False
    poisoned = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    out = layer(poisoned, ids, mask=mask)
    assert not out[:, :3].any() and relative(out[:, 3:], layer(x[:, 3:], ids[:, 3:])) < 1e-13
    out.backward(torch.ones_like(out).masked_fill(~mask[..., None], torch.inf))
    assert not poisoned.grad[:, :3].any() and all(p.grad.isfinite().all() for p in layer.parameters())
    assert not layer(poisoned, ids, mask=mask, lengths=torch.tensor([5, 9]))[0, 5:].any()


@pytest.mark.parametrize("chunks", [[1] * 10, [3, 0, 5, 2], [10]])
@pytest.mark.parametrize("documents", [False, True])
def test_any_chunks_are_one_pass(chunks, documents):
    layer = small_layer()
    x, ids = torch.randn(2, 10, 6, dtype=torch.float64), torch.randint(50, (2, 10))
    document_ids = torch.tensor([[0] * 4 + [1] * 6, [3] * 9 + [4]]) if documents else None
    expected = layer(x, ids, document_ids=document_ids)
    state, parts, begin = layer.init_state(2), [], 0
    for size in chunks:
        now = slice(begin, begin + size)
        parts.append(layer(x[:, now], ids[:, now], state=state,
                           document_ids=None if document_ids is None else document_ids[:, now]))
        begin += size
    assert relative(torch.cat(parts, 1), expected) < 1e-12 and state.position.tolist() == [10, 10]


def test_rollback_and_ragged_lengths():
    layer = small_layer()
    x, ids = torch.randn(2, 8, 6, dtype=torch.float64), torch.randint(50, (2, 8))
    state = layer.init_state(2, max_rollback=2)
    layer(x[:, :5], ids[:, :5], state=state, lengths=torch.tensor([5, 3]))
    layer(torch.randn_like(x[:, :2]), torch.randint(50, (2, 2)), state=state)
    state.rollback(2)
    out = layer(x[:, 5:6], ids[:, 5:6], state=state)
    assert relative(out[:1], layer(x[:1], ids[:1])[:, 5:6]) < 1e-12
    ragged = [torch.cat([t[1:, :3], t[1:, 5:6]], 1) for t in (x, ids)]
    assert relative(out[1:], layer(*ragged)[:, 3:]) < 1e-12


# --------------------------------------------------------------------------------------------------- state and devices


def test_built_on_meta_and_filled_from_a_state_dict():
    source = small_layer()
    x, ids = torch.randn(2, 5, 6, dtype=torch.float64), torch.randint(50, (2, 5))
    expected = source(x, ids)
    for assign in (False, True):
        layer = EngramLayer(6, 50, **SMALL, device="meta", dtype=torch.float64)
        assert layer(x.to("meta"), ids.to("meta")).shape == x.shape
        if not assign:
            layer.to_empty(device="cpu")
        layer.load_state_dict(source.state_dict(), assign=assign)
        assert layer(x, ids).equal(expected)
    layer = EngramLayer(6, 50, **SMALL, device="meta").to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer.multi_head_emb.offsets.equal(source.multi_head_emb.offsets)
    assert layer.multipliers.equal(source.multipliers) and layer(x.float(), ids).isfinite().all()


def test_a_state_dict_of_another_vocabulary_is_refused():
    weights = small_layer().state_dict()
    before = small_layer()
    wrong = weights | {"multi_head_emb.offsets": weights["multi_head_emb.offsets"] + 1}
    with pytest.raises(RuntimeError, match=r"multi_head_emb.offsets: must be \[0, 53, 112, 173\], got \[1, 54"):
        before.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="size mismatch for multi_head_emb.embedding.weight"):
        EngramLayer(6, 60, **SMALL, dtype=torch.float64).load_state_dict(
            {name: tensor for name, tensor in weights.items() if "offsets" not in name}, strict=False)


def test_from_the_preset():
    config = EngramConfig.preset("hybrid-layer", hidden_size=6, vocab_size=50, layer_ids=(1, 4), heads_per_ngram=2,
                                 embed_dim_per_head=4, max_ngram_size=4, kernel_size=2, seed=7)
    layer = EngramLayer.from_config(config, dtype=torch.float64)
    knobs = dict(engram_max_ngram_size=4, engram_kernel_size=2, engram_seed=7)
    same = EngramLayer(6, 50, **SMALL, **knobs, dtype=torch.float64)
    same.load_state_dict(layer.state_dict())
    x, ids = torch.randn(2, 5, 6, dtype=torch.float64), torch.randint(50, (2, 5))
    assert layer(x, ids).equal(same(x, ids))
    rows = nn.NgramHash(config)(ids)  # the configuration says the same of the hash
    assert rows[0].equal(rows[1]) and rows[0].equal(layer.hasher.hash(ids) + layer.multi_head_emb.offsets)
    for wrong, message in (
        (dict(table_size=9), "table_size must be 50, got 9"),
        (dict(bias=True), "bias must be False, got True"),
        (dict(layout="engram"), "layout must be 'hybrid', got 'engram'"),
    ):
        with pytest.raises(ValueError, match=message):
            EngramLayer.from_config(EngramConfig.from_dict({**config.to_dict(), **wrong}))


@pytest.mark.parametrize("arguments, message", [
    (dict(hidden_size=0, vocab_size=9), "EngramLayer: hidden_size must be at least 1, got 0"),
    (dict(hidden_size=4, vocab_size=0), r"hashed_vocab_size must be in \[1, 2\*\*30\), got 0"),
    (dict(hidden_size=4, vocab_size=9, engram_max_ngram_size=1), "NgramHasher: max_ngram_size must be at least 2"),
    (dict(hidden_size=4, vocab_size=9, engram_n_heads_per_ngram=0), "n_heads_per_ngram must be at least 1, got 0"),
    (dict(hidden_size=4, vocab_size=9, engram_kernel_size=0), "engram_kernel_size must be at least 1, got 0"),
    (dict(hidden_size=4, vocab_size=9, engram_embed_dim_per_head=0), "engram_embed_dim_per_head must be at least 1"),
    (dict(hidden_size=4, vocab_size=9, engram_seed=-1), "seed and layer_id must be >= 0, got seed -1"),
])
def test_wrong_knobs(arguments, message):
    with pytest.raises(ValueError, match=message):
        EngramLayer(**arguments)


@pytest.mark.parametrize("change, error, message", [
    (dict(x=torch.zeros(2, 6)), ValueError, r"x must be \[B, T, 6\]"),
    (dict(x=torch.zeros(2, 5, 7)), ValueError, r"x must be \[B, T, 6\]"),
    (dict(input_ids=torch.zeros(2, 4, dtype=torch.int64)), ValueError, r"input_ids must be integer \[2, 5\]"),
    (dict(input_ids=torch.zeros(2, 5)), ValueError, r"input_ids must be integer \[2, 5\]"),
    (dict(mask=torch.ones(5, dtype=torch.bool)), ValueError, r"mask must be bool \[2, 5\]"),
    (dict(document_ids=torch.zeros(1, 5, dtype=torch.int64)), ValueError, r"document_ids must be integer \[2, 5\]"),
    (dict(lengths=torch.tensor([6, 1])), ValueError, r"lengths must be in \[0, 5\], got 6"),
    (dict(state=object()), TypeError, "state must be an EngramState, got object"),
])
def test_wrong_arguments(change, error, message):
    good = dict(x=torch.zeros(2, 5, 6), input_ids=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(error, match=message):
        EngramLayer(6, 50, **SMALL)(**good | change)


def test_wrong_states():
    layer = EngramLayer(6, 50, **SMALL)
    x, ids = torch.zeros(2, 5, 6), torch.zeros(2, 5, dtype=torch.int64)
    for state in (layer.init_state(3), EngramLayer(6, 50, engram_max_ngram_size=2).init_state(2)):
        with pytest.raises(ValueError, match="state must come from this layer's init_state, for a batch of 2 on cpu"):
            layer(x, ids, state=state)
    with pytest.raises(ValueError, match="max_rollback must be at least 0, got -1"):
        layer.init_state(1, -1)


# ------------------------------------------------------------------------------------------------------------- hasher


def test_hasher_takes_numpy_and_tensors():
    hasher = NgramHasher(4, 2, 1000, seed=3)
    ids = np.random.default_rng(0).integers(0, 1000, size=(2, 7))
    rows = hasher.hash(ids)
    assert isinstance(rows, np.ndarray) and rows.shape == (2, 7, 6) and rows.dtype == np.int64
    assert hasher.hash(torch.from_numpy(ids)).equal(torch.from_numpy(rows))
    assert (rows < np.array(hasher.moduli).ravel()).all() and (rows >= 0).all()
    assert all(map(tables.is_prime, hasher.sizes)) and len(set(hasher.sizes)) == 6 and min(hasher.sizes) >= 1000
    assert np.array_equal(hasher.hash(ids[:, ::2]), hasher.hash(ids[:, ::2].copy()))
    assert hasher.hash(ids[:0]).shape == (0, 7, 6)
    for wrong in (ids[0], ids.astype(np.float64)):
        with pytest.raises(ValueError, match="ngram_hash: token_ids must be"):
            hasher.hash(wrong)
