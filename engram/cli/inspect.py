"""`engram inspect`: sizes of a configuration or checkpoint, and what its hash and gates do on a text."""

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import engram
from engram import EngramConfig, TokenMap
from engram.cli.errors import UsageError, require
from engram.cli.train import CHECKPOINT
from engram.config import _PRESETS
from engram.statistics import MAX_LOAD, GateRecord, HashStatistics, hash_statistics, record_gates

if TYPE_CHECKING:  # needs the optional dependencies
    from engram.models.lm import LanguageModel
    from engram.models.training import TrainConfig

DESCRIPTION = """\
Print how big the Engram layers of a configuration or checkpoint are, and with --text what they do on it: for each hash
head how many n-grams share a row and how often rows are read, for each n-gram order how many n-grams are unique, and
for a checkpoint of `engram train` how far each layer's gates open.

CONFIG_OR_CHECKPOINT is the name of a preset, a JSON file of EngramConfig.to_dict(), a checkpoint of `engram train`, or
its folder."""

EPILOG = """\
examples:
  engram inspect deepseek-v4.1-flash                            sizes: rows, parameters, bytes, bytes read per token
  engram inspect paper-27b --text notes/ --tokenizer tokenizer.json
  engram inspect demo --text book.txt --set table_size=5000     what a smaller table would do
  engram inspect engram-run --text book.txt                     a trained model: its gates, too

With --text, the --out folder gets bucket-load.png, row-use.png, unique-fraction.png and, of a trained model,
gates.png."""

TRAINED_VOCAB_SIZE = 4096  # of the tokenizer that stands in: more would learn the text by heart


@dataclass
class Subject:
    """What is inspected; `model` and `settings` of a checkpoint only."""

    name: str
    config: EngramConfig
    token_map: TokenMap | None = None
    model: "LanguageModel | None" = None
    settings: "TrainConfig | None" = None
    folder: Path | None = None
    fingerprint: str = ""  # of the token map that belongs to it


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `engram inspect`."""
    parser.add_argument("subject", metavar="CONFIG_OR_CHECKPOINT")
    parser.add_argument("--text", nargs="+", metavar="PATH", help="text files and folders of them, read as UTF-8")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE",
                        help="tokenizer.json (default: the checkpoint's own; for a configuration a BPE of "
                             f"{TRAINED_VOCAB_SIZE} tokens, trained on the text)")
    parser.add_argument("--ids", choices=("compressed", "raw"),
                        help="what is hashed: ids of the token map, or raw ones (default: as the model does)")
    parser.add_argument("--tokens", type=int, default=100_000, metavar="N", help="tokens to look at (default: 100000)")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE",
                        help="other values for fields of the configuration, as JSON")
    parser.add_argument("--out", type=Path, default=Path("engram-inspect"), metavar="DIR",
                        help="where the PNGs go (default: ./engram-inspect)")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print it; returns exit status and record. Raises UsageError for what the user can put right."""
    if options.tokens < 1:
        raise UsageError(f"--tokens must be at least 1, got {options.tokens}")
    subject = load(options.subject, options.set)
    try:
        sizes = subject.config.describe()
    except ValueError as error:
        raise UsageError(error) from None
    print(f"{subject.name}: {summary(subject.config)}\n\n{sizes}")
    record: dict[str, Any] = {"config": subject.config.to_dict(), "sizes": sizes.to_dict()}
    if not options.text:
        print("\ngive --text PATH to see what hash" + (" and gates do" if subject.model else " does") + " on a text")
        return 0, record

    token_ids, document_ids, note = tokenise(subject, options)
    print(f"\n{note}")
    hashed, gates = hash_of(subject, token_ids, document_ids), None
    print(f"\n{hashed}\n")
    print_orders(hashed)
    if subject.model is not None and subject.settings is not None:
        gates = gates_of(subject.model, subject.settings, token_ids, document_ids)
        print(f"\n{gates}")
    else:
        print("\ngates: none, a configuration has no weights; give a checkpoint of `engram train`")
    plots = plot(hashed, gates, options.out)
    record |= {
        "tokens": token_ids.numel(),
        "hash": hashed.to_dict(),
        "gates": None if gates is None else gates.to_dict(),
        "plots": [str(path) for path in plots],
    }
    return 0, record


