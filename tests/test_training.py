"""Text to batches, and the training of both models: splits, order, resume, checkpoints."""

import math
import os

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from engram.models import corpus as corpora  # noqa: E402
from engram.models import training  # noqa: E402
from engram.models.corpus import CorpusError, IGNORE, Stream, find_files, load_corpus, read_texts  # noqa: E402
from engram.models.lm import ManifoldResidual  # noqa: E402
from engram.models.training import CheckpointError, Comparison, DivergenceError, TrainConfig  # noqa: E402

SMALL = dict(
    steps=6, tokens=64, length=16, vocab_size=300, hidden_size=16, heads=2, layers=2, table_size=101, lr=1e-2
)


def write_texts(folder, files=12, lines=60):
    folder.mkdir()
    for i in range(files):
        text = "".join(f"def function_{i}_{j}(value): return value + {i * j}  # Value\n" for j in range(lines))
        (folder / f"{i:02}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return load_corpus([write_texts(tmp_path_factory.mktemp("corpus") / "texts")], vocab_size=300)


# Text


def test_default_is_the_standard_library_without_tests():
    files = find_files()
    names = {file.relative_to(corpora.standard_library()).as_posix() for file in files}
    assert {"os.py", "json/decoder.py"} <= names
    assert len(files) > 300 and all(name.endswith(".py") for name in names)
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))


def test_find_files_order_and_duplicates(tmp_path):
    folder = write_texts(tmp_path / "b", files=2)
    (folder / "sub").mkdir()
    (folder / "sub" / "x.md").write_text("x")
    (folder / ".hidden").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.py").write_text("x")
    first = tmp_path / "z.txt"
    first.write_text("z")
    (folder / "link.txt").symlink_to(first)
    found = find_files([first, folder, folder / "00.py"])
    assert [file.name for file in found] == ["z.txt", "00.py", "01.py", "x.md"]
    with pytest.raises(CorpusError, match="no such file or folder: .*nowhere"):
        find_files([folder, tmp_path / "nowhere"])


def test_read_texts(tmp_path):
    contents = dict(a=b"caf\xe9", b=b"\x7fELF\0\0", c=b"", d=b"  \n", e="späte".encode())
    files = [tmp_path / name for name in contents]
    for file, content in zip(files, contents.values()):
        file.write_bytes(content)
    assert read_texts(files) == (["caf\ufffd", "späte"], 1, False)
    assert read_texts(files, max_bytes=3) == (["caf"], 0, True)
    assert read_texts(files[:1], max_bytes=4) == (["caf\ufffd"], 0, False)
    with pytest.raises(CorpusError, match="b is not a text file"):
        read_texts(files, explicit=files[1:2])
    with pytest.raises(CorpusError, match="cannot read .*gone: No such file"):
        read_texts([tmp_path / "gone"], explicit=[tmp_path / "gone"])
    assert read_texts([tmp_path / "gone"]) == ([], 1, False)


@pytest.mark.parametrize("count, held_out", [(2, [1]), (9, [8]), (10, [9]), (25, [9, 19])])
def test_split_by_files(count, held_out):
    train, held = corpora.split_texts([str(i) for i in range(count)])
    assert held == [str(i) for i in held_out] and len(train) == count - len(held)


def test_split_of_a_lone_file():
    text = "".join(f"line {i}\n" for i in range(100))
    (train,), (held,) = corpora.split_texts([text])
    assert train + held == text and train.endswith("\n") and 0 < len(held) <= len(text) // 9
    assert "".join(sum(corpora.split_texts(["x" * 50]), [])) == "x" * 50


def test_encode_round_trip_whatever_the_text():
    texts = ["plain\n", "the mark <|endoftext|> spelled out", "ünï ☃ \ufffd\t\r\n", "word " * 40000]
    tokenizer = corpora.train_tokenizer(texts, 300)
    stream = corpora.encode(tokenizer, texts)
    for index, text in enumerate(texts):
        tokens = stream.tokens[stream.documents == index]
        assert tokens[0] == 0 and (tokens[1:] != 0).all()
        assert tokenizer.decode(tokens[1:].tolist(), skip_special_tokens=False) == text
    assert (np.diff(stream.documents) >= 0).all()


