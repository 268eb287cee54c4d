"""progress=: what functions take, bars on a terminal, lines elsewhere, silence by default."""
import io
import sys

import pytest
import torch

from engram import TokenMap, progress, quantize
from engram.quantize import quantize_table

TABLE = torch.ones(600, 8)


@pytest.fixture(autouse=True)
def six_chunks(monkeypatch):
    monkeypatch.setattr(quantize, "CHUNK", 800)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """To be called in the test: pytest puts its own stderr in place after all fixtures."""
    def put() -> Terminal:
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return put


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    from engram.models.corpus import train_tokenizer

    return train_tokenizer([" ".join(f"word{i} Word{i}" for i in range(4000))], 2500)


def test_a_function_is_told(tokenizer):
    told = []
    quantize_table(TABLE, progress=lambda *numbers: told.append(numbers))
    rows = len(TABLE)
    assert told == [(rows * i // 6, rows) for i in range(1, 7)]
    told.clear()
    token_map = TokenMap.from_tokenizer(tokenizer, progress=lambda *numbers: told.append(numbers))
    size = token_map.vocab_size
    assert size > 2000 and told == [(1000, size), (2000, size), (size, size)]
    assert token_map == TokenMap.from_tokenizer(tokenizer)


def test_silent_by_default(capfd, monkeypatch, tokenizer):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    quantize_table(TABLE)
    TokenMap.from_tokenizer(tokenizer)
    assert capfd.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    quantize_table(TABLE, progress=True)
    assert capsys.readouterr() == ("", "")  # done before a line was due
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    quantize_table(TABLE, progress=True)
    out, lines = capsys.readouterr()
    lines = lines.splitlines()
    assert not out and [line.split(",")[0] for line in lines] == [
        f"quantising: {share}%" for share in (17, 33, 50, 67, 83, 100)]
    assert lines[-1] == "quantising: 100%, 0 s left"


def test_a_bar_on_a_terminal(terminal):
    pytest.importorskip("tqdm")
    stream = terminal()
    quantize_table(TABLE, progress=True)
    text = stream.getvalue()
    assert "\r" in text and "quantising: 100%" in text and "rows/s" in text and f"{len(TABLE)}/{len(TABLE)}" in text


def test_without_tqdm_a_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    stream = terminal()
    quantize_table(TABLE, progress=True)
    assert stream.getvalue().count("\n") == 6 and "\r" not in stream.getvalue()


@pytest.mark.parametrize("given", [True, False, lambda done, total: None])
def test_errors_pass_through(terminal, given):
    wrong = TABLE.clone()
    wrong[-1, 0] = torch.nan
    stream = terminal()
    with pytest.raises(ValueError, match="table must be finite"):
        quantize_table(wrong, progress=given)
    assert stream.getvalue().endswith("\n") if given is True else not stream.getvalue()  # a bar is closed


def test_bytes_have_prefixes(terminal):
    pytest.importorskip("tqdm")
    stream = terminal()
    with progress.reporting(True, "loading", "B") as report:
        report(3 << 20, 3 << 20)
    assert "3.00M/3.00M" in stream.getvalue()
