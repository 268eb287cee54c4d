"""Engram inside models of transformers: what decoding gives is what one pass gives; training, saving, errors."""

import contextlib
import copy
import inspect
import os
import pickle
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.57")

import engram  # noqa: E402
from engram import EngramConfig, TokenMap, hf  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

VOCAB, HIDDEN, EOS = 97, 32, 2
CONFIGS = dict(
    llama=("LlamaConfig", dict(num_key_value_heads=2)),
    mistral=("MistralConfig", dict(num_key_value_heads=2, sliding_window=None)),
    qwen2=("Qwen2Config", dict(num_key_value_heads=2)),
    qwen3=("Qwen3Config", dict(num_key_value_heads=2, head_dim=8)),
    gpt_neox=("GPTNeoXConfig", {}),
    gpt2=("GPT2Config", dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)),
)
FAMILIES = pytest.mark.parametrize("kind", ("llama", "gpt_neox", "gpt2"))
ALL = pytest.mark.parametrize("kind", sorted(CONFIGS))
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
MODELS = pytest.mark.parametrize("kind, dtype", [
    ("llama", torch.float32), ("llama", torch.float64), ("gpt_neox", torch.float64), ("gpt2", torch.float64),
])


def plain(kind="llama", dtype=torch.float64, layers=3, **numbers):
    torch.manual_seed(0)
    name, own = CONFIGS[kind]
    sizes = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=48)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=EOS)
    config = getattr(transformers, name)(
        **{**sizes, **ids, **own, **numbers}, num_hidden_layers=layers, max_position_embeddings=256
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def settings(**changes):
    numbers = dict(
        hidden_size=HIDDEN, vocab_size=VOCAB, layer_ids=(0, 2), table_size=101, embed_dim_per_head=8, heads_per_ngram=2,
        conv_init="default",
    )
    return EngramConfig(**{**numbers, **changes})


def token_map():
    return TokenMap([i // 2 for i in range(VOCAB)])


def with_engram(kind="llama", dtype=torch.float64, *, max_rollback=64, share_table=False, numbers={}, **changes):
    model = plain(kind, dtype, **numbers)
    return hf.add_engram(
        model, settings(**changes), token_map(), max_rollback=max_rollback, share_table=share_table
    )


def prompts(batch=2, length=9, seed=0):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def cache_name(model):
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


@torch.no_grad()
def logits(model, ids, cache=None, **arguments):
    if cache is not None:
        arguments[cache_name(model)] = cache
    return model(ids, use_cache=cache is not None, **arguments).logits


def near(actual, expected, dtype=torch.float64):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


def positions_of(mask):
    return (mask.long().cumsum(1) - 1).clamp(min=0)


# The layer is in the model.


@ALL
def test_it_is_an_engram_before_the_attention(kind):
    model, reference = with_engram(kind), plain(kind)
    ids = prompts()
    names = [name for name, _ in model.named_parameters() if ".engram." in name]
    assert names and all(name in model.state_dict() for name in names)
    base = reference.base_model
    layers, grown = (getattr(m, "h", None) or m.layers for m in (base, model.base_model))
    assert [hasattr(layer, "engram") for layer in grown] == [True, False, True]
    # By hand: a hook on the plain model that adds what the module gives.
    for layer, own in zip(layers, grown):
        if hasattr(own, "engram"):
            def add(_, args, kwargs, module=own.engram):
                return (args[0] + module(args[0], ids), *args[1:]), kwargs
            layer.register_forward_pre_hook(add, with_kwargs=True)
    near(logits(model, ids), logits(reference, ids))
    assert (logits(model, ids) - logits(plain(kind), ids)).abs().max() > 1e-3


def test_names_and_classes_stay():
    model, reference = with_engram(), plain()
    assert isinstance(model, type(reference)) and type(model).__name__ == type(reference).__name__
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    out = model(prompts(), output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert inspect.signature(type(model).forward) == inspect.signature(type(reference).forward)


def test_a_silent_engram_changes_no_bit():
    model = with_engram(table_std=0.0, bias=False)
    assert torch.equal(logits(model, prompts()), logits(plain(), prompts()))
    model(prompts(), labels=prompts()).loss.backward()
    assert all(model.model.layers[i].engram.embedding.weight.grad.abs().max() > 0 for i in (0, 2))  # but it learns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_follows_the_model(dtype):
    model = with_engram(dtype=dtype, table_dtype=torch.float32)
    module = model.model.layers[0].engram
    assert module.key_proj.weight.dtype == module.conv.weight.dtype == dtype
    assert module.embedding.weight.dtype == torch.float32
    assert logits(model, prompts()).isfinite().all()


def test_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "A": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="c"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for given in (tokenizer, fast, tmp_path / "tokenizer.json"):
        model = hf.add_engram(plain(), settings(), given)
        ids = model.model.layers[0].engram.hash.token_map
        assert ids[0] == ids[1] != ids[2] and len(ids) == VOCAB


# Decoding equals one pass.


@contextlib.contextmanager
def recorded(model):
    """{position: logits [B, V]} of what the model gives for each, the last time that it is asked."""
    seen, name = {}, cache_name(model)

    def before(module, args, kwargs):
        module.begin = 0 if kwargs.get(name) is None else int(kwargs[name].get_seq_length())
        module.end = module.begin + kwargs["input_ids"].shape[1]

    def after(module, args, kwargs, output):
        count = output.logits.shape[1]
        seen.update({module.end - count + i: output.logits[:, i].clone() for i in range(count)})

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ):
        yield seen


def generate(model, ids, mask=None, count=10, **how):
    mask = torch.ones_like(ids) if mask is None else mask
    numbers = dict(max_new_tokens=count, min_new_tokens=count, return_dict_in_generate=True, do_sample=False)
    return model.generate(ids, attention_mask=mask, **{**numbers, **how})


def generate_and_compare(model, ids, mask=None, dtype=torch.float64, **how):
    """`generate`, its logits (before it rounds them to float32) compared with one pass over what it wrote."""
    mask = torch.ones_like(ids) if mask is None else mask
    with recorded(model) as seen:
        out = generate(model, ids, mask, **how).sequences
    mask = torch.cat([mask, mask.new_ones(len(out), out.shape[1] - mask.shape[1])], 1)
    whole = logits(model, out, attention_mask=mask, position_ids=positions_of(mask))
    steps = range(ids.shape[1] - 1, out.shape[1] - 1)
    assert len(steps) >= 8
    for step in steps:
        near(seen[step], whole[:, step], dtype)
    return out


MODES = dict(
    greedy={}, sampling=dict(do_sample=True, top_k=20), static=dict(cache_implementation="static"),
    chunked_prefill=dict(prefill_chunk_size=4),
)


@MODELS
@pytest.mark.parametrize("mode", ["greedy", "sampling", "static", "chunked_prefill"])
def test_generate(kind, dtype, mode):
    torch.manual_seed(1)
    generate_and_compare(with_engram(kind, dtype), prompts(), dtype=dtype, **MODES[mode])


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - {"llama", "gpt_neox", "gpt2"}))
@pytest.mark.parametrize("mode", ["greedy", "static"])
def test_generate_with_the_other_families(kind, mode):
    generate_and_compare(with_engram(kind), prompts(), **MODES[mode])


@FAMILIES
@pytest.mark.parametrize("mode", ["greedy", "static"])
def test_left_padding(kind, mode):
    model, ids, lengths = with_engram(kind), prompts(3), (9, 5, 1)
    mask = torch.stack([torch.arange(9) >= 9 - length for length in lengths]).long()
    out = generate_and_compare(model, torch.where(mask.bool(), ids, 0), mask, **MODES[mode])
    for row, length in enumerate(lengths):  # alone and without padding
        alone = generate(model, ids[row : row + 1, 9 - length :]).sequences
        assert torch.equal(alone[0, length:], out[row, 9:])
        padded = logits(model, out, attention_mask=(pads := torch.cat([mask, mask.new_ones(3, 10)], 1)),
                        position_ids=positions_of(pads))
        near(logits(model, alone)[0], padded[row, 9 - length :])


@pytest.mark.parametrize("kind, dtype, implementation", [
    ("llama", torch.float32, None), ("llama", torch.float64, "static"), ("gpt_neox", torch.float64, None),
    ("gpt2", torch.float64, "static"),
])
def test_beams(kind, dtype, implementation):
    model, ids = with_engram(kind, dtype), prompts()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    how = dict(num_beams=4, num_return_sequences=3, length_penalty=0.0, output_scores=True)
    out = generate(model, ids, mask, cache_implementation=implementation, **how)
    mask = torch.cat([mask.repeat_interleave(3, 0), mask.new_ones(6, 10)], 1)
    full = logits(model, out.sequences, attention_mask=mask, position_ids=positions_of(mask))[:, 8:-1].log_softmax(-1)
    score = full.gather(-1, out.sequences[:, 9:, None]).sum((1, 2))
    torch.testing.assert_close(out.sequences_scores, score.float(), rtol=0, atol=1e-5)  # they are float32 in all dtypes
    again = generate(model, ids, mask[::3, :9], use_cache=False, **how)
    assert torch.equal(again.sequences, out.sequences)


def test_the_state_follows_the_beams(monkeypatch):
    """The negative control: beams that leave the state where it is are found."""
    model, ids = with_engram(), prompts()
    expected = generate(model, ids, num_beams=4, use_cache=False, output_scores=True).sequences_scores
    kept = generate(model, ids, num_beams=4, output_scores=True).sequences_scores
    torch.testing.assert_close(kept, expected, rtol=0, atol=1e-6)
    monkeypatch.setattr(engram.state.EngramState, "select", lambda self, index: None)
    assert not torch.allclose(generate(model, ids, num_beams=4, output_scores=True).sequences_scores, expected)


@MODELS
def test_assisted(kind, dtype):
    """A draft model without Engram, one with, and prompt lookup: the tokens and the logits of greedy decoding."""
    model, ids = with_engram(kind, dtype), prompts(1, 12)
    ids[0, 6:] = ids[0, :6]
    endless = dict(min_new_tokens=None, eos_token_id=VOCAB + 1)  # older versions know no minimum here
    greedy = generate(model, ids, count=14, **endless).sequences
    drafts = [plain(kind, dtype, layers=1), copy.deepcopy(model)]
    for how in [*(dict(assistant_model=draft) for draft in drafts), dict(prompt_lookup_num_tokens=3)]:
        out = generate_and_compare(model, ids, dtype=dtype, count=14, **endless, **how)
        assert torch.equal(out, greedy)


@ALL
@pytest.mark.parametrize("static", [False, True], ids=("dynamic", "static"))
def test_chunks(kind, static):
    model, ids = with_engram(kind), prompts(2, 30)
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache(config=model.config)
    parts = [logits(model, ids[:, a:b], cache) for a, b in ((0, 11), (11, 12), (12, 13), (13, 29), (29, 30))]
    near(torch.cat(parts, 1), logits(model, ids))


@FAMILIES
def test_caches_do_not_see_each_other(kind):
    model = with_engram(kind)
    texts, caches = [prompts(2, 12, seed) for seed in (1, 2)], [DynamicCache(), DynamicCache()]
    parts = [[], []]
    for begin in range(0, 12, 3):
        for text, cache, part in zip(texts, caches, parts):
            part.append(logits(model, text[:, begin : begin + 3], cache))
    for text, part in zip(texts, parts):
        near(torch.cat(part, 1), logits(model, text))
    # A new cache is a new sequence; one that was reset as well, also of another batch size.
    caches[0].reset()
    if caches[0].get_seq_length() == 0:  # before 5.x a dynamic cache keeps its length, with zeros for keys
        near(logits(model, texts[0][:1], caches[0]), logits(model, texts[0][:1]))
    near(logits(model, texts[0], DynamicCache()), logits(model, texts[0]))


def test_a_static_cache_is_reset_in_place():
    model, cache = with_engram(), StaticCache(config=plain().config, max_cache_len=20)
    logits(model, prompts(seed=3), cache)
    address = cache.layers[0].engram_state.history.position.data_ptr()
    cache.reset()
    near(logits(model, prompts(), cache), logits(model, prompts()))
    assert cache.layers[0].engram_state.history.position.data_ptr() == address


def remove(cache, count):
    """Take `count` tokens back in all versions of transformers."""
    cache.crop(-count)


@FAMILIES
def test_a_cache_is_edited_by_hand(kind):
    """What a search of one's own does: repeat, select, reorder, crop, copy."""
    model, ids = with_engram(kind), prompts(3, 10)
    cache = DynamicCache(config=model.config)
    logits(model, ids, cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 0, 1, 5]))
    cache.reorder_cache(torch.tensor([3, 2, 0, 0]))
    origin = torch.tensor([2, 0, 2, 2])
    remove(cache, 3)
    tail = prompts(4, 8, seed=5)
    kept, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    whole = logits(model, torch.cat([ids[origin][:, :7], tail], 1))[:, 7:]
    for each in (cache, kept, pickled):
        near(logits(model, tail[:, :5], each), whole[:, :5])
        remove(each, 2)
        near(logits(model, tail[:, 3:], each), whole[:, 3:])


