"""The example language model: what it computes, with one and with four residual streams."""

import subprocess
import sys

import pytest
import torch

import engram
from engram.models.generation import generate, generate_speculatively
from engram.models.lm import MIXINGS, DecodingState, LanguageModel, LanguageModelConfig, ManifoldResidual, sinkhorn

V, D, T = 60, 32, 24
MAP = engram.TokenMap([i % 50 for i in range(V)])


def build(branches=1, with_engram=True, seed=0, mixing="static", **options):
    common = dict(vocab_size=V, hidden_size=D, branches=branches)
    memory = None
    if with_engram:
        memory = engram.EngramConfig(
            **common, heads_per_ngram=2, embed_dim_per_head=4, table_size=53, layer_ids=(0, 1), pad_id=0, **options
        )
    torch.manual_seed(seed)
    model = LanguageModel(LanguageModelConfig(**common, layers=2, heads=2, engram=memory, mixing=mixing), MAP)
    return model.double()


def ids(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("branches", [1, 4])
@pytest.mark.parametrize("with_engram", [False, True])
def test_forward_and_backward_reach_every_parameter(branches, with_engram):
    model = build(branches, with_engram, conv_init="default")
    tokens = ids(2, T)
    logits = model(tokens, torch.zeros_like(tokens))
    assert logits.shape == (2, T, V) and logits.dtype == torch.float64
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not silent
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_loss_is_the_mean_over_counted_targets():
    model = build()
    tokens, targets = ids(2, T), ids(2, T, seed=1)
    targets[:, 10:] = -100
    logp = model(tokens).log_softmax(-1)[:, :10]
    expected = -logp.gather(-1, targets[:, :10, None]).mean()
    torch.testing.assert_close(model.loss(tokens, targets), expected)


@pytest.mark.parametrize("branches", [1, 4])
def test_same_backbone_with_and_without_engram(branches):
    plain, memory = build(branches, False).state_dict(), build(branches).state_dict()
    assert plain.keys() < memory.keys()
    assert all(torch.equal(plain[name], memory[name]) for name in plain)
    assert not torch.equal(plain["embedding.weight"], build(branches, False, seed=1).state_dict()["embedding.weight"])


@pytest.mark.parametrize("mixing", MIXINGS)
def test_four_streams_start_as_the_plain_residual(mixing):
    tokens = ids(2, T)
    wide, plain = build(4, False, mixing=mixing), build(1, False)
    missing = wide.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("residual" in name for name in missing.missing_keys)
    torch.testing.assert_close(wide(tokens), plain(tokens), rtol=1e-10, atol=1e-10)


def manifold_residual(branches=4):
    """With coefficients that differ from token to token."""
    torch.manual_seed(0)
    residual = ManifoldResidual(branches, D, index=1).double()
    with torch.no_grad():
        residual.weight.normal_(std=0.05)
        residual.scale.add_(torch.tensor([1.0, -0.8, 0.6]))
        for parameter in (residual.read, residual.write, residual.mix):
            parameter.add_(0.5 * torch.randn_like(parameter))
    return residual


@pytest.mark.parametrize("branches", [2, 4])
def test_manifold_residual_is_the_formula(branches):
    residual = manifold_residual(branches)
    h = torch.randn(2, 3, branches, D, dtype=torch.float64, requires_grad=True)
    out = residual(h, torch.tanh)
    for b in range(2):
        for t in range(3):
            x = h[b, t].flatten()
            y = residual.weight @ (x / (x.square().mean() + 1e-6).sqrt())
            read, write, mix = y[:branches], y[branches : 2 * branches], y[2 * branches :].view(branches, branches)
            read = 1 / (1 + (-residual.scale[0] * read - residual.read).exp())
            write = 2 / (1 + (-residual.scale[1] * write - residual.write).exp())
            mix = (residual.scale[2] * mix + residual.mix).exp()
            mix = mix / mix.sum(1, keepdim=True)
            for _ in range(20):
                mix = mix / mix.sum(0, keepdim=True)
                mix = mix / mix.sum(1, keepdim=True)
            expected = mix @ h[b, t] + write[:, None] * torch.tanh(read @ h[b, t])
            torch.testing.assert_close(out[b, t], expected, rtol=2e-4, atol=2e-4)
    out.square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in (h, *residual.parameters()))


