"""Train two language models that differ only in the Engram layer, side by side, on the same batches.

Same backbone weights at the start, same data order, same optimizer and schedule. The schedule does not depend on the
number of steps: a run that is stopped and resumed, also with more steps, equals one that never stopped, bit for bit (on
one device, torch version and thread count).
"""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram import optim
from engram.config import EngramConfig
from engram.models.corpus import Corpus, held_out_batches, training_batch
from engram.models.generation import generate
from engram.models.lm import MIXINGS, LanguageModel, LanguageModelConfig
from engram.nn import MultiHeadEmbedding
from engram.vocab import TokenMap

BASELINE, ENGRAM = NAMES = ("baseline", "engram")
# What steps the tables; the rest is AdamW's. "adamw" is dense: a step costs what the table holds.
BETAS = (0.9, 0.95)
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "row-wise-adam": lambda groups: optim.RowWiseAdam(groups, betas=BETAS),
    "row-wise-adagrad": lambda groups: optim.RowWiseAdagrad(groups),
    "lazy-adamw": lambda groups: optim.LazyAdamW(groups, betas=BETAS),
    "adamw": lambda groups: torch.optim.AdamW(groups, betas=BETAS, fused=True),
}
DTYPES = ("float32", "bfloat16", "float64")
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.1
TABLE_LR = 5.0  # the tables learn five times as fast and without weight decay, as in the paper
MAX_GRAD_NORM = 1.0
HELD_OUT_WINDOWS = 128
METADATA = {"config", "step", "history", "corpus", "token_map"}  # beside the tensors of a checkpoint
# Small enough for a dense Adam on two cores. Rows start small: beside token embeddings of std 0.02, rows of std 1 would
# be noise that the first hundred steps are spent on removing.
TABLES: dict[str, Any] = dict(max_ngram_size=3, heads_per_ngram=4, embed_dim_per_head=16, table_std=0.02)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that belongs to another run. One sentence."""


class DivergenceError(RuntimeError):
    """A loss that is not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting that decides the numbers of a run; all of it is kept in the checkpoint.

    Raises ValueError naming the field for a wrong value.
    """

    text: tuple[str, ...] = ()  # files and folders; empty: the standard library
    steps: int = 300
    tokens: int = 2048  # per step
    length: int = 256  # of a window
    vocab_size: int = 4096
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    branches: int = 1
    mixing: str = "static"  # of the branches, where there are several
    engram_layers: tuple[int, ...] = (1,)
    table_size: int = 20000  # rows of each of the 8 tables of an Engram layer, about
    seed: int = 0
    lr: float = 3e-3  # the best for the baseline of 2, 3, 4, 5.5 and 8e-3
    warmup: int = WARMUP_STEPS
    dtype: str = "float32"  # bfloat16: float32 weights under autocast
    optimizer: str = "adamw"  # of the tables, out of OPTIMIZERS

    def __post_init__(self) -> None:
        for name in ("text", "engram_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("steps", "tokens", "hidden_size", "layers", "heads", "branches", "table_size", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, got {self.length}")
        if self.tokens % self.length:
            raise ValueError(f"tokens must be a multiple of length = {self.length}, got {self.tokens}")
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size must be at least 257 (256 bytes and end of text), got {self.vocab_size}")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size must be a multiple of 2 * heads = {2 * self.heads}, got {self.hidden_size}")
        if not self.engram_layers or len(set(self.engram_layers)) < len(self.engram_layers):
            raise ValueError(f"engram_layers must name each layer once, got {list(self.engram_layers)}")
        if not all(0 <= layer < self.layers for layer in self.engram_layers):
            raise ValueError(f"engram_layers must lie in [0, layers = {self.layers}), got {list(self.engram_layers)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive, got {self.lr}")
        for name, known in (("dtype", DTYPES), ("optimizer", OPTIMIZERS), ("mixing", MIXINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Raises ValueError where the text is none of to_json's, or of another version's."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not the settings of this version of engram: {error}") from None


def build_optimizers(model: nn.Module, lr: float, table_optimizer: str) -> list[torch.optim.Optimizer]:
    """AdamW for the matrices, with weight decay, and for norms and taps, without; the other one for the tables."""
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    tables = [m.weight for m in model.modules() if isinstance(m, MultiHeadEmbedding)]
    taken = set(map(id, [*matrices, *tables]))
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        dict(params=matrices, lr=lr, weight_decay=WEIGHT_DECAY, peak_lr=lr),
        dict(params=rest, lr=lr, weight_decay=0.0, peak_lr=lr),
    ]
    optimizers = [OPTIMIZERS["adamw"](groups)]
    if tables:
        lr *= TABLE_LR
        optimizers.append(OPTIMIZERS[table_optimizer]([dict(params=tables, lr=lr, weight_decay=0.0, peak_lr=lr)]))
    return optimizers


def schedule(step: int, warmup: int = WARMUP_STEPS) -> float:
    """Factor of the learning rate at a step (from 0): linear warm-up, then the inverse square root."""
    falling: float = (warmup / (step + 1)) ** 0.5
    return min((step + 1) / warmup, falling)


def model_config(config: TrainConfig, token_map: TokenMap, with_engram: bool) -> LanguageModelConfig:
    """Of a model trained with these settings on text of that vocabulary."""
    common: dict[str, Any] = dict(
        vocab_size=token_map.vocab_size, hidden_size=config.hidden_size, branches=config.branches
    )
    engram = None
    if with_engram:
        engram = EngramConfig(
            **common,
            **TABLES,
            table_size=config.table_size,
            compressed_vocab_size=token_map.compressed_vocab_size,
            layer_ids=config.engram_layers,
            pad_id=0,  # END_OF_TEXT
            seed=config.seed,
            sparse_grad=config.optimizer != "adamw",
        )
    return LanguageModelConfig(
        **common, layers=config.layers, heads=config.heads, engram=engram, mixing=config.mixing
    )


class Trainee:
    """One model and what trains it: `[optimizer of the backbone, of the tables]`.

    Args:
        config: the settings of the run; the weights are drawn with its seed.
        model: its sizes, from `model_config`, changed at will.
        token_map: that of the text's tokenizer.
        device: where it is trained.
        name: of the model, in messages.
    """

    def __init__(
        self, config: TrainConfig, model: LanguageModelConfig, token_map: TokenMap, device: str | torch.device = "cpu",
        name: str = "model",
    ) -> None:
        self.config, self.device, self.name = config, torch.device(device), name
        torch.manual_seed(config.seed)
        built = LanguageModel(model, token_map)
        self.model = self._prepare((built.double() if config.dtype == "float64" else built).to(self.device))
        self.optimizers = build_optimizers(self.model, config.lr, config.optimizer)

    def train_step(self, step: int, batch: tuple[Tensor, ...]) -> float:
        """One optimizer step on `training_batch`'s; returns the loss.

        Raises DivergenceError where it is not finite; nothing is changed then.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * schedule(step, self.config.warmup)
        value = self._gradients(step, batch)
        for optimizer in self.optimizers:
            optimizer.step()
        return value

    def _prepare(self, model: LanguageModel) -> LanguageModel:
        return model

    def _gradients(self, step: int, batch: tuple[Tensor, ...]) -> float:
        """The loss of a batch; its clipped gradients are the parameters' afterwards."""
        loss = self._loss(batch)
        value = self._finite(step, loss.item())
        self.model.zero_grad()
        loss.backward()
        optim.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        return value

    def _finite(self, step: int, loss: float) -> float:
        if not math.isfinite(loss):
            raise DivergenceError(f"the {self.name}'s loss is {loss} at step {step + 1}; try a smaller lr")
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[tuple[Tensor, ...]]) -> float:
        """Mean loss over all targets of the batches that count; NaN where none does."""
        total, count = 0.0, 0
        for batch in batches:
            if targets := int((batch[1] >= 0).sum()):
                total += self._loss(batch).item() * targets
                count += targets
        return total / count if count else math.nan

    def _loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, targets, documents = (tensor.to(self.device) for tensor in batch)
        half = self.config.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext():
            return self.model.loss(tokens, targets, documents)


