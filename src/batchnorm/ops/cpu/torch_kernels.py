"""Batch normalization by torch's fused kernel and its own derivative, with a check that the kernel is accurate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activation import Activation
from ..moments import Moments, statistics_dtype
from .layout import GRADIENT_ROWS, ROWS, VECTOR, flatten, unflatten

# Largest ||mean / std|| for which a*x + b in float32 is good to 100 * 2^-24 * a few = 2e-5 of a standard deviation.
CONDITION = 100.0

# Up to here, per thread that has a channel to work on, one call of a slow kernel beats several calls of fast ones:
# torch's loop over (N, C, L) is not vectorized.
IMAGE_ELEMENTS = 200_000
# And here, where few channels lie side by side.
FEW_ELEMENTS = 16_000


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


def batch_norm(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
    constant_moments: bool,
) -> tuple[Tensor, Moments] | None:
    """Normalize ``x``, or return None where the result would be inaccurate or is not finite."""
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
        """dl/dx = dl/dmu * 1/m + dl/dvar * 2 (x - mu)/m, in operations that can be differentiated again."""
        x, mean = ctx.saved_tensors
        m = x.numel() // x.shape[1]
        shape = (-1, *[1] * (x.dim() - 2))
        if torch.is_grad_enabled():  # the saved mean is a constant
            mean = x.mean([0, *range(2, x.dim())], dtype=mean.dtype)
        dx = None
        if dvar is not None:
            dx = (x - mean.view(shape)) * (dvar * (2 / m)).view(shape)
        if dmean is not None:
            each = (dmean / m).view(shape)
            dx = each.expand(x.shape) if dx is None else dx + each
        return None if dx is None else dx.to(x.dtype), None, None
