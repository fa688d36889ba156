"""The one place that knows how a network is called on a batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a network is called with on a batch: a tensor as it is, the first of a tuple or list, a dict by name.

    Raises:
        TypeError: for anything else; ``forward=`` is the way out.

    >>> arguments((torch.zeros(2), "labels"))
    ((tensor([0., 0.]),), {})

    Beyond the paper: a batch as loaders give it.
    """
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple | list) and batch:
        return (batch[0],), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise TypeError(
        f"cannot call a network on a batch of type {type(batch).__name__}: give a tensor, a tuple or list whose first"
        " item is the input, or a dict of named inputs; or say how with forward=lambda net, batch: net(...)"
    )


def call(net: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run the network on a batch.

    Raises:
        TypeError: if the network's ``forward`` cannot take the batch; ``forward=`` is the way out.
    """
    if forward is not None:
        return forward(net, batch)
    args, kwargs = arguments(batch)
    try:
        return net(*args, **kwargs)
    except TypeError as error:
        form = _misfit(net, args, kwargs)
        if form is None:
            raise
        called = "net(batch)" if isinstance(batch, Tensor) else "net(batch[0])" if args else "net(**batch)"
        raise TypeError(
            f"the network cannot be called as {called} on a batch of type {type(batch).__name__}: {form}; say how with"
            " forward=, for example forward=lambda net, batch: net(*batch)"
        ) from error


def _misfit(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Say why the network's ``forward`` cannot be called with these arguments; None if it can."""
    try:
        inspect.signature(net.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # no signature
        return None
    return None


def eagerly() -> AbstractContextManager[Any]:
    """Run what is compiled as it is written, for a while: compiled code need not see hooks that came after it."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def device_of(net: nn.Module) -> torch.device:
    """Return where the network's first parameter or buffer lives; the CPU for a network without any."""
    for tensor in (*net.parameters(), *net.buffers()):
        return tensor.device
    return torch.device("cpu")


def to_device(batch: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Return the batch with its tensors on a device; ``copy`` protects the caller's from in-place code."""

    def move(t: Tensor) -> Tensor:
        return t.detach().to(device, copy=copy)

    return map_tensors(batch, move)


def map_tensors(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Apply ``fn`` to each tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(x, fn) for x in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(x, fn) for x in tree)
    if isinstance(tree, dict):
        return {k: map_tensors(v, fn) for k, v in tree.items()}
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists, dicts and plain objects such as dataclasses, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        children: Any = tree.values()
    elif isinstance(tree, tuple | list):
        children = tree
    elif hasattr(tree, "__dataclass_fields__"):
        children = vars(tree).values()
    else:
        return []
    return [t for child in children for t in tensors_in(child)]
