"""The modules: wiring against the reference, what a token may see, token maps in checkpoints, refusals."""
import copy
import io
import pickle

import pytest
import torch
from samples import DEVICES

from engram import EngramConfig, TokenMap, nn, reference

V = 50
MAP = TokenMap([i * 7 % 30 for i in range(V)])


def configure(**values):
    values = dict(dict(hidden_size=12, vocab_size=V, heads_per_ngram=2, embed_dim_per_head=4, table_size=40,
                       layer_ids=(1, 3), conv_init="default"), **values)
    return EngramConfig(**values)


def build(config=None, layer_id=3, seed=0, dtype=torch.float64, **options):
    """A layer whose weights are all random, norms included."""
    torch.manual_seed(seed)
    layer = nn.Engram(config or configure(), layer_id, dtype=dtype, **options)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 2 and name.startswith(("gate", "conv")):
            torch.nn.init.normal_(parameter, 1, 0.2)
    return layer


def draw(batch=2, tokens=9, branches=1, size=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, size) if branches == 1 else (batch, tokens, branches, size)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, torch.randint(0, V, (batch, tokens), generator=generator)


def expected(layer, hidden, ids, document_ids=None, mask=None):
    """The layer written out with the reference ops."""
    config, buffers = layer.config, dict(layer.hash.named_buffers())
    token_map = buffers.pop("token_map")
    rows = reference.ngram_hash(ids, **buffers, pad_id=config.pad_id, token_map=token_map if len(token_map) else None,
                                document_ids=document_ids, mask=mask)[0]
    memory = reference.embedding(layer.embedding.weight, rows, mask=mask).flatten(-2)
    streams = hidden.reshape(*ids.shape, config.branches, config.hidden_size)
    key = layer.key_proj(memory).view_as(streams)
    out = reference.gate(streams, key, layer.value_proj(memory), layer.gate.hidden_weight, layer.gate.key_weight,
                         eps=config.norm_eps or 2.220446049250313e-16, zero_rule=config.zero_rule, mask=mask)
    if config.kernel_size:
        out = reference.short_conv(out, layer.conv.weight, layer.conv.norm_weight, dilation=config.conv_dilation,
                                   eps=config.conv_norm_eps, mask=mask,
                                   document_ids=document_ids if config.conv_reset else None)
    return out.reshape(hidden.shape)


def close(a, b, tolerance=1e-12):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------------------------------- wiring


def test_names_shapes_and_dtypes():
    layer = nn.Engram(configure(branches=4, table_size=(11, 31)), 1, token_map=MAP)
    rows = sum(layer.embedding.sizes)
    assert {name: list(p.shape) for name, p in layer.named_parameters()} == {
        "embedding.weight": [rows, 4], "key_proj.weight": [48, 16], "key_proj.bias": [48],
        "value_proj.weight": [12, 16], "value_proj.bias": [12], "gate.hidden_weight": [4, 12],
        "gate.key_weight": [4, 12], "conv.weight": [4, 12, 4], "conv.norm_weight": [4, 12],
    }
    assert {name: (list(b.shape), b.dtype) for name, b in layer.named_buffers()} == {
        "hash.token_map": ([V], torch.int32), "hash.multipliers": ([1, 3], torch.int64),
        "hash.moduli": ([1, 4], torch.int64), "hash.offsets": ([1, 4], torch.int64),
    }
    assert set(layer.state_dict()) == {name for name, _ in [*layer.named_parameters(), *layer.named_buffers()]}
    assert layer.hash.moduli.tolist() == [[11, 13, 31, 37]] and layer.hash.offsets.tolist() == [[0, 11, 24, 55]]
    assert nn.Engram(layer.config, 3).hash.moduli.tolist() == [[17, 19, 41, 43]]
    bare = nn.Engram(configure(bias=False, kernel_size=0), 1)
    assert set(dict(bare.named_parameters())) == {
        "embedding.weight", "key_proj.weight", "value_proj.weight", "gate.hidden_weight", "gate.key_weight"}