def test_tokenizer_is_cached_by_text_and_size(tmp_path):
    folder = write_texts(tmp_path / "texts")
    first = load_corpus([folder], vocab_size=300, cache=tmp_path)
    (file,) = tmp_path.glob("tokenizer-*.json")
    written = file.stat().st_mtime_ns
    assert load_corpus([folder], vocab_size=300, cache=tmp_path).fingerprint == first.fingerprint
    assert file.stat().st_mtime_ns == written
    (folder / "00.py").write_text("other")
    assert load_corpus([folder], vocab_size=300, cache=tmp_path).fingerprint != first.fingerprint
    load_corpus([folder], vocab_size=290, cache=tmp_path)
    assert len(list(tmp_path.glob("tokenizer-*"))) == 3


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("hardly anything")
    with pytest.raises(CorpusError, match="too little text: the training part has .* at least 17 are needed"):
        load_corpus([tmp_path], min_tokens=17)
    with pytest.raises(CorpusError, match="no text in "):
        load_corpus([(tmp_path / "empty").mkdir() or tmp_path / "empty"])
    (tmp_path / "empty" / "binary").write_bytes(bytes(10))
    with pytest.raises(CorpusError, match="no text in .*1 binary or unreadable files passed over"):
        load_corpus([tmp_path / "empty"])


# Batches


def stream_of(*lengths):
    total = sum(lengths)
    return Stream(np.arange(total, dtype=np.int32), np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))


def test_batches_depend_on_seed_and_step_alone():
    stream = stream_of(40, 60)
    batch = dict(batch=4, length=8)
    one = corpora.training_batch(stream, **batch, seed=3, step=5)
    again = corpora.training_batch(stream, **batch, seed=3, step=5)
    assert all(map(torch.equal, one, again))
    for other in (dict(seed=3, step=6), dict(seed=4, step=5)):
        assert not torch.equal(one[0], corpora.training_batch(stream, **batch, **other)[0])
    assert all(tensor.shape == (4, 8) and tensor.dtype == torch.int64 for tensor in one)


def test_targets_never_cross_documents():
    stream = stream_of(5, 1, 30)
    tokens, targets, documents = corpora.training_batch(stream, batch=200, length=6, seed=0, step=0)
    following = torch.from_numpy(stream.documents)[(tokens + 1).clamp(max=35)]
    crossing = following != documents
    assert crossing.any() and (targets[crossing] == IGNORE).all()
    assert (targets[~crossing] == tokens[~crossing] + 1).all()


@pytest.mark.parametrize("windows, expected", [(3, 3), (100, 12)])
def test_held_out_windows_do_not_overlap(windows, expected):
    batches = corpora.held_out_batches(stream_of(100), batch=2, length=8, windows=windows)
    tokens = torch.cat([batch[0] for batch in batches])
    assert len(tokens) == expected and tokens.unique().numel() == tokens.numel()


# Training


def test_equals_itself_after_resume_bit_for_bit(corpus, tmp_path):
    straight = Comparison(TrainConfig(**SMALL), corpus)
    for _ in range(6):
        straight.train_step()
    first = Comparison(TrainConfig(**{**SMALL, "steps": 3}), corpus)
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "c.safetensors")
    torch.manual_seed(99)
    second = Comparison(TrainConfig(**SMALL), corpus)
    second.load(tmp_path / "c.safetensors")
    assert second.step == 3
    for _ in range(3):
        second.train_step()
    assert second.history == straight.history
    assert second.evaluate() == straight.evaluate()
    for name in training.NAMES:
        one, other = straight.models[name].state_dict(), second.models[name].state_dict()
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        for one, other in zip(straight.optimizers[name], second.optimizers[name]):
            one, other = one.state_dict()["state"], other.state_dict()["state"]
            assert one and all(torch.equal(one[i][key], other[i][key]) for i in one for key in one[i])


