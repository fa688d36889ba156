"""Gradients of convolution kernels, computed concurrently with the rest of the backward pass."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.torch_state import is_forward_mode, is_unseen


class WeightGradients:
    """Compute the gradients of convolution kernels on a separate stream, concurrently with the backward pass.

    Use the object in a ``with`` statement around the forward pass; it applies to calls of :func:`convolve`. A
    kernel's gradient must not be read before :meth:`wait`, so use ``torch.autograd.grad``: ``loss.backward()`` would
    read the gradients to add them to ``.grad``.
    """

    AHEAD = 2  # at most this many gradients are pending; their inputs stay in memory

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.others: set[torch.cuda.Stream] = set()  # streams that used :meth:`beside` since the last :meth:`wait`
        self.uses: Counter[int] = Counter()  # how often this forward pass has used the kernel at each address
        self.stems: list[Tensor] = []  # outputs of convolutions whose input needs no gradient, such as an image

    def __enter__(self) -> None:
        _local.gradients = self
        self.uses.clear()
        self.stems.clear()

    def __exit__(self, *_: object) -> None:
        _local.gradients = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the block on this object's stream; the tensors that it reads must stay in memory until :meth:`wait`."""
        current = torch.cuda.current_stream()
        self.others.add(current)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield

    def compute(self, dy: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, Any]) -> Tensor:
        """Return the gradient of ``weight``, which may be incomplete until :meth:`wait`."""
        with self.beside():
            _, dweight = _convolution_gradients(dy, x, weight, options, (False, True))
            event = torch.cuda.Event()
            event.record()
        self.pending.append((event, (dy, x)))
        while len(self.pending) > self.AHEAD:
            done, _ = self.pending.popleft()
            # After this loop, the memory of the gradient's inputs can be reused, because later work waits for `done`.
            for stream in self.others:
                stream.wait_event(done)
        return dweight

    def wait(self) -> None:
        """Make the current stream wait for all gradients."""
        if not self.others:  # nothing ran on self.stream, and a CUDA graph capture must not wait for an unused stream
            return
        for stream in (self.stream, *self.others):  # a CUDA graph capture must join all streams used in it
            torch.cuda.current_stream().wait_stream(stream)
        self.pending.clear()
        self.others.clear()


class _Local(threading.local):
    gradients: WeightGradients | None = None


_local = _Local()


def is_aside() -> bool:
    """Return whether this thread is inside a :class:`WeightGradients` block."""
    return _local.gradients is not None


def note_stem(x: Tensor, y: Tensor) -> None:
    """Tell an enclosing :class:`WeightGradients` block that ``y`` is a convolution of ``x``, usually the image."""
    if _local.gradients is not None and not x.requires_grad and y.requires_grad:
        _local.gradients.stems.append(y)


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
        dweight = ctx.gradients.compute(dy, x, weight, ctx.options)
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _ = _convolution_gradients(dy, x, weight, ctx.options, (True, False))
        return dx, dweight, None, None, None


def _convolution_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, Any], wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    rest = (*options, (1, 1), False, (0, 0), 1, (*wanted, False))
    dx, dweight, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *rest)
    return dx, dweight
