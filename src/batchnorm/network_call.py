"""Call a network on a batch, and walk through the tensors in batches and outputs."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

Forward = Callable[[nn.Module, Any], Any]

LEAVES = (
    *(Tensor, nn.Module, np.ndarray, torch.dtype, torch.device, torch.Size),
    *(str, bytes, int, float, complex, type(None)),
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.fx.Graph),
)
"""Types whose parts :func:`walk` does not visit: tensors, modules, plain values and code."""


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for calling a network on a batch.

    A tensor or PackedSequence is passed unchanged. Of a tuple or list, only the first item is passed. A dict becomes
    keyword arguments.

    Raises:
        TypeError: if the batch has another type, is an empty tuple or list, or is a shape, such as (8, 3, 32, 32),
            instead of a tensor. For a batch of another type, pass ``forward=`` to :func:`call`.

    >>> arguments((torch.zeros(2), "labels"))
    ((tensor([0., 0.]),), {})
    """
    if isinstance(batch, Tensor | PackedSequence):
        return (batch,), {}
    if isinstance(batch, tuple | list) and batch:
        if len(batch) > 1 and all(type(item) is int for item in batch):
            raise TypeError(
                f"the batch {tuple(batch)} looks like a shape: pass a tensor, such as torch.randn{tuple(batch)}"
            )
        return (batch[0],), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, DataLoader | Iterator):
        raise TypeError(f"a {type(batch).__name__} is not a batch: pass one batch, such as next(iter(loader))")
    raise TypeError(
        f"cannot call a network on a batch of type {type(batch).__name__}: pass a tensor, a tuple or list whose first"
        " item is the input, or a dict of named inputs; for anything else, pass forward=lambda net, batch: net(...)"
    )


def check_network(net: Any) -> None:
    """Raise TypeError if ``net`` is not a network.

    >>> check_network(None)
    Traceback (most recent call last):
        ...
    TypeError: the network must be a torch.nn.Module, not NoneType: pass the network as the first argument
    """
    if isinstance(net, nn.Module):
        return
    found = f"{type(net).__name__}: pass the network as the first argument"
    if isinstance(net, type):
        found = f"the class {net.__name__}: pass an instance"
    raise TypeError(f"the network must be a torch.nn.Module, not {found}")


def check_batches(batches: Iterable[Any]) -> None:
    """Raise an error if ``batches`` is not an iterable of batches, or is one batch: a tensor or a dict."""
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes | nn.Module):
        found = type(batches).__name__
        raise TypeError(f"batches must be an iterable of batches, such as a list or a DataLoader, not {found}")
    if isinstance(batches, Mapping):
        raise ValueError("batches must be an iterable of batches, not one dict: pass [batch] for one batch")
    if isinstance(batches, Tensor):
        raise ValueError(
            f"batches must be an iterable of batches, not a tensor (got one of shape {tuple(batches.shape)}): pass [x]"
            " for one batch, or x.split(64) for several"
        )


@contextmanager
def at_index(index: int, batch: Any) -> Iterator[None]:
    """Inside the block, put the index of the batch into the messages of exceptions.

    >>> with at_index(3, torch.zeros(2, 3)):
    ...     raise ValueError("too few features")
    Traceback (most recent call last):
        ...
    ValueError: batch at index 3: too few features
    """
    # If a single batch (images, labels) is passed as batches, the network is called on the labels and fails.
    labels = index > 0 and isinstance(batch, Tensor) and batch.dim() < 2
    hint = " (if batches is one batch, pass [batch])" if labels else ""
    with _saying(f"batch at index {index}{hint}"):
        yield


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Inside the block, put ``what`` before the messages of exceptions; keep their types and tracebacks."""
    try:
        yield
    except Exception as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (f"{what}: {error.args[0]}",)
        raise


def call(net: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run the network on a batch.

    Raises:
        TypeError: if the network's ``forward`` cannot take the batch; pass ``forward=`` to say how to call the network.
    """
    if forward is not None:
        return forward(net, batch)
    args, kwargs = arguments(batch)
    several = isinstance(batch, tuple | list) and isinstance(batch[0], tuple | list | Mapping)
    given = f"the network got the first item of the batch, a {type(args[0]).__name__}" if several else ""
    try:
        with _saying(f"{given} (if this is a list of batches, pass one of them)") if several else nullcontext():
            return net(*args, **kwargs)
    except TypeError as error:
        form = _misfit(net, args, kwargs)
        if form is None:
            raise
        if isinstance(batch, Tensor | PackedSequence):
            called, working = "net(batch)", "net(batch, ...)"
        elif isinstance(batch, Mapping):
            called, working = "net(**batch)", 'net(batch["x"])'
        else:
            called, working = "net(batch[0])", "net(*batch)"
        raise TypeError(
            f"the network cannot be called as {called} on a batch of type {type(batch).__name__}: {form}. Pass a dict"
            " that maps the names of the network's inputs to their values. If the function that you called has a"
            f" forward= argument, you can instead say how to call the network: forward=lambda net, batch: {working}"
        ) from error