def test_a_crop_beyond_max_rollback_is_refused():
    model, ids = with_engram(max_rollback=4), prompts(2, 12)
    cache = DynamicCache()
    logits(model, ids, cache)
    remove(cache, 4)
    near(logits(model, ids[:, 8:10], cache), logits(model, ids[:, :10])[:, 8:])
    with pytest.raises(ValueError, match="the Engram layers can take 2 tokens back, got 3; add_engram.max_rollback"):
        remove(cache, 3)
    with pytest.raises(ValueError, match="begin with an empty cache"):
        logits(model, ids[:, :1], cache)
    cache = DynamicCache()
    logits(model, ids, cache)
    remove(cache, 12)  # everything: as new
    near(logits(model, ids, cache), logits(model, ids))


def test_a_cache_of_another_model_is_refused():
    model, cache = with_engram(), DynamicCache()
    logits(plain(), prompts(), cache)
    with pytest.raises(ValueError, match="the cache holds tokens that the Engram layers have not seen"):
        logits(model, prompts(), cache)
    with pytest.raises(TypeError, match="a transformers Cache, got tuple"):
        logits(model, prompts(), ())


def test_sliding_window_cache():
    """Keys and values are forgotten beyond the window; the state of Engram is not."""
    generate_and_compare(with_engram("mistral", numbers=dict(sliding_window=6)), prompts(1, 20))


