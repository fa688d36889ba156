"""Query torch's state: whether a transform, tracer, mode or compiler is active, or activations are recomputed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_compiled() -> bool:
    """Return whether torch.compile is compiling this code, or compiled code called it after a graph break."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    return torch.compiler.is_compiling() or callback() not in (None, False)


def is_recomputation() -> bool:
    """Return whether this forward pass runs inside a backward pass, as under activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform (vmap, grad, jvp, ...) is active."""
    # Return False in compiled code, because torch.compile traces transforms itself.
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(x: Tensor) -> bool:
    """Return whether ``x`` is wrapped by a ``torch.func`` transform.

    A transform wraps the arguments of the function that it transforms.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def is_observed(x: Tensor) -> bool:
    """Return whether a tensor subclass, a dispatch mode or a tracer intercepts torch operations on ``x``.

    If so, this library's own kernels must not run, because they would bypass the interception.
    """
    return (
        type(x) not in (Tensor, nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_plain(x: Tensor) -> bool:
    """Return whether ``x`` is an ordinary CPU tensor and no compiler, transform, dispatch mode or tracer is active.

    Here, forward-mode differentiation counts as a transform.
    """
    # This is one expression with module-level aliases for speed, because layers run it on every call.
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
    """Return whether nothing except autograd intercepts torch operations on these tensors.

    That is the case if no compiler, transform, tracer, mode or tensor subclass is involved.
    """
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