def _misfit(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why the network's ``forward`` cannot be called with these arguments, or None if no reason is known."""
    try:
        inspect.signature(net.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None


def eagerly() -> AbstractContextManager[Any]:
    """Return a context manager that disables torch.compile, because compiled code may ignore hooks added later."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def device_of(net: nn.Module) -> torch.device:
    """Return the device of the network's first parameter or buffer, or the CPU if there are none."""
    for tensor in (*net.parameters(), *net.buffers()):
        return tensor.device
    return torch.device("cpu")


def copy_for(net: nn.Module, batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of the batch on the network's device; if ``dtype`` is given, cast floating-point tensors to it."""
    device = device_of(net)
    # torch requires the batch_sizes of a PackedSequence to stay on the CPU.
    staying = {id(item.batch_sizes) for _, item in walk([("", batch)]) if isinstance(item, PackedSequence)}

    def move(t: Tensor) -> Tensor:
        target = t.device if id(t) in staying else device
        return t.detach().to(target, dtype if t.is_floating_point() else None, copy=True)

    return map_tensors(batch, move, lambda other: _with_tensors(other, move))


def _with_tensors(holder: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of an object with ``fn`` applied to its tensors.

    If the object has no tensors or cannot be copied, return the object itself.
    """
    try:
        memo: dict[int, Any] = {id(t): fn(t) for t in tensors_in(holder)}
        return deepcopy(holder, memo) if memo else holder
    except (TypeError, ValueError, RuntimeError):
        return holder


def map_tensors(tree: Any, fn: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None) -> Any:
    """Return nested tuples, lists and dicts with ``fn`` applied to the tensors, and ``other`` to all other leaves."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_make"):
        # Do not call type(tree)(...), because the constructor of PackedSequence accepts only tensors.
        return tree._make(map_tensors(x, fn, other) for x in tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(x, fn, other) for x in tree)
    if isinstance(tree, dict):
        return {k: map_tensors(v, fn, other) for k, v in tree.items()}
    return tree if other is None else other(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in a tree of containers and plain objects, in order.

    >>> from types import SimpleNamespace
    >>> tensors_in({"a": torch.zeros(1), "b": SimpleNamespace(c=torch.ones(1))})
    [tensor([0.]), tensor([1.])]
    """
    if isinstance(tree, Tensor):
        return [tree]
    return [item for _, item in walk([("", tree)]) if isinstance(item, Tensor)]


def walk(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield every object in the given trees with its path, such as ``output[0].features``.

    An object that occurs more than once is yielded each time, but its parts are yielded only once.
    """
    entered: dict[int, Any] = {}  # keeps the objects alive, so that no id() is reused
    waiting = list(roots)[::-1]
    while waiting:
        path, item = waiting.pop()
        yield path, item
        if not isinstance(item, LEAVES) and id(item) not in entered:
            entered[id(item)] = item
            # Reading attributes may raise any error, for example if the item is a dead weakref proxy or a closed file.
            with suppress(Exception):
                waiting.extend((path + label, part) for label, part in reversed(parts(item)))


def parts(item: Any) -> list[tuple[str, Any]]:
    """List an object's items, attributes and slots, each with a label such as ``[0]`` or ``.name``."""
    if isinstance(item, LEAVES):
        return []
    inside: list[tuple[str, Any]] = []
    if isinstance(item, Mapping):
        inside = [(f"[{key!r}]", item[key]) for key in item]
    elif isinstance(item, tuple | list | deque | Set):
        inside = [(f"[{i}]", part) for i, part in enumerate(item)]
    # Skip attributes that are also items: Hugging Face's model outputs hold each value as an item and as an attribute.
    known = {id(part) for _, part in inside}
    return inside + [(f".{name}", part) for name, part in _attributes(item) if id(part) not in known]


def _attributes(item: Any) -> list[tuple[str, Any]]:
    found = getattr(item, "__dict__", None)
    attributes = list(found.items()) if isinstance(found, dict) else []
    for kind in type(item).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and name != "__dict__":
                with suppress(AttributeError):
                    attributes.append((name, slot.__get__(item)))
    return attributes