def summary(config: EngramConfig) -> str:
    """One line."""
    hashed = "" if config.compressed_vocab_size is None else f" ({config.compressed_vocab_size:,} compressed)"
    layers = ", ".join(map(str, config.layer_ids))
    return (f"layers {layers}, n-grams of 2 to {config.max_ngram_size} tokens, {config.heads_per_ngram} heads each, "
            f"rows of {config.embed_dim_per_head}, width {config.hidden_size} x {config.branches}, "
            f"vocabulary {config.vocab_size:,}{hashed}")


def load(name: str, overrides: list[str]) -> Subject:
    """A preset, a JSON file, or a checkpoint, with the --set options over it."""
    path, given = Path(name), dict(map(override, overrides))
    try:
        if name in _PRESETS:
            return Subject(name, EngramConfig.preset(name, **given))
        if path.is_dir():
            path = path / CHECKPOINT
            if not path.is_file():
                raise UsageError(f"no {CHECKPOINT} in {name}, so it is no folder of engram train; of a model saved by "
                                 f"transformers name its config.json")
        if not path.is_file():
            raise UsageError(f"{name} is neither a file nor a preset; presets: {', '.join(_PRESETS)}")
        if path.suffix == ".safetensors":
            if given:
                raise UsageError(f"--set is for configurations, {name} is a checkpoint")
            return load_checkpoint(path)
        try:
            values = json.loads(path.read_bytes())
        except ValueError as error:
            raise UsageError(f"{name} is neither JSON nor a .safetensors file: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"{name} must hold an EngramConfig as a JSON object, got {type(values).__name__}")
        if isinstance(saved := values.get("engram"), dict):  # config.json of a model with engram.hf's layers
            values = saved.get("config", saved)
        return Subject(name, EngramConfig.from_dict({**values, **given}))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None


def override(text: str) -> tuple[str, Any]:
    """`field=value`; a value that is no JSON is a string."""
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise UsageError(f"--set takes FIELD=VALUE, got {text!r}")
    try:
        return field, json.loads(value)
    except ValueError:
        return field, value


def load_checkpoint(path: Path) -> Subject:
    """The model with Engram layers of a checkpoint of `engram train`."""
    require("safetensors")
    from engram.models.training import load_model, read_metadata

    model, token_map, settings = load_model(path)
    fingerprint = read_metadata(path)["token_map"]
    config = model.config.engram
    if config is None:
        raise UsageError(f"{path} has no Engram layers")
    return Subject(str(path), config, token_map, model.eval(), settings, path.parent, fingerprint)


def tokenise(subject: Subject, options: argparse.Namespace) -> tuple[Tensor, Tensor, str]:
    """Token and document ids int64 [1, T] of the text, and a line about them; sets the subject's token map and, where
    the tokenizer is another than the configuration's, its compressed vocabulary size."""
    require("tokenizers")
    from engram.models.corpus import CorpusError, encode, find_files, read_texts

    try:
        # No token is longer than a few bytes on average; what is read beyond is cut off.
        texts, _, _ = read_texts(find_files(options.text), explicit=options.text, max_bytes=16 * options.tokens)
    except CorpusError as error:
        raise UsageError(error) from None
    if not texts:
        raise UsageError(f"no text in {', '.join(options.text)}")
    tokenizer, trained = find_tokenizer(subject, options, texts)
    stream = encode(tokenizer, texts)
    ids, documents = (torch.from_numpy(part[: options.tokens].astype("int64"))[None]
                      for part in (stream.tokens, stream.documents))
    config = subject.config
    if int(ids.max()) >= config.vocab_size:
        raise UsageError(f"the tokenizer gives token {int(ids.max())}, the vocabulary has {config.vocab_size}")
    published_raw = config.reference_keys == "qwen3.8" or config.layout == "hybrid"  # the others have a token map
    raw = options.ids == "raw" or options.ids is None and published_raw and config.compressed_vocab_size is None
    if subject.model is not None:
        if options.ids == "raw":
            raise UsageError(f"--ids raw contradicts {subject.name}, whose hash has a token map")
    elif raw:
        subject.config = replace(config, compressed_vocab_size=None)
    else:
        try:
            subject.token_map = TokenMap.from_tokenizer(tokenizer, vocab_size=config.vocab_size, progress=True)
        except ValueError as error:
            raise UsageError(error) from None
        if trained:  # stands in for the model's own: the hash constants are drawn for its size
            subject.config = replace(config, compressed_vocab_size=subject.token_map.compressed_vocab_size)
    hashed = "raw ids" if subject.token_map is None else f"{subject.token_map.compressed_vocab_size:,} compressed ids"
    count = len(documents.unique())
    note = f"text: {ids.numel():,} tokens of {count:,} document{'s' * (count > 1)}, hashed as {hashed}"
    return ids, documents, note + ("; tokenizer trained on the text (--tokenizer takes the model's own)" * trained)


def find_tokenizer(subject: Subject, options: argparse.Namespace, texts: list[str]) -> tuple[Any, bool]:
    """The tokenizer, and whether it was trained here for want of another."""
    from tokenizers import Tokenizer

    from engram.models.corpus import train_tokenizer

    files = [options.tokenizer] if options.tokenizer else []
    if subject.folder is not None and not files:
        files = sorted(subject.folder.glob("tokenizer-*.json"))
    for file in files:
        if not file.is_file():
            raise UsageError(f"no tokenizer at {file}")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  the Rust side raises bare Exception
            raise UsageError(f"{file} is not a tokenizer.json: {error}") from None
        if subject.model is None or TokenMap.from_tokenizer(tokenizer).fingerprint == subject.fingerprint:
            return tokenizer, False
    if subject.model is not None:
        if options.tokenizer:
            raise UsageError(f"{options.tokenizer} is not the tokenizer of {subject.name}")
        raise UsageError(f"the tokenizer of {subject.name} is not beside it; give --tokenizer")
    if subject.config.vocab_size < 257:
        raise UsageError(f"a vocabulary of {subject.config.vocab_size} has no room for all bytes; give --tokenizer")
    return train_tokenizer(texts, min(subject.config.vocab_size, TRAINED_VOCAB_SIZE)), True


def hash_of(subject: Subject, token_ids: Tensor, document_ids: Tensor) -> HashStatistics:
    """Of all layers; those of a model with the constants that they have been loaded with."""
    try:
        if subject.model is None:
            hashes = [engram.nn.NgramHash(subject.config, subject.token_map)]
        else:
            hashes = [layer.hash for layer in subject.model.engrams.values() if isinstance(layer, engram.nn.Engram)]
        found = [hash_statistics(hash, token_ids, document_ids=document_ids).orders for hash in hashes]
    except ValueError as error:  # a token map of another size than the configuration's
        raise UsageError(error) from None
    return HashStatistics(sum(found, ()))


@torch.no_grad()
def gates_of(
    model: "LanguageModel", settings: "TrainConfig", token_ids: Tensor, document_ids: Tensor
) -> GateRecord:
    """The model's gates on the text, in windows of the length it was trained on; the last tokens may be left over."""
    length = min(settings.length, token_ids.shape[1])
    whole = token_ids.shape[1] // length * length
    windows = [ids[0, :whole].view(-1, length) for ids in (token_ids, document_ids)]
    with record_gates(model) as gates:
        for batch in zip(*(x.split(max(1, settings.tokens // length)) for x in windows)):
            model(*batch)
    return gates


def print_orders(hashed: HashStatistics) -> None:
    """A line for each layer and order: what all its heads do together."""
    for usage in hashed.orders:
        print(f"layer {usage.layer_id}, {usage.order}-grams: {usage.ngrams:,} of {usage.lookups:,} are different "
              f"({usage.unique:.1%}), {usage.alone:.1%} of these have a row for themselves in some head")


def plot(hashed: HashStatistics, gates: GateRecord | None, out: Path) -> list[Path]:
    """Draw all; returns the files, none (and says so) without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nno PNGs: matplotlib is not installed; run: python -m pip install matplotlib")
        return []
    layers = sorted({usage.layer_id for usage in hashed.orders}, key=[u.layer_id for u in hashed.orders].index)
    colors = {order: f"C{i}" for i, order in enumerate(sorted({usage.order for usage in hashed.orders}))}

    def figure(columns: int, **labels: Any) -> tuple[Figure, list[Any]]:
        drawn = Figure(figsize=(1 + 4.5 * columns, 4), dpi=120, layout="constrained")
        axes = drawn.subplots(1, columns, squeeze=False, sharey=True)[0]
        for axis in axes:
            axis.set(**labels)
            axis.grid(alpha=0.3)
        return drawn, list(axes)

    drawn = {}
    for name, attribute, xlabel in (("bucket-load", "loads", "different n-grams in a row"),
                                    ("row-use", "reads", "times a row is read, by powers of two")):
        drawn[name], axes = figure(len(layers), xlabel=xlabel, ylabel="rows", yscale="log")
        for axis, layer in zip(axes, layers):
            axis.set_title(f"layer {layer}: one line a head")
            longest = 1
            for usage in (usage for usage in hashed.orders if usage.layer_id == layer):
                for head in usage.heads:
                    counts = getattr(head, attribute)
                    longest = max(longest, len(counts))
                    axis.plot(range(len(counts)), [count or None for count in counts], color=colors[usage.order],
                              alpha=0.6, marker=".", label=f"{usage.order}-grams" if head.head == 0 else None)
            ticks = [str(n) for n in range(1, MAX_LOAD)] + [f"{MAX_LOAD}+"]
            if attribute == "reads":
                ticks = ["1"] + [f"{2**n}+" for n in range(1, longest)]
            axis.set_xticks(range(len(ticks)), ticks)
            axis.legend()

    drawn["unique-fraction"], axes = figure(len(layers), xlabel="n-gram order", ylabel="share", ylim=(0, 1.3))
    for axis, layer in zip(axes, layers):
        usages = [usage for usage in hashed.orders if usage.layer_id == layer]
        for shift, label, values in ((-0.2, "different n-grams of all", [u.unique for u in usages]),
                                     (0.2, "of these, alone in some head's row", [u.alone for u in usages])):
            axis.bar([usage.order + shift for usage in usages], values, width=0.4, label=label)
        axis.set_xticks([usage.order for usage in usages])
        axis.set_title(f"layer {layer}")
        axis.legend(loc="upper left")

    if gates is not None and gates.layers:
        drawn["gates"], axes = figure(len(gates.layers), xlabel="gate", ylabel="share of tokens")
        for axis, (name, seen) in zip(axes, gates.layers.items()):
            bins = seen.histogram.shape[1]
            for branch, counts in enumerate(seen.histogram.tolist()):
                axis.stairs([count / max(1, sum(counts)) for count in counts], [i / bins for i in range(bins + 1)],
                            label=f"branch {branch}, mean {seen.mean[branch]:.2f}")
            axis.set_title(name)
            axis.legend()
    return [save(drawing, out / f"{name}.png") for name, drawing in drawn.items()]


def save(figure: Any, path: Path) -> Path:
    """Write a PNG and say so; a file already there is replaced in one go."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure).print_png(str(part))
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror}") from None
    print(f"wrote {path}")
    return path
