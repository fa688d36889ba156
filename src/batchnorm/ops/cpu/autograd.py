"""Layers in training on the CPU by kernel.c, as autograd sees it.

Torch's own kernels take a pass for each step, and around them stands Python. Here one call has the statistics, the
guard, the running averages, the transform and ReLU; another the whole gradient, for which x and five numbers a channel
are kept. compiler.py makes the kernel; where it cannot, fast_path.py and passes.py do the same by torch's kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import reference
from ..torch_state import is_forward_mode, is_unseen
from .compiler import kernels
from .passes import stored_like

# Fewer values than this are worked on sooner than a second thread has begun.
PARALLEL = 1 << 14
ROWS_KEPT = 5  # numbers of a channel, for the backward pass: kernel.c's LINES


class Shape(ctypes.Structure):
    """Describe a tensor to the kernel: planes (n, channels, length), or rows (n, channels) where the length is 0.

    Beyond the paper: how memory is laid out.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "channels", "length", "relu")),
        *((name, ctypes.c_void_p) for name in ("parallel", "thread", "team")),
    )


class Form(NamedTuple):
    """Hold what calls of one shape have in common, so that none has to ask for it.

    Beyond the paper: how the kernel is called.
    """

    forward: Callable[..., int]
    backward: Callable[..., int]
    shape: Shape
    address: int  # of the shape
    parallel: bool  # whether a pass is worth more than one thread


def form_of(x: Tensor, relu: bool) -> Form | None:
    """Return the form of ``x`` (N, C, ...), or None where the kernel does not take it."""
    if x.dtype is not torch.float32 or x.dim() < 2:
        return None
    channels = x.shape[1]
    if x.numel() <= channels:  # no batch, or one value per channel
        return None
    locations = prod(x.shape[2:])
    if x.is_contiguous() and locations > 1 and channels > 1:
        n, length = x.shape[0], locations
    elif x.is_contiguous() or x.movedim(1, -1).is_contiguous():
        n, length = x.numel() // channels, 0
    else:
        return None
    found = kernels()
    if found is None:
        return None
    shape = Shape(n, channels, length, relu, *found.openmp)
    parallel = x.numel() >= PARALLEL and found.openmp[0] is not None
    return Form(found.forward, found.backward, shape, ctypes.addressof(shape), parallel)


def normalize_batch_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: tuple[int | None, int | None, int | None],
    momentum: float | None,
    eps: float,
    form: Form,
    activate: Callable[[Tensor], Tensor] | None,
) -> Tensor | None:
    """Return y and move the averages at the addresses ``running``; None, and nothing moved, if another way is due.

    ``activate`` is what the kernel does not do itself.
    """
    if not (_has_memory(x) and _fits(gamma) and _fits(beta)) or (x.is_inference() and torch.is_grad_enabled()):
        return None  # the last cannot be saved, and is refused before anything moves
    try:
        y = _apply(x, gamma, beta, running, momentum, eps, form)
    except _NotFinite:
        return None
    return y if activate is None else activate(y)


def _fits(v: Tensor | None) -> bool:
    if v is None:
        return True
    return v.is_contiguous() and v.is_cpu and _has_memory(v) and (type(v) is Tensor or type(v) is nn.Parameter)


class _NotFinite(Exception):
    pass


class Normalize(torch.autograd.Function):
    """(x, gamma, beta) -> y by the kernel.

    Beyond the paper: how autograd sees it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        running: tuple[int | None, int | None, int | None],
        momentum: float | None,
        eps: float,
        form: Form,
    ) -> Tensor:
        """Keep x and a few numbers a channel."""
        y, kept = torch.empty_like(x), x.new_empty((ROWS_KEPT, x.shape[1]))
        failed = form.forward(
            form.address, torch.get_num_threads() if form.parallel else 1, eps, nan if momentum is None else momentum,
            x.data_ptr(), None if gamma is None else gamma.data_ptr(), None if beta is None else beta.data_ptr(),
            *running, y.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError if failed < 0 else _NotFinite
        ctx.set_materialize_grads(False)
        ctx.form, ctx.eps, ctx.kept, ctx.shape, ctx.stride = form, eps, kept, x.shape, x.stride()
        ctx.save_for_backward(x, gamma)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Go back through ReLU and Algorithm 1; by plain operations where the kernel would not see all there is."""
        if dy is None:
            return (None,) * 7
        x, gamma = ctx.saved_tensors
        seen = torch.is_grad_enabled() or is_forward_mode() or not is_unseen(x, dy)
        if seen or not (x.is_cpu and _has_memory(x) and _has_memory(dy)):
            return _plain_backward(ctx, x, gamma, dy)
        form, kept = ctx.form, ctx.kept
        if x.dtype is not kept.dtype or x.stride() != ctx.stride or x.shape != ctx.shape:
            # Saved-tensor hooks gave it back otherwise.
            x = kept.new_empty_strided(ctx.shape, ctx.stride).copy_(x)
        wanted, of_gamma, of_beta = ctx.needs_input_grad[:3]
        dy = stored_like(dy, x)
        dx = torch.empty_like(x) if wanted else None
        dgamma, dbeta = kept.new_empty(x.shape[1]), kept.new_empty(x.shape[1])
        if form.backward(
            form.address, torch.get_num_threads() if form.parallel else 1, x.data_ptr(), dy.data_ptr(), kept.data_ptr(),
            None if dx is None else dx.data_ptr(), dgamma.data_ptr(), dbeta.data_ptr(),
        ):  # fmt: skip
            raise MemoryError
        return dx, dgamma if of_gamma else None, dbeta if of_beta else None, None, None, None, None


# What Function.apply calls when no torch.func transform is at work, which callers have made sure of.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, Normalize).apply


def _has_memory(t: Tensor) -> bool:
    """Say whether a tensor's memory holds its values."""
    # Not so a batch of gradients (is_grads_batched of torch.autograd.grad), zeros without memory, and a lazy negation.
    return not (_is_batched(t) or t._is_zerotensor() or t.is_neg())


_is_batched = torch._C._functorch.is_legacy_batchedtensor


def _plain_backward(ctx: Any, x: Tensor, gamma: Tensor | None, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return Section 3's gradients by operations that can be differentiated again, and vectorized."""
    shape = (-1, *[1] * (x.dim() - 2))
    center, scale, offset = (v.view(shape) for v in ctx.kept[:3])
    d = x - center
    dz = torch.where(d * scale + offset <= 0, 0, dy) if ctx.form.shape.relu else dy
    dz, d = (t.movedim(1, -1).reshape(-1, x.shape[1]) for t in (dz, d))  # BN(x) = BN(x - center)
    found = reference.batch_norm_backward(dz, d, torch.ones_like(ctx.kept[0]) if gamma is None else gamma, ctx.eps)
    dx = found.x.reshape(x.movedim(1, -1).shape).movedim(-1, 1)
    grads = zip((dx, found.gamma, found.beta), ctx.needs_input_grad, strict=False)
    return *(g if needed else None for g, needed in grads), *(None,) * 4