# Masks and documents.


@FAMILIES
def test_packed_sequences(kind):
    model, parts = with_engram(kind), [prompts(1, n, seed=n) for n in (7, 1, 9)]
    ids = torch.cat(parts, 1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = logits(model, ids, position_ids=positions)
    near(packed, torch.cat([logits(model, part) for part in parts], 1))
    assert not torch.allclose(packed[:, 8:], logits(model, ids)[:, 8:])


def test_mask_and_documents_of_ones_own():
    model, ids = with_engram(), prompts()
    module = model.model.layers[0].engram
    seen = {}
    module.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    mask, documents = torch.rand(2, 9) > 0.3, torch.arange(18).view(2, 9) // 4
    causal = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    logits(model, ids, attention_mask=causal, engram_mask=mask, engram_document_ids=documents)
    assert torch.equal(seen["mask"], mask) and torch.equal(seen["document_ids"], documents)
    with pytest.raises(ValueError, match=r"mask must be bool \[2, 9\]"):
        logits(model, ids, engram_mask=mask[:, :5])
    with pytest.raises(ValueError, match=r"document_ids must be integer \[2, 9\]"):
        logits(model, ids, engram_document_ids=documents.double())


def test_input_ids_are_needed():
    model = with_engram()
    with pytest.raises(ValueError, match="needs input_ids: they hash token ids"):
        model(inputs_embeds=torch.zeros(2, 3, HIDDEN, dtype=torch.float64))
    with pytest.raises(ValueError, match="call the model, not the layer"):
        model.model.layers[0](torch.zeros(2, 3, HIDDEN, dtype=torch.float64))


# Training.


@FAMILIES
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(kind, reentrant):
    model, ids = with_engram(kind).train(), prompts()

    def gradients():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}

    loss, expected = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    calls = []
    model.base_model.get_submodule("h" if kind == "gpt2" else "layers")[0].engram.register_forward_hook(
        lambda *_: calls.append(1)
    )
    again, actual = gradients()
    assert len(calls) == 2  # once more on the way back
    assert torch.equal(loss, again) and all(torch.equal(expected[name], actual[name]) for name in expected)


