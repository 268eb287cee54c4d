"""`engram train`: two language models on real text, with and without Engram; progress, checkpoint, plot, signals."""

import argparse
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from engram.cli.check import devices
from engram.cli.errors import UsageError, require

if TYPE_CHECKING:  # needs the optional dependencies
    from engram.distributed.peers import Peers
    from engram.models.training import Comparison, TrainConfig

STEPS_VARIABLE = "ENGRAM_TRAIN_STEPS"
CHECKPOINT, PREVIOUS, PLOT = "checkpoint.safetensors", "checkpoint.previous.safetensors", "losses.png"
SHARDED_CHECKPOINT, SHARDED_PREVIOUS = "checkpoint", "checkpoint.previous"  # folders, of several ranks
SECONDS = 300  # that a rank waits for another

DESCRIPTION = """\
Train two small language models on the same text and compare their losses on text that neither has seen.

Both have the same backbone with the same initial weights, and see the same batches in the same order under the same
optimizer and schedule. They differ in one thing: before the attention of some layers, one of them adds the output of an
Engram layer. The text is tokenised with a byte-level BPE trained on it; whole files are held out (every tenth)."""

EPILOG = """\
examples:
  engram train                                 300 steps on Python's own source files, a few minutes on two cores
  engram train --text book.txt notes/          your own text: files and folders
  engram train --steps 2000 --out runs/long    stop it with Ctrl-C, then
  engram train --resume --out runs/long        continue it, bit for bit as if it had never stopped

  torchrun --nproc-per-node 2 -m engram train  two ranks (gloo, with --device cuda NCCL): each takes its share of the
                                               windows and of the tables; checkpoint is a folder then, which
                                               torchrun with any number of ranks can --resume

The --out folder gets checkpoint.safetensors (models, optimizers, losses), losses.png (the curves) and tokenizer-*.json.
Ctrl-C and SIGTERM save and end with exit status 130 and 143; a second Ctrl-C ends at once. Wrong usage: status 2."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that decide the numbers have no default here: those not given come from the checkpoint with --resume, and
    from TrainConfig without."""
    text = parser.add_argument_group("text").add_argument
    text("--text", nargs="+", metavar="PATH",
         help="text files and folders of them, read as UTF-8 (default: the .py files of Python's standard library)")
    text("--vocab-size", type=int, metavar="N", help="tokens of the BPE, at most (default: 4096)")

    run = parser.add_argument_group("run").add_argument
    run("--steps", type=int, metavar="N",
        help=f"optimizer steps of each model (default: the environment variable {STEPS_VARIABLE}, or 300)")
    run("--tokens", type=int, metavar="N", help="tokens per step (default: 2048)")
    run("--length", type=int, metavar="N", help="tokens in a row that attention can see (default: 256)")
    run("--lr", type=float, metavar="X", help="peak learning rate; five times as much for the tables (default: 3e-3)")
    run("--warmup", type=int, metavar="N",
        help="steps until the peak rate is reached; it falls with the root of the step after that (default: 40)")
    run("--optimizer", choices=("row-wise-adam", "row-wise-adagrad", "lazy-adamw", "adamw"),
        help="of the tables: a step of the first three costs what the batch touches, one of adamw what the tables hold "
             "(default: adamw); all else is trained by AdamW")
    run("--seed", type=int, metavar="N", help="of the weights, the hash and the data order (default: 0)")
    run("--out", type=Path, default=Path("engram-run"), metavar="DIR",
        help="where checkpoint, plot and tokenizer go (default: ./engram-run)")
    run("--resume", action="store_true",
        help="continue the checkpoint in --out with its own settings; only --steps and the machine may differ")
    run("--save-every", type=int, default=50, metavar="N", help="steps between two checkpoints (default: 50)")

    model = parser.add_argument_group("model").add_argument
    model("--layers", type=int, metavar="N", help="transformer blocks (default: 3)")
    model("--hidden-size", type=int, metavar="N", help="width (default: 128)")
    model("--heads", type=int, metavar="N", help="attention heads (default: 4)")
    model("--branches", type=int, choices=(1, 4),
          help="residual streams: 1 is the plain residual, 4 are hyper-connections, one Engram gate each (default: 1)")
    model("--mixing", choices=("static", "manifold"),
          help="how 4 streams are read, written and mixed: by learned constants, or, mHC, token by token and doubly "
               "stochastic (default: static)")
    model("--engram-layers", type=int, nargs="+", metavar="I",
          help="blocks with an Engram layer before their attention, counted from 0 (default: 1)")
    model("--table-size", type=int, metavar="N",
          help="rows of each of the 8 lookup tables of an Engram layer, rounded up to a prime (default: 20000)")

    machine = parser.add_argument_group("machine").add_argument
    machine("--device", choices=("cpu", "cuda"), help="where to run (default: cuda where engram has kernels for it)")
    machine("--dtype", choices=("float32", "bfloat16", "float64"),
            help="bfloat16: float32 weights under torch.autocast (default: float32)")
    machine("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Train; returns exit status and record. Raises UsageError for what the user can put right."""
    require("tokenizers", "safetensors", "tqdm", "matplotlib")
    from engram.models.corpus import CorpusError
    from engram.models.training import CheckpointError, DivergenceError

    try:
        with ranks(options.device) as peers:
            return train(options, peers)
    except (CorpusError, CheckpointError) as error:
        raise UsageError(error) from None
    except DivergenceError as error:
        print(f"engram: {error}", file=sys.stderr)
        return 1, {"error": str(error)}
    except RuntimeError as error:
        if (message := lost_ranks(error)) is None:
            raise
        print(f"engram: {message}", file=sys.stderr)
        return 1, {"error": message}
    except BrokenPipeError:
        raise
    except OSError as error:  # the output folder: not writable, disk full...
        if error.filename is None and error.strerror is None:
            raise
        raise UsageError(f"{error.filename or options.out}: {error.strerror}") from None


@contextmanager
def ranks(wanted: str | None) -> "Iterator[Peers | None]":
    """The ranks that torchrun has started, None without it; only the first one prints."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        yield None
        return
    import torch.distributed as dist

    from engram.distributed.peers import Peers

    on_gpu = devices(wanted)[-1] == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=SECONDS))
    try:
        peers = Peers()
        with nullcontext() if peers.rank == 0 else open(os.devnull, "w") as nowhere:
            with nullcontext() if peers.rank == 0 else redirect_stdout(nowhere):
                yield peers
    finally:
        dist.destroy_process_group()


def agree(peers: "Peers", **values: Any) -> None:
    """Raises UsageError, on all ranks, unless they have the same values."""
    try:
        peers.agree("engram train", **values)
    except ValueError as error:
        raise UsageError(error) from None


def lost_ranks(error: RuntimeError) -> str | None:
    """What to say of an error of the connection between ranks, None for any other."""
    import torch.distributed as dist

    text = str(error)
    if not isinstance(error, dist.DistError) and not any(word in text.lower() for word in ("gloo", "nccl", "connection")):
        return None
    return f"rank {os.environ.get('RANK', '?')} has lost another rank, and ends: {text.splitlines()[0]}"


def train(options: argparse.Namespace, peers: "Peers | None" = None) -> tuple[int, dict[str, Any]]:
    """`run` without the translation of errors."""
    from engram.models.corpus import find_files, load_corpus
    from engram.models.training import BASELINE, ENGRAM, Comparison

    first_rank = peers is None or peers.rank == 0
    checkpoint = options.out / (CHECKPOINT if peers is None else SHARDED_CHECKPOINT)
    previous = options.out / (PREVIOUS if peers is None else SHARDED_PREVIOUS)
    config = settings(options, checkpoint, peers)
    if options.save_every < 1:
        raise UsageError(f"--save-every must be at least 1, got {options.save_every}")
    if options.threads is not None:
        if options.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    device = devices(options.device)[-1]

    began = time.monotonic()
    print(f"reading {len(find_files(config.text)):,} files, training the tokenizer ...", flush=True)
    read = partial(load_corpus, config.text, vocab_size=config.vocab_size, cache=options.out, min_tokens=config.length + 1)
    if peers is None:
        comparison = Comparison(config, read(), device)
    else:
        from engram.models.sharded import ShardedComparison

        corpus = read() if first_rank else None  # trains the tokenizer, which the others find then
        agree(peers, save_every=options.save_every)
        try:
            comparison = ShardedComparison(config, corpus or read(), device, peers)
        except ValueError as error:
            raise UsageError(error) from None
    if options.resume:
        comparison.load(checkpoint)
        if comparison.step > config.steps:
            raise UsageError(f"{checkpoint} is at step {comparison.step} already, past --steps {config.steps}")
    first = comparison.step
    describe(comparison)
    if options.resume:
        print(f"resumed at step {comparison.step} from {checkpoint}")
    elif first_rank and checkpoint.exists():
        if previous.is_dir():
            shutil.rmtree(previous)
        os.replace(checkpoint, previous)
        print(f"kept the checkpoint of an earlier run as {previous} (--resume would have continued it)")
    print(flush=True)

    with Signals() as signals:
        train_steps(comparison, options, checkpoint, signals, peers)
        if signals.anywhere(peers) is None:
            losses = comparison.evaluate()
        comparison.save(checkpoint)
        if first_rank:
            plot(comparison.history, options.out / PLOT)
        stopped = signals.anywhere(peers)

    record: dict[str, Any] = {
        "step": comparison.step,
        "steps": config.steps,
        "held_out": None,
        "parameters": comparison.parameter_counts(),
        "optimizer_bytes": comparison.optimizer_bytes(),
        "step_ms": {name: 1e3 * seconds / max(1, comparison.step - first)
                    for name, seconds in comparison.seconds.items()},
        "seconds": round(time.monotonic() - began, 1),
        "checkpoint": str(checkpoint),
        "plot": str(options.out / PLOT),
    }
    if peers is not None:
        record["ranks"] = peers.size
    if stopped is not None:
        command = "engram train --resume" + ("" if str(options.out) == "engram-run" else f" --out {options.out}")
        print(f"\nstopped by {stopped.name}; saved step {comparison.step} of {config.steps}")
        print(f"continue: {command}")
        return 128 + stopped, record
    change = 100 * (losses[ENGRAM] / losses[BASELINE] - 1)
    record |= {"held_out": losses, "difference_percent": change}
    print(f"\nheld-out loss after {comparison.step} steps of {config.tokens} tokens ({record['seconds']:.0f} s)")
    print(f"  baseline    {losses[BASELINE]:.4f}")
    print(f"  engram      {losses[ENGRAM]:.4f}")
    print(f"  difference  {change:+.1f} %")
    step_ms, state = record["step_ms"], record["optimizer_bytes"]
    print(f"step        {step_ms[BASELINE]:.0f} ms baseline, {step_ms[ENGRAM]:.0f} ms engram")
    print(f"optimizer   {state[BASELINE]:,} bytes of state baseline, {state[ENGRAM]:,} engram, "
          f"of which {state['tables']:,} for the tables ({config.optimizer})")
    prompt, continuation = comparison.sample(ENGRAM)
    record["sample"] = {"prompt": prompt, "continuation": continuation}
    print(f"sample      {prompt!r}\n  goes on   {continuation!r}")
    print(f"curves: {options.out / PLOT}, models: {checkpoint}")
    return 0, record


def settings(options: argparse.Namespace, checkpoint: Path, peers: "Peers | None" = None) -> "TrainConfig":
    """The TrainConfig of this run: the options given, over the checkpoint's with --resume, over the defaults else.

    Raises UsageError for a wrong value, and for an option that contradicts the checkpoint.
    """
    from engram.models.training import TrainConfig, read_metadata

    read = read_metadata
    if peers is not None:
        from engram.models import sharded

        agree(peers, resume=options.resume)
        read = partial(sharded.read_metadata, peers=peers)
    given = {name: getattr(options, name) for name in TrainConfig.__dataclass_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    if "text" in given:
        given["text"] = [str(Path(path).absolute()) for path in given["text"]]
    if "engram_layers" in given:
        given["engram_layers"] = tuple(given["engram_layers"])
    try:
        if options.resume:
            stored = TrainConfig.from_json(read(checkpoint)["config"])
            for name, value in given.items():
                if name not in ("steps", "text") and value != getattr(stored, name):
                    option = "--" + name.replace("_", "-")
                    raise UsageError(f"{option} {value} contradicts {checkpoint}, which was started with "
                                     f"{getattr(stored, name)}; leave it out, or start anew without --resume")
            return replace(stored, **given)
        if "steps" not in given and STEPS_VARIABLE in os.environ:
            try:
                given["steps"] = int(os.environ[STEPS_VARIABLE])
            except ValueError:
                raise UsageError(f"{STEPS_VARIABLE} must be an integer, got {os.environ[STEPS_VARIABLE]!r}") from None
        return TrainConfig(**given)
    except ValueError as error:
        raise UsageError(error) from None


def describe(comparison: "Comparison") -> None:
    """Print what is trained on what."""
    from engram.models.corpus import MAX_TEXT_BYTES

    corpus, counts, token_map = comparison.corpus, comparison.parameter_counts(), comparison.token_map
    tables = counts["tables"]
    print(f"documents  {corpus.train_documents:,} to train on ({len(corpus.train):,} tokens), "
          f"{corpus.held_out_documents:,} held out ({len(corpus.held_out):,} tokens)")
    if corpus.cut:
        print(f"           more than {MAX_TEXT_BYTES >> 20} MiB: the rest of the text is not used")
    if corpus.skipped:
        print(f"           {corpus.skipped:,} binary or unreadable files passed over")
    print(f"tokenizer  {token_map.vocab_size:,} tokens, {token_map.compressed_vocab_size:,} for the hash "
          "(case, accents and space folded)")
    print(f"baseline   {counts['baseline']:,} parameters")
    print(f"engram     {counts['engram']:,} parameters: the same backbone, {tables:,} in lookup tables, "
          f"{counts['engram'] - counts['baseline'] - tables:,} in projections, gate and convolution")


def train_steps(
    comparison: "Comparison", options: argparse.Namespace, checkpoint: Path, signals: "Signals",
    peers: "Peers | None" = None,
) -> None:
    """Train up to the last step or a signal, with held-out losses on the way and a bar, or lines, of progress."""
    from tqdm import tqdm

    steps, first = comparison.config.steps, comparison.step
    evaluate_every = max(10, steps // 10)
    terminal = sys.stderr.isatty() and (peers is None or peers.rank == 0)
    began = time.monotonic()
    bar = tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True, disable=not terminal)
    with bar:
        while comparison.step < steps and signals.anywhere(peers) is None:
            losses = comparison.train_step()
            step = comparison.step
            bar.set_postfix_str("loss: " + "  ".join(f"{n} {x:.3f}" for n, x in losses.items()), refresh=False)
            bar.update()
            if step % evaluate_every == 0 and step < steps:
                held_out = comparison.evaluate()
                line = f"step {step}/{steps}  held-out loss: "
                line += "  ".join(f"{name} {loss:.4f}" for name, loss in held_out.items())
                if terminal:
                    bar.write(line)
                else:
                    left = (time.monotonic() - began) / (step - first) * (steps - step)
                    print(f"{line}  {left:.0f} s left", flush=True)
            if step % options.save_every == 0 and step < steps:
                comparison.save(checkpoint)


class Signals:
    """Within the context the first SIGINT or SIGTERM is noted in `caught`; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def anywhere(self, peers: "Peers | None") -> signal.Signals | None:
        """The signal to any of the ranks, the same on all of them; it is `caught` on all then."""
        if peers is None:
            return self.caught
        own = torch.tensor([self.caught or 0], device=peers.device_type())
        highest = int(torch.cat(peers.gather(own)).max())
        if not highest:
            return None  # whatever was caught since: the others do not know of it, and hear at the next call
        self.caught = signal.Signals(highest)
        return self.caught

    def note(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number)


def plot(history: dict[str, list[list[float]]], path: Path) -> None:
    """Draw the losses: training thin, held-out with dots. The PNG at `path` is replaced in one go."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, color) in enumerate((("baseline", "tab:gray"), ("engram", "tab:blue")), start=1):
        steps = [entry[0] for entry in history["train"]]
        axes.plot(steps, [entry[index] for entry in history["train"]], color=color, linewidth=0.7, alpha=0.5,
                  label=f"{name}, training")
        steps = [entry[0] for entry in history["held_out"]]
        axes.plot(steps, [entry[index] for entry in history["held_out"]], color=color, marker="o", markersize=4,
                  label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="The same language model with and without Engram")
    axes.grid(alpha=0.3)
    axes.legend()
    part = path.with_suffix(".part")
    FigureCanvasAgg(figure).print_png(str(part))
    os.replace(part, path)
