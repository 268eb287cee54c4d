"""Optimizers whose step over a table costs what the batch touched, not what the table holds.

They take the sparse gradients of `engram.ops.embedding(..., sparse_grad=True)` (or torch's own) and make one pass over
the touched rows: row, state and gradient are read once, row and state written once (`engram.ops.row_update`, which has
the formulas). A gradient that is not coalesced, as several backwards before one step leave it, is summed in float32. On
a dense gradient every row counts as touched, and SGD is torch.optim.SGD.

What is lazy about all of them: a row that a step does not touch keeps its value and its state. Moments do not decay
there and weight decay, always decoupled, does not act there; bias corrections count all steps. With every row touched
in every step LazyAdamW is torch.optim.AdamW.

State is float32 (float64 for float64 parameters), also for half tables. Updated parameters are rounded to nearest, or
with `stochastic_rounding` for bfloat16 ones at random, so that updates far below a rounding step are not lost but right
in the mean; the random bits depend on `seed`, step, row and column only.
"""
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engram import ops
from engram.nn import MultiHeadEmbedding
from engram.storage import zeros_where_touched

__all__ = ["SGD", "RowWiseAdagrad", "RowWiseAdam", "LazyAdamW", "param_groups", "clip_grad_norm_"]


class _RowOptimizer(torch.optim.Optimizer):
    """What the four have in common. `_states` names the entries beside "step" and says which have one number a row."""

    _rule: str
    _states: dict[str, str]  # name in state_dict -> argument of row_update, "first" or "second"
    _per_row = False  # whether "second" is [R]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            check = _CHECKS.get(name)
            for number in value if isinstance(value, tuple) else (value,):
                if check and not check[0](number):
                    raise ValueError(f"{type(self).__name__}: {name} must be {check[1]}, got {value}")
        super().__init__(params, defaults)

    @staticmethod
    def _row_shape(param: Tensor) -> tuple[int, int]:
        """Parameters are matrices of rows: all but the last dimension count rows, and a vector is one row."""
        width = param.shape[-1] if param.dim() else 1
        return (param.numel() // width if width else 0, width)

    def _used(self, group: dict[str, Any]) -> dict[str, str]:
        """Of the states those that this group keeps: the first moment only with momentum."""
        return {n: a for n, a in self._states.items() if a == "second" or group.get("momentum", True)}

    @staticmethod
    def _factors(group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group.get("betas") or (group.get("momentum", 0.0), 0.0)
        return dict(beta1=beta1, beta2=beta2, eps=group.get("eps", 0.0))

    def _state_shape(self, param: Tensor, argument: str) -> tuple[int, ...]:
        return self._row_shape(param)[:1] if argument == "second" and self._per_row else tuple(param.shape)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            state["step"] = torch.zeros(1, dtype=torch.int64, device=param.device)
            for name, argument in self._used(group).items():
                shape = self._state_shape(param, argument)
                state[name] = zeros_where_touched(shape, dtype=dtype, device=param.device)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient, sparse (coalesced or not) or dense.

        Args:
            closure: recomputes the loss, with gradients; what it returns is returned.

        Raises:
            ValueError: a sparse gradient with another than one sparse dimension, a parameter that is not contiguous, or
                what `engram.ops.row_update` refuses.
            IndexError: a sparse gradient with rows that the parameter has not (CPU).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.layout == torch.sparse_coo:
                    plan, values = _plan_of(param.grad, self._row_shape(param)[0])
                    self._update(param, group, values, plan)
                else:
                    self._update(param, group, param.grad, None)
        return loss

    @torch.no_grad()
    def step_plan(self, param: Tensor, plan: ops.RowPlan, grad: Tensor) -> None:
        """One step on one table straight from the gradient of the rows that were looked up.

        No sparse tensor is built: sums are never rounded to the table's dtype, nothing waits for a CUDA device, and the
        call can be captured in a CUDA graph (with the learning rate it had then). For a lookup outside of autograd:

            rows_out = engram.ops.embedding(table.detach(), rows).requires_grad_()
            ...loss.backward()
            optimizer.step_plan(table, engram.ops.row_plan(rows, len(table)), rows_out.grad)

        Args:
            param: [R, d], one of this optimizer's parameters.
            plan: of the looked up rows.
            grad: [..., C, d], one row for each slot of the plan.

        Raises:
            ValueError: a parameter of another optimizer, or what `engram.ops.row_update` refuses.
        """
        for group in self.param_groups:
            if any(param is own for own in group["params"]):
                return self._update(param, group, grad, plan)
        raise ValueError(f"{type(self).__name__}.step_plan: param must be one of this optimizer's parameters")

    def _update(self, param: Tensor, group: dict[str, Any], grad: Tensor, plan: ops.RowPlan | None) -> None:
        if not param.is_contiguous():
            raise ValueError(f"{type(self).__name__}: parameters must be contiguous, got strides {param.stride()}")
        state, shape = self._state_of(param, group), self._row_shape(param)
        state["step"] += 1
        states: dict[str, Tensor] = {}
        for name, argument in self._used(group).items():
            states[argument] = state[name].view(shape[: 1 if argument == "second" and self._per_row else 2])
        keys, runs, count = plan or (None, None, None)
        stochastic = group["stochastic_rounding"] and param.dtype == torch.bfloat16
        ops.row_update(
            param.view(shape), states.get("first"), states.get("second"), grad.reshape(shape) if plan is None else grad,
            keys, runs, count, state["step"], rule=self._rule, lr=float(group["lr"]),
            weight_decay=group["weight_decay"], maximize=group["maximize"], seed=group["seed"] if stochastic else None,
            **self._factors(group),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`, bit for bit: state keeps its dtype also where the parameters are of half width.

        Raises:
            ValueError: other groups or parameters than this optimizer's, or state of another shape; nothing is changed
                then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        params = [param for group in self.param_groups for param in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        loaded = {}
        for index, param in zip(ids, params):
            if index not in state_dict["state"]:
                continue
            state = state_dict["state"][index]
            for name, argument in self._states.items():
                shape = self._state_shape(param, argument)
                if name in state and tuple(state[name].shape) != shape:
                    raise ValueError(f"{type(self).__name__}.load_state_dict: {name} of parameter {index} must be "
                                     f"{list(shape)}, got {list(state[name].shape)}")
            loaded[param] = {name: value.detach().to(param.device, copy=True) for name, value in state.items()}
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(loaded)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda x: math.isfinite(x) and x >= 0, "at least 0"),
    "momentum": (lambda x: isinstance(x, bool) or 0 <= x < 1, "in [0, 1)"),
    "betas": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "eps": (lambda x: math.isfinite(x) and x >= 0, "at least 0"),
    "weight_decay": (lambda x: math.isfinite(x) and x >= 0, "at least 0"),
    "seed": (lambda x: isinstance(x, int) and -(2**63) <= x < 2**63, "an integer of 64 bits"),
}


class SGD(_RowOptimizer):
    """Stochastic gradient descent: `m = momentum m + g; w -= lr m`, one buffer [R, d] only with momentum.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate.
        momentum: in [0, 1).
        weight_decay: decoupled, on touched rows: they are multiplied by `1 - lr * weight_decay`.
        maximize: ascend.
        stochastic_rounding: for bfloat16 parameters; others are rounded to nearest.
        seed: of the stochastic rounding.

    Raises:
        ValueError: a number out of its range.
    """

    _rule, _states = "sgd", {"momentum_buffer": "first"}

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, *, maximize: bool = False,
        stochastic_rounding: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, dict(
            lr=lr, momentum=momentum, weight_decay=weight_decay, maximize=maximize,
            stochastic_rounding=stochastic_rounding, seed=seed))


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad with one number a row: `s += mean(g^2); w -= lr g / (sqrt(s) + eps)`. State: 4 bytes a row.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate.
        eps: added to the root.
        weight_decay: decoupled, on touched rows.
        maximize: ascend.
        stochastic_rounding: for bfloat16 parameters; others are rounded to nearest.
        seed: of the stochastic rounding.

    Raises:
        ValueError: a number out of its range.
    """

    _rule, _states, _per_row = "adagrad", {"sum": "second"}, True

    def __init__(
        self, params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, *, maximize: bool = False,
        stochastic_rounding: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, dict(
            lr=lr, eps=eps, weight_decay=weight_decay, maximize=maximize, stochastic_rounding=stochastic_rounding,
            seed=seed))


class RowWiseAdam(_RowOptimizer):
    """Adam with one second moment a row, of mean(g^2), and a first moment [R, d] unless `momentum` is False.

    Without the first moment the state is 4 bytes a row.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the root.
        weight_decay: decoupled, on touched rows.
        momentum: keep a first moment.
        maximize: ascend.
        stochastic_rounding: for bfloat16 parameters; others are rounded to nearest.
        seed: of the stochastic rounding.

    Raises:
        ValueError: a number out of its range.
    """

    _rule, _states, _per_row = "adam", {"exp_avg": "first", "exp_avg_sq": "second"}, True

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, momentum: bool = True, *, maximize: bool = False, stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, dict(
            lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, momentum=momentum, maximize=maximize,
            stochastic_rounding=stochastic_rounding, seed=seed))


class LazyAdamW(_RowOptimizer):
    """AdamW on the touched rows, with both moments [R, d].

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the root.
        weight_decay: decoupled, on touched rows.
        maximize: ascend.
        stochastic_rounding: for bfloat16 parameters; others are rounded to nearest.
        seed: of the stochastic rounding.

    Raises:
        ValueError: a number out of its range.
    """

    _rule, _states = "adam", {"exp_avg": "first", "exp_avg_sq": "second"}

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, maximize: bool = False, stochastic_rounding: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, dict(
            lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, maximize=maximize,
            stochastic_rounding=stochastic_rounding, seed=seed))


def param_groups(
    model: nn.Module, lr: float, weight_decay: float, table_lr_multiplier: float = 5.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the lookup tables learn faster and do not decay (arXiv:2601.07372, section 4.1).

    Args:
        model: any module with Engram layers in it; parameters that need no gradient are left out.
        lr: learning rate of everything but the tables.
        weight_decay: likewise.
        table_lr_multiplier: the tables learn at `lr` times this.

    Returns:
        `[{params, lr, weight_decay}, {params, lr, weight_decay}]`, the tables last; a group without parameters is left
        out. Pass the two to two optimizers where the tables are to have one of their own.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, MultiHeadEmbedding)}
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        dict(params=[p for p in params if id(p) not in tables], lr=lr, weight_decay=weight_decay),
        dict(params=[p for p in params if id(p) in tables], lr=lr * table_lr_multiplier, weight_decay=0.0),
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, right for sparse gradients too.

    The norm is that of the gradient itself: entries of the same row are added up first (a sparse gradient that is not
    coalesced is replaced by one that is), in float32.

    Args:
        parameters: one or many; those without a gradient are passed over.
        max_norm: what the norm of all gradients together is brought down to.
        norm_type: p of the norm; may be infinite.
        error_if_nonfinite: raise for a norm that is NaN or infinite.

    Returns:
        The norm before clipping, a scalar in float32 (float64 with float64 gradients), on the device of the first
        gradient.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; the gradients are unchanged then.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = total_norm(parameters, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {total.item()}, so they cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for x in _gradient_values(parameters):
        x.mul_(factor.to(x.device))
    return total


@torch.no_grad()
def total_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm that `clip_grad_norm_` returns, which has the arguments in its documentation; clips nothing."""
    values = _gradient_values([parameters] if isinstance(parameters, Tensor) else parameters)
    if not values:
        return torch.zeros(())
    device = values[0].device
    norms = [torch.linalg.vector_norm(x, norm_type, dtype=_sum_dtype(x)).to(device) for x in values if x.numel()]
    wide = torch.float64 if any(x.dtype == torch.float64 for x in values) else torch.float32
    each = torch.stack([norm.to(wide) for norm in norms]) if norms else torch.zeros(1, dtype=wide, device=device)
    total: Tensor = torch.linalg.vector_norm(each, norm_type)
    return total


def _gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The elements of each gradient there is; a sparse one that is not coalesced is replaced by one that is."""
    values: list[Tensor] = []
    for param in parameters:
        if param.grad is None:
            continue
        if param.grad.layout == torch.sparse_coo and not param.grad.is_coalesced():
            param.grad = _coalesce(param.grad)
        values.append(param.grad._values() if param.grad.layout == torch.sparse_coo else param.grad)
    return values


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _plan_of(grad: Tensor, num_rows: int) -> tuple[ops.RowPlan, Tensor]:
    """The plan of a sparse gradient's entries, and its values [n, d]. Entries in order are not sorted again."""
    if grad.sparse_dim() != 1 or grad.dim() != 2:
        raise ValueError(f"a sparse gradient must be of a matrix, by rows, got {list(grad.shape)} with "
                         f"{grad.sparse_dim()} sparse dimensions")
    return ops.row_plan(grad._indices()[0, :, None], num_rows), grad._values()


def _coalesce(grad: Tensor) -> Tensor:
    """grad.coalesce() with sums in float32, in the order of the entries."""
    plan, values = _plan_of(grad, grad.shape[0])
    rows, sums = ops.row_sum(values, *plan)
    return torch.sparse_coo_tensor(rows[None], sums, grad.shape, check_invariants=False, is_coalesced=True)
