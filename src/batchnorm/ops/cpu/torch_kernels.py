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

# Torch's kernel normalizes by computing a*x + b, in float32 unless x is float64. In float32, this is accurate enough if
# |mean| / std is at most CONDITION for every channel: rounding in a*x + b then causes an error of at most about 2e-5
# standard deviations. `run` compares CONDITION with the norm of all channels' ratios, which is at least as large as
# each ratio.
CONDITION = 100.0

# Torch's kernel computes the statistics of contiguous images in a scalar loop. Up to this many elements per thread, one
# call of this slow kernel is still faster than the several calls of fast kernels in passes.py.
IMAGE_ELEMENTS = 200_000
# For channels_last input with few channels (fewer than VECTOR, see below), torch's kernel is faster than passes.py up
# to this many elements.
FEW_ELEMENTS = 16_000
# For channels_last input, torch's kernels are vectorized if there are at least this many channels.
VECTOR = 16
# If the channels are adjacent in memory, x is a matrix with one column per channel, and torch's kernels add its rows
# one by one in float32. For values of the same sign, the relative error of a sum over ROWS rows is about 1e-6, which is
# good enough for a mean. Over GRADIENT_ROWS rows, the error is about 1e-5, which is good enough for sums of gradients.
ROWS, GRADIENT_ROWS = 1 << 13, 1 << 18

# Up to this many elements, the ReLU that `for_fresh` returns does not run in place, because autograd's overhead for an
# in-place operation takes longer than writing to a second buffer.
SMALL = 1 << 14
# In half precision, torch's ReLU converts one value at a time to float32. From this many elements on, HalfRelu is
# faster, although it is an autograd function written in Python.
LARGE_HALF = 1 << 20


def is_fast(x: Tensor) -> bool:
    """Return whether torch's kernels are faster than passes.py for ``x``, and sum accurately enough.

    Even then, their output is accurate only if |mean| / std is small (see CONDITION).
    """
    elements, shape = x.numel(), x.shape
    channels = shape[1]
    if elements <= channels:  # with one value per channel, the kernel's unbiased variance would be 0/0
        return False
    # In half precision, only torch's kernel is fast, and the error of a sum over GRADIENT_ROWS rows is small enough.
    half = x.dtype.itemsize == 2 and elements <= GRADIENT_ROWS * channels
    if x.is_contiguous():
        if elements > shape[0] * channels:
            return half or elements <= IMAGE_ELEMENTS * min(channels, torch.get_num_threads())
    elif not x.movedim(1, -1).is_contiguous() or (x.dim() == 3 and not half):
        return False  # x is not dense, or is (N, C, L) with adjacent channels, for which torch's kernel is slow
    elif channels < VECTOR:
        return x.dim() > 3 and elements <= FEW_ELEMENTS
    # Here, the channels are adjacent in memory, and torch's kernel is faster than passes.py at any size. But it adds
    # the rows one by one in float32, which is inaccurate for many rows; passes.py adds the rows in blocks.
    return half or elements <= ROWS * channels


def run(call: Call, constant_moments: bool) -> tuple[Tensor, Moments] | None:
    """Normalize by the batch's own statistics; return None if the result may be inaccurate or not finite."""
    x, gamma, beta, eps, activation, residual, *_ = call
    dtype = statistics_dtype(x)
    channels = x.shape[1]
    m = x.numel() // channels
    gamma = without_gaps(gamma if gamma is None or gamma.dtype == dtype else gamma.to(dtype))
    beta = beta if beta is None or beta.dtype == dtype else beta.to(dtype)
    # The kernel returns 1/sqrt(var + eps), from which a variance much smaller than eps cannot be recovered. But the
    # kernel also updates a running variance. If that is 0 before the call, and the momentum is (m-1)/m, then after the
    # call it holds the biased variance of the batch.
    var, unused = (x.new_zeros(channels, dtype=dtype) for _ in range(2))
    y, mean, invstd = torch.native_batch_norm(flatten(x, x), gamma, beta, unused, var, True, (m - 1) / m, eps)
    ratio = mean * invstd  # unlike NumPy, torch does not warn about overflow and inf * 0
    if not ratio.dot(ratio).item() <= CONDITION**2:  # `not ... <=` is also true for NaN; `>` is not
        return None
    if residual is not None:
        y = (y + flatten(residual, x)).to(x.dtype)
    y = unflatten(y.relu_() if activation.name == "relu" else activation(y), x)
    if x.requires_grad and not constant_moments and torch.is_grad_enabled():
        mean, var = _DifferentiableMoments.apply(x, mean, var)  # type: ignore[no-untyped-call]
    return y, Moments(x.new_full((), m, dtype=dtype), mean, var)


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
        # Double backward must differentiate the mean too. The saved mean is a constant, so compute the mean from x.
        return moments_backward(x, dmean, dvar, None if torch.is_grad_enabled() else mean), None, None


def flatten(t: Tensor, x: Tensor) -> Tensor:
    """Flatten ``t``, which has x's shape, if torch's kernels could otherwise misread the layout of x's gradient.

    With four or more dimensions, the kernels tell contiguous from channels_last gradients by their strides. The stride
    of a dimension of size 1 is meaningless, so the kernels may mistake one layout for the other. A flattened tensor has
    two dimensions (positions, C) or three (N, C, locations), for which the kernels expect only one layout.
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


def without_gaps(v: Tensor | None) -> Tensor | None:
    """Return ``v`` (C,), copied unless it is contiguous.

    If the channels are adjacent in memory, torch's backward kernel ignores the strides of gamma and, in evaluation
    mode, of the running mean and variance: it reads them as if they were contiguous.
    """
    return v if v is None or v.is_contiguous() else v.contiguous()


def stored_like(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t`` with the dtype and strides of ``x``."""
    return t if t.dtype == x.dtype and t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def apply_(activation: Activation, z: Tensor) -> Tensor:
    """Overwrite ``z`` with g(z), which is faster than writing to a second buffer, and return ``z``."""
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
    return Tensor.relu_ if elements < LARGE_HALF or dtype.itemsize > 2 else HalfRelu.apply


class HalfRelu(torch.autograd.Function):
    """Apply ReLU in place to float16 or bfloat16 by comparing bit patterns, without converting to float32.

    The bit patterns are read as int16. Positive values and +0 are then nonnegative integers. Negative values and -0 are
    integers that do not exceed the integer of -inf. The integer of a NaN is larger than that of -inf, so a NaN is not
    mistaken for a negative value.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        """Zero every value whose bit pattern, read as int16, is at most that of -inf."""
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
