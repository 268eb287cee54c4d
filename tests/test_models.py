"""The example language model: what it computes, with one and with four residual streams."""

import subprocess
import sys

import pytest
import torch

import engram
from engram.models.lm import LanguageModel, LanguageModelConfig

V, D, T = 60, 32, 24
MAP = engram.TokenMap([i % 50 for i in range(V)])


def build(branches=1, with_engram=True, seed=0, **options):
    common = dict(vocab_size=V, hidden_size=D, branches=branches)
    memory = None
    if with_engram:
        memory = engram.EngramConfig(
            **common, heads_per_ngram=2, embed_dim_per_head=4, table_size=53, layer_ids=(0, 1), pad_id=0, **options
        )
    torch.manual_seed(seed)
    model = LanguageModel(LanguageModelConfig(**common, layers=2, heads=2, engram=memory), MAP)
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


def test_four_streams_start_as_the_plain_residual():
    tokens = ids(2, T)
    wide, plain = build(4, False), build(1, False)
    missing = wide.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("residual" in name for name in missing.missing_keys)
    torch.testing.assert_close(wide(tokens), plain(tokens), rtol=1e-10, atol=1e-10)


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
