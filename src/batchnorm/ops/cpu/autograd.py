"""Layers in training on the CPU by kernel.c, as autograd sees it.

Torch's own kernels take a pass for each step, and around them stands Python. Here one call has the statistics, the
guard, the running averages, the transform, the residual and the activation; another the whole gradient. For that x and
five numbers a channel are kept, and with a residual one byte per element (relu, relu6, leaky_relu) or the residual
itself. compiler.py makes the kernel; where it cannot, fast_path.py and passes.py do the same by torch's kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import composite
from ..activation import IDENTITY, NAMES, TWO_SLOPES, Activation
from ..call import Call
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
        *((name, ctypes.c_int64) for name in ("n", "channels", "length", "activation")),
        ("slope", ctypes.c_double),
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
    activation: Activation
    is_smooth: bool  # whether the derivative has more than two values: a residual is kept, dz is written


def form_of(x: Tensor, activation: Activation) -> Form | None:
    """Return the form of ``x`` (N, C, ...), or None if the kernel does not take it."""
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
    shape = Shape(n, channels, length, NAMES.index(activation.name), activation.slope, *found.openmp)
    parallel = x.numel() >= PARALLEL and found.openmp[0] is not None
    smooth = activation.name not in ("identity", *TWO_SLOPES)
    return Form(found.forward, found.backward, shape, ctypes.addressof(shape), parallel, activation, smooth)


def normalize_batch_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    running: tuple[int | None, int | None, int | None],
    momentum: float | None,
    eps: float,
    form: Form,
) -> Tensor | None:
    """Return y and move the averages at the addresses ``running``; None, and nothing moved, if another way is due."""
    if not (_has_memory(x) and _fits(gamma) and _fits(beta)) or (x.is_inference() and torch.is_grad_enabled()):
        return None  # the last cannot be saved, and is refused before anything moves
    if residual is not None:
        if (
            residual.shape != x.shape
            or not _is_usual(residual)
            or (residual.is_inference() and torch.is_grad_enabled())
        ):
            return None
        residual = stored_like(residual, x)
    try:
        return _apply(x, gamma, beta, residual, running, momentum, eps, form)
    except _NotFinite:
        return None


def _fits(v: Tensor | None) -> bool:
    return v is None or (v.is_contiguous() and _is_usual(v))


def _is_usual(v: Tensor) -> bool:
    return v.is_cpu and _has_memory(v) and (type(v) is Tensor or type(v) is nn.Parameter)


class _NotFinite(Exception):
    pass


class Normalize(torch.autograd.Function):
    """(x, gamma, beta, residual) -> y by the kernel.

    Beyond the paper: how autograd sees it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        running: tuple[int | None, int | None, int | None],
        momentum: float | None,
        eps: float,
        form: Form,
    ) -> Tensor:
        """Keep x, a few numbers a channel, and with a residual what tells the derivative of the activation."""
        y, kept, passed, kept_residual = torch.empty_like(x), x.new_empty((ROWS_KEPT, x.shape[1])), None, None
        if residual is not None:
            if form.is_smooth:
                kept_residual = residual
            elif form.shape.activation and any(ctx.needs_input_grad):
                passed = torch.empty_like(x, dtype=torch.bool)
        failed = form.forward(
            form.address, torch.get_num_threads() if form.parallel else 1, eps, nan if momentum is None else momentum,
            x.data_ptr(), None if gamma is None else gamma.data_ptr(), None if beta is None else beta.data_ptr(),
            None if residual is None else residual.data_ptr(), *running,
            y.data_ptr(), None if passed is None else passed.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError if failed < 0 else _NotFinite
        ctx.set_materialize_grads(False)
        ctx.form, ctx.eps, ctx.kept, ctx.shape, ctx.stride = form, eps, kept, x.shape, x.stride()
        ctx.save_for_backward(x, gamma, beta if form.is_smooth else None, kept_residual, passed)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Go back through g and Algorithm 1; by plain operations if the kernel would not see all there is."""
        if dy is None:
            return (None,) * 8
        x, gamma, beta, residual, passed = ctx.saved_tensors
        form, kept, eps = ctx.form, ctx.kept, ctx.eps
        of_x, of_gamma, of_beta, of_residual = ctx.needs_input_grad[:4]
        dx: Tensor | None
        seen = torch.is_grad_enabled() or is_forward_mode() or not is_unseen(x, dy)
        if seen or not (x.is_cpu and _has_memory(x) and _has_memory(dy)):
            g = form.activation
            if not form.is_smooth and passed is None:
                center, scale, offset = (composite.per_channel(v, x) for v in kept[:3])
                dy, g = g.backward(dy, (x - center) * scale + offset), IDENTITY  # by the sign that the kernel saw
            dx, dgamma, dbeta, dz = composite.backward(Call(x, gamma, beta, eps, g, residual), dy, passed)
        else:
            # Saved-tensor hooks may give back other types and layouts.
            if x.dtype is not kept.dtype or x.stride() != ctx.stride or x.shape != ctx.shape:
                x = kept.new_empty_strided(ctx.shape, ctx.stride).copy_(x)
            residual = None if residual is None else stored_like(residual, x)
            if passed is not None and (passed.dtype is not torch.bool or passed.stride() != ctx.stride):
                passed = torch.empty_like(x, dtype=torch.bool).copy_(passed)
            dy = stored_like(dy, x)
            dx = torch.empty_like(x) if of_x else None
            dz = dy
            if form.is_smooth or passed is not None:
                dz = dx if dx is not None and not of_residual else torch.empty_like(x)
            dgamma, dbeta = kept.new_empty(x.shape[1]), kept.new_empty(x.shape[1])
            if form.backward(
                form.address, torch.get_num_threads() if form.parallel else 1, x.data_ptr(), dy.data_ptr(),
                None if residual is None else residual.data_ptr(), None if passed is None else passed.data_ptr(),
                kept.data_ptr(), None if dx is None else dx.data_ptr(), None if dz is dy else dz.data_ptr(),
                dgamma.data_ptr(), dbeta.data_ptr(),
            ):  # fmt: skip
                raise MemoryError
        return (
            dx if of_x else None,
            dgamma if of_gamma else None,
            dbeta if of_beta else None,
            dz if of_residual else None,
            None,
            None,
            None,
            None,
        )


# What Function.apply calls when no torch.func transform is at work, which callers have made sure of.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, Normalize).apply


def _has_memory(t: Tensor) -> bool:
    """Say whether a tensor's memory holds its values."""
    # Not so a batch of gradients (is_grads_batched of torch.autograd.grad), zeros without memory, and a lazy negation.
    return not (_is_batched(t) or t._is_zerotensor() or t.is_neg())


_is_batched = torch._C._functorch.is_legacy_batchedtensor