@pytest.mark.parametrize("values", [
    dict(), dict(branches=2), dict(branches=4, max_ngram_size=4, dilation=1), dict(branches=3, kernel_size=0),
    dict(bias=False, branches=2), dict(norm_eps=1e-2, conv_norm_eps=1e-2, kernel_size=2), dict(zero_rule="copysign"),
    dict(moduli=((7, 5, 9, 8), (6, 10, 7, 12)), pad_id=4), dict(seed=5, heads_per_ngram=3),
    dict(compressed_vocab_size=30),
], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_forward_and_gradients_against_the_reference(values, mapped):
    config = configure(**values)
    layer = build(config, token_map=MAP if mapped or config.compressed_vocab_size else None)
    hidden, ids = draw(branches=config.branches)
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    documents = torch.tensor([[0] * 4 + [1] * 5, [5, 5, 2, 2, 2, 2, 5, 5, 5]])
    for options in ({}, dict(mask=mask), dict(document_ids=documents), dict(mask=mask, document_ids=documents)):
        gradients = []
        for run in (layer, lambda *a, **o: expected(layer, *a, **o)):
            inputs = [hidden.clone().requires_grad_(), *layer.parameters()]
            out = run(inputs[0], ids, **options)
            gradients.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
        assert gradients[0][0].shape == hidden.shape
        assert all(close(a, b, 1e-10) for a, b in zip(*gradients))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("branches, kernel_size", [(1, 4), (4, 4), (4, 0)])
def test_dtypes(device, dtype, branches, kernel_size):
    config = configure(branches=branches, kernel_size=kernel_size)
    exact = build(config)
    layer = copy.deepcopy(exact).to(device, dtype)
    exact.load_state_dict({name: tensor.cpu() for name, tensor in layer.state_dict().items()})
    hidden, ids = draw(branches=branches, dtype=dtype)
    out = layer(hidden.to(device), ids.to(device), residual=True)
    assert out.dtype == dtype and out.device.type == device
    error = (out.cpu().double() - exact(hidden.double(), ids, residual=True)).norm() / out.double().norm().cpu()
    assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


def test_one_branch_takes_both_shapes():
    layer = build()
    hidden, ids = draw()
    out = layer(hidden, ids)
    assert out.shape == hidden.shape
    assert layer(hidden.unsqueeze(2), ids).equal(out.unsqueeze(2))
    assert layer(hidden.transpose(0, 1).contiguous().transpose(0, 1), ids.T.contiguous().T).equal(out)


@pytest.mark.parametrize("batch, tokens", [(0, 5), (2, 0), (0, 0), (2, 1)])
@pytest.mark.parametrize("boundary", [{}, dict(boundary="eos", eos_id=3)])
def test_empty_and_single_tokens(batch, tokens, boundary):
    layer = build(configure(branches=2, **boundary))
    hidden, ids = draw(batch, tokens, branches=2)
    hidden.requires_grad_()
    out = layer(hidden, ids, lengths=torch.full((batch,), tokens), residual=True)
    assert out.shape == hidden.shape
    out.sum().backward()
    assert hidden.grad.shape == hidden.shape and all(p.grad is not None for p in layer.parameters())


def test_residual():
    for kernel_size in (0, 4):
        layer = build(configure(kernel_size=kernel_size))
        hidden, ids = draw()
        assert close(layer(hidden, ids, residual=True), hidden + layer(hidden, ids))


def test_a_zero_conv_adds_nothing_and_learns():
    layer = build(configure(conv_init="zeros"))
    bare = build(configure(kernel_size=0))
    bare.load_state_dict({name: t for name, t in layer.state_dict().items() if not name.startswith("conv")})
    hidden, ids = draw()
    out = layer(hidden, ids)
    assert out.equal(bare(hidden, ids))
    out.square().sum().backward()
    assert layer.conv.weight.grad.norm() > 0


def test_initialisation():
    config = configure(hidden_size=64, embed_dim_per_head=64, table_size=500, table_std=0.02)
    layer = nn.Engram(config, 1)
    assert abs(layer.embedding.weight.std().item() / 0.02 - 1) < 0.02
    assert layer.gate.hidden_weight.eq(1).all() and layer.gate.key_weight.eq(1).all()
    assert layer.conv.norm_weight.eq(1).all() and 0.4 < layer.conv.weight.abs().max() <= 0.5
    assert nn.Engram(configure(conv_init="zeros"), 1).conv.weight.eq(0).all()
    assert nn.Engram(configure(table_std=0), 1).embedding.weight.eq(0).all()


def test_table_dtype():
    layer = build(configure(table_dtype=torch.bfloat16), dtype=torch.float32)
    assert layer.embedding.weight.dtype == torch.bfloat16 and layer.key_proj.weight.dtype == torch.float32
    hidden, ids = draw(dtype=torch.float32)
    out = layer(hidden, ids)
    out.sum().backward()
    assert out.dtype == torch.float32 and layer.embedding.weight.grad.dtype == torch.bfloat16
    wide = copy.deepcopy(layer)
    wide.embedding.float()
    assert wide(hidden, ids).equal(out)


def test_autocast():
    layer = build(configure(branches=2), dtype=torch.float32)
    hidden, ids = draw(branches=2, dtype=torch.float32)
    exact = layer(hidden, ids)
    for streams in (hidden, hidden.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(streams, ids)
        assert out.dtype == streams.dtype
        assert 0 < (out - exact).norm() / exact.norm() < 2e-2
        out.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_norm_eps_none_is_the_rule_of_torch():
    """Tiny inputs, so that epsilon decides the result."""
    for dtype, eps in ((torch.float64, 2.220446049250313e-16), (torch.float32, 1.1920928955078125e-07)):
        gate = nn.ContextGate(configure(), dtype=dtype)
        hidden = 1e-4 * torch.randn(3, 1, 12, dtype=dtype)
        key, value = 1e-4 * torch.randn(3, 1, 12, dtype=dtype), torch.randn(3, 12, dtype=dtype)
        q, k = (torch.nn.functional.rms_norm(x, (12,)) for x in (hidden, key))
        score = (q * k).sum(-1, keepdim=True) / 12**0.5
        out = (score.sign() * score.abs().clamp_min(1e-6).sqrt()).sigmoid() * value.unsqueeze(-2)
        assert close(gate(hidden, key, value), out, 1e-5)
        fixed = nn.ContextGate(configure(norm_eps=eps), dtype=dtype)
        assert fixed(hidden, key, value).equal(gate(hidden, key, value))


def test_zero_rule():
    value = torch.ones(1, 12)
    zero = torch.zeros(1, 1, 12)
    sign, copysign = (nn.ContextGate(configure(zero_rule=rule))(zero, zero, value)[0, 0, 0].item()
                      for rule in ("sign", "copysign"))
    assert sign == 0.5 and abs(copysign - 0.50025) < 1e-6


def test_nan_in_hidden_flows_to_its_own_token():
    layer = build()
    hidden, ids = draw()
    hidden[0, 4, 3] = float("nan")
    # Its gate is NaN, so are the taps that reach it, and nothing else.
    wrong = layer(hidden, ids).isnan().any(-1)
    assert wrong.nonzero().tolist() == [[0, 4], [0, 7]]


def test_no_map_hashes_any_id():
    layer = build()
    hidden, ids = draw()
    ids[0, 0], ids[1, 3] = -5, 2**62
    assert layer(hidden, ids).isfinite().all()


# --------------------------------------------------------------------------------------------- what a token may see


@pytest.mark.parametrize("values", [dict(), dict(branches=2, kernel_size=0), dict(dilation=1, max_ngram_size=4)])
def test_causal(values):
    layer = build(configure(**values), token_map=MAP)
    hidden, ids = draw(branches=layer.config.branches)
    out = layer(hidden, ids)
    for tokens in range(1, 9):
        assert close(layer(hidden[:, :tokens], ids[:, :tokens]), out[:, :tokens])


@pytest.mark.parametrize("branches", [1, 4])
def test_packed_documents_equal_separate_ones(branches):
    layer = build(configure(branches=branches), token_map=MAP)
    hidden, ids = draw(1, 14, branches=branches)
    cuts = [0, 5, 6, 14]
    documents = torch.tensor([[0] * 5 + [1] + [0] * 8])
    hidden.requires_grad_()
    out = layer(hidden, ids, document_ids=documents)
    for begin, end in zip(cuts, cuts[1:]):
        alone = layer(hidden[:, begin:end], ids[:, begin:end])
        assert close(out[:, begin:end], alone)
        gradient, = torch.autograd.grad(out[:, begin:end].sum(), hidden, retain_graph=True)
        assert gradient[:, :begin].eq(0).all() and gradient[:, end:].eq(0).all() and gradient.norm() > 0
    assert not close(out, layer(hidden, ids))


def runs_after(ids, eos_id):
    return torch.cat([torch.zeros_like(ids[:, :1]), (ids == eos_id).long().cumsum(1)[:, :-1]], 1)


@pytest.mark.parametrize("conv_reset", [True, False])
def test_boundary_eos_is_documents_after_each_eos(conv_reset):
    plain = configure(conv_reset=conv_reset)
    layer = build(plain)
    ending = build(configure(conv_reset=conv_reset, boundary="eos", eos_id=6))
    hidden, ids = draw(2, 12)
    ids[0, [3, 4, 8]], ids[1, 0] = 6, 6
    runs = runs_after(ids, 6)
    assert ending(hidden, ids).equal(layer(hidden, ids, document_ids=runs))
    assert not ending(hidden, ids).equal(layer(hidden, ids))
    # Documents of the call count as well.
    documents = torch.tensor([[1] * 6 + [2] * 6, [1] * 12])
    assert ending(hidden, ids, document_ids=documents).equal(layer(hidden, ids, document_ids=runs * 10 + documents))
    # A masked end of text ends nothing, unless masked ids are hashed.
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 3] = False
    seen = ids.masked_fill(~mask, 0)
    assert ending(hidden, ids, mask=mask).equal(layer(hidden, ids, mask=mask, document_ids=runs_after(seen, 6)))


def test_boundary_eos_and_history():
    module = nn.NgramHash(configure(boundary="eos", eos_id=6, max_ngram_size=4))
    ids = torch.tensor([[1, 2, 3, 6, 4, 5, 9, 9], [6, 6, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8, 9]])
    rows = module(ids)
    for cut in range(3, 8):
        assert module(ids[:, cut:], history=ids[:, cut - 3:cut]).equal(rows[:, :, cut:])


def test_conv_reset_false_lets_only_the_conv_reach_across():
    layer = build(configure(conv_reset=False))
    hidden, ids = draw(1, 8)
    hidden.requires_grad_()
    documents = torch.tensor([[0] * 4 + [1] * 4])
    assert layer.hash(ids, document_ids=documents)[0, :, 4:].equal(layer.hash(ids[:, 4:])[0])
    gradient, = torch.autograd.grad(layer(hidden, ids, document_ids=documents)[:, 4:].sum(), hidden)
    assert gradient[:, :4].norm() > 0


@pytest.mark.parametrize("branches", [1, 2])
def test_padded_equals_unpadded(branches):
    layer = build(configure(branches=branches), token_map=MAP)
    hidden, ids = draw(1, 7, branches=branches)
    alone = layer(hidden, ids)
    for left, right in ((3, 0), (0, 4), (2, 2)):
        pads, junk = [0, 0] * (hidden.dim() - 2) + [left, right], float("nan")
        padded = torch.nn.functional.pad(hidden, pads, value=junk)
        padded_ids = torch.nn.functional.pad(ids, (left, right), value=-100)
        mask = torch.nn.functional.pad(torch.ones_like(ids, dtype=torch.bool), (left, right))
        padded.requires_grad_()
        out = layer(padded, padded_ids, mask=mask)
        assert close(out[:, left:left + 7], alone) and out[~mask].eq(0).all()
        out.backward(torch.where(mask.view(1, -1, *[1] * (hidden.dim() - 2)), 1.0, junk).expand_as(out))
        assert padded.grad.isfinite().all() and padded.grad[~mask].eq(0).all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("mask_blocks_hash", [True, False])
def test_lengths(mask_blocks_hash):
    layer = build(configure(mask_blocks_hash=mask_blocks_hash), token_map=MAP)
    hidden, ids = draw(3, 6)
    lengths = torch.tensor([0, 4, 6], dtype=torch.int32)
    within = torch.arange(6) < lengths[:, None]
    out = layer(hidden.masked_fill(~within[..., None], float("inf")), ids.masked_fill(~within, -100), lengths=lengths)
    assert out[~within].eq(0).all() and close(out[within], layer(hidden, ids)[within])
    mask = torch.ones_like(within)
    mask[:, 1] = False
    assert layer(hidden, ids, lengths=lengths, mask=mask).equal(layer(hidden, ids, mask=mask & within))


def test_mask_blocks_hash_false_hashes_masked_ids():
    blocking, hashing = build(configure()), build(configure(mask_blocks_hash=False))
    hidden, ids = draw()
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 4] = False
    assert hashing.hash(ids, mask=mask).equal(hashing.hash(ids))
    assert not blocking.hash(ids, mask=mask).equal(blocking.hash(ids))
    out = hashing(hidden, ids, mask=mask)
    assert out[:, 4].eq(0).all()
    assert not close(out[:, 5], blocking(hidden, ids, mask=mask)[:, 5])
    out.sum().backward()
    untouched = hashing.hash(ids)[0, :, 4].flatten()
    elsewhere = hashing.hash(ids)[0][mask].flatten()
    only_masked = untouched[~torch.isin(untouched, elsewhere)]
    assert only_masked.numel() and hashing.embedding.weight.grad[only_masked].eq(0).all()


