"""What decoding keeps of a sequence: the state of one Engram layer, with which chunks equal one pass over all."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engram.ops import Ring


class EngramState:
    """State of one Engram layer for a batch of sequences, from `nn.Engram.init_state`.

    `layer(hidden, ids, state=state)` continues the sequences and appends its tokens; whatever the chunks, the results
    are those of one pass over everything. Tensors have fixed addresses and are updated in place, so a call can be
    captured in a CUDA graph; nothing is shared between states, or kept in the module. A pytree of its tensors.

    Attributes:
        history: `Ring` of the raw token ids; what n-grams look back on.
        conv: `Ring` of the convolution's inputs, for `ops.gate_conv(state=)`; None without a convolution.
        max_rollback: how many tokens `rollback` can take back.
    """

    def __init__(self, history: Ring, conv: Ring | None) -> None:
        self.history, self.conv = history, conv

    @property
    def rings(self) -> dict[str, Ring]:
        return {"history": self.history} | ({} if self.conv is None else {"conv": self.conv})

    @property
    def max_rollback(self) -> int:
        return self.history.max_rollback

    @property
    def batch_size(self) -> int:
        return self.position.shape[0]

    @property
    def device(self) -> torch.device:
        return self.position.device

    @property
    def position(self) -> Tensor:
        """int64 [B]: tokens appended so far (with `rows=` given to the layer, the convolution's count)."""
        return self.history.position if self.conv is None else self.conv.position

    def rollback(self, count: int | Tensor) -> None:
        """Take the last tokens back, as if they had never been appended: what speculation drafted and did not keep.

        Args:
            count: for all sequences, or int [B].

        Raises:
            ValueError: a negative count, or more than `max_rollback` or than were appended since `init_state`, `reset`
                or the last rollback allow (on CUDA such counts are cut off instead: checking would wait for the device).
        """
        if isinstance(count, Tensor) and tuple(count.shape) not in ((), (self.batch_size,)):
            raise ValueError(f"rollback: count must be an int or [{self.batch_size}], got {list(count.shape)}")
        wanted = torch.as_tensor(count, device=self.device).to(torch.int64).expand(self.batch_size)
        # With `rows=` the caller keeps the history, and only the convolution has anything to take back.
        rooms = [ring.tensors["room"] for ring in self.rings.values()]
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            room = torch.stack(rooms).amax(0)
            wrong = (wanted < 0) | (wanted > room)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise ValueError(f"rollback: count must be in [0, {room[row].item()}] for sequence {row} "
                                 f"(max_rollback is {self.max_rollback}), got {wanted[row].item()}")
        for ring, room in zip(self.rings.values(), rooms):
            ring.rollback(torch.minimum(wanted.clamp(min=0), room))

    def select(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was, as a beam search needs.

        Args:
            index: integer [B].

        Raises:
            ValueError: another shape or dtype.
            IndexError: an index outside the batch (CPU).
        """
        if index.is_floating_point() or index.dtype == torch.bool or tuple(index.shape) != (self.batch_size,):
            raise ValueError(f"select: index must be integer [{self.batch_size}], "
                             f"got {index.dtype} {list(index.shape)}")
        for ring in self.rings.values():
            ring.select(index.to(self.device))

    def reset(self, batch_index: int | Tensor | None = None) -> None:
        """Forget the sequences with these numbers (int, or integer tensor), or all."""
        rows = None if batch_index is None else torch.as_tensor(batch_index, device=self.device).view(-1).long()
        for ring in self.rings.values():
            ring.reset(rows)

    def clone(self) -> "EngramState":
        """A copy that shares nothing."""
        return self._map(Tensor.clone)

    def to(self, device: torch.device | str) -> "EngramState":
        """A copy on another device; itself if it is there already."""
        return self if torch.device(device) == self.device else self._map(lambda tensor: tensor.to(device))

    def state_dict(self) -> dict[str, Any]:
        """All tensors by name, sharing memory, and the sizes; for torch.save."""
        return {name: dict(tensors=dict(ring.tensors), reach=ring.reach, max_rollback=ring.max_rollback)
                for name, ring in self.rings.items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "EngramState":
        """The state that `state_dict` was asked of."""
        rings = {name: Ring.of(**ring) for name, ring in state.items()}
        return cls(rings["history"], rings.get("conv"))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "EngramState":
        tensors, context = _flatten(self)
        return _unflatten([function(tensor) for tensor in tensors], context)

    def __repr__(self) -> str:
        size = sum(t.nbytes for ring in self.rings.values() for t in ring.tensors.values())
        return f"EngramState(batch_size={self.batch_size}, max_rollback={self.max_rollback}, device={self.device}, " \
               f"{size:,} bytes)"


def _flatten(state: EngramState) -> tuple[list[Tensor], Any]:
    context = [(name, list(ring.tensors), ring.reach, ring.max_rollback) for name, ring in state.rings.items()]
    return [tensor for ring in state.rings.values() for tensor in ring.tensors.values()], context


def _unflatten(tensors: Iterable[Tensor], context: Any) -> EngramState:
    left, rings = list(tensors), {}
    for name, names, reach, max_rollback in context:
        own, left = left[: len(names)], left[len(names) :]
        rings[name] = Ring.of(dict(zip(names, own)), reach, max_rollback)
    return EngramState(rings["history"], rings.get("conv"))


def _flatten_with_keys(state: EngramState) -> tuple[list[tuple[Any, Tensor]], Any]:
    tensors, context = _flatten(state)
    names = [f"{ring}.{name}" for ring, own, *_ in context for name in own]
    return [(pytree.MappingKey(name), tensor) for name, tensor in zip(names, tensors)], context


pytree.register_pytree_node(
    EngramState, _flatten, _unflatten, serialized_type_name="engram.EngramState",
    flatten_with_keys_fn=_flatten_with_keys,
)
