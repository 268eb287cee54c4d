"""The published comparison, small: what do residual streams, and Engram on top of them, do to the held-out loss?

    python examples/compare.py                     about an hour of one CPU core
    python examples/compare.py --report docs       the same, with comparison.md and comparison.png in docs/

Every model is trained from the same backbone weights on the same batches, once for each seed. A finished run is a line
of runs.jsonl in the --out folder; the same command, started again, goes on behind the last one and then writes the
report. Models:

    vanilla             one residual stream
    vanilla-active      one stream, MLPs widened until as many parameters act on a token as in streams+engram
    vanilla-total       one stream, made wider until it has as many parameters as streams+engram, tables included
    vanilla+engram      one stream and Engram
    streams             four streams, read, written and mixed by manifold-constrained hyper-connections (--mixing)
    streams+capacity1   streams+engram with one row in each table: all of the layer but its memory
    streams+engram      four streams and Engram
"""

import argparse
import io
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import engram
from engram.cli.check import devices
from engram.cli.errors import UsageError, require
from engram.models.corpus import IGNORE, MAX_TEXT_BYTES, Corpus, CorpusError, load_corpus
from engram.models.lm import LanguageModel, LanguageModelConfig
from engram.models.training import (
    TABLES, DivergenceError, Trainee, TrainConfig, batch_of_step, batches_held_out, model_config
)
from engram.nn import MultiHeadEmbedding
from engram.vocab import TokenMap

MODELS = (
    "vanilla", "vanilla-active", "vanilla-total", "vanilla+engram", "streams", "streams+capacity1", "streams+engram"
)
PAIRS = (  # whose difference says something
    ("vanilla+engram", "vanilla"),
    ("streams", "vanilla"),
    ("streams+engram", "vanilla"),
    ("streams+engram", "streams"),
    ("streams+capacity1", "streams"),
    ("streams+engram", "streams+capacity1"),
    ("streams+engram", "vanilla-active"),
    ("streams+engram", "vanilla-total"),
)
COLORS = dict(zip(MODELS, ("black", "tab:gray", "tab:brown", "tab:orange", "tab:green", "tab:purple", "tab:blue")))
ABOUT = {
    "vanilla": "one residual stream.",
    "vanilla-active": "one stream, its MLPs widened to the active parameters of streams+engram.",
    "vanilla-total": "one stream, made wider to the parameters of streams+engram, tables included: more arithmetic for "
                     "each token.",
    "vanilla+engram": "one stream, and Engram.",
    "streams": "several residual streams (`engram/models/lm.py`), which start as exactly the vanilla model.",
    "streams+capacity1": "streams+engram with one row in each table: projections, gates, convolution, but no memory.",
    "streams+engram": "several streams, and Engram with a gate for each.",
}
CAVEATS = """\
## What this is not

Small models early in their training, on one text: what they win does not carry over to the published size. Program text
repeats itself more than prose does, which favours a memory of n-grams. The seeds bound the noise of weights and
batches, not that of the choice of text. All models have one learning rate and schedule, chosen for vanilla; a wider
model may want a lower rate, so `vanilla-total` need not be the best of its size.

## At 124 M parameters

The same script on one GPU with 80 GB, a folder with about 10 GB of text, and the main memory to hold it. This has not
been run for this page; a run takes hours there, an interrupted one starts anew, finished ones are kept. Without
`--models` and `--seeds` the same command adds the other models and seeds.

```bash
python examples/compare.py --text TEXT_FOLDER --text-mib 12000 --vocab-size 50257 --length 1024 --tokens 32768 \\
    --steps 76294 --hidden-size 768 --layers 12 --heads 12 --lr 6e-4 --warmup 2000 --dtype bfloat16 --device cuda \\
    --engram-layers 1 6 --heads-per-ngram 8 --embed-dim-per-head 32 --table-size 100000 --optimizer lazy-adamw \\
    --models vanilla streams streams+engram --seeds 0 --out engram-124m
```"""
RUNS, TABLE, FIGURE = "runs.jsonl", "comparison.md", "comparison.png"
EVALUATIONS = 6  # of a run
SMALL = 0.05  # percent: a difference below that is none
SEEDS = (0, 1, 2)
MIB = 2**20