def test_autocast():
    model, ids = with_engram(dtype=torch.float32).train(), prompts()
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = DynamicCache()
        parts = [logits(model, ids[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts, 1), logits(model, ids), rtol=0.05, atol=0.05)
        double = with_engram()  # which autocast leaves alone
        near(logits(double, ids, DynamicCache()), logits(double, ids))


def test_train_mode():
    model = hf.add_engram(plain(), settings(), train_mode="engram")
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".engram." in name}
    model.train()(prompts(), labels=prompts()).loss.backward()
    assert all((param.grad is not None) == (name in trained) for name, param in model.named_parameters())
    frozen = plain().requires_grad_(False)
    hf.add_engram(frozen, settings())
    assert {name for name, param in frozen.named_parameters() if param.requires_grad} == trained  # as it was
    hf.set_train_mode(model, "all")
    assert all(param.requires_grad for param in model.parameters())
    with pytest.raises(ValueError, match="train_mode must be 'all' or 'engram', got 'some'"):
        hf.set_train_mode(model, "some")


def trainer(model, folder, **changes):
    # accelerate and transformers keep the precision of the last one in the process.
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    optimizer = changes.pop("optimizer", None)
    numbers = dict(
        max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, save_steps=2, logging_steps=1,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True,
    )
    data = [dict(input_ids=ids, labels=ids) for ids in prompts(32, 16)]
    return transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(folder), **{**numbers, **changes}),
        train_dataset=data, **({} if optimizer is None else dict(optimizers=(optimizer, None))),
    )


