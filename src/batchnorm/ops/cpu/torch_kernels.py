"""Torch's batch normalization kernel with an accuracy check, and activation functions to apply to its output."""

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

# Computing a*x + b in float32 is accurate enough if |mean| / std is at most this limit for every feature. The error is
# then at most about 2e-5 standard deviations. `run` checks the norm of all features' ratios, which is at least as large
# as each ratio.
CONDITION = 100.0

# Torch's loop over (N, C, L) is not vectorized. Up to this many elements per thread in use, one call of this slow
# kernel is still faster than several calls of fast kernels.
IMAGE_ELEMENTS = 200_000
# With fewer than VECTOR channels in channels_last, torch's kernel is the fastest up to this many elements.
FEW_ELEMENTS = 16_000
# Torch's kernels vectorize over adjacent channels if there are at least this many channels.
VECTOR = 16
# If the channels are adjacent, torch's kernels add rows one by one in float32. For values of the same sign, the
# relative error of a sum over ROWS rows is about 1e-6, which is good enough for a mean. Over GRADIENT_ROWS rows, the
# error is about 1e-5, which is good enough for sums of gradients.
ROWS, GRADIENT_ROWS = 1 << 13, 1 << 18

# Up to this many elements, a second buffer costs less than autograd's overhead for an in-place operation.
SMALL = 1 << 14
# In half precision, torch's ReLU converts one value at a time to float32. From this many elements on, this ReLU takes
# longer than an autograd function in Python (HalfRelu).
LARGE_HALF = 1 << 20


def is_fast(x: Tensor) -> bool:
    """Return whether torch's kernels are the fastest for ``x`` and accurate for well-conditioned values."""
    elements, shape = x.numel(), x.shape
    channels = shape[1]
    if elements <= channels:  # one value per channel: the kernel's unbiased variance is 0/0
        return False
    # In half precision, no other path is fast, and an error of about 1e-5 (GRADIENT_ROWS) is good enough.
    half = x.dtype.itemsize == 2 and elements <= GRADIENT_ROWS * channels
    if x.is_contiguous():
        if elements > shape[0] * channels:
            return half or elements <= IMAGE_ELEMENTS * min(channels, torch.get_num_threads())
    elif not x.movedim(1, -1).is_contiguous() or (x.dim() == 3 and not half):  # torch's (N, C, L) kernel is slow here
        return False
    elif channels < VECTOR:
        return x.dim() > 3 and elements <= FEW_ELEMENTS
    # The kernel for adjacent channels is the fastest at any size, but it adds the rows one by one in float32. With many
    # rows, passes.py is used instead and adds them in blocks.
    return half or elements <= ROWS * channels


def run(call: Call, constant_moments: bool) -> tuple[Tensor, Moments] | None:
    """Normalize by the batch's own statistics; return None if the result may be inaccurate or not finite."""
    x, gamma, beta, eps, activation, residual, *_ = call
    dtype = statistics_dtype(x)
    channels = x.shape[1]
    m = x.numel() // channels
    gamma = gamma if gamma is None or gamma.dtype == dtype else gamma.to(dtype)
    beta = beta if beta is None or beta.dtype == dtype else beta.to(dtype)
    # The kernel returns 1/sqrt(var + eps), from which a small variance cannot be recovered. But if its running variance
    # starts at 0 and the momentum is (m-1)/m, the running variance becomes the biased variance. The running mean is not
    # used.
    var, unused = torch.zeros(channels, dtype=dtype), torch.zeros(channels, dtype=dtype)
    y, mean, invstd = torch.native_batch_norm(flatten(x, x), gamma, beta, unused, var, True, (m - 1) / m, eps)
    ratio = mean.numpy() * invstd.numpy()
    if not ratio.dot(ratio) <= CONDITION**2:  # this condition is also true for NaN
        return None
    if residual is not None:
        y = (y + flatten(residual, x)).to(x.dtype)
    y = unflatten(y.relu_() if activation.name == "relu" else activation(y), x)
    if x.requires_grad and not constant_moments and torch.is_grad_enabled():
        mean, var = _DifferentiableMoments.apply(x, mean, var)  # type: ignore[no-untyped-call]
    return y, Moments(torch.full((), m, dtype=dtype), mean, var)


class _DifferentiableMoments(torch.autograd.Function):
    """Make the moments that torch's kernel returns differentiable with respect to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, dmean: Tensor | None, dvar: Tensor | None) -> tuple[Tensor | None, None, None]:
        x, mean = ctx.saved_tensors
        # The saved mean is a constant, so double backward computes the mean again.
        return moments_backward(x, dmean, dvar, None if torch.is_grad_enabled() else mean), None, None


def flatten(t: Tensor, x: Tensor) -> Tensor:
    """Flatten ``t``, which has x's shape, if torch's kernels could otherwise misread the layout of x's gradient.

    With four or more dimensions, the kernels tell contiguous from channels_last gradients by their strides. The stride
    of a dimension of size 1 is meaningless, so the kernels may mistake one layout for the other. For rows (M, C) and
    planes (N, C, L), the kernels know only one layout.
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
    """Return ``t`` with the dtype and strides of ``x``."""
    return t if t.dtype == x.dtype and t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def apply_(activation: Activation, z: Tensor) -> Tensor:
    """Overwrite ``z`` with g(z): a second buffer would cost more than the arithmetic."""
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
    """Return a function that computes g(z) and may overwrite z, or None for the identity."""
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
    """Apply ReLU in place to float16 or bfloat16 by comparing bit patterns, without converting to float32.

    Read as int16, the bit patterns of +0 and of positive values are not negative. The patterns of negative values are
    at most the pattern of -inf. The patterns of NaNs with a sign bit are above the pattern of -inf.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        """Zero every value whose pattern is at most that of -inf: negative values, but not NaN."""
        torch.threshold_(z.view(torch.int16), -(1 << 7) if z.dtype is torch.bfloat16 else -(1 << 10), 0)
        ctx.mark_dirty(z)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Pass the gradient through where the output is positive."""
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or dy.dtype is not y.dtype:
            return _threshold_backward(dy, y, 0)  # type: ignore[no-any-return]
        dz: Tensor = _threshold_backward(dy.view(torch.int16), y.view(torch.int16), 0)
        return dz.view(dy.dtype)


_threshold_backward = torch.ops.aten.threshold_backward
