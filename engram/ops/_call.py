"""How an operator with autograd is called."""

import torch


def call(op, *args, **options):
    """``op(*args, **options)``; where no argument of `args` asks for a gradient, without the detour through the
    autograd kernel, which is written in Python and costs more than the lookup of a few tokens."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
        return op(*args, **options)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **options)
