"""Text files to training batches: find the files, train a byte-level BPE, pack the documents, cut windows.

One file is one document. Every tenth file is held out, whole, so that nothing of it is ever trained on. A window is a
slice of the packed stream and may hold the end of one document and the start of the next; `document_ids` say which
token belongs to which. The batch of a step depends on (seed, step) alone, so a resumed run sees the same ones.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"  # token 0, the first of every document; also the pad id of the Engram layers
HELD_OUT_EVERY = 10
MAX_TEXT_BYTES = 32 * 2**20
IGNORE = -100  # target of the positions whose next token belongs to another document (cross_entropy's own default)
TEST_FOLDERS = {"test", "tests", "idle_test"}  # of the standard library: many distributions leave them out
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


class CorpusError(ValueError):
    """The text cannot be used: a path is missing or unreadable, is not text, or holds too little. One sentence."""


@dataclass(frozen=True)
class Stream:
    """Packed documents: `tokens` and `documents` are int32 [n], the latter the index of the token's document."""

    tokens: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Corpus:
    """Text ready to train on; see `load_corpus`."""

    train: Stream
    held_out: Stream
    tokenizer: Any  # tokenizers.Tokenizer
    train_documents: int
    held_out_documents: int
    skipped: int  # binary or unreadable files
    cut: bool  # whether there was more text than was read

    @property
    def fingerprint(self) -> str:
        """sha256 over all token and document ids, in hexadecimal: what a resumed run must find unchanged."""
        digest = hashlib.sha256()
        for stream in (self.train, self.held_out):
            digest.update(len(stream).to_bytes(8, "little"))
            digest.update(stream.tokens.astype("<i4").tobytes())
            digest.update(stream.documents.astype("<i4").tobytes())
        return digest.hexdigest()


