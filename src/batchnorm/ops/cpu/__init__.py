"""The CPU path: torch's kernels where they are fast, our passes over memory where they are not, accurate everywhere.

What there is to gain, for 32x64x56x56 float32 (26 MB) on two cores that copy 68 GB/s: a forward pass reads x twice
and writes y, 1.1 ms at least; torch takes 6.6 contiguous (5.5 of them the statistics, a scalar loop) and 1.6
channels_last. ReLU as a second call costs 1.0 more forward and 1.4 backward, mostly for fresh memory. With 3 channels
in channels_last torch's vectors are 3 wide: 11.6 ms where 0.1 is the limit. Hence

native.py    torch's kernel and its derivative, for small batches (an operator costs 2 to 5 us and a Python backward
             40, against 57 us for all of torch's forward and backward on a (60, 100) batch), for channels_last with
             channels enough, and for half precision. The activation is applied in place.
function.py  everything else: statistics by sums that run at the speed of memory, the transform, the activation in
             place, torch's kernel for the backward pass where it knows the layout.
layout.py    what those passes are for planes, for rows, and for rows made of several positions where channels are few.

``batchnorm bench cpu`` measures all of it against torch; results/cpu.json holds the numbers.

Neither way keeps its digits when the mean is many standard deviations from zero, for then a*x + b is a difference of
large numbers. Both check this on the statistics, and such a batch is first shifted by its mean: BN(x) = BN(x - s).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composite
from ..activation import Activation
from ..moments import Moments, statistics_dtype
from ..running import Running
from ..saving import remember
from . import native, nonlinear
from .function import BatchNormFunction
from .layout import layout_of


def batch_norm(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
    *,
    constant_moments: bool = False,
) -> tuple[Tensor, Moments]:
    """Normalize a non-empty CPU tensor (N, C, ...) by its own statistics.

    ``constant_moments`` says that nobody differentiates the moments; on small batches that saves a third of the time.
    """
    # A half-precision sum with the residual would round z before the activation looks at its sign.
    if native.is_fast(x) and (residual is None or x.dtype.itemsize > 2):
        found = native.batch_norm(x, gamma, beta, eps, activation, residual, constant_moments)
        if found is not None:
            remember(found[0], _native_again(eps, activation), x, gamma, beta, residual)
            return found
    layout = layout_of(x)
    if layout is None:
        # Elements between those of x: a copy of it in the same order costs one pass of the six that follow.
        x = x.clone(memory_format=torch.preserve_format)
        layout = layout_of(x)
        if layout is None:  # dimensions stored in an order that no network produces
            return composite.batch_norm(x, gamma, beta, eps, activation, residual)
    rest = (eps, activation, layout)
    y, mean, var = BatchNormFunction.apply(x, gamma, beta, residual, *rest)  # type: ignore[no-untyped-call]
    remember(y, lambda *v: BatchNormFunction.apply(*v, *rest)[0], x, gamma, beta, residual)  # type: ignore[no-untyped-call]
    return y, Moments(torch.full((), x.numel() // x.shape[1], dtype=statistics_dtype(x)), mean, var)


def small_batch_norm_(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, running: Running, momentum: float | None, eps: float,
    activation: Activation,
) -> tuple[Tensor, Moments] | None:  # fmt: skip
    """Normalize a small batch and move the running averages in one call of torch's kernel; None where it may not be."""
    if x.dim() < 2 or not x.is_floating_point() or x.numel() <= x.shape[1] or not native.is_fast(x):
        return None
    channels = x.shape[1:2]
    if (gamma is not None and gamma.shape != channels) or (beta is not None and beta.shape != channels):
        return None
    found = native.batch_norm_(x, gamma, beta, running, momentum, eps, activation)
    if found is not None:
        remember(found[0], _native_again(eps, activation), x, gamma, beta, None)
    return found


def _native_again(eps: float, activation: Activation) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> Tensor:
        found = native.batch_norm(x, gamma, beta, eps, activation, residual, constant_moments=True)
        assert found is not None  # as it was not the first time
        return found[0]

    return again


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor:
    """Normalize a non-empty CPU tensor (N, C, ...) by given statistics: torch's kernel, the activation in place."""
    dtype = statistics_dtype(x)
    mean, var = mean.to(dtype), var.to(dtype)
    gamma, beta = (None if v is None else v.to(dtype) for v in (gamma, beta))
    if not bool((mean.square() <= native.CONDITION**2 * (var + eps)).all()):
        return composite.normalize(x, mean, var, gamma, beta, eps, activation, residual)
    y = F.batch_norm(x, mean, var, gamma, beta, training=False, eps=eps)
    if residual is not None:
        y = y.add_(residual)
    return activation(y) if y.requires_grad else nonlinear.apply_(activation, y)
