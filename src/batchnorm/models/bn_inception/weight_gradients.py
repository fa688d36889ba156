"""Gradients of weights, computed concurrently with the rest of the backward pass."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.torch_state import is_forward_mode, is_unseen

_A = TypeVar("_A")


class WeightGradients:
    """Compute the gradients of weights on a separate stream, concurrently with the backward pass.

    Use the object in a ``with`` statement around the forward pass; it applies to calls of :func:`convolve` and
    :func:`linear`. A weight's gradient must not be read before :meth:`wait`, so use ``torch.autograd.grad``:
    ``loss.backward()`` would read the gradients to add them to ``.grad``.
    """

    # Wait for the oldest gradients if more than AHEAD are pending and their inputs, which stay in memory, have more
    # than BYTES bytes.
    AHEAD, BYTES = 2, 2**29

    def __init__(self) -> None:
        self.stream, self.update_stream = torch.cuda.Stream(), torch.cuda.Stream()
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.others: set[torch.cuda.Stream] = set()  # streams that must be joined by :meth:`wait`
        self.uses: Counter[int] = Counter()  # how often this forward pass has used the weight at each address
        self.cuts: list[tuple[Tensor, set[int]]] = []  # see :func:`note_cut`

    def __enter__(self) -> None:
        _local.gradients = self
        self.uses.clear()
        self.cuts.clear()

    def __exit__(self, *_: object) -> None:
        _local.gradients = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the block on this object's stream; the tensors that it reads must stay in memory until :meth:`wait`."""
        current = torch.cuda.current_stream()
        self.others |= {current, self.stream}
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Run the block on a third stream, after all gradients so far; its inputs must stay in memory as well."""
        for stream in (torch.cuda.current_stream(), self.stream):
            self.update_stream.wait_stream(stream)
        self.others.add(self.update_stream)
        with torch.cuda.stream(self.update_stream):
            yield

    def compute(self, function: Callable[..., _A], *inputs: Tensor) -> _A:
        """Return ``function(*inputs)``, which computes gradients; they may be incomplete until :meth:`wait`."""
        with self.beside():
            found = function(*inputs)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((event, inputs))
        while len(self.pending) > self.AHEAD and self._pending_bytes() > self.BYTES:
            done, _ = self.pending.popleft()
            # After this loop, the memory of the gradient's inputs can be reused, because later work waits for `done`.
            for stream in self.others - {self.stream, self.update_stream}:
                stream.wait_event(done)
        return found

    def _pending_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, inputs in self.pending for t in inputs)

    def wait(self) -> None:
        """Make the current stream wait for all gradients."""
        for stream in self.others:  # a CUDA graph capture must join all streams used in it, and no others
            torch.cuda.current_stream().wait_stream(stream)
        self.pending.clear()
        self.others.clear()


class _Local(threading.local):
    gradients: WeightGradients | None = None


_local = _Local()


def is_aside() -> bool:
    """Return whether this thread is inside a :class:`WeightGradients` block."""
    return _local.gradients is not None


def note_cut(x: Tensor, before: Iterable[Tensor]) -> None:
    """Tell an enclosing :class:`WeightGradients` block that all weights but ``before`` are used after ``x``.

    The gradients of the other weights are then known as soon as that of ``x`` is.
    """
    if _local.gradients is not None and x.requires_grad:
        _local.gradients.cuts.append((x, set(map(id, before))))


def convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    """Convolve ``x``; in a :class:`WeightGradients` block, a separate stream computes the gradient of ``weight``."""
    gradients = _local.gradients
    plain = is_unseen(x, weight) and not is_forward_mode() and not weight._backward_hooks
    if gradients is None or x.dtype != weight.dtype or not plain:
        return F.conv2d(x, weight, None, stride, padding)
    gradients.uses[weight.data_ptr()] += 1
    y: Tensor = _Convolution.apply(x, weight, stride, padding, gradients)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Any, padding: Any, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (stride, padding)
        ctx.gradients = gradients
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        # If a kernel is used more than once, autograd adds up its gradients, without waiting for the separate stream.
        if torch.is_grad_enabled() or ctx.gradients.uses[weight.data_ptr()] > 1:
            return *_convolution_gradients(dy, x, weight, ctx.options, (True, True)), None, None, None
        dweight = ctx.gradients.compute(
            lambda dy, x: _convolution_gradients(dy, x, weight, ctx.options, (False, True))[1], dy, x
        )
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _ = _convolution_gradients(dy, x, weight, ctx.options, (True, False))
        return dx, dweight, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer; in a :class:`WeightGradients` block, a separate stream computes its weights' gradients."""
    gradients = _local.gradients
    if gradients is None or bias is None or x.dim() != 2 or x.dtype != weight.dtype or not x.requires_grad:
        return F.linear(x, weight, bias)
    if not is_unseen(x, weight, bias) or is_forward_mode() or weight._backward_hooks or bias._backward_hooks:
        return F.linear(x, weight, bias)
    gradients.uses[weight.data_ptr()] += 1
    y: Tensor = _Linear.apply(x, weight, bias, gradients)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients, ctx.dtype = gradients, bias.dtype
        return F.linear(x, weight, bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors

        def parameters(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return dy.t() @ x, dy.sum(0, dtype=ctx.dtype)

        with torch.autocast(dy.device.type, enabled=False):
            if torch.is_grad_enabled() or ctx.gradients.uses[weight.data_ptr()] > 1:
                return dy @ weight, *parameters(dy, x), None
            dweight, dbias = ctx.gradients.compute(parameters, dy, x)
            return dy @ weight, dweight, dbias, None


def _convolution_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, Any], wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    rest = (*options, (1, 1), False, (0, 0), 1, (*wanted, False))
    dx, dweight, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *rest)
    return dx, dweight