@pytest.mark.parametrize("options", [
    dict(), dict(branches=4), dict(branches=4, mixing="manifold"), dict(warmup=5),
    dict(dtype="bfloat16"), dict(dtype="float64"),
    *(dict(optimizer=name) for name in training.OPTIMIZERS),
])
def test_both_models_learn(corpus, options):
    comparison = Comparison(TrainConfig(**{**SMALL, **options}), corpus)
    before = comparison.evaluate()
    counts = comparison.parameter_counts()
    assert counts["engram"] > counts["baseline"] + counts["tables"] > counts["baseline"]
    for _ in range(25):
        comparison.train_step()
    after = comparison.evaluate()
    assert all(after[name] < before[name] - 0.5 for name in after)
    assert [entry[0] for entry in comparison.history["held_out"]] == [0, 25]


@pytest.mark.parametrize("name", training.OPTIMIZERS)
def test_optimizers(corpus, name):
    comparison = Comparison(TrainConfig(**SMALL, optimizer=name), corpus)
    backbone, tables = comparison.optimizers["engram"]
    matrices, rest = backbone.param_groups
    (table,) = tables.param_groups
    assert (matrices["weight_decay"], rest["weight_decay"], table["weight_decay"]) == (0.1, 0, 0)
    assert (matrices["peak_lr"], rest["peak_lr"], table["peak_lr"]) == (0.01, 0.01, 0.05)
    assert [p.shape[1] for p in table["params"]] == [16]
    everything = list(comparison.models["engram"].parameters())
    assert sum(len(group["params"]) for group in (matrices, rest, table)) == len(everything)
    assert len(comparison.optimizers["baseline"]) == 1
    comparison.train_step()
    weight, = table["params"]
    assert weight.grad.is_sparse == (name != "adamw")
    rows, sizes = len(weight), comparison.optimizer_bytes()
    per_row = {"row-wise-adam": 4 + 64, "row-wise-adagrad": 4, "lazy-adamw": 128, "adamw": 128}[name]
    assert 0 <= sizes["tables"] - rows * per_row <= 8
    assert sizes["engram"] > sizes["baseline"] + sizes["tables"] and min(comparison.seconds.values()) > 0


def test_a_run_of_another_optimizer_is_not_resumed(corpus, tmp_path):
    Comparison(TrainConfig(**SMALL), corpus).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="was trained with another optimizer"):
        Comparison(TrainConfig(**SMALL, optimizer="row-wise-adam"), corpus).load(tmp_path / "c")


def test_schedule():
    factors = [training.schedule(step) for step in range(400)]
    assert factors[0] == 1 / 40 and max(factors) == factors[39] == 1 and factors[159] == 0.5
    assert [training.schedule(step, 4) for step in (0, 3, 15)] == [0.25, 1, 0.5]


def test_warmup_and_mixing_reach_the_model(corpus):
    slow = Comparison(TrainConfig(**SMALL, branches=4, mixing="manifold", warmup=1000), corpus)
    quick = Comparison(TrainConfig(**SMALL, branches=4, mixing="manifold", warmup=2), corpus)
    for comparison in (slow, quick):
        before = comparison.evaluate()
        for _ in range(4):
            comparison.train_step()
        comparison.moved = before["baseline"] - comparison.evaluate()["baseline"]
        assert any(isinstance(module, ManifoldResidual) for module in comparison.models["engram"].modules())
    assert quick.moved > 10 * abs(slow.moved)