def batch_of_step(config: TrainConfig, corpus: Corpus, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the step, counted from 0, trains on."""
    shape = dict(batch=config.tokens // config.length, length=config.length)
    return training_batch(corpus.train, **shape, seed=config.seed, step=step)


def batches_held_out(config: TrainConfig, corpus: Corpus) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What the held-out loss is measured on: at most HELD_OUT_WINDOWS windows."""
    shape = dict(batch=config.tokens // config.length, length=config.length)
    return held_out_batches(corpus.held_out, **shape, windows=HELD_OUT_WINDOWS)


class Comparison:
    """Both models, their optimizers (`{name: [for the backbone, for the tables]}`), the step reached and the losses.

    `history` is `{"train": [[step, baseline, engram], ...], "held_out": [...]}`.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, device: str | torch.device = "cpu") -> None:
        self.config, self.corpus, self.device = config, corpus, torch.device(device)
        self.token_map = TokenMap.from_tokenizer(corpus.tokenizer)
        self.trainees = {
            name: self._trainee(config, model_config(config, self.token_map, name == ENGRAM), self.token_map, device, name)
            for name in NAMES
        }
        self.models = {name: trainee.model for name, trainee in self.trainees.items()}
        self.optimizers = {name: trainee.optimizers for name, trainee in self.trainees.items()}
        self.step = 0
        self.seconds = dict.fromkeys(NAMES, 0.0)  # of the steps made here
        self.history: dict[str, list[list[float]]] = {"train": [], "held_out": []}

    def _trainee(self, *arguments: Any) -> Trainee:
        return Trainee(*arguments)

    def parameter_counts(self) -> dict[str, int]:
        """`{"baseline": n, "engram": n, "tables": n}`; the tables are part of "engram"."""
        counts = {name: sum(p.numel() for p in model.parameters()) for name, model in self.models.items()}
        tables = [m for m in self.models[ENGRAM].modules() if isinstance(m, MultiHeadEmbedding)]
        counts["tables"] = sum(sum(m.sizes) * m.dim for m in tables)
        counts[ENGRAM] += counts["tables"] - sum(m.weight.numel() for m in tables)  # rows that other ranks have
        return counts

    def optimizer_bytes(self) -> dict[str, int]:
        """`{"baseline": n, "engram": n, "tables": n}`: memory of the optimizers' state so far; "tables" is the part
        that the tables' optimizer has."""
        def size(optimizer: torch.optim.Optimizer) -> int:
            return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())

        sizes = {name: sum(map(size, optimizers)) for name, optimizers in self.optimizers.items()}
        return sizes | {"tables": size(self.optimizers[ENGRAM][-1])}

    def train_step(self) -> dict[str, float]:
        """One optimizer step of each model on the batch of this step. Returns the losses `{name: float}`.

        Raises DivergenceError where a loss is not finite; the step then does not count.
        """
        batch = batch_of_step(self.config, self.corpus, self.step)
        losses = {}
        for name, trainee in self.trainees.items():
            began = time.perf_counter()
            losses[name] = trainee.train_step(self.step, batch)
            self.seconds[name] += time.perf_counter() - began
        self.step += 1
        self.history["train"].append([self.step, *losses.values()])
        return losses

    def evaluate(self) -> dict[str, float]:
        """Mean held-out losses `{name: float}`, per token; recorded once a step."""
        batches = batches_held_out(self.config, self.corpus)
        losses = {name: trainee.evaluate(batches) for name, trainee in self.trainees.items()}
        if not self.history["held_out"] or self.history["held_out"][-1][0] != self.step:
            self.history["held_out"].append([self.step, *losses.values()])
        return losses

    def sample(self, name: str, prompt: int = 24, count: int = 48, temperature: float = 0.8) -> tuple[str, str]:
        """A prompt of so many held-out tokens and the model's continuation of so many, as text; always the same."""
        stream = self.corpus.held_out
        tokens = torch.from_numpy(stream.tokens[: min(prompt, len(stream) - 1)].astype("int64"))[None].to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        found = generate(self.models[name], tokens, count, temperature=temperature, generator=generator)
        return tuple(self.corpus.tokenizer.decode(ids[0].tolist()) for ids in (tokens, found))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to `path` (safetensors). A file already there is replaced only by a complete one.

        Raises OSError where it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {"rng": torch.get_rng_state()}
        for name in NAMES:
            for key, tensor in self.models[name].state_dict().items():
                tensors[f"{name}.model.{key}"] = tensor
            for number, optimizer in enumerate(self.optimizers[name]):
                for index, state in optimizer.state_dict()["state"].items():
                    for key, tensor in state.items():
                        tensors[f"{name}.optimizer.{number}.{index}.{key}"] = tensor
        metadata = {"format": "pt", **self._metadata()}
        path = Path(path)
        part = path.with_name(path.name + ".part")
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part, metadata)
            _fsync(part)
            os.replace(part, path)
            _fsync(path.parent)
        except SafetensorError as error:
            raise OSError(errno.EIO, f"cannot be written: {error}", str(path)) from None
        finally:
            part.unlink(missing_ok=True)

    def _metadata(self) -> dict[str, str]:
        return {
            "config": self.config.to_json(),
            "step": str(self.step),
            "history": json.dumps(self.history),
            "corpus": self.corpus.fingerprint,
            "token_map": self.token_map.fingerprint,
        }

    def _refuse_another(self, path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
        """Raises CheckpointError unless the metadata is that of this very run."""
        stored = TrainConfig.from_json(metadata["config"])
        differing = [
            f.name for f in fields(stored)
            if f.name not in ("steps", "text") and getattr(stored, f.name) != getattr(self.config, f.name)
        ]
        if differing:
            raise CheckpointError(f"{path} was trained with another {', '.join(differing)}")
        if metadata["corpus"] != self.corpus.fingerprint or metadata["token_map"] != self.token_map.fingerprint:
            raise CheckpointError(f"{path} was trained on another text: the files or the tokenizer have changed")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over models, optimizers, step and history of a checkpoint of this very run (steps may differ).

        Raises CheckpointError where it cannot be read or differs in settings or text; nothing is changed then.
        """
        from safetensors.torch import load_file

        metadata = read_metadata(path)
        self._refuse_another(path, metadata)
        tensors = load_file(path)
        for name in NAMES:
            prefix = f"{name}.model."
            self.models[name].load_state_dict(
                {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            )
            for number, optimizer in enumerate(self.optimizers[name]):
                prefix = f"{name}.optimizer.{number}."
                state = optimizer.state_dict() | {"state": {}}
                for key, tensor in tensors.items():
                    if key.startswith(prefix):
                        index, entry = key.removeprefix(prefix).split(".")
                        state["state"].setdefault(int(index), {})[entry] = tensor
                optimizer.load_state_dict(state)
        torch.set_rng_state(tensors["rng"])
        self.step = int(metadata["step"])
        self.history = json.loads(metadata["history"])


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a checkpoint. Raises CheckpointError where it is missing, damaged or of another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not METADATA <= metadata.keys():
        raise CheckpointError(f"{path} is not a checkpoint of engram train")
    return metadata


def load_model(path: str | os.PathLike[str]) -> tuple[LanguageModel, TokenMap, TrainConfig]:
    """The model with Engram layers of a checkpoint, its token map and its settings, on the CPU.

    Raises CheckpointError where the checkpoint cannot be read.
    """
    from safetensors import safe_open

    config = TrainConfig.from_json(read_metadata(path)["config"])
    prefix = f"{ENGRAM}.model."
    with safe_open(path, framework="pt") as file:
        state = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}
    ids = state.get(f"engrams.{config.engram_layers[0]}.hash.token_map")
    if ids is None:
        raise CheckpointError(f"{path} has no token map")
    try:
        token_map = TokenMap(ids)
        model = LanguageModel(model_config(config, token_map, True))
        model.to(state["embedding.weight"].dtype).load_state_dict(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit its own settings: {error}") from None
    return model, token_map, config


def _fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
