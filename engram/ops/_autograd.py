"""How an operator, its gradient and its public function are tied together."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]
) -> Callable[..., Any]:
    """Register the gradient of ``engram::name``; returns the function to call the operator by, with all its arguments in
    the order of its schema.

    That is the operator itself where something traces it (torch.compile, torch.export, torch.func). Elsewhere it is a
    ``torch.autograd.Function`` of the same two functions, or just the operator below autograd where no gradient is asked
    for: the autograd kernel that torch.library makes looks up the defaults of all arguments in Python at every call,
    which costs more than the kernels of a few hundred tokens.
    """
    torch.library.register_autograd(f"engram::{name}", backward, setup_context=setup_context)
    operator = getattr(torch.ops.engram, name).default

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = operator(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    eager: Any = type(f"engram_{name}", (torch.autograd.Function,), methods)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return operator(*args)
        # Inside a level of forward-mode AD the Function says that it has none; the operator would drop the tangents.
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args) or forward_ad._current_level >= 0:
            return eager.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return call