@pytest.mark.parametrize("sparse", [False, True], ids=("dense", "sparse"))
def test_trainer(sparse, tmp_path):
    def run(folder, **resume):
        model = with_engram(dtype=torch.float32, sparse_grad=sparse)
        groups = engram.optim.param_groups(model, 1e-2, 0.0)
        run = trainer(model, folder, **(dict(optimizer=engram.optim.LazyAdamW(groups)) if sparse else {}))
        hf.clip_sparse_gradients(run)
        run.train(**resume)
        return model, run

    begin = {name: x.clone() for name, x in with_engram(dtype=torch.float32).state_dict().items()}
    model, done = run(tmp_path)
    table = "model.layers.2.engram.embedding.weight"
    assert not torch.equal(model.state_dict()[table], begin[table])
    assert done.state.global_step == 4 and all(entry.get("loss", 1) < 10 for entry in done.state.log_history)
    saved = hf.load_engram(tmp_path / "checkpoint-4")
    resumed, _ = run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, x in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], x) and torch.equal(resumed.state_dict()[name], x)


def test_trainer_with_gradient_checkpointing_and_bfloat16(tmp_path):
    model = with_engram(dtype=torch.float32)
    run = trainer(model, tmp_path, gradient_checkpointing=True, bf16=True, max_steps=2, save_steps=10)
    assert run.train().training_loss < 10