def test_no_target_no_loss(corpus):
    trainee = Comparison(TrainConfig(**SMALL), corpus).trainees["engram"]
    batches = training.batches_held_out(trainee.config, corpus)
    silent = [(tokens, torch.full_like(targets, IGNORE), documents) for tokens, targets, documents in batches]
    assert math.isnan(trainee.evaluate(silent))
    assert trainee.evaluate([*batches, *silent]) == trainee.evaluate(batches)


def test_evaluate_is_the_mean_over_tokens(corpus):
    comparison = Comparison(TrainConfig(**SMALL), corpus)
    total = count = 0
    for tokens, targets, documents in corpora.held_out_batches(corpus.held_out, batch=1, length=16, windows=128):
        with torch.no_grad():
            logits = comparison.models["engram"](tokens, documents)
        losses = torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
        total, count = total + losses.item(), count + int((targets != IGNORE).sum())
    assert math.isclose(comparison.evaluate()["engram"], total / count, rel_tol=1e-5)


def test_a_loss_that_is_not_finite_ends_the_training(corpus):
    comparison = Comparison(TrainConfig(**SMALL), corpus)
    with torch.no_grad():
        comparison.models["engram"].norm.weight.fill_(math.nan)
    with pytest.raises(DivergenceError, match="the engram's loss is nan at step 1"):
        comparison.train_step()
    assert comparison.step == 0 and not comparison.history["train"]


def test_a_failed_save_keeps_the_old_checkpoint(corpus, tmp_path, monkeypatch):
    comparison = Comparison(TrainConfig(**SMALL), corpus)
    file = tmp_path / "c.safetensors"
    comparison.save(file)
    before = file.read_bytes()
    comparison.train_step()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        comparison.save(file)
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["c.safetensors"]
    with pytest.raises(OSError, match="No such file|cannot be written"):
        comparison.save(tmp_path / "missing" / "c.safetensors")


def test_load_refuses_what_is_not_this_run(corpus, tmp_path):
    comparison = Comparison(TrainConfig(**SMALL), corpus)
    file = tmp_path / "c.safetensors"
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        comparison.load(file)
    comparison.save(file)
    with pytest.raises(CheckpointError, match="was trained with another seed, lr"):
        Comparison(TrainConfig(**{**SMALL, "seed": 1, "lr": 0.5}), corpus).load(file)
    other = load_corpus([write_texts(tmp_path / "other", lines=50)], vocab_size=300)
    with pytest.raises(CheckpointError, match="was trained on another text"):
        Comparison(TrainConfig(**SMALL), other).load(file)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot read"):
        comparison.load(file)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="is not a checkpoint of engram train"):
        comparison.load(file)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("steps", 0, "steps must be at least 1"),
        ("tokens", 65, "tokens must be a multiple of length = 16"),
        ("length", 1, "length must be at least 2"),
        ("vocab_size", 256, "vocab_size must be at least 257"),
        ("hidden_size", 18, "hidden_size must be a multiple of 2 \\* heads = 4"),
        ("engram_layers", (), "engram_layers must name each layer once"),
        ("engram_layers", (1, 1), "engram_layers must name each layer once"),
        ("engram_layers", (2,), "engram_layers must lie in \\[0, layers = 2\\)"),
        ("seed", -1, "seed must not be negative"),
        ("lr", 0.0, "lr must be positive"),
        ("lr", math.nan, "lr must be positive"),
        ("dtype", "float16", "dtype must be one of float32, bfloat16, float64"),
        ("mixing", "dynamic", "mixing must be one of static, manifold, got dynamic"),
        ("warmup", 0, "warmup must be at least 1, got 0"),
        ("optimizer", "sgd", "optimizer must be one of row-wise-adam, row-wise-adagrad, lazy-adamw, adamw"),
    ],
)
def test_wrong_settings(field, value, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**SMALL, field: value})


def test_settings_survive_json():
    config = TrainConfig(**SMALL, text=("a", "b"), engram_layers=(0, 1))
    assert TrainConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="not the settings of this version of engram"):
        TrainConfig.from_json('{"stepz": 3}')