@pytest.mark.parametrize("kernel_size", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_residual_keeps_masked_positions_bit_for_bit(kernel_size, dtype):
    layer = build(configure(kernel_size=kernel_size), dtype=dtype)
    hidden, ids = draw(1, 6, dtype=dtype)
    hidden[0, 2, :4] = torch.tensor([-0.0, float("nan"), float("-inf"), 0.0])
    mask = torch.tensor([[True, True, False, True, True, True]])
    hidden.requires_grad_()
    out = layer(hidden, ids, mask=mask, residual=True)
    bits = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert out[~mask].detach().view(bits).equal(hidden[~mask].detach().view(bits))
    assert out[mask].isfinite().all()
    gradient = torch.ones_like(out)
    gradient[0, 2, :2] = torch.tensor([float("nan"), float("inf")])
    out.backward(gradient)
    assert hidden.grad[~mask].detach().view(bits).equal(gradient[~mask].view(bits))
    assert hidden.grad[mask].isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


# ---------------------------------------------------------------------------------------------------- shared rows


def test_shared_rows():
    config = configure()
    shared = nn.NgramHash(config, MAP)
    hidden, ids = draw()
    rows = shared(ids)
    assert rows.shape == (2, *ids.shape, 4)
    for index, layer_id in enumerate(config.layer_ids):
        layer = build(config, layer_id, token_map=MAP)
        assert layer.hash(ids)[0].equal(rows[index])
        assert layer(hidden, rows=rows).equal(layer(hidden, ids))
        assert build(config, layer_id)(hidden, rows=rows).equal(layer(hidden, ids))  # the map is the caller's
    assert nn.NgramHash(config, MAP, [3, 1])(ids).equal(rows.flip(0))


def test_masked_rows_are_never_read():
    layer = build()
    hidden, ids = draw()
    mask = ids % 4 != 0
    rows = nn.NgramHash(layer.config)(ids, mask=mask)
    out = layer(hidden, rows=rows, mask=mask)
    assert not mask.all()
    assert layer(hidden, rows=rows.masked_fill(~mask[None, ..., None], -1), mask=mask).equal(out)


def test_shared_rows_with_eos_need_the_ids_for_the_conv():
    config = configure(boundary="eos", eos_id=6)
    layer = build(config)
    hidden, ids = draw()
    ids[0, 4] = 6
    rows = nn.NgramHash(config)(ids)
    assert layer(hidden, ids, rows=rows).equal(layer(hidden, ids))
    with pytest.raises(ValueError, match="token_ids is needed beside rows"):
        layer(hidden, rows=rows)
    without = build(configure(boundary="eos", eos_id=6, conv_reset=False))
    assert without(hidden, rows=rows).equal(without(hidden, ids))


def test_modules_share_nothing():
    first, second = (nn.Engram(configure(), layer, token_map=MAP) for layer in (1, 3))
    storages = [{t.data_ptr() for t in layer.state_dict().values()} for layer in (first, second)]
    assert not storages[0] & storages[1]


# --------------------------------------------------------------------------------- checkpoints, token maps, copies


def test_a_checkpoint_needs_no_tokenizer():
    hidden, ids = draw()
    for sized in (None, 30):
        trained = build(configure(compressed_vocab_size=sized), token_map=MAP)
        out = trained(hidden, ids)
        for assign in (False, True):
            fresh = nn.Engram(trained.config, 3, dtype=torch.float64)
            fresh.load_state_dict(copy.deepcopy(trained.state_dict()), assign=assign)
            assert fresh(hidden, ids).equal(out)
            fresh.load_state_dict(trained.state_dict())


def test_missing_map():
    layer = build(configure(compressed_vocab_size=30))
    hidden, ids = draw()
    assert layer.hash.multipliers.equal(build(token_map=MAP).hash.multipliers)
    with pytest.raises(RuntimeError, match="compressed_vocab_size is 30 but there is no token map yet"):
        layer(hidden, ids)
    with pytest.raises(RuntimeError, match="the checkpoint hashes raw ids and this module has a token map"):
        layer.load_state_dict(build().state_dict())


def test_multipliers_follow_the_hashed_vocabulary():
    raw, identity, mapped = build(), build(token_map=TokenMap.identity(V)), build(token_map=MAP)
    assert raw.hash.multipliers.equal(identity.hash.multipliers)
    assert not raw.hash.multipliers.equal(mapped.hash.multipliers)
    _, ids = draw()
    assert raw.hash(ids).equal(identity.hash(ids))


@pytest.mark.parametrize("state, message", [
    (dict(token_map=torch.arange(V - 1, dtype=torch.int32)), "token_map must map vocab_size = 50 ids, got 49"),
    (dict(token_map=torch.zeros(V, dtype=torch.int32)), "token_map must map to compressed_vocab_size = 30 ids, got 1"),
    (dict(token_map=torch.arange(-1, V - 1, dtype=torch.int32)), "token_map: values must be >= 0, got -1"),
    (dict(token_map=torch.arange(V)), r"token_map: must be int32 \[V\], got int64 \[50\]"),
    (dict(token_map=torch.zeros(1, V, dtype=torch.int32)), r"token_map: must be int32 \[V\], got int32 \[1, 50\]"),
    (dict(token_map=torch.zeros(0, dtype=torch.int32)), "token_map: empty"),
    (dict(moduli=torch.tensor([[41, 43, 47, 53]])), "moduli: other table sizes than the configuration's"),
    (dict(offsets=torch.zeros(1, 4, dtype=torch.int64)), "offsets: other table sizes"),
])
def test_checkpoints_that_do_not_fit(state, message):
    layer = build(configure(compressed_vocab_size=30))
    wrong = build(layer.config, token_map=MAP).state_dict() | {f"hash.{name}": value for name, value in state.items()}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(wrong)
    assert layer.hash.token_map.numel() == 0


def test_another_map_than_the_own_one_is_refused():
    layer = build(token_map=MAP)
    layer.load_state_dict(build(token_map=MAP, seed=1).state_dict())
    with pytest.raises(RuntimeError, match="token_map: differs from the module's own"):
        layer.load_state_dict(build(token_map=TokenMap.identity(V)).state_dict())


def test_the_checkpoint_of_another_layer_is_refused():
    with pytest.raises(RuntimeError, match="moduli: other table sizes"):
        build(layer_id=1).load_state_dict(build(layer_id=3).state_dict())


def test_maps_that_do_not_fit():
    with pytest.raises(ValueError, match="token_map must map vocab_size = 50 ids, got 49"):
        nn.NgramHash(configure(), TokenMap.identity(49))
    with pytest.raises(ValueError, match="token_map must map to compressed_vocab_size = 20 ids, got 30"):
        nn.Engram(configure(compressed_vocab_size=20), 1, token_map=MAP)
    with pytest.raises(TypeError, match="token_map must be an engram.TokenMap, got list"):
        nn.NgramHash(configure(), [0] * V)


@pytest.mark.parametrize("context", [False, True])
def test_meta_device(context):
    if context:
        with torch.device("meta"):
            layer = nn.Engram(configure(), 3, token_map=MAP, dtype=torch.float64)
    else:
        layer = nn.Engram(configure(), 3, token_map=MAP, device="meta", dtype=torch.float64)
    assert all(t.is_meta for t in layer.state_dict().values())
    hidden, ids = draw()
    trained = build(token_map=MAP)
    assigned = copy.deepcopy(layer)
    assigned.load_state_dict(trained.state_dict(), assign=True)
    assert assigned(hidden, ids).equal(trained(hidden, ids))
    with pytest.raises(RuntimeError, match="meta device"):
        layer.load_reference_state_dict(trained.to_reference_state_dict())
    # Built from scratch: what to_empty() leaves undefined comes back through reset_parameters().
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(a.equal(b) for a, b in zip(layer.hash.buffers(), trained.hash.buffers()))
    assert layer(hidden, ids).isfinite().all()


def test_copies():
    layer = build(configure(branches=2), token_map=MAP)
    hidden, ids = draw(branches=2)
    out = layer(hidden, ids)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert other(hidden, ids).equal(out)
        with torch.no_grad():
            other.embedding.weight.zero_()
        assert layer(hidden, ids).equal(out)


def test_repr():
    text = repr(build(configure(branches=2), token_map=MAP))
    for piece in ("layer_id=3", "token map of 50", "zero_rule='sign'", "dilation=3", "heads=4", "branches=2"):
        assert piece in text


@pytest.mark.parametrize("values, options", [
    (dict(branches=2), {}),
    (dict(boundary="eos", eos_id=6, mask_blocks_hash=False), dict(mask=True, lengths=True)),
    (dict(kernel_size=0), dict(mask=True)),
], ids=["plain", "eos", "no_conv"])
def test_compiles_as_one_graph(values, options):
    layer = build(configure(**values), token_map=MAP)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 12):
        hidden, ids = draw(2, tokens, branches=layer.config.branches)
        given = {}
        if "mask" in options:
            given["mask"] = ids % 5 != 0
        if "lengths" in options:
            given["lengths"] = torch.tensor([tokens, 4])
        results = []
        for run in (layer, compiled):
            leaf = hidden.clone().requires_grad_()
            out = run(leaf, ids, residual=True, **given)
            results.append([out, *torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])])
        assert all(close(a, b) for a, b in zip(*results))


