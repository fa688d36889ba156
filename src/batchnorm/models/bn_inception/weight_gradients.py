"""Gradients of convolution kernels, computed beside the rest of the backward pass."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.torch_state import is_forward_mode, is_unseen


class WeightGradients:
    """Compute gradients of convolution kernels on a stream of their own, beside all that waits for gradients of inputs.

    Around a forward pass it takes over the convolutions that :func:`convolve` computes. Nobody may read a kernel's
    gradient before :meth:`wait`. Autograd reads it to add it to ``.grad``: use ``torch.autograd.grad``.
    """

    AHEAD = 2  # gradients on their way: what they read stays in memory

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.others: set[torch.cuda.Stream] = set()  # that this backward pass runs on
        self.uses: Counter[int] = Counter()  # of kernels in this forward pass, by address

    def __enter__(self) -> None:
        _local.gradients = self
        self.uses.clear()

    def __exit__(self, *_: object) -> None:
        _local.gradients = None

    def compute(self, dy: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, Any]) -> Tensor:
        """Return a gradient that may not be there yet."""
        current = torch.cuda.current_stream()
        self.others.add(current)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            _, dweight = _convolution_gradients(dy, x, weight, options, (False, True))
            event = torch.cuda.Event()
            event.record()
        self.pending.append((event, (dy, x)))
        while len(self.pending) > self.AHEAD:
            done, _ = self.pending.popleft()
            # Only now may this memory be used again, by what is launched after it.
            for stream in self.others:
                stream.wait_event(done)
        return dweight

    def wait(self) -> None:
        """Let the current stream wait for all gradients."""
        if not self.others:  # nothing was computed aside; a stream outside a capture must not be waited for
            return
        for stream in (self.stream, *self.others):  # others have waited as well: a capture must join them again
            torch.cuda.current_stream().wait_stream(stream)
        self.pending.clear()
        self.others.clear()


class _Local(threading.local):
    gradients: WeightGradients | None = None


_local = _Local()


def is_aside() -> bool:
    """Say whether this thread is inside :class:`WeightGradients`."""
    return _local.gradients is not None


def convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    """Convolve; inside :class:`WeightGradients` that computes the kernel's gradient."""
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
        # Autograd adds the gradients of a kernel that is used twice, and does not wait for them.
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
