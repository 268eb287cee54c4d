"""The token map: raw vocabulary ids to ids of a smaller vocabulary in which spellings of one word share an id."""
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram.progress import Progress, reporting

_SENTINEL = "\ue000"  # keeps a key that is one space alive through Strip
_INSTALL = "TokenMap.from_tokenizer needs the tokenizers package: python -m pip install tokenizers"


class TokenMap:
    """A map from raw token ids `[0, V)` to compressed ids `[0, V')`, V' = largest value + 1. Immutable.

    Args:
        ids: integers [V], each >= 0: list, numpy array or CPU tensor.
        source: digest of what the ids were made from, part of the fingerprint; `from_tokenizer` sets it.

    Attributes:
        ids: int32 numpy array [V], read-only.
        vocab_size: V.
        compressed_vocab_size: V'.
        fingerprint: hex digest of the map and, when built from a tokenizer, of the tokenizer's vocabulary, added
            tokens, decoder and normalizer and of the rules of `from_tokenizer`. Equal maps have equal fingerprints.

    Raises:
        TypeError: ids that are not integers.
        ValueError: ids that are empty, not one-dimensional, negative, or beyond int32.
    """

    def __init__(self, ids: Any, *, source: str = "") -> None:
        ids = np.asarray(ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"TokenMap: ids must be integers, got {ids.dtype}")
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"TokenMap: ids must have shape [V] with V >= 1, got {list(ids.shape)}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= 2**31 - 1:
            raise ValueError(f"TokenMap: ids must be in [0, 2**31 - 1), got {low if low < 0 else high}")
        self.ids: NDArray[np.int32] = ids.astype(np.int32)
        self.ids.setflags(write=False)
        self.vocab_size = len(ids)
        self.compressed_vocab_size = high + 1
        self._source = source
        digest = hashlib.sha256(f"engram token map 1 {source}\n".encode())
        digest.update(self.ids.astype("<i4").tobytes())
        self.fingerprint = digest.hexdigest()

    @classmethod
    def identity(cls, vocab_size: int) -> "TokenMap":
        """The map that leaves every id in `[0, vocab_size)` as it is, and refuses all others."""
        return cls(np.arange(vocab_size, dtype=np.int64))

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, vocab_size: int | None = None, progress: Progress = False
    ) -> "TokenMap":
        """Give one id to all tokens whose text is the same but for case, accents, width and white space.

        In id order, added and special tokens included: the text is the token decoded alone. Undecodable bytes
        (U+FFFD in the text) are keyed by the raw token string, all else by the normalised text, or by the text itself
        where normalising leaves nothing. A key's id is the order of its first appearance. Nothing is downloaded and
        no code that comes with a tokenizer runs.

        Args:
            tokenizer: a `tokenizers.Tokenizer`, a fast tokenizer of `transformers`, or the path of a `tokenizer.json`.
            vocab_size: rows of the model's embedding where they exceed the tokenizer's; ids that no token has decode
                to the empty text and so share one id. None: as many as the tokenizer has.
            progress: see `engram.progress`; counts tokens, by the thousand.

        Raises:
            ImportError: the `tokenizers` package is missing.
            FileNotFoundError: no such file.
            TypeError: a tokenizer of another kind.
            ValueError: a file that is no tokenizer, a tokenizer without tokens, or a `vocab_size` smaller than its own.

        Source: `CompressedTokenizer` of `engram_demo_v1.py`, in the form of DeepSeek-V4.1 (backend decoder).
        """
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(_INSTALL) from error
        tokenizer = _backend(tokenizer, tokenizers.Tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("TokenMap: the tokenizer has no tokens")
        known = max(vocabulary.values()) + 1
        if vocab_size is None:
            vocab_size = known
        elif vocab_size < known:
            raise ValueError(f"TokenMap: vocab_size must be >= {known}, the size of the tokenizer, got {vocab_size}")

        normalizer = _key_normalizer(tokenizers)
        seen: dict[str, int] = {}
        ids = []
        with reporting(progress, "token map", " tokens") as report:
            for token in range(vocab_size):
                # Not decode_batch: its threads would make every later fork of the process print a warning.
                text = tokenizer.decode([token], skip_special_tokens=False)
                if "\ufffd" in text:
                    key = tokenizer.id_to_token(token)
                else:
                    key = normalizer.normalize_str(text) or text
                ids.append(seen.setdefault(key, len(seen)))
                if len(ids) % 1000 == 0 or len(ids) == vocab_size:
                    report(len(ids), vocab_size)
        return cls(np.array(ids, dtype=np.int64), source=_source_digest(tokenizer, vocabulary))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map to `path` (.npz). A file already there is replaced only by a complete one."""
        path = Path(path)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as file:
                np.savez(file, ids=self.ids, source=np.array(self._source), fingerprint=np.array(self.fingerprint))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TokenMap":
        """Read a map written by `save`. No pickle is ever opened.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a token map, or a damaged one.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
                ids, source, fingerprint = (content[name] for name in ("ids", "source", "fingerprint"))
            token_map = cls(ids, source=str(source))
        except (ValueError, TypeError, KeyError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{os.fspath(path)!r} is not a token map: {error}") from error
        if token_map.fingerprint != str(fingerprint):
            raise ValueError(f"{os.fspath(path)!r} is damaged: its ids do not match its fingerprint")
        return token_map

    def __len__(self) -> int:
        return self.vocab_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenMap) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"TokenMap({self.vocab_size} -> {self.compressed_vocab_size}, {self.fingerprint[:12]})"


def _backend(tokenizer: Any, kind: Any) -> Any:
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"TokenMap: no tokenizer.json at {path!r}")
        try:
            return kind.from_file(path)
        except Exception as error:  # the Rust side raises bare Exception
            raise ValueError(f"TokenMap: {path!r} is not a tokenizer.json: {error}") from error
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(tokenizer, kind):
        raise TypeError("TokenMap: tokenizer must be a tokenizers.Tokenizer, a fast tokenizer of transformers or the "
                        f"path of a tokenizer.json, got {type(tokenizer).__name__}")
    return tokenizer


def _key_normalizer(tokenizers: Any) -> Any:
    step = tokenizers.normalizers
    return step.Sequence([
        step.NFKC(), step.NFD(), step.StripAccents(), step.Lowercase(),
        step.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
        step.Replace(tokenizers.Regex(r"^ $"), _SENTINEL), step.Strip(), step.Replace(_SENTINEL, " "),
    ])


def _source_digest(tokenizer: Any, vocabulary: dict[str, int]) -> str:
    """Digest of what the map was made from: two tokenizers that differ only in the decoder differ here."""
    own = (tokenizer.decoder, tokenizer.normalizer)
    parts = [None if part is None else part.__getstate__().decode() for part in own]
    added = {token: repr(text) for token, text in tokenizer.get_added_tokens_decoder().items()}
    return hashlib.sha256(json.dumps([vocabulary, added, parts], sort_keys=True).encode()).hexdigest()
