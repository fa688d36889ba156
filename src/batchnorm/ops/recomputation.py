"""Save memory in training: recompute outputs in the backward pass instead of keeping them.

While :func:`recompute` is active, autograd calls a hook for each tensor that it saves. If the tensor is the output of a
batch normalization or of a concatenation, and can be recomputed, the hook saves a recipe (:class:`Recomputed`) instead
of the tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .torch_state import is_recomputation

_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)


@contextmanager
def recompute() -> Iterator[None]:
    """Recompute batch normalization outputs in the backward pass instead of keeping them.

    Use this context manager around a forward pass. For conv-BN-ReLU-conv with the ReLU fused into BN, autograd then
    keeps only BN's input x, instead of x and the second convolution's input. The backward pass recomputes the second
    convolution's input from x. The recomputed tensor is the same bit for bit, so gradients do not change. Running
    averages are not updated again. A concatenation is recomputed from its inputs if keeping the inputs takes no more
    memory than keeping the concatenation.

    Some tensors are kept as usual:

    - outputs of layers that are frozen or in evaluation mode
    - outputs on the path "composite" (see :func:`batchnorm.ops.explain`), for example with a ``mask``
    - outputs of layers that use ``Renorm``, or ``Sync`` over several ranks
    - outputs that are changed in place before an operation saves them
    - results of other operations on an output, such as a cast, pooling or an activation that is not fused
    - everything under ``torch.compile``, which decides itself what to recompute

    If contexts with saved-tensor hooks are nested (``save_on_cpu``, ``torch.utils.checkpoint``), only the innermost
    context applies.

    Raises:
        RuntimeError: in the backward pass, if a kept tensor was changed in place after it was saved.

    >>> import batchnorm as bn
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), bn.BatchNorm2d(8, activation="relu"), nn.Conv2d(8, 4, 3))
    >>> with recompute():
    ...     loss = net(torch.randn(2, 3, 16, 16)).square().mean()
    >>> loss.backward()

    Beyond the paper: less memory at the cost of time.
    """
    if torch.compiler.is_compiling():
        yield
        return
    outer = _local.registry
    registry = _local.registry = outer or Registry()
    _count(1)
    try:
        with saved_tensors_hooks(registry.pack, Kept.read), nullcontext() if outer else _Concatenations():
            yield
    finally:
        _count(-1)
        _local.registry = outer


def remember(y: Tensor, again: Callable[..., Tensor], *sources: Tensor | None) -> None:
    """Inside :func:`recompute`, register that ``again(*sources)`` recomputes ``y`` with the same bits and strides."""
    if torch.compiler.is_compiling() or _local.registry is None or not y.requires_grad:
        return
    with torch._C.DisableTorchFunction():  # keeps _Concatenations from intercepting these operations
        _local.registry.remember(y, again, sources)


def is_active() -> bool:
    """Return whether this thread is inside :func:`recompute`."""
    # Layers call this function in every forward pass, so check the global count first, which is faster than reading a
    # thread-local variable.
    return _active > 0 and _local.registry is not None


class Recomputed:
    """Recompute a tensor in the backward pass, and share it among the operations that read it."""

    def __init__(self, y: Tensor, again: Callable[..., Tensor], sources: list[Kept | None]) -> None:
        self.again, self.sources = again, sources
        self.storage = StorageWeakRef(y.untyped_storage())
        self.version, self.dtype, self.stride, self.offset = y._version, y.dtype, y.stride(), y.storage_offset()
        self.readers = self.left = 0
        self.value: tuple[Tensor, object] | None = None

    def read(self, counted: bool) -> Tensor:
        """Return the tensor, and keep it until every operation that saved it has read it, or the backward pass ends."""
        value = self.value[0] if self.value is not None and self.value[1] == _stream(self.value[0]) else self.compute()
        if is_recomputation():
            self.left -= counted
            if self.left == 0:
                self.forget()
            else:
                self.hold(value)
        return value

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Recompute the tensor from its sources."""
        value = self.again(*(None if source is None else source.read() for source in self.sources))
        assert value.stride() == self.stride
        return value

    def hold(self, value: Tensor) -> None:
        """Keep the value for later readers."""
        if self.value is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)
        # `read` returns this value only on the stream that computed it, because on other streams it may not be ready.
        self.value = value, _stream(value)

    def forget(self) -> None:
        """Free the value, and reset the number of pending reads for the next backward pass."""
        self.value, self.left = None, self.readers