def test_manifold_mixing_is_doubly_stochastic():
    _, _, mix = manifold_residual().coefficients(torch.randn(2, 5, 4, D, dtype=torch.float64))
    assert (mix > 0).all() and mix.std((0, 1)).min() > 1e-3  # each token has its own
    torch.testing.assert_close(mix.sum(-1), torch.ones(2, 5, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(mix.sum(-2), torch.ones(2, 5, 4, dtype=torch.float64), rtol=0, atol=2e-2)
    even = sinkhorn(torch.randn(50, 4, 4, dtype=torch.float64))
    torch.testing.assert_close(even.sum(-2), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=1e-4)
    extreme = sinkhorn(torch.tensor([[500.0, 0.0], [500.0, 0.0]]))
    torch.testing.assert_close(extreme, torch.full((2, 2), 0.5))


def test_manifold_streams_learn_to_differ():
    """The streams begin alike; every parameter moves nonetheless."""
    model, tokens = build(4, False, mixing="manifold"), ids(2, T)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # scale waits for weight to leave zero
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if torch.equal(p, start[name])]
    write = model.blocks[0].attention_residual.write
    assert (write - write.mean()).abs().max() > 0


@pytest.mark.parametrize("mixing", MIXINGS)
def test_autocast_does_not_round_the_streams(mixing):
    model = build(4, False, mixing=mixing).float()
    h = torch.randn(1, 3, 4, D)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.blocks[0].mlp_residual(h, torch.zeros_like)
    expected = model.blocks[0].mlp_residual(h, torch.zeros_like)
    assert out.dtype == torch.float32 and torch.equal(out, expected)


def test_mlp_size():
    config = LanguageModelConfig(vocab_size=V, hidden_size=D, layers=1, heads=2, mlp_size=5)
    assert LanguageModel(config).blocks[0].mlp.down.weight.shape == (D, 5)


def test_engram_changes_the_output():
    tokens = ids(1, T)
    assert (build()(tokens) - build(with_engram=False)(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("branches", [1, 4])
def test_causal(branches):
    model = build(branches, conv_init="default")
    tokens = ids(1, T)
    changed = tokens.clone()
    changed[0, 15:] = (changed[0, 15:] + 1) % V
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=1e-12, atol=1e-12)
    assert (before[:, 15] - after[:, 15]).abs().max() > 1e-6


@pytest.mark.parametrize("branches", [1, 4])
def test_documents_in_a_row_do_not_see_each_other(branches):
    model = build(branches, conv_init="default")
    tokens = ids(1, T)
    documents = torch.tensor([[7] * 10 + [3] * (T - 10)])
    changed = tokens.clone()
    changed[0, :10] = (changed[0, :10] + 1) % V
    packed, other = model(tokens, documents), model(changed, documents)
    torch.testing.assert_close(packed[:, 10:], other[:, 10:], rtol=1e-12, atol=1e-12)
    # Alone in its row, the second document gives what it gives behind the first: rotary positions are relative.
    torch.testing.assert_close(packed[:, 10:], model(tokens[:, 10:]), rtol=1e-9, atol=1e-9)
    assert (model(tokens)[:, 10:] - packed[:, 10:]).abs().max() > 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(hidden_size=30), "hidden_size 30 must be a multiple of 2 \\* heads = 8"),
        (dict(branches=4), "engram.branches is 1, the model's 4"),
        (dict(vocab_size=V + 1), "engram.vocab_size is 60, the model's 61"),
        (dict(mixing="dynamic"), "mixing must be one of static, manifold, got 'dynamic'"),
        (dict(mlp_size=0), "mlp_size must be at least 1, got 0"),
        (dict(layers=1), "engram.layer_ids .* must lie in \\[0, layers = 1\\)"),
    ],
)
def test_wrong_configurations(change, message):
    memory = engram.EngramConfig(hidden_size=D, vocab_size=V, layer_ids=(0, 1), table_size=53, pad_id=0)
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**{**dict(vocab_size=V, hidden_size=D, layers=2, engram=memory), **change})


def test_models_are_an_attribute_of_the_package():
    code = "import sys, engram; assert 'engram.models' not in sys.modules; engram.models.LanguageModel"
    subprocess.run([sys.executable, "-c", code], check=True)


# Generation ---------------------------------------------------------------------------------------------------------