def standard_library() -> Path:
    """The folder with the .py files of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(paths: Sequence[str | os.PathLike[str]] | None = None) -> list[Path]:
    """The text files below `paths` (files or folders, in the order given, folders sorted), each once.

    Without paths: the standard library's own .py files, without its tests. Inside folders hidden names, __pycache__ and
    links to folders are passed over. Raises CorpusError for a path that does not exist.
    """
    standard = not paths
    found: dict[Path, Path] = {}
    for path in map(Path, paths or [standard_library()]):
        if path.is_file():
            found.setdefault(path.resolve(), path)
        elif path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(f for f in folders if not _skipped(f, standard))
                for name in sorted(names):
                    file = Path(folder, name)
                    if not name.startswith(".") and file.is_file() and (not standard or name.endswith(".py")):
                        found.setdefault(file.resolve(), file)
        else:
            raise CorpusError(f"no such file or folder: {path}")
    return list(found.values())


def _skipped(folder: str, standard: bool) -> bool:
    if standard and folder in TEST_FOLDERS | PACKAGE_FOLDERS:
        return True
    return folder.startswith(".") or folder == "__pycache__"


def read_texts(
    files: Iterable[Path], explicit: Iterable[str | os.PathLike[str]] = (), max_bytes: int = MAX_TEXT_BYTES
) -> tuple[list[str], int, bool]:
    """The files' contents as `(texts, skipped, cut)`.

    Bytes that are no UTF-8 become U+FFFD. Binary (a zero byte in the first 8 KiB) and unreadable files are counted in
    `skipped`, unless named in `explicit`: then they raise CorpusError. Empty files are left out. At most max_bytes are
    read in all; `cut` says whether there was more.
    """
    explicit = set(map(Path, explicit))
    texts, skipped, left = [], 0, max_bytes
    for file in files:
        try:
            with open(file, "rb") as stream:
                data = stream.read(left + 1)
        except OSError as error:
            if file in explicit:
                raise CorpusError(f"cannot read {file}: {error.strerror}") from None
            skipped += 1
            continue
        if b"\0" in data[:8192]:
            if file in explicit:
                raise CorpusError(f"{file} is not a text file")
            skipped += 1
            continue
        cut = len(data) > left
        text = data[:left].decode("utf-8", errors="replace")
        left -= len(data)
        if text.strip():
            texts.append(text)
        if cut:
            return texts, skipped, True
    return texts, skipped, False


def split_texts(texts: list[str]) -> tuple[list[str], list[str]]:
    """`(train, held_out)`: every tenth is held out; of fewer than ten, the last; of a lone one, its last tenth."""
    if len(texts) == 1:
        (text,) = texts
        cut = len(text) - len(text) // HELD_OUT_EVERY
        cut = text.rfind("\n", 0, cut) + 1 or cut
        return [text[:cut]], [text[cut:]]
    last = HELD_OUT_EVERY - 1 if len(texts) >= HELD_OUT_EVERY else len(texts) - 1
    held_out = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY == last]
    return [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY != last], held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of at most vocab_size tokens (all bytes and END_OF_TEXT among them)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str]) -> Stream:
    """The texts as one Stream. END_OF_TEXT, where the tokenizer has it, opens each; where a text spells it out, it is
    plain characters."""
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(END_OF_TEXT)
    start = np.array([] if end is None else [end], dtype=np.int32)
    tokens, documents = [], []
    pieces = [(document, piece) for document, text in enumerate(texts) for piece in _pieces([text])]
    previous = None
    for begin in range(0, len(pieces), 256):  # an Encoding is far larger than its ids: hold few of them
        batch = pieces[begin : begin + 256]
        encodings = tokenizer.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        for (document, _), encoding in zip(batch, encodings):
            ids = np.array(encoding.ids, dtype=np.int32)
            if document != previous:
                ids = np.concatenate([start, ids])
                previous = document
            tokens.append(ids)
            documents.append(np.full(len(ids), document, dtype=np.int32))
    return Stream(np.concatenate(tokens), np.concatenate(documents))


def _pieces(texts: Iterable[str], size: int = 1 << 16) -> Iterator[str]:
    """Cut long texts into pieces of about `size` characters, after a line end where there is one."""
    for text in texts:
        begin = 0
        while begin < len(text):
            end = begin + size
            if end < len(text):
                end = text.rfind("\n", begin, end) + 1 or end
            yield text[begin:end]
            begin = end


def load_corpus(
    paths: Sequence[str | os.PathLike[str]] | None = None,
    *,
    vocab_size: int = 4096,
    cache: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_TEXT_BYTES,
    min_tokens: int = 257,
) -> Corpus:
    """Read, split and tokenise the text below `paths` (default: the standard library's .py files).

    cache: a folder, made where missing, that keeps the tokenizer under a name made of vocab_size and the text's hash.
    Raises CorpusError where a path is wrong, or the training or the held-out part has fewer than min_tokens tokens.
    """
    from tokenizers import Tokenizer

    texts, skipped, cut = read_texts(find_files(paths), explicit=paths or (), max_bytes=max_bytes)
    if not texts:
        note = f" ({skipped} binary or unreadable files passed over)" if skipped else ""
        raise CorpusError(f"no text in {', '.join(map(str, paths or [standard_library()]))}{note}")
    train, held_out = split_texts(texts)
    file = None
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        for text in texts:
            digest.update(hashlib.sha256(text.encode("utf-8", errors="replace")).digest())
        file = Path(cache, f"tokenizer-{vocab_size}-{digest.hexdigest()[:16]}.json")
    if file is not None and file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
    else:
        tokenizer = train_tokenizer(train, vocab_size)
        if file is not None:
            part = file.with_suffix(".part")
            tokenizer.save(str(part))
            os.replace(part, file)
    streams = [encode(tokenizer, part) for part in (train, held_out)]
    for stream, name in zip(streams, ("training", "held-out")):
        if len(stream) < min_tokens:
            raise CorpusError(
                f"too little text: the {name} part has {len(stream)} tokens, at least {min_tokens} are needed"
            )
    return Corpus(streams[0], streams[1], tokenizer, len(train), len(held_out), skipped, cut)


def training_batch(
    stream: Stream, *, batch: int, length: int, seed: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows at places that depend on (seed, step) alone: `(tokens, targets, document_ids)`, int64 [batch, length].

    targets are the next tokens, IGNORE where the next token belongs to another document.
    """
    generator = np.random.default_rng([seed, step])
    return _windows(stream, generator.integers(0, len(stream) - length, size=batch), length)


def held_out_batches(
    stream: Stream, *, batch: int, length: int, windows: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """At most `windows` windows without overlap, spread evenly over the stream, as batches like training_batch's."""
    count = min(windows, (len(stream) - 1) // length)
    begins = np.linspace(0, len(stream) - 1 - length, count).astype(np.int64)
    return [_windows(stream, begins[i : i + batch], length) for i in range(0, count, batch)]


def _windows(stream: Stream, begins: np.ndarray, length: int) -> tuple[Tensor, Tensor, Tensor]:
    index = begins[:, None] + np.arange(length + 1)
    tokens = torch.from_numpy(stream.tokens[index].astype(np.int64))
    documents = torch.from_numpy(stream.documents[index].astype(np.int64))
    targets = torch.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], IGNORE)
    return tokens[:, :-1].contiguous(), targets, documents[:, :-1].contiguous()