def test_exports():
    layer = build(configure(branches=2), token_map=MAP)
    hidden, ids = draw(branches=2)
    program = torch.export.export(layer, (hidden, ids))
    assert close(program.module()(hidden, ids), layer(hidden, ids))


# ------------------------------------------------------------------------------------------------ reference weights


@pytest.mark.parametrize("values", [dict(), dict(branches=4), dict(branches=2, bias=False), dict(kernel_size=0)])
def test_reference_state_dict_round_trip(values, tmp_path):
    first, second = build(configure(**values), seed=1), build(configure(**values), seed=2)
    hidden, ids = draw(branches=first.config.branches)
    state = first.to_reference_state_dict()
    branches = first.config.branches
    assert state["norm1.0.weight"].equal(first.gate.key_weight[0])
    assert state[f"norm2.{branches - 1}.weight"].equal(first.gate.hidden_weight[-1])
    assert state[f"key_projs.{branches - 1}.weight"].equal(first.key_proj.weight[-12:])
    assert ("short_conv.conv.weight" in state) == bool(first.config.kernel_size)
    assert ("value_proj.bias" in state) == first.config.bias
    second.load_reference_state_dict(state)
    assert second(hidden, ids).equal(first(hidden, ids))

    from safetensors.torch import load_file, save_file
    save_file(state, tmp_path / "weights.safetensors")
    third = build(configure(**values), seed=3)
    third.load_reference_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert third(hidden, ids).equal(first(hidden, ids))


