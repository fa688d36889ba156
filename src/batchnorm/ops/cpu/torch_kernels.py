"""Torch's batch normalization kernel with a check that it is accurate, and activations in place on its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import Activation
from ..call import Call
from ..composite import moments_backward
from ..moments import Moments, statistics_dtype

# Largest ||mean / std|| for which a*x + b in float32 is good to 100 * 2^-24 * a few = 2e-5 of a standard deviation.
CONDITION = 100.0

# Up to here, per thread that has a channel to work on, one call of a slow kernel beats several calls of fast ones:
# torch's loop over (N, C, L) is not vectorized.
IMAGE_ELEMENTS = 200_000
# And here, if few channels lie side by side.
FEW_ELEMENTS = 16_000
# torch's kernels are vectorized over channels that lie side by side if there are so many of them.
VECTOR = 16
# They add rows one after the other in float32. After ROWS of one sign the error is below 1e-6, good enough for a mean;
# after GRADIENT_ROWS below 1e-5, good enough for the sums over gradients.
ROWS, GRADIENT_ROWS = 1 << 13, 1 << 18

# Up to here a second buffer costs less than what autograd does for an operation in place.
SMALL = 1 << 14
# From here on the passes over half-precision values, which torch widens one by one, cost more than Python's backward.
LARGE_HALF = 1 << 20


def is_fast(x: Tensor) -> bool:
    """Say whether torch's kernels are the fastest for ``x`` and accurate for well-conditioned values."""
    elements, shape = x.numel(), x.shape
    channels = shape[1]
    if elements <= channels:  # one value per channel: the kernel's unbiased variance is 0/0
        return False
    # In half precision nothing else is fast, and the sums need not be better than float32's GRADIENT_ROWS.
    half = x.dtype.itemsize == 2 and elements <= GRADIENT_ROWS * channels
    if x.is_contiguous():
        if elements > shape[0] * channels:
            return half or elements <= IMAGE_ELEMENTS * min(channels, torch.get_num_threads())
    elif not x.movedim(1, -1).is_contiguous() or (x.dim() == 3 and not half):  # torch knows no such sequences
        return False
    elif channels < VECTOR:
        return x.dim() > 3 and elements <= FEW_ELEMENTS
    # The kernel for channels that lie side by side is the fastest at any size, but it adds up the rows one after the
    # other in float32: where there are many they go in blocks.
    return half or elements <= ROWS * channels


def run(call: Call, constant_moments: bool) -> tuple[Tensor, Moments] | None:
    """Normalize by the batch's own statistics; None if the result would be inaccurate or is not finite."""
    x, gamma, beta, eps, activation, residual, *_ = call
    dtype = statistics_dtype(x)
    channels = x.shape[1]
    m = x.numel() // channels
    gamma = gamma if gamma is None or gamma.dtype == dtype else gamma.to(dtype)
    beta = beta if beta is None or beta.dtype == dtype else beta.to(dtype)
    # The kernel returns 1/sqrt(var + eps), which forgets a small variance. Its running average, started from 0 with
    # momentum (m-1)/m, is the biased variance itself; that of the mean has no use.
    var, unused = torch.zeros(channels, dtype=dtype), torch.zeros(channels, dtype=dtype)
    y, mean, invstd = torch.native_batch_norm(flatten(x, x), gamma, beta, unused, var, True, (m - 1) / m, eps)
    ratio = mean.numpy() * invstd.numpy()
    if not ratio.dot(ratio) <= CONDITION**2:  # NaN is not
        return None
    if residual is not None:
        y = (y + flatten(residual, x)).to(x.dtype)
    y = unflatten(y.relu_() if activation.name == "relu" else activation(y), x)
    if x.requires_grad and not constant_moments and torch.is_grad_enabled():
        mean, var = _DifferentiableMoments.apply(x, mean, var)  # type: ignore[no-untyped-call]
    return y, Moments(torch.full((), m, dtype=dtype), mean, var)


class _DifferentiableMoments(torch.autograd.Function):
    """Connect the moments, which torch's kernel returns as constants, to x; costs nothing backward until used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, dmean: Tensor | None, dvar: Tensor | None) -> tuple[Tensor | None, None, None]:
        x, mean = ctx.saved_tensors
        # The saved mean is a constant.
        return moments_backward(x, dmean, dvar, None if torch.is_grad_enabled() else mean), None, None


def flatten(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t``, of x's shape, in the form in which torch's kernels read gradients of ``x`` right.

    In four and more dimensions they tell contiguous gradients from channels_last ones by their strides. If a dimension
    has size 1 its stride says nothing, and they read one layout as the other. Of rows (M, C) and planes (N, C, L) they
    know one layout each, and autograd brings gradients into that form.
    """
    if x.dim() < 4 or 1 not in x.shape:
        return t
    rows = x.shape[1] > 1 and x.movedim(1, -1).is_contiguous()
    return t.movedim(1, -1).flatten(0, -2) if rows else t.flatten(2)


def unflatten(y: Tensor, x: Tensor) -> Tensor:
    """Undo :func:`flatten`."""
    if y.dim() == x.dim():
        return y
    return y.view(x.movedim(1, -1).shape).movedim(-1, 1) if y.dim() == 2 else y.view(x.shape)


def stored_like(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t`` in the type and strides of ``x``."""
    return t if t.dtype == x.dtype and t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def apply_(activation: Activation, z: Tensor) -> Tensor:
    """Overwrite ``z`` by g(z): a second buffer would cost more than the arithmetic."""
    match activation.name:
        case "identity":
            return z
        case "leaky_relu":
            return F.leaky_relu(z, activation.slope, inplace=True)
        case "sigmoid":
            return z.sigmoid_()
        case "tanh":
            return z.tanh_()
    return getattr(F, activation.name)(z, inplace=True)  # type: ignore[no-any-return]


def for_fresh(activation: Activation, elements: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Return what makes g(z) of a freshly allocated z that its own derivative does not need."""
    if activation.name == "identity":
        return None
    if activation.name != "relu":
        return activation.__call__
    if elements <= SMALL:
        return Tensor.relu
    return Tensor.relu_ if elements < LARGE_HALF or dtype.itemsize > 2 else _half_relu


def _half_relu(z: Tensor) -> Tensor:
    return HalfRelu.apply(z)  # type: ignore[no-any-return, no-untyped-call]


class HalfRelu(torch.autograd.Function):
    """ReLU in place on float16 or bfloat16 by their bit patterns, for torch widens the values to compare them.

    Read as int16, values of 0 and more are not negative; below 0 they lie at or below that of -inf, and NaN above it.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        """Set to 0 what is not above -inf's pattern: negative values, not NaN."""
        torch.threshold_(z.view(torch.int16), -(1 << 7) if z.dtype is torch.bfloat16 else -(1 << 10), 0)
        ctx.mark_dirty(z)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Let pass what belongs to positive outputs."""
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or dy.dtype is not y.dtype:
            return _threshold_backward(dy, y, 0)  # type: ignore[no-any-return]
        dz: Tensor = _threshold_backward(dy.view(torch.int16), y.view(torch.int16), 0)
        return dz.view(dy.dtype)


_threshold_backward = torch.ops.aten.threshold_backward
