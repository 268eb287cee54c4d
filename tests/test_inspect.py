"""`engram inspect`: what it prints, draws and refuses."""
import json
import sys

import pytest
import torch
from test_cli import call, call_json, texts, train  # noqa: F401  (a fixture)

from engram import EngramConfig, TokenMap, nn
from engram.statistics import hash_statistics

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

HASH_PLOTS = ["bucket-load.png", "row-use.png", "unique-fraction.png"]


def inspect_json(capsys, *arguments):
    status, record, lines = call_json(capsys, "inspect", *arguments)
    assert status == 0, lines
    return record, "\n".join(lines)


@pytest.fixture
def config_file(tmp_path):
    config = EngramConfig(hidden_size=8, vocab_size=300, table_size=61, layer_ids=(0, 2), heads_per_ngram=2, pad_id=0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    return path


def test_the_config_of_a_transformers_model(capsys, config_file):
    """config.json as engram.hf saves it, the Engram's configuration inside; its folder has no weights we could read."""
    expected = inspect_json(capsys, config_file)[0]["sizes"]
    config_file.write_text(json.dumps(
        {"model_type": "llama", "hidden_size": 8, "engram": {"config": json.loads(config_file.read_text())}}))
    assert inspect_json(capsys, config_file)[0]["sizes"] == expected
    status, _, error = call(capsys, "inspect", config_file.parent)
    assert status == 2 and "name its config.json" in error


def test_sizes_of_a_preset(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record, text = inspect_json(capsys, "deepseek-v4.1-flash")
    assert [layer["rows"] for layer in record["sizes"]["layers"]] == [384006168, 384016682]
    assert "384,006,168" in text and "384,016,682" in text and "give --text PATH to see what hash does" in text
    assert EngramConfig.from_dict(record["config"]) == EngramConfig.preset("deepseek-v4.1-flash")
    assert not list(tmp_path.iterdir())


def test_fields_can_be_set(capsys):
    record, _ = inspect_json(capsys, "hybrid-layer", "--set", "hidden_size=24", "vocab_size=101", "table_size=101",
                             "seed=7")
    assert record["config"]["seed"] == 7 and record["sizes"]["total"]["rows"] > 8 * 101
    record, _ = inspect_json(capsys, "demo", "--set", "conv_init=zeros", "layer_ids=[3]", "table_size=[5, 9]")
    assert (record["config"]["conv_init"], record["config"]["layer_ids"]) == ("zeros", [3])


def test_hash_of_a_configuration_on_a_text(capsys, texts, tmp_path, config_file):
    out = tmp_path / "out" / "deeper"
    record, text = inspect_json(capsys, config_file, "--text", texts, "--out", out, "--tokens", 500)
    assert record["tokens"] == 500 and record["gates"] is None and "gates: none, a configuration has no weights" in text
    assert sorted(path.name for path in out.iterdir()) == HASH_PLOTS
    assert record["plots"] == [str(out / name) for name in HASH_PLOTS]
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in HASH_PLOTS)
    assert "tokenizer trained on the text" in text and "layer 2, 3-grams: " in text
    orders = record["hash"]["orders"]
    assert [(o["layer_id"], o["order"]) for o in orders] == [(0, 2), (0, 3), (2, 2), (2, 3)]
    assert all(o["lookups"] == 500 and len(o["heads"]) == 2 for o in orders)
    assert [head["rows"] for head in orders[0]["heads"]] == [61, 67]


def test_the_statistics_are_those_of_the_named_tokenizer(capsys, texts, tmp_path, config_file):
    from engram.models.corpus import encode, train_tokenizer

    contents = [path.read_text() for path in sorted(texts.iterdir())]
    tokenizer = train_tokenizer(contents, 290)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = [config_file, "--text", texts, "--tokenizer", tmp_path / "tokenizer.json", "--tokens", 400,
                 "--out", tmp_path / "out"]
    stream = encode(tokenizer, contents)
    ids, documents = (torch.from_numpy(part[:400].astype("int64"))[None] for part in (stream.tokens, stream.documents))
    config = EngramConfig.from_dict(json.loads(config_file.read_text()))
    for options, token_map in (([], TokenMap.from_tokenizer(tokenizer, vocab_size=300)), (["--ids", "raw"], None)):
        record, text = inspect_json(capsys, *arguments, *options)
        expected = hash_statistics(nn.NgramHash(config, token_map), ids, document_ids=documents)
        assert record["hash"] == json.loads(json.dumps(expected.to_dict()))
        assert ("hashed as raw ids" in text) == bool(options) and "trained on the text" not in text


@pytest.mark.parametrize("preset, fields, raw", [
    ("qwen3.8-flash-next", [], True), ("hybrid-layer", ["hidden_size=8", "vocab_size=300"], True), ("demo", [], False),
    ("deepseek-v4.1-flash", [], False), ("qwen3.8-flash-next", ["compressed_vocab_size=99"], False),
])
def test_raw_ids_where_the_model_hashes_those(capsys, texts, tmp_path, preset, fields, raw):
    given = ["--set", "layer_ids=[0]", *fields]
    _, text = inspect_json(capsys, preset, *given, "--text", texts / "00.py", "--tokens", 50, "--out", tmp_path / "out")
    assert ("hashed as raw ids" in text) == raw


def test_gates_of_a_checkpoint(capsys, texts, tmp_path):
    assert train(capsys, texts, tmp_path / "run", "--steps", 1, "--branches", 4)[0] == 0
    out = tmp_path / "out"
    for subject in (tmp_path / "run", tmp_path / "run" / "checkpoint.safetensors"):
        record, text = inspect_json(capsys, subject, "--text", texts, "--tokens", 330, "--out", out)
        assert sorted(path.name for path in out.iterdir()) == sorted([*HASH_PLOTS, "gates.png"])
        gates = record["gates"]["engrams.1"]
        assert gates["count"] == [320] * 4  # in windows of 16
        bounds = zip(gates["minimum"], gates["mean"], gates["maximum"])
        assert all(0 < low < mean < high < 1 for low, mean, high in bounds)
        assert "engrams.1" in text and record["config"]["table_size"] == 101
        assert record["hash"]["orders"][0]["heads"][0]["rows"] == 101
    record, _ = inspect_json(capsys, tmp_path / "run", "--text", texts, "--tokens", 3, "--out", out)
    assert record["gates"]["engrams.1"]["count"] == [3] * 4
    record, text = inspect_json(capsys, tmp_path / "run")
    assert "hash and gates do on a text" in text and "hash" not in record


def test_a_checkpoint_without_its_tokenizer(capsys, texts, tmp_path):
    run = tmp_path / "run"
    train(capsys, texts, run, "--steps", 1)
    (tokenizer,) = run.glob("tokenizer-*.json")
    moved, other = tokenizer.rename(tmp_path / "kept.json"), tmp_path / "other.json"
    arguments = ["inspect", run, "--text", texts, "--out", tmp_path / "out", "--tokens", 50]
    status, _, error = call(capsys, *arguments)
    assert status == 2 and "the tokenizer of" in error and "is not beside it; give --tokenizer" in error
    assert call(capsys, *arguments, "--tokenizer", moved)[0] == 0
    content = json.loads(moved.read_text())
    content["added_tokens"][0]["content"] = "<other>"
    content["model"]["vocab"]["<other>"] = content["model"]["vocab"].pop("<|endoftext|>")
    other.write_text(json.dumps(content))
    status, _, error = call(capsys, *arguments, "--tokenizer", other)
    assert status == 2 and "other.json is not the tokenizer of" in error
    status, _, error = call(capsys, *arguments, "--tokenizer", moved, "--ids", "raw")
    assert status == 2 and "--ids raw contradicts" in error
    status, _, error = call(capsys, "inspect", run, "--set", "seed=1")
    assert status == 2 and "--set is for configurations" in error


def test_without_matplotlib(capsys, texts, tmp_path, config_file, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    record, text = inspect_json(capsys, config_file, "--text", texts, "--out", tmp_path / "out", "--tokens", 50)
    assert record["plots"] == [] and record["hash"]["orders"] and not (tmp_path / "out").exists()
    assert "no PNGs: matplotlib is not installed; run: python -m pip install matplotlib" in text


@pytest.mark.parametrize("module", ["tokenizers", "safetensors"])
def test_a_missing_extra(capsys, texts, tmp_path, config_file, monkeypatch, module):
    checkpoint = tmp_path / "x.safetensors"
    checkpoint.write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    status, _, error = call(capsys, "inspect", config_file if module == "tokenizers" else checkpoint, "--text", texts)
    assert status == 2 and error.startswith(f"engram: error: {module} is not installed; run: ")
    assert call(capsys, "inspect", "demo")[0] == 0


@pytest.mark.parametrize("content, message", [
    (b"", "config.json is neither JSON nor a .safetensors file"),
    (b"{", "config.json is neither JSON nor a .safetensors file"),
    (b"\xff\xfe", "config.json is neither JSON nor a .safetensors file"),
    (b"[1]", "config.json must hold an EngramConfig as a JSON object, got list"),
    (b"{}", "config.json: EngramConfig needs hidden_size, vocab_size"),
    (b'{"hidden_size": 8, "vocab_size": 0}', "vocab_size must be an integer in"),
    (b'{"hidden_size": 8, "vocab_size": 9, "heads": 2}', "EngramConfig has no field heads"),
])
def test_malformed_configurations(capsys, tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    status, _, error = call(capsys, "inspect", path)
    assert status == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_malformed_checkpoints(capsys, tmp_path, content):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(content)
    for subject in (path, tmp_path):
        status, _, error = call(capsys, "inspect", subject)
        assert status == 2 and str(path) in error and error.count("\n") == 1


def test_a_cut_checkpoint_and_one_of_another_shape(capsys, texts, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    train(capsys, texts, tmp_path / "run", "--steps", 1)
    path = tmp_path / "run" / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    status, _, error = call(capsys, "inspect", path)
    assert status == 2 and f"cannot read {path}" in error
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for change, message in (
        ({"engram.model.engrams.1.embedding.weight": torch.zeros(5, 16)}, "does not fit its own settings"),
        ({"engram.model.engrams.1.hash.token_map": torch.zeros(0, dtype=torch.int32)}, "does not fit its own settings"),
    ):
        save_file(tensors | change, path, metadata)
        status, _, error = call(capsys, "inspect", path)
        assert status == 2 and message in error
    del tensors["engram.model.engrams.1.hash.token_map"]
    save_file(tensors, path, metadata)
    assert "has no token map" in call(capsys, "inspect", path)[2]


@pytest.mark.parametrize("arguments, message", [
    (["no-such-thing"], "no-such-thing is neither a file nor a preset; presets: demo, "),
    (["."], "no checkpoint.safetensors in ."),
    (["demo", "--tokens", "0"], "--tokens must be at least 1, got 0"),
    (["demo", "--set", "seed"], "--set takes FIELD=VALUE, got 'seed'"),
    (["demo", "--set", "seeds=1"], "demo: EngramConfig has no field seeds"),
    (["demo", "--set", "seed=-1"], "demo: seed must be an integer >= 0"),
    (["hybrid-layer"], "hybrid-layer: EngramConfig needs hidden_size, vocab_size"),
    (["demo", "--text", "nowhere"], "no such file or folder: nowhere"),
    (["demo", "--text", "empty.txt"], "no text in empty.txt"),
    (["demo", "--text", "some.txt", "--tokenizer", "none.json"], "no tokenizer at none.json"),
    (["demo", "--text", "some.txt", "--tokenizer", "some.txt"], "some.txt is not a tokenizer.json: "),
    (["demo", "--text", "some.txt", "--set", "vocab_size=100"], "a vocabulary of 100 has no room for all bytes"),
    (["demo", "--text", "some.txt", "--out", "some.txt/x"], "some.txt/x: Not a directory"),
])
def test_wrong_usage_is_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "some.txt").write_text("some words and some more words\n" * 20)
    status, _, error = call(capsys, "inspect", *arguments)
    assert status == 2 and error.startswith("engram: error: ") and message in error and error.count("\n") == 1


def test_a_tokenizer_of_another_size(capsys, tmp_path, texts):
    from engram.models.corpus import train_tokenizer

    train_tokenizer(["some words"], 300).save(str(tmp_path / "tokenizer.json"))
    arguments = ["--text", texts, "--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "out"]
    status, _, error = call(capsys, "inspect", "deepseek-v4.1-flash", *arguments)
    assert status == 2 and "compressed_vocab_size = 99092 ids, got " in error
    status, _, error = call(capsys, "inspect", "demo", "--set", "vocab_size=250", *arguments)
    assert status == 2 and "vocab_size must be >= 2" in error
    status, _, error = call(capsys, "inspect", "demo", "--set", "vocab_size=40", "--ids", "raw", *arguments)
    assert status == 2 and "the tokenizer gives token" in error and "the vocabulary has 40" in error