def test_sparse_gradients_are_clipped_as_dense_ones(tmp_path):
    """Tables so small that every row is touched: the sparse model steps as the dense one, AdamW and all."""
    results = []
    for sparse in (False, True):
        model = with_engram(sparse_grad=sparse, table_size=2)
        groups = engram.optim.param_groups(model, 1e-2, 0.0)
        optimizer = engram.optim.LazyAdamW(groups) if sparse else torch.optim.AdamW(groups)
        run = trainer(model, tmp_path, optimizer=optimizer, max_grad_norm=0.1, save_steps=10)
        if sparse:
            hf.clip_sparse_gradients(run)
        run.train()
        results.append((model.state_dict(), [entry["grad_norm"] for entry in run.state.log_history[:-1]]))
    (dense, norms), (own, own_norms) = results
    assert own_norms == pytest.approx(norms, rel=1e-5) and min(norms) > 0.1
    for name, x in dense.items():
        torch.testing.assert_close(own[name], x, rtol=0, atol=1e-6)


def test_trainers_own_clipping_refuses_sparse_gradients(tmp_path):
    """Why there is `clip_sparse_gradients`."""
    model = with_engram(sparse_grad=True)
    optimizer = engram.optim.LazyAdamW(engram.optim.param_groups(model, 1e-2, 0.0))
    with pytest.raises(NotImplementedError):
        trainer(model, tmp_path, optimizer=optimizer).train()


@pytest.mark.slow
def test_real_text_is_learnt_better_with_engram():
    """ENGRAM_TRAIN_STEPS=1000 makes minutes of it, with more to see."""
    corpora = pytest.importorskip("engram.models.corpus")
    pytest.importorskip("tokenizers")
    folder = corpora.standard_library()
    corpus = corpora.load_corpus([folder / name for name in ("json", "email", "http")], vocab_size=512)
    steps, shape = max(60, int(os.environ.get("ENGRAM_TRAIN_STEPS", 0))), dict(batch=4, length=64)
    sizes = dict(hidden_size=64, vocab_size=512, layers=2, intermediate_size=128)
    memory = EngramConfig(
        hidden_size=64, vocab_size=512, layer_ids=(1,), table_size=3000, embed_dim_per_head=16, heads_per_ngram=4,
        pad_id=0, table_std=0.02, sparse_grad=True,
    )
    models = [plain(dtype=torch.float32, **sizes), plain(dtype=torch.float32, **sizes)]
    hf.add_engram(models[1], memory, corpus.tokenizer)
    assert all(torch.equal(x, models[1].state_dict()[name]) for name, x in models[0].state_dict().items())
    held_out = corpora.held_out_batches(corpus.held_out, **shape, windows=24)

    def loss(model, batch):
        ids, targets, documents = batch
        own = {} if model is models[0] else dict(engram_document_ids=documents)
        out = model(ids, use_cache=False, **own).logits
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())

    results = []
    for model in models:
        rest, *tables = engram.optim.param_groups(model, 3e-3, 0.01)
        optimizers = [torch.optim.AdamW([rest]), *(engram.optim.LazyAdamW([group]) for group in tables)]
        begin = loss(model, held_out[0]).item()
        for step in range(steps):
            loss(model.train(), corpora.training_batch(corpus.train, **shape, seed=0, step=step)).backward()
            engram.optim.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            results.append(sum(loss(model.eval(), batch).item() for batch in held_out) / len(held_out))
        assert results[-1] < begin - 0.5
    print(f"held out after {steps} steps: plain {results[0]:.3f}, with Engram {results[1]:.3f}")
    assert results[1] < results[0] - 0.1