class Kept:
    """Hold a saved tensor or, in its place, a recipe that recomputes it.

    A saved tensor may be a view of the recomputed tensor, so its shape, strides and offset are stored with the recipe.
    """

    def __init__(self, tensor: Tensor, *, counted: bool) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.counted = counted  # True if an operation saved the tensor, False if the tensor is a source of a recipe
        self.recipe: Recomputed | None = None
        self.place: tuple[Any, ...] = ()

    def follow(self, recipe: Recomputed) -> None:
        """Replace the tensor with the recipe, unless the recipe is for another version or dtype of the tensor."""
        t = self.tensor
        if t is None or (self.version, t.dtype) != (recipe.version, recipe.dtype):
            return
        self.place = (t.shape, t.stride(), t.storage_offset() - recipe.offset)
        self.recipe, self.tensor = recipe, None
        recipe.readers += self.counted
        recipe.left = recipe.readers

    def read(self) -> Tensor:
        """Return the tensor, recomputed if necessary."""
        if self.recipe is not None:
            value = self.recipe.read(self.counted)
            shape, stride, offset = self.place
            return value.as_strided(shape, stride, value.storage_offset() + offset)
        t = self.tensor
        assert t is not None
        if t._version != self.version:
            raise RuntimeError(
                f"the backward pass needs a tensor of shape {tuple(t.shape)} ({t.dtype}) that was changed in place"
                " after it was saved: change a copy of it (x = x + 1 instead of x += 1). If you cannot, try the forward"
                " pass without recompute(), so that autograd saves other tensors"
            )
        return t


class Registry:
    """Record, during one forward pass, which tensors can be recomputed."""

    def __init__(self) -> None:
        self.recipes: dict[int, Recomputed] = {}
        # An operation may save its output before `remember` registers a recipe for the output. So for each storage
        # without a recipe, this dict holds the `Kept` object that was saved last, and `remember` replaces the object's
        # tensor with the recipe.
        self.waiting: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()

    def pack(self, t: Tensor) -> Kept:
        """Return the object that autograd saves in place of a tensor."""
        kept = self.keep(t, counted=True)
        if kept.tensor is not None:
            self.waiting[_address(t)] = kept
        return kept

    def keep(self, t: Tensor, *, counted: bool = False) -> Kept:
        """Return an object that holds the tensor or, if there is a recipe for its current version, only the recipe."""
        kept = Kept(t, counted=counted)
        recipe = self.recipes.get(_address(t))
        if recipe is not None:
            kept.follow(recipe)
        return kept

    def remember(self, y: Tensor, again: Callable[..., Tensor], sources: tuple[Tensor | None, ...]) -> None:
        """Record how to recompute ``y``; if autograd has already saved ``y``, replace it with the recipe."""
        # Drop the recipes whose outputs have been freed, because a recipe keeps its sources alive. Each remaining
        # recipe has a weak reference to its output's StorageImpl, so no other storage can have the same _cdata, which
        # is the recipe's key in the dict.
        self.recipes = {at: recipe for at, recipe in self.recipes.items() if not recipe.storage.expired()}
        # Copy gamma and beta: FSDP2 may have freed the parameters when a later layer's backward pass recomputes y.
        copies = [v.detach().clone() if v is not None and v.dim() == 1 < y.dim() else v for v in sources]
        recipe = Recomputed(y, again, [None if v is None else self.keep(v) for v in copies])
        self.recipes[_address(y)] = recipe
        kept = self.waiting.pop(_address(y), None)
        if kept is not None:
            kept.follow(recipe)

    def can_stand_for(self, parts: list[Tensor]) -> bool:
        """Return whether keeping the parts takes no more memory than keeping their concatenation."""
        return all(_address(t) in self.recipes or _is_alone(t) for t in parts)


class _Concatenations(TorchFunctionMode):
    """Register the results of ``torch.cat`` for recomputation from its inputs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _CONCATENATE and "out" not in kwargs and not torch.compiler.is_compiling():
            parts, rest = (args[0], args[1:]) if args else (kwargs["tensors"], ())
            named = {k: v for k, v in kwargs.items() if k != "tensors"}
            if _local.registry is not None and _local.registry.can_stand_for(parts):
                remember(result, lambda *again: func(again, *rest, **named), *parts)
        return result


class _Local(threading.local):
    registry: Registry | None = None


_local = _Local()
_active = 0  # the number of active `recompute` contexts in all threads
_lock = threading.Lock()


def _count(step: int) -> None:
    global _active
    with _lock:
        _active += step


def _address(t: Tensor) -> int:
    # Sparse tensors have no storage, so return -1 for them. No recipe has this key, because only strided tensors have
    # recipes.
    return t.untyped_storage()._cdata if t.layout is torch.strided else -1


def _is_alone(t: Tensor) -> bool:
    return t.layout is torch.strided and t.untyped_storage().nbytes() == t.nbytes


def _stream(t: Tensor) -> object:
    return torch.cuda.current_stream(t.device) if t.is_cuda else None