def naive(model, tokens, count):
    """The most likely continuation by full passes."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[:, -count:]


EACH_MODEL = pytest.mark.parametrize("branches, with_engram", [(1, False), (1, True), (4, True)])


def lively(branches=1, with_engram=True, seed=0, mixing="static"):
    """Weights large enough that what a token saw decides what follows it."""
    model = build(branches, with_engram, seed=seed, mixing=mixing, conv_init="default")
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return model


@EACH_MODEL
def test_chunks_through_a_state(branches, with_engram):
    model, tokens = lively(branches, with_engram), ids(2, T)
    whole = model(tokens)
    for cuts in ([T], [1] * T, [5, 1, 18]):
        state, begin, parts = DecodingState(model, 2, T), 0, []
        for size in cuts:
            with torch.no_grad():
                parts.append(model(tokens[:, begin : begin + size], state=state))
            begin += size
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=f"the state has room for {T} tokens, got {T} . 1"):
        model(tokens[:, :1], state=state)
    with pytest.raises(ValueError, match="document_ids must be None"):
        model(tokens[:, :1], tokens[:, :1], state=DecodingState(model, 2, T))


def test_manifold_streams_decode_as_they_train():
    model, tokens = lively(4, mixing="manifold"), ids(2, T)
    for module in model.modules():
        if isinstance(module, ManifoldResidual):
            torch.nn.init.normal_(module.weight)
    state, parts = DecodingState(model, 2, T), []
    for begin, end in ((0, 5), (5, 6), (6, T)):
        with torch.no_grad():
            parts.append(model(tokens[:, begin:end], state=state))
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-10, atol=1e-10)


@EACH_MODEL
def test_greedy_is_the_full_forward(branches, with_engram):
    model, prompts = lively(branches, with_engram), ids(3, 7)
    expected = naive(model, prompts, 12)
    assert torch.equal(generate(model, prompts, 12), expected) and len(expected.unique()) > 5
    assert torch.equal(generate(model, prompts[:, :1], 3), naive(model, prompts[:, :1], 3))
    assert generate(model, prompts, 0).shape == (3, 0)


@EACH_MODEL
def test_left_padding_is_no_padding(branches, with_engram):
    model, lengths = lively(branches, with_engram), [7, 3, 1]
    prompts = [ids(1, length, seed=length) for length in lengths]
    padded = torch.cat([torch.cat([torch.full((1, 7 - p.shape[1]), 5), p], 1) for p in prompts])
    mask = torch.arange(7) >= 7 - torch.tensor(lengths)[:, None]
    for options in (dict(), dict(beams=3)):
        together = generate(model, padded, 9, mask=mask, **options)
        for row, prompt in zip(together, prompts):
            assert torch.equal(row[None], generate(model, prompt, 9, **options))


def test_sampling():
    model, prompts = lively(), ids(4, 5)
    draw = lambda seed: torch.Generator().manual_seed(seed)                           # noqa: E731
    one, same, other = (generate(model, prompts, 8, temperature=1.5, generator=draw(s)) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(generate(model, prompts, 8, temperature=2.0, top_k=1), naive(model, prompts, 8))
    most_likely = model(prompts)[:, -1].topk(3).indices
    for seed in range(20):
        token = generate(model, prompts, 1, temperature=5.0, top_k=3, generator=draw(seed))
        assert (most_likely == token).any(1).all()


@pytest.mark.parametrize("eos", [None, 3])
def test_beams_find_the_most_likely(eos):
    """As many beams as there are continuations find the best of all."""
    model, count = lively(), 2
    prompts = ids(2, 6)
    found = generate(model, prompts, count, beams=V, eos_id=eos)
    every = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    if eos is not None:
        every = every[(every[:, 0] != eos) | (every[:, 1] == eos)]
    for prompt, continuation in zip(prompts, found):
        logits = model(torch.cat([prompt.expand(len(every), -1), every], 1))[:, -3:-1].float().log_softmax(-1)
        score = logits.gather(2, every[..., None])[..., 0]
        if eos is not None:
            score[every[:, 0] == eos, 1] = 0
        assert torch.equal(every[score.sum(1).argmax()], continuation)


def test_ended_rows_are_filled():
    model, prompts = lively(), ids(5, 4)
    plain = generate(model, prompts, 10)
    eos = int(plain[0, 3])
    ended = generate(model, prompts, 10, eos_id=eos)
    for row, cut in zip(plain, ended):
        first = (row == eos).nonzero()
        end = int(first[0]) if len(first) else 10
        assert torch.equal(cut[:end], row[:end]) and (cut[end:] == eos).all()


@pytest.mark.parametrize("ahead", [1, 3, 6])
@pytest.mark.parametrize("draft", ["itself", "another", "no_engram"])
def test_speculation_is_greedy(draft, ahead):
    model = lively()
    drafts = {"itself": model, "another": lively(seed=1), "no_engram": lively(with_engram=False)}
    for prompt in (ids(1, 9), ids(1, 1)):
        assert torch.equal(generate_speculatively(model, drafts[draft], prompt, 17, ahead=ahead), naive(model, prompt, 17))
    assert generate_speculatively(model, model, ids(1, 3), 0).shape == (1, 0)


@pytest.mark.parametrize("options, message", [
    (dict(token_ids=ids(2, 0)), "T, the length of the prompts, must be at least 1, got 0"),
    (dict(max_new_tokens=-1), "max_new_tokens must be at least 0, got -1"),
    (dict(temperature=-0.5), "temperature must be at least 0, got -0.5"),
    (dict(beams=0), "beams must be at least 1, got 0"),
    (dict(beams=2, temperature=1.0), "temperature must be 0"),
    (dict(temperature=1.0, top_k=-2), "top_k must be at least 1, got -2"),
])
def test_wrong_wishes(options, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), **dict(token_ids=ids(2, 3), max_new_tokens=2) | options)
    with pytest.raises(ValueError, match="token_ids must be"):
        generate_speculatively(build(), build(), ids(2, 3), 2)
