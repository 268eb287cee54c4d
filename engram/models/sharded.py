"""The comparison of `training`, by several ranks: each takes its share of the windows of every batch, the tables of the
Engram layers are spread over the ranks, everything else is the same on all of them.

Up to the order of float sums, the losses are those of one process; held-out losses, of the same weights, to the bit.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from engram import distributed
from engram.distributed.model import reduce_gradients, sharded_parameters
from engram.distributed.peers import Peers
from engram.models.corpus import IGNORE, Corpus
from engram.models.lm import LanguageModel
from engram.models.training import MAX_GRAD_NORM, METADATA, NAMES, CheckpointError, Comparison, Trainee, TrainConfig


class ShardedTrainee(Trainee):
    """Trainee for one rank of many, which takes these windows of every batch."""

    def __init__(self, *arguments: Any, peers: Peers, windows: slice) -> None:
        self.peers, self.windows = peers, windows
        super().__init__(*arguments)
        for optimizer in self.optimizers:
            distributed.shard_optimizer_state(optimizer, self.model)

    def _prepare(self, model: LanguageModel) -> LanguageModel:
        return distributed.shard_tables(model, self.peers.group)

    def _gradients(self, step: int, batch: tuple[Tensor, ...]) -> float:
        model, mine = self.model, tuple(tensor[self.windows] for tensor in batch)
        counted, total = (int((targets != IGNORE).sum()) for targets in (mine[1], batch[1]))
        # The mean over all tokens is the sum of the ranks' shares; their gradients are summed, too.
        loss = self._loss(mine) * (counted / total) if counted else 0 * model(mine[0].to(self.device)).sum()
        shares = self.peers.gather(loss.detach().double())
        value = self._finite(step, torch.stack(shares).sum().item())
        model.zero_grad()
        loss.backward()
        sharded = {id(param) for param in sharded_parameters(model)}
        reduce_gradients([param for param in model.parameters() if id(param) not in sharded], self.peers)
        distributed.clip_grad_norm_(model, MAX_GRAD_NORM)
        return value


class ShardedComparison(Comparison):
    """Comparison for one rank of many. All ranks call the same methods in the same order.

    Raises:
        ValueError: ranks with other settings or another text, or more ranks than a batch has windows.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, device: str | torch.device, peers: Peers) -> None:
        windows = config.tokens // config.length
        settings = json.loads(config.to_json())
        del settings["text"]  # the same text may lie elsewhere
        peers.agree("engram train", **settings, text=corpus.fingerprint)
        if windows < peers.size:
            raise ValueError(f"tokens / length must be at least the number of ranks, {peers.size}, got {windows}")
        self.peers = peers
        self.windows = slice(windows * peers.rank // peers.size, windows * (peers.rank + 1) // peers.size)
        super().__init__(config, corpus, device)

    def _trainee(self, *arguments: Any) -> Trainee:
        return ShardedTrainee(*arguments, peers=self.peers, windows=self.windows)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rng": torch.get_rng_state()}
        for name in NAMES:
            optimizers = [get_optimizer_state_dict(self.models[name], optimizer) for optimizer in self.optimizers[name]]
            state[name] = {"model": self.models[name].state_dict(), "optimizers": optimizers}
        return state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to the folder `path`, which every number of ranks can load; before the first step there is
        nothing to save.

        Raises OSError where it cannot be written, on every rank.
        """
        if self.step == 0:
            return
        try:
            state = {"metadata": json.dumps(self._metadata()), "state": self._state()}
            distributed.save_checkpoint(state, path, self.step, self.peers.group)
        except distributed.CheckpointError as error:
            raise OSError(None, str(error), str(path)) from None

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over a checkpoint of this very run, by whatever number of ranks. Raises CheckpointError, as Comparison."""
        metadata = read_metadata(path, self.peers)
        self._refuse_another(path, metadata)
        found = {"state": self._state()}
        try:
            distributed.load_checkpoint(found, path, self.peers.group)
        except distributed.CheckpointError as error:
            raise CheckpointError(str(error)) from None
        state = found["state"]
        for name in NAMES:
            self.models[name].load_state_dict(state[name]["model"])
            for optimizer, entries in zip(self.optimizers[name], state[name]["optimizers"]):
                set_optimizer_state_dict(self.models[name], optimizer, entries)
        torch.set_rng_state(state["rng"])
        self.step = int(metadata["step"])
        self.history = json.loads(metadata["history"])


def read_metadata(path: str | os.PathLike[str], peers: Peers) -> dict[str, str]:
    """`training.read_metadata` of a checkpoint folder, on all ranks."""
    state = {"metadata": ""}
    try:
        distributed.load_checkpoint(state, Path(path), peers.group)
        metadata: dict[str, str] = json.loads(state["metadata"])
    except (distributed.CheckpointError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    if not METADATA <= metadata.keys():
        raise CheckpointError(f"{path} is not a checkpoint of engram train")
    return metadata
