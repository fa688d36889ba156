"""Questions about the surroundings of a call, asked of torch in one place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_recomputation() -> bool:
    """Say whether this forward pass runs inside a backward pass, as activation checkpointing does."""
    return torch._C._current_graph_task_id() != -1


def is_transformed() -> bool:
    """Say whether ``torch.func`` (vmap, grad, jvp, ...) is at work on this call."""
    # Under torch.compile the transforms are traced, and the compiler asks for itself.
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Say whether tangents may be on their way through this call."""
    return forward_ad._current_level >= 0


def is_observed(x: Tensor) -> bool:
    """Say whether someone records or replaces the operations on ``x``: what leaves torch would be lost to them."""
    return (
        type(x) not in (Tensor, nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_plain(x: Tensor) -> bool:
    """Say whether this is an ordinary forward pass on the CPU: no compiler, transform or tracer."""
    # All questions of this file in one expression, by short names: layers ask them in every call.
    return (
        not torch.compiler.is_compiling()
        and (type(x) is Tensor or type(x) is nn.Parameter)
        and x.is_cpu
        and _interpreter() is None
        and forward_ad._current_level < 0
        and _modes() == 0
        and _tracing_state() is None
    )


def is_unseen(*tensors: Tensor | None) -> bool:
    """Say whether autograd alone has to see an operation on these: no compiler, transform, tracer, mode or subclass."""
    return (
        not torch.compiler.is_compiling()
        and _interpreter() is None
        and _modes() == 0
        and _function_modes() == 0
        and _tracing_state() is None
        and _PLAIN.issuperset(map(type, tensors))
    )


_PLAIN = frozenset((Tensor, nn.Parameter, type(None)))
_interpreter = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing_state = torch._C._get_tracing_state