def test_reference_state_dict_is_strict():
    layer = build(configure(branches=2))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state = build(configure(branches=2), seed=1).to_reference_state_dict()
    wrong = {name: tensor for name, tensor in state.items() if name not in ("norm1.0.weight", "value_proj.bias")}
    wrong |= {"norm1.2.weight": torch.ones(12), "key_projs.1.bias": torch.ones(13)}
    with pytest.raises(ValueError) as error:
        layer.load_reference_state_dict(wrong)
    for piece in ("missing norm1.0.weight", "missing value_proj.bias", "unexpected norm1.2.weight",
                  "key_projs.1.bias must be [12], got [13]"):
        assert piece in str(error.value)
    # Same shapes, other table layout.
    shifted = state | {"multi_head_embedding.offsets": state["multi_head_embedding.offsets"] + 1}
    with pytest.raises(ValueError, match=r"multi_head_embedding.offsets must be \[0, .* \(layer 3 of"):
        layer.load_reference_state_dict(shifted)
    assert all(tensor.equal(before[name]) for name, tensor in layer.state_dict().items())


# --------------------------------------------------------------------------------------------------------- refusals


def test_states_that_do_not_fit():
    layer = build()
    hidden, ids = draw()
    with pytest.raises(TypeError, match="state must be an EngramState, got object"):
        layer(hidden, ids, state=object())
    with pytest.raises(ValueError, match="state must be of batch size 2 on cpu, got 3 on cpu"):
        layer(hidden, ids, state=layer.init_state(3))
    for other in (build(configure(kernel_size=0)), build(configure(max_ngram_size=4))):
        with pytest.raises(ValueError, match="state must come from this layer's init_state"):
            layer(hidden, ids, state=other.init_state(2))
    with pytest.raises(ValueError, match="gate_conv: state must keep value torch.float64"):
        layer(hidden, ids, state=layer.init_state(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="init_state: max_rollback must be at least 0, got -1"):
        layer.init_state(2, -1)


def test_layers_that_are_not_in_the_configuration():
    with pytest.raises(ValueError, match=r"layer_id must be one of \[1, 3\], got 2"):
        nn.Engram(configure(), 2)
    with pytest.raises(ValueError, match=r"layer_ids must be out of \[1, 3\], got 4"):
        nn.NgramHash(configure(), layer_ids=[1, 4])
    with pytest.raises(ValueError, match="kernel_size must be >= 1, got 0"):
        nn.ShortConv(configure(kernel_size=0))


@pytest.mark.parametrize("arguments, message", [
    (dict(hidden=torch.zeros(2, 9, 11)), r"hidden must be \[B, T, 1, 12\] or \[B, T, 12\], got float32 \[2, 9, 11\]"),
    (dict(hidden=torch.zeros(2, 9, 2, 12)), r"hidden must be .* got float32 \[2, 9, 2, 12\]"),
    (dict(hidden=torch.zeros(9, 12)), "hidden must be"),
    (dict(token_ids=torch.zeros(2, 8, dtype=torch.int64)), r"token_ids must be integer \[2, 9\], got int64 \[2, 8\]"),
    (dict(token_ids=torch.zeros(2, 9)), r"token_ids must be integer \[2, 9\], got float32"),
    (dict(token_ids=torch.zeros(2, 9, dtype=torch.bool)), "token_ids must be integer"),
    (dict(token_ids=torch.zeros(2, 9, dtype=torch.int16)), "token_ids"),
    (dict(token_ids=None), "token_ids or rows must be given"),
    (dict(document_ids=torch.zeros(9, dtype=torch.int64)), r"document_ids must be integer \[2, 9\], got int64 \[9\]"),
    (dict(document_ids=torch.zeros(2, 9)), "document_ids must be integer"),
    (dict(mask=torch.ones(2, 9)), r"mask must be bool \[2, 9\], got float32 \[2, 9\]"),
    (dict(mask=torch.ones(2, 1, dtype=torch.bool)), r"mask must be bool \[2, 9\], got bool \[2, 1\]"),
    (dict(lengths=torch.tensor([9, 10])), r"lengths must be in \[0, 9\], got 10"),
    (dict(lengths=torch.tensor([-1, 9])), r"lengths must be in \[0, 9\], got -1"),
    (dict(lengths=torch.tensor([9.0, 9.0])), r"lengths must be integer \[2\], got float32 \[2\]"),
    (dict(lengths=torch.tensor([9])), r"lengths must be integer \[2\], got int64 \[1\]"),
    (dict(rows=torch.zeros(2, 9, 4, dtype=torch.int64)), r"rows must be \[2, 2, 9, 4\], got int64 \[2, 9, 4\]"),
    (dict(rows=torch.zeros(1, 2, 9, 4, dtype=torch.int64)), r"rows must be \[2, 2, 9, 4\]"),
    (dict(rows=torch.zeros(2, 2, 9, 4)), "rows"),
    (dict(hidden=torch.zeros(2, 9, 12, dtype=torch.bfloat16)), "gate_conv: "),
    (dict(hidden=torch.zeros(2, 9, 12, dtype=torch.int64)), "gate_conv: "),
    (dict(hidden=torch.zeros(2, 9, 12, device="meta")), "hidden must be on cpu like the parameters, got meta"),
    (dict(token_ids=torch.zeros(2, 9, dtype=torch.int64, device="meta")), "token_ids must be on cpu"),
])
def test_wrong_inputs(arguments, message):
    layer = build(dtype=torch.float32)
    given = dict(hidden=torch.zeros(2, 9, 12), token_ids=torch.zeros(2, 9, dtype=torch.int64)) | arguments
    with pytest.raises(ValueError, match=message):
        layer(given.pop("hidden"), given.pop("token_ids"), **given)


@pytest.mark.parametrize("arguments, message", [
    (([[0.0]], None), "hidden must be a tensor, got list"),
    ((None, None), "hidden must be a tensor, got NoneType"),
    ((torch.zeros(1, 2, 12), [[1, 2]]), "token_ids must be a tensor, got list"),
])
def test_inputs_that_are_no_tensors(arguments, message):
    with pytest.raises(TypeError, match=message):
        build()(*arguments)


@pytest.mark.parametrize("token", [-100, -1, V, 2**63 - 1, -2**63])
def test_ids_outside_the_map(token):
    layer = build(token_map=MAP)
    hidden, ids = draw()
    ids[1, 5] = token
    with pytest.raises(IndexError, match=str(token)):
        layer(hidden, ids)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 5] = False
    assert layer(hidden, ids, mask=mask).isfinite().all()