def test_peft(tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = with_engram(), prompts()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["engram"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, lora)
    trained = [name for name, param in tuned.named_parameters() if param.requires_grad]
    assert all("lora_" in name or ".engram." in name for name in trained)
    assert any("lora_" in name for name in trained) and any("embedding.weight" in name for name in trained)
    optimizer = torch.optim.AdamW([param for param in tuned.parameters() if param.requires_grad], lr=1e-2)
    for _ in range(2):
        tuned.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.eval()
    with torch.no_grad():
        expected = tuned(input_ids=ids).logits
    assert not torch.allclose(expected, logits(with_engram(), ids))
    out = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    whole = tuned.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, use_cache=False
    )
    assert torch.equal(out, whole)
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(with_engram(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    near(logits(loaded.merge_and_unload(), ids), expected)


# torch.compile.


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.slow
def test_compile(kind):
    model, ids = with_engram(kind), prompts()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    near(logits(compiled, ids), logits(model, ids))
    model.train()
    compiled(ids, use_cache=False).logits.square().mean().backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model(ids, use_cache=False).logits.square().mean().backward()
    for param, grad in zip(model.parameters(), gradients):
        near(grad, param.grad)


@pytest.mark.slow
@torch.no_grad()
def test_compile_one_graph_for_all_steps():
    model, ids = with_engram(), prompts(2, 16)
    whole, cache = logits(model, ids), StaticCache(config=model.config, max_cache_len=20)
    parts = [logits(model, ids[:, :6], cache)]
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True)
    for t in range(6, 16):
        where = dict(position_ids=torch.full((2, 1), t))
        if "cache_position" in inspect.signature(type(model).forward).parameters:
            where["cache_position"] = torch.tensor([t])
        parts.append(compiled(ids[:, t : t + 1], use_cache=True, **{cache_name(model): cache}, **where).logits)
    near(torch.cat(parts, 1), whole)
    assert counter.frame_count <= 2


# Saving and loading.


@FAMILIES
@pytest.mark.parametrize("share_table, tied", [(False, False), (True, True)], ids=("nothing_shared", "shared_and_tied"))
def test_save_and_load(kind, share_table, tied, tmp_path):
    for dtype, table, shard in ((torch.float32, None, "5GB"), (torch.bfloat16, torch.float32, "10KB")):
        model = with_engram(
            kind, dtype, share_table=share_table, table_dtype=table, numbers=dict(tie_word_embeddings=tied),
            max_rollback=9,
        )
        folder = tmp_path / shard
        model.save_pretrained(folder, max_shard_size=shard)
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "10KB")
        for loaded in (hf.load_engram(folder), type(model).from_pretrained(folder)):
            own, back = model.state_dict(), loaded.state_dict()
            assert own.keys() == back.keys() and type(loaded) is type(model) and not loaded.training
            assert all(torch.equal(own[name], back[name]) and own[name].dtype == back[name].dtype for name in own)
            assert torch.equal(logits(loaded, prompts()), logits(model, prompts()))
            modules = [module for module in loaded.modules() if isinstance(module, engram.nn.Engram)]
            assert (modules[0].embedding.weight is modules[1].embedding.weight) == share_table
            assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
            assert modules[0].config == engram.EngramConfig.from_dict(model.config.engram["config"])
        hf.load_engram(folder).save_pretrained(tmp_path / "again")  # and what was loaded saves, too
        assert torch.equal(logits(hf.load_engram(tmp_path / "again"), prompts()), logits(model, prompts()))


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_bits(tmp_path):
    model = with_engram(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    torch.save(logits(model, prompts()), tmp_path / "logits.pt")
    code = (
        "import sys, torch, engram; model = engram.hf.load_engram(sys.argv[1] + '/model'); "
        "ids = torch.load(sys.argv[1] + '/ids.pt'); "
        "assert torch.equal(model(ids).logits, torch.load(sys.argv[1] + '/logits.pt'))"
    )
    torch.save(prompts(), tmp_path / "ids.pt")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_load_with_another_dtype(tmp_path):
    with_engram(dtype=torch.float32).save_pretrained(tmp_path)
    model = hf.load_engram(tmp_path, dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_load_refuses_what_has_no_engram(tmp_path):
    plain().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no Engram layers: no field 'engram' in its config.json"):
        hf.load_engram(tmp_path / "plain")
    model = with_engram()
    del model.model.layers[2].engram
    model.save_pretrained(tmp_path / "part")
    with pytest.raises(ValueError, match=r"has no model\.layers\.2\.engram\..*embedding\.weight"):
        hf.load_engram(tmp_path / "part")


def test_copies():
    model = with_engram()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(logits(other, prompts()), logits(model, prompts()))
        with torch.no_grad():
            other.model.layers[0].engram.embedding.weight.zero_()
        assert not torch.equal(logits(other, prompts()), logits(model, prompts()))


def test_a_dispatched_model():
    """Models on several devices have hooks of accelerate's, which hold on to the forward that they found."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = plain()
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", io_same_device=True))
    hf.add_engram(model, settings(), token_map())
    assert all(hasattr(layer, "_hf_hook") for layer in model.model.layers)
    expected = with_engram()
    expected.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, prompts()), logits(expected, prompts()))


# Errors, which leave the model as it was.


class Other(torch.nn.Module):
    pass


@pytest.mark.parametrize("change, message", [
    (dict(branches=4), "branches must be 1, a transformer has one residual stream, got 4"),
    (dict(hidden_size=64), "hidden_size must be 32, the model's, got 64"),
    (dict(vocab_size=96), "vocab_size must be 97, the model's, got 96"),
    (dict(layer_ids=(0, 3)), r"layer_ids must be in \[0, 3\), the model's layers, got 3"),
    (dict(compressed_vocab_size=40), "token_map must map to compressed_vocab_size = 40"),
])
def test_numbers_that_do_not_fit(change, message):
    model = plain()
    with pytest.raises(ValueError, match=message):
        hf.add_engram(model, settings(**change), token_map())
    assert type(model) is type(plain()) and not hasattr(model.config, "engram")
    assert type(model.model.layers[0]) is type(plain().model.layers[0]) and "engram" not in str(model)


def test_what_is_refused():
    model = plain()
    with pytest.raises(ValueError, match="compressed_vocab_size is 49, so a tokenizer or token map is needed"):
        hf.add_engram(model, settings(compressed_vocab_size=49))
    with pytest.raises(ValueError, match="train_mode must be"):
        hf.add_engram(model, settings(), train_mode="none")
    with pytest.raises(ValueError, match="max_rollback must be an integer >= 0, got -1"):
        hf.add_engram(model, settings(), max_rollback=-1)
    with pytest.raises(TypeError, match="config must be an EngramConfig, got dict"):
        hf.add_engram(model, settings().to_dict())
    with pytest.raises(TypeError, match="model must be a transformers model, not wrapped, got Other"):
        hf.add_engram(Other(), settings())
    with pytest.raises(ValueError, match="type llama, .*got LlamaModel of type 'llama'"):
        hf.add_engram(model.model, settings())
    bert = transformers.BertLMHeadModel(transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        is_decoder=True,
    ))
    with pytest.raises(ValueError, match="must be a causal language model of type llama, .*of type 'bert'"):
        hf.add_engram(bert, settings())
    assert type(model) is type(plain())
    hf.add_engram(model, settings())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"the model has Engram layers already, at \[0, 2\]"):
        hf.add_engram(model, settings(layer_ids=(1,)))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match="hash a vocabulary of 97 ids, got 100; resize the model before add_engram"):
        model.resize_token_embeddings(100)
    model.resize_token_embeddings(97)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(plain().config)
    with pytest.raises(ValueError, match="weights are offloaded or not loaded yet"):
        hf.add_engram(meta, settings())