HELP = {  # the settings of TrainConfig that are options here
    "steps": "optimizer steps of each run",
    "tokens": "per step",
    "length": "of a window",
    "vocab_size": "tokens of the BPE, at most",
    "hidden_size": "width of all models but vanilla-total",
    "layers": "transformer blocks",
    "heads": "attention heads",
    "table_size": "rows of each table of an Engram layer, rounded up to a prime",
    "lr": "peak learning rate; five times as much for the tables",
    "warmup": "steps until the peak rate is reached; it falls with the root of the step after that",
    "mixing": "how streams are read, written and mixed: manifold (token by token, doubly stochastic) or static",
    "dtype": "float32, float64, or bfloat16: float32 weights under autocast",
    "optimizer": "of the tables: adamw (dense), or row-wise-adam, row-wise-adagrad, lazy-adamw (rows that are read)",
}
SHAPE = ("max_ngram_size", "heads_per_ngram", "embed_dim_per_head")  # those of EngramConfig
DEFAULTS = {f.name: f.default for f in fields(TrainConfig)} | {"mixing": "manifold"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL", help="which ones (default: all)")
    option("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="of weights, hash and data order (0 1 2)")
    option("--text", nargs="+", default=(), metavar="PATH",
           help="text files and folders of them (default: the .py files of Python's standard library)")
    option("--text-mib", type=int, default=MAX_TEXT_BYTES // MIB, metavar="N", help="text that is read, at most (32)")
    for name, text in HELP.items():
        kind = type(DEFAULTS[name])
        option("--" + name.replace("_", "-"), type=kind, default=DEFAULTS[name], metavar="X" if kind is float else
               "NAME" if kind is str else "N", help=f"{text} ({DEFAULTS[name]})")
    option("--streams", type=int, default=4, metavar="N", help="residual streams of the streams models (4)")
    option("--engram-layers", type=int, nargs="+", default=DEFAULTS["engram_layers"], metavar="I",
           help="blocks with an Engram layer before their attention, counted from 0 (1)")
    for name in SHAPE:
        option("--" + name.replace("_", "-"), type=int, default=TABLES[name], metavar="N",
               help=f"of the Engram layers, see EngramConfig ({TABLES[name]})")
    option("--device", choices=("cpu", "cuda"), help="(cuda where engram has kernels for it)")
    option("--threads", type=int, metavar="N", help="CPU threads (torch's own choice)")
    option("--out", type=Path, default=Path("engram-comparison"), metavar="DIR",
           help=f"where {RUNS} and the tokenizer go (./engram-comparison)")
    option("--report", type=Path, metavar="DIR", help=f"where {TABLE} and {FIGURE} go (the --out folder)")
    option("--json", action="store_true", help="print the results once more, as one last line of JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 good, 1 a training failed, 2 wrong usage, 130 after Ctrl-C."""
    options = build_parser().parse_args(argv)
    try:
        results = compare(options)
    except (UsageError, CorpusError) as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2
    except DivergenceError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"compare.py: error: {error.filename or options.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"compare.py: interrupted; the same command goes on behind the runs in {options.out / RUNS}",
              file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(results), flush=True)
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not trained yet, write the report, return what it says."""
    require("tokenizers", "tqdm", "matplotlib")
    config = settings(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = devices(options.device)[-1]
    corpus = load_corpus(config.text, vocab_size=config.vocab_size, cache=options.out, min_tokens=config.length + 1,
                         max_bytes=options.text_mib * MIB)
    models = model_configs(config, options, TokenMap.from_tokenizer(corpus.tokenizer))
    common = {name: value for name, value in asdict(config).items() if name not in ("seed", "text", "branches")}
    common |= {"streams": options.streams, "corpus": corpus.fingerprint}
    common = json.loads(json.dumps(common | {name: getattr(options, name) for name in SHAPE}))

    file = options.out / RUNS
    runs = read_runs(file, common)
    wanted = [(seed, name) for seed in options.seeds for name in options.models]
    left = [run for run in wanted if run not in runs]
    print(f"{len(wanted)} runs of {config.steps} steps, {len(wanted) - len(left)} of them done in {file}", flush=True)
    train_all(left, runs, file, models, config, corpus, device, common)

    records = [runs[run] for run in wanted]
    results = summarise(records)
    folder = options.report or options.out
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / FIGURE, figure(records, results))
    write(folder / TABLE, table(records, results, options, corpus).encode())
    for line in results["differences"]:
        print(f"{line['model']:17} against {line['against']:17} {spread(line, '+.2f')} %")
    print(f"report: {folder / TABLE}, {folder / FIGURE}")
    return results | {"runs": str(file), "report": str(folder / TABLE), "figure": str(folder / FIGURE)}


def settings(options: argparse.Namespace) -> TrainConfig:
    """What all runs have in common. Raises UsageError for a wrong value."""
    for name, least in (("streams", 2), ("text_mib", 1), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if len(set(options.seeds)) < len(options.seeds) or len(set(options.models)) < len(options.models):
        raise UsageError("--seeds and --models must name each one once")
    given = {name: getattr(options, name) for name in (*HELP, "text", "engram_layers")}
    try:
        return [TrainConfig(**given, seed=seed) for seed in options.seeds][0]
    except ValueError as error:
        raise UsageError(error) from None


def model_configs(
    config: TrainConfig, options: argparse.Namespace, token_map: TokenMap
) -> dict[str, LanguageModelConfig]:
    """The MODELS. Raises UsageError where the Engram settings are wrong."""
    shape = {name: getattr(options, name) for name in SHAPE}
    wide = replace(config, branches=options.streams)

    def with_engram(config: TrainConfig, **changes: Any) -> LanguageModelConfig:
        model = model_config(config, token_map, True)
        return replace(model, engram=replace(model.engram, **shape, **changes))

    try:
        full = with_engram(wide)
        memory = full.engram
        one_row = ((1,) * memory.hash_columns,) * len(memory.layer_ids)
        vanilla = model_config(config, token_map, False)
        size = parameters(full, token_map)
        return {
            "vanilla": vanilla,
            "vanilla-active": widen(vanilla, size["active"], token_map, hidden=False),
            "vanilla-total": widen(vanilla, size["total"], token_map, hidden=True),
            "vanilla+engram": with_engram(config),
            "streams": model_config(wide, token_map, False),
            "streams+capacity1": with_engram(wide, moduli=one_row),
            "streams+engram": full,
        }
    except ValueError as error:
        raise UsageError(error) from None


def parameters(config: LanguageModelConfig, token_map: TokenMap) -> dict[str, int]:
    """`total`, and `active`: of the tables only the rows that a token reads."""
    with torch.device("meta"):
        model = LanguageModel(config, token_map)
    total = sum(p.numel() for p in model.parameters())
    tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, MultiHeadEmbedding))
    rows = len(config.engram.layer_ids) * config.engram.memory_width if config.engram else 0
    return {"total": total, "active": total - tables + min(rows, tables)}


def widen(config: LanguageModelConfig, target: int, token_map: TokenMap, hidden: bool) -> LanguageModelConfig:
    """The model with about `target` parameters: wider throughout as far as the heads let it, then in its MLPs."""
    while hidden:
        wider = replace(config, hidden_size=config.hidden_size + 2 * config.heads)
        if parameters(wider, token_map)["total"] > target:
            break
        config = wider
    one, two = (parameters(replace(config, mlp_size=size), token_map)["total"] for size in (8, 16))
    return replace(config, mlp_size=max(8, 8 + 8 * round((target - one) / (two - one))))


# Runs ---------------------------------------------------------------------------------------------------------------


def read_runs(file: Path, common: dict[str, Any]) -> dict[tuple[int, str], dict[str, Any]]:
    """The finished runs `{(seed, model): record}`. A last line that an interruption cut off is taken out of the file.

    Raises UsageError where the file holds something else, or runs of other settings or text.
    """
    if not file.exists():
        return {}
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    runs = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            key, stored = (record["seed"], record["model"]), record["settings"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{file}, line {number}, is no run of compare.py") from None
        # A setting younger than the run had its default.
        stored = {name: value for name, value in DEFAULTS.items() if name in common} | stored
        if differing := sorted(name for name in common | stored if common.get(name) != stored.get(name)):
            raise UsageError(f"{file} has runs with another {', '.join(differing)}; use another --out")
        runs[key] = record
    if len(whole) < len(data):
        write(file, whole)
    return runs


def train_all(
    left: list[tuple[int, str]], runs: dict, file: Path, models: dict[str, LanguageModelConfig], config: TrainConfig,
    corpus: Corpus, device: str | torch.device, common: dict[str, Any],
) -> None:
    """Make the runs that are left, with a bar, or lines, of progress; each goes into `runs` and the file."""
    from tqdm import tqdm

    began, terminal = time.monotonic(), sys.stderr.isatty()
    with tqdm(total=len(left) * config.steps, unit="step", dynamic_ncols=True, disable=not terminal) as bar:
        for done, (seed, name) in enumerate(left, start=1):
            bar.set_description(f"{name} seed {seed}")
            record = {"model": name, "seed": seed, "settings": common}
            record |= train(replace(config, seed=seed), models[name], corpus, device, name, bar)
            runs[seed, name] = record
            with open(file, "ab") as stream:
                stream.write(json.dumps(record).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            line = f"{name}, seed {seed}: held-out loss {record['held_out']:.4f}  ({done} of {len(left)}"
            line += f", {(time.monotonic() - began) / done * (len(left) - done):.0f} s left)"
            bar.write(line) if terminal else print(line, flush=True)


def train(
    config: TrainConfig, model: LanguageModelConfig, corpus: Corpus, device: str | torch.device, name: str, bar: Any
) -> dict[str, Any]:
    """One run: its losses, sizes and step time."""
    token_map = TokenMap.from_tokenizer(corpus.tokenizer)
    if model.engram is not None:
        model = replace(model, engram=replace(model.engram, seed=config.seed))
    trainee = Trainee(config, model, token_map, device, name)
    held_out = batches_held_out(config, corpus)
    familiar = Familiar(held_out, token_map.vocab_size)
    # On a CPU, also a shared one, what counts is the time that the process really had.
    clock = time.perf_counter if trainee.device.type == "cuda" else time.process_time
    curve, seconds = [], []
    marks = {round(config.steps * i / EVALUATIONS) for i in range(1, EVALUATIONS)}
    for step in range(config.steps):
        batch = batch_of_step(config, corpus, step)
        familiar.note(batch)
        before = clock()
        trainee.train_step(step, batch)
        seconds.append(clock() - before)
        if step + 1 in marks:
            curve.append([step + 1, trainee.evaluate(held_out)])
        bar.update()
    loss = trainee.evaluate(held_out)
    known, new = familiar.split(held_out)
    return {
        "held_out": loss,
        "known": trainee.evaluate(known),
        "new": trainee.evaluate(new),
        "known_share": familiar.share(held_out),
        "curve": [*curve, [config.steps, loss]],
        "parameters": parameters(model, token_map),
        "step_ms": 1e3 * statistics.median(seconds),
        "device": str(device),
        "machine": machine(trainee.device),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


class Familiar:
    """Which held-out targets follow two tokens behind which they also came in training: what a table of trigrams could
    have learned, as against what asks for more than memory."""

    def __init__(self, batches: list, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.trigrams = np.unique(np.concatenate([self._trigrams(*batch[:2]).ravel() for batch in batches]))
        self.seen = np.zeros(len(self.trigrams), dtype=bool)

    def note(self, batch: tuple) -> None:
        """A batch that is trained on."""
        found = self._trigrams(*batch[:2])
        place = np.searchsorted(self.trigrams, found).clip(max=len(self.trigrams) - 1)
        self.seen[place[(self.trigrams[place] == found) & (found >= 0)]] = True

    def split(self, batches: list) -> tuple[list, list]:
        """The batches with known, and with new targets only."""
        known, new = [], []
        for tokens, targets, documents in batches:
            seen = self._seen(tokens, targets)
            known.append((tokens, targets.where(seen, IGNORE), documents))
            new.append((tokens, targets.where(~seen, IGNORE), documents))
        return known, new

    def share(self, batches: list) -> float:
        """Known targets as a part of all."""
        known = sum(int(self._seen(*batch[:2]).sum()) for batch in batches)
        return known / sum(int((batch[1] >= 0).sum()) for batch in batches)

    def _seen(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.seen[np.searchsorted(self.trigrams, self._trigrams(tokens, targets))])

    def _trigrams(self, tokens: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
        """A number for each target with the two tokens before it, -1 where it does not count or has fewer."""
        number = torch.full_like(tokens, -1)
        number[:, 1:] = (tokens[:, :-1] * self.vocab_size + tokens[:, 1:]) * self.vocab_size + targets[:, 1:]
        return number.where(targets >= 0, -1).numpy()


def machine(device: torch.device) -> str:
    """What the run was made on."""
    threads = torch.get_num_threads()
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpus.read_text(), re.MULTILINE) if cpus.exists() else []
    where = f"{(names or [platform.machine()])[0]}, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return f"{where}, torch {torch.__version__}, Python {platform.python_version()}, engram {engram.__version__}"


# Report -------------------------------------------------------------------------------------------------------------


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Per model the losses over the seeds, per pair the differences in percent, seed by seed."""
    runs = {(record["model"], record["seed"]): record for record in records}
    names = [name for name in MODELS if any(model == name for model, _ in runs)]
    seeds = list(dict.fromkeys(record["seed"] for record in records))

    def values(name: str, key: str) -> list[float]:
        return [runs[name, seed][key] for seed in seeds]

    def change(name: str, other: str, key: str) -> list[float]:
        return [100 * (a / b - 1) for a, b in zip(values(name, key), values(other, key))]

    models = {
        name: {
            **statistic(values(name, "held_out")),
            "known": statistic(values(name, "known")),
            "new": statistic(values(name, "new")),
            "parameters": runs[name, seeds[0]]["parameters"],
            "step_ms": statistics.median(values(name, "step_ms")),
        }
        for name in names
    }
    differences = [
        {"model": name, "against": other, **statistic(change(name, other, "held_out")),
         "known": statistic(change(name, other, "known")), "new": statistic(change(name, other, "new"))}
        for name, other in PAIRS if name in models and other in models
    ]
    return {"seeds": seeds, "models": models, "differences": differences,
            "known_share": statistics.mean(record["known_share"] for record in records)}


def statistic(values: list[float]) -> dict[str, Any]:
    """Values, mean, and standard deviation over the seeds (None for one seed)."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"values": values, "mean": statistics.fmean(values), "deviation": deviation}


def spread(of: dict[str, Any], form: str) -> str:
    """Mean ± standard deviation."""
    mean = format(of["mean"], form)
    return mean if of["deviation"] is None else f"{mean} ± {of['deviation']:{form.lstrip('+')}}"


def table(records: list[dict[str, Any]], results: dict[str, Any], options: argparse.Namespace, corpus: Corpus) -> str:
    """The report as Markdown."""
    models, differences, seeds = results["models"], results["differences"], results["seeds"]
    size = min(of["parameters"]["total"] for of in models.values())
    clock = "time" if any("cuda" in record["device"] for record in records) else "CPU time"
    source = "the files of `--text`" if options.text else "the .py files of Python's standard library without its tests"
    parts = [
        "# The published comparison, small",
        paragraph(
            f"Written by `{command(options)}`; do not edit. Published: 124 M parameters, trained on 2.5 B tokens, have "
            "a loss about 2.5 % lower with manifold-constrained hyper-connections (mHC) and Engram than without both. "
            f"This is the same comparison in shape, from {size:,} parameters and with "
            f"{options.steps * options.tokens:,} tokens, together with the controls that tell memory from streams and "
            "from parameters."),
        paragraph(
            f"Text: {source}; {len(corpus.train):,} tokens to train on, other files held out, whole. {options.steps:,} "
            f"steps of {options.tokens:,} tokens in windows of {options.length}. Width {options.hidden_size}, "
            f"{options.layers} blocks, {corpus.tokenizer.get_vocab_size():,} tokens in the vocabulary, Engram before "
            f"the attention of block {', '.join(map(str, options.engram_layers))} (counted from 0), {options.streams} "
            f"streams, {options.mixing} mixing; learning rate {options.lr:g}, the tables' five times that and by "
            f"{options.optimizer}; {options.dtype}. Seeds {', '.join(map(str, seeds))}."),
        paragraph(
            f"Machine: {'; '.join(dict.fromkeys(record['machine'] for record in records))}. "
            f"Finished {max(record['date'] for record in records)}."),
        f"![held-out losses]({FIGURE})",
        "## Losses",
        paragraph(
            "Nats per held-out token, mean ± standard deviation over the seeds. Known are those targets, "
            f"{100 * results['known_share']:.0f} % of all, that came in training, too, behind the same two tokens; new "
            "are the others. Active parameters act on a token: all but the tables, and of these the rows that it "
            f"reads. Step: median {clock}."),
        "\n".join([
            "| model | parameters | active | loss | known | new | step, ms |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(f"| {name} | {of['parameters']['total']:,} | {of['parameters']['active']:,} | {spread(of, '.4f')} "
              f"| {spread(of['known'], '.3f')} | {spread(of['new'], '.3f')} | {of['step_ms']:.0f} |"
              for name, of in models.items()),
        ]),
        "\n".join(paragraph(f"* **{name}**: {ABOUT[name]}") for name in models),
    ]
    if differences:
        parts += [
            "## Differences",
            paragraph(
                "Of the losses, in percent, seed by seed: the models of a seed start with the same backbone, where "
                "they have the same widths, and see the same batches. Negative is better; mean ± standard deviation "
                "over the seeds, then each."),
            "\n".join([
                "| model | against | difference | each seed | lower in | known | new |",
                "| --- | --- | ---: | --- | --- | ---: | ---: |",
                *map(row, differences),
            ]),
            "## What comes out",
            "\n".join(paragraph(f"* {verdict(of)}") for of in differences),
        ]
    return "\n\n".join([*parts, CAVEATS]) + "\n"


def paragraph(text: str) -> str:
    """In lines of 120 characters."""
    indent = "  " if text.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def command(options: argparse.Namespace) -> str:
    """What decided the numbers: the options that differ from their defaults, without paths of this machine."""
    words = ["python", "examples/compare.py"]
    for action in build_parser()._actions:
        if action.dest not in ("help", "device", "threads", "out", "report", "json"):
            value, default = (words_of(x) for x in (getattr(options, action.dest), action.default))
            if value != default:
                words += [action.option_strings[0], *(["PATH"] if action.dest == "text" else value)]
    return shlex.join([*words, "--report", "docs"])


def words_of(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]


def row(of: dict[str, Any]) -> str:
    """A difference as a row of the table."""
    each, lower = ", ".join(f"{value:+.2f}" for value in of["values"]), sum(value < 0 for value in of["values"])
    return (f"| {of['model']} | {of['against']} | {spread(of, '+.2f')} | {each} | {lower} of {len(of['values'])} | "
            f"{spread(of['known'], '+.2f')} | {spread(of['new'], '+.2f')} |")


def verdict(of: dict[str, Any]) -> str:
    """A difference in words; what does not help is said as plainly as what does."""
    mean, count, lower = of["mean"], len(of["values"]), sum(value < 0 for value in of["values"])
    clear = lower in (0, count) and abs(mean) > max(of["deviation"] or 0, SMALL)
    name, other = of["model"], of["against"]
    if not clear:
        text = f"**{name}** against {other}: no clear difference, {mean:+.2f} %, lower with {lower} of {count} seeds."
    elif mean < 0:
        text = f"**{name}** helps against {other}: {-mean:.2f} % lower, with every seed."
    else:
        text = f"**{name}** does not help against {other}: {mean:.2f} % higher, with every seed."
    known, new = of["known"]["mean"], of["new"]["mean"]
    if math.isfinite(known) and math.isfinite(new):
        text += f" Known targets {known:+.2f} %, new ones {new:+.2f} %"
        text += ", where it does not help." if clear and mean < 0 and new > -SMALL else "."
    return text


def figure(records: list[dict[str, Any]], results: dict[str, Any]) -> bytes:
    """A PNG: the held-out losses on the way, mean and range of the seeds, and the differences at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    picture = Figure(figsize=(11, 4.6), dpi=100, layout="constrained")
    left, right = picture.subplots(1, 2, width_ratios=(5, 4))
    for name in results["models"]:
        curves = np.array([record["curve"] for record in records if record["model"] == name])
        steps, losses = curves[0, :, 0], curves[:, :, 1]
        left.plot(steps, losses.mean(0), color=COLORS[name], label=name, marker="o", markersize=3, linewidth=1.2)
        left.fill_between(steps, losses.min(0), losses.max(0), color=COLORS[name], alpha=0.12, linewidth=0)
    left.set(xlabel="step", ylabel="held-out loss, nats per token", title="Mean and range of the seeds")
    left.grid(alpha=0.3)
    left.legend(fontsize="small")
    labels = []
    for row, of in enumerate(results["differences"]):
        color = COLORS[of["model"]]
        right.plot(of["values"], [row] * len(of["values"]), "o", color=color, markersize=5, alpha=0.6)
        right.plot([of["mean"]], [row], "|", color=color, markersize=18, markeredgewidth=2)
        labels.append(f"{of['model']}\nagainst {of['against']}")
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(range(len(labels)), labels, fontsize="small")
    right.set(xlabel="difference of the final loss, %: seeds and mean", title="Left of zero is better")
    right.invert_yaxis()
    right.grid(alpha=0.3, axis="x")
    canvas, stream = FigureCanvasAgg(picture), io.BytesIO()
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128)
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def write(path: Path, data: bytes) -> None:
    """Replace the file in one go."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