def test_rows_outside_the_table():
    layer = build()
    hidden, ids = draw()
    rows = nn.NgramHash(layer.config)(ids)
    rows[1, 0, 0, 0] = sum(layer.embedding.sizes)
    with pytest.raises(IndexError):
        layer(hidden, rows=rows)


def test_multi_head_embedding():
    table = nn.MultiHeadEmbedding([3, 5], 2, dtype=torch.float64)
    rows = torch.tensor([[0, 3], [2, 7]])
    assert table(rows).equal(table.weight[rows])
    assert table(rows.int(), torch.tensor([True, False]))[1].eq(0).all()
    with pytest.raises(ValueError, match=r"rows must be \[\.\.\., 2\], got int64 \[2, 3\]"):
        table(torch.zeros(2, 3, dtype=torch.int64))
    for sizes, dim in (([], 2), ([3, 0], 2), ([3], 0)):
        with pytest.raises(ValueError, match="needs sizes, dim and row_multiple >= 1"):
            nn.MultiHeadEmbedding(sizes, dim)


@pytest.mark.parametrize("arguments, message", [
    (dict(token_ids=torch.zeros(3, dtype=torch.int64)), r"token_ids must be int32 or int64 \[B, T\], got int64 \[3\]"),
    (dict(token_ids=torch.zeros(1, 3)), r"token_ids must be integer \[1, 3\], got float32"),
    (dict(mask=torch.ones(1, 2, dtype=torch.bool)), r"mask must be bool \[1, 3\], got bool \[1, 2\]"),
    (dict(document_ids=torch.ones(1, 2, dtype=torch.int64)), r"document_ids must be integer \[1, 3\]"),
    (dict(history=torch.ones(1, 3, dtype=torch.int64)), "history"),
])
def test_wrong_inputs_of_the_hash_with_eos(arguments, message):
    module = nn.NgramHash(configure(boundary="eos", eos_id=6))
    given = dict(token_ids=torch.zeros(1, 3, dtype=torch.int64)) | arguments
    with pytest.raises(ValueError, match=message):
        module(given.pop("token_ids"), **given)
