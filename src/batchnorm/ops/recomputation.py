"""What autograd keeps for the backward pass, and how to keep less: outputs that can be computed again are not kept.

Autograd shows each tensor that an operation saves to a pair of hooks while :func:`recompute` is active. A tensor whose
memory is a batch normalization's output, or a concatenation, is exchanged for a :class:`Recomputed`; all others stay.
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
    """Keep a batch normalization's input for the backward pass, and compute its output again when it is read there.

    Use it around a forward pass. Of conv-BN-ReLU-conv, autograd then keeps only x per layer, instead of x and the
    second convolution's input. The backward pass computes that input again from x and the batch's statistics, once and
    bit for bit, so gradients are the same and running averages do not move again. Concatenations are recomputed from
    their parts.

    These outputs are kept as usual: of frozen layers and of layers in evaluation, with a ``mask`` or with ``Sync`` over
    several ranks; outputs that are changed in place, cast or pooled; and everything under ``torch.compile``, which
    decides by itself what to recompute. If such contexts are nested (``save_on_cpu``, ``torch.utils.checkpoint``), the
    innermost one decides.

    Raises:
        RuntimeError: in the backward pass, if a tensor that it needs was changed in place after the forward pass.

    >>> import batchnorm as bn
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), bn.BatchNorm2d(8, activation="relu"), nn.Conv2d(8, 4, 3))
    >>> with recompute():
    ...     loss = net(torch.randn(2, 3, 16, 16)).square().mean()
    >>> loss.backward()

    Beyond the paper: memory for time.
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
    """Say that ``again(*sources)`` computes the fresh tensor ``y`` once more, bit for bit and as it lies in memory."""
    if torch.compiler.is_compiling() or _local.registry is None or not y.requires_grad:
        return
    with torch._C.DisableTorchFunction():  # what follows is no concatenation
        _local.registry.remember(y, again, sources)


def is_active() -> bool:
    """Say whether this thread is inside :func:`recompute`."""
    # Layers ask in every call, and nearly always nobody is.
    return _active > 0 and _local.registry is not None


class Recomputed:
    """Compute a tensor again: once per backward pass, however many of its readers are in the graph.

    Beyond the paper: memory for time.
    """

    def __init__(self, y: Tensor, again: Callable[..., Tensor], sources: list[Kept | None]) -> None:
        self.again, self.sources = again, sources
        self.storage = StorageWeakRef(y.untyped_storage())
        self.version, self.dtype, self.stride, self.offset = y._version, y.dtype, y.stride(), y.storage_offset()
        self.readers = self.left = 0
        self.value: tuple[Tensor, object] | None = None

    def read(self, counted: bool) -> Tensor:
        """Return the tensor; held on to until the last of the counted readers has it, or the backward pass ends."""
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
        """Run the recipe."""
        value = self.again(*(None if source is None else source.read() for source in self.sources))
        assert value.stride() == self.stride
        return value

    def hold(self, value: Tensor) -> None:
        """Hold the value for the readers to come."""
        if self.value is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)
        self.value = value, _stream(value)  # work queued on another stream may not be done

    def forget(self) -> None:
        """Free the value and wait for the next backward pass."""
        self.value, self.left = None, self.readers


class Kept:
    """Stand for a saved tensor: the tensor itself, or a recipe and where in its result the tensor lies.

    Beyond the paper: memory for time.
    """

    def __init__(self, tensor: Tensor, *, counted: bool) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.counted = counted
        self.recipe: Recomputed | None = None
        self.place: tuple[Any, ...] = ()

    def follow(self, recipe: Recomputed) -> None:
        """Let go of the tensor where the recipe gives it again: the same memory, not changed since."""
        t = self.tensor
        if t is None or (self.version, t.dtype) != (recipe.version, recipe.dtype):
            return
        self.place = (t.shape, t.stride(), t.storage_offset() - recipe.offset)
        self.recipe, self.tensor = recipe, None
        recipe.readers += self.counted
        recipe.left = recipe.readers

    def read(self) -> Tensor:
        """Return the tensor, or compute it."""
        if self.recipe is not None:
            value = self.recipe.read(self.counted)
            shape, stride, offset = self.place
            return value.as_strided(shape, stride, value.storage_offset() + offset)
        t = self.tensor
        assert t is not None
        if t._version != self.version:
            raise RuntimeError(
                f"the backward pass needs a tensor of shape {tuple(t.shape)} ({t.dtype}) as it was in the forward pass,"
                " but it was changed in place since then: change a copy of it (x = x + 1 instead of x += 1), or run"
                " the forward pass without recompute()"
            )
        return t


class Registry:
    """Know, during one forward pass, which memory can be computed again.

    Beyond the paper: memory for time.
    """

    def __init__(self) -> None:
        self.recipes: dict[int, Recomputed] = {}
        # An operation saves its own output before anyone can say how to compute it: the last Kept of each storage.
        self.waiting: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()

    def pack(self, t: Tensor) -> Kept:
        """Keep a tensor for autograd."""
        kept = self.keep(t, counted=True)
        if kept.tensor is not None:
            self.waiting[_address(t)] = kept
        return kept

    def keep(self, t: Tensor, *, counted: bool = False) -> Kept:
        """Keep a tensor, by its recipe where there is one."""
        kept = Kept(t, counted=counted)
        recipe = self.recipes.get(_address(t))
        if recipe is not None:
            kept.follow(recipe)
        return kept

    def remember(self, y: Tensor, again: Callable[..., Tensor], sources: tuple[Tensor | None, ...]) -> None:
        """Note how to compute ``y``, and exchange it where it was kept already."""
        # The weak reference keeps a dead storage's address from being used again, and the recipe keeps x alive.
        self.recipes = {at: recipe for at, recipe in self.recipes.items() if not recipe.storage.expired()}
        recipe = Recomputed(y, again, [None if source is None else self.keep(source) for source in sources])
        self.recipes[_address(y)] = recipe
        kept = self.waiting.pop(_address(y), None)
        if kept is not None:
            kept.follow(recipe)

    def can_stand_for(self, parts: list[Tensor]) -> bool:
        """Say whether keeping the parts takes no more memory than keeping their concatenation."""
        return all(_address(t) in self.recipes or _is_alone(t) for t in parts)


class _Concatenations(TorchFunctionMode):
    """Remember what ``torch.cat`` puts together: a convolution after it reads a copy of several outputs."""

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
_active = 0  # contexts open in any thread
_lock = threading.Lock()


def _count(step: int) -> None:
    global _active
    with _lock:
        _active += step


def _address(t: Tensor) -> int:
    # Sparse tensors have no storage, and none of them is anyone's output here.
    return t.untyped_storage()._cdata if t.layout is torch.strided else -1


def _is_alone(t: Tensor) -> bool:
    return t.layout is torch.strided and t.untyped_storage().nbytes() == t.nbytes


def _stream(t: Tensor) -> object:
    return torch.cuda.current_stream(t.device) if t.is_cuda else None
