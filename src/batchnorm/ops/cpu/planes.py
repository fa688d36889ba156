"""Contiguous images in training, with as little as there can be around the passes over memory.

Torch's statistics of such images are a scalar loop that takes longer than all the rest. Here they are two sums that run
at the speed of memory; the transform and the backward pass are torch's kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..activation import Activation
from .function import CONDITION
from .layout import SHORT

# From here on, per thread that has a channel to work on, the time gained on the statistics is more than what Python
# takes for a backward pass.
ELEMENTS = 100_000
# A variance below this fits float32 with room for m/(m-1).
LARGEST = 1e38

_kernel = torch.native_batch_norm
_backward = torch.ops.aten.native_batch_norm_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default
_norm = torch.linalg.vector_norm


def is_fast(x: Tensor, activation: Activation) -> bool:
    """Say whether this is the fastest way for ``x``."""
    channels, elements = x.shape[1], x.numel()
    return (
        activation.name in ("identity", "relu")
        and x.dtype is torch.float32
        and x.is_contiguous()
        and elements >= SHORT * channels * x.shape[0]
        and elements > ELEMENTS * min(channels, torch.get_num_threads())
    )


class Statistics(NamedTuple):
    """What the kernels and the running averages take."""

    mean: Tensor
    var: Tensor
    invstd: Tensor
    unbiased_var: Tensor


@np.errstate(all="ignore")  # inf and NaN are refused below
def statistics(x: Tensor, eps: float) -> Statistics | None:
    """Return the statistics of each channel; None where they are not finite, or where x has to be shifted first."""
    batch, channels = x.shape[:2]
    m = x.numel() // channels
    planes = x.detach().view(batch, channels, -1)
    norms = _norm(planes, dim=2).numpy()
    mean = np.add.reduce(planes.sum(2).numpy(), 0, np.float64) / m
    square = mean * mean
    var = np.maximum(np.einsum("nc,nc->c", norms, norms, dtype=np.float64) / m - square, 0)
    spread = var + eps
    if not ((square <= CONDITION * spread) & (spread < LARGEST)).all():  # NaN is not
        return None
    kept = np.empty((4, channels), np.float32)
    kept[0], kept[1], kept[2], kept[3] = mean, var, spread**-0.5, var * (m / (m - 1))
    return Statistics(*torch.from_numpy(kept).unbind())


def normalized(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float, relu: bool
) -> Tensor:
    """Return y by torch's kernel for given statistics."""
    y, _, _ = _kernel(x, gamma, beta, mean, var, False, 0.0, eps)
    return y.relu_() if relu else y


class PlanesFunction(torch.autograd.Function):
    """(x, gamma, beta) -> y, for statistics of x that are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        found: Statistics,
        eps: float,
        relu: bool,
    ) -> Tensor:
        """Keep x and, for ReLU's derivative, y."""
        y = normalized(x, gamma, beta, found.mean, found.var, eps, relu)
        ctx.eps = eps
        ctx.save_for_backward(x, gamma, found.mean, found.invstd, y if relu else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Go back through ReLU, then through Algorithm 1; torch knows the derivatives of both steps."""
        x, gamma, mean, invstd, y = ctx.saved_tensors
        dz = dy.contiguous() if y is None else _threshold_backward(dy, y, 0)
        needs = ctx.needs_input_grad[:3]
        grads = _backward(dz, x, gamma, None, None, mean, invstd, True, ctx.eps, needs)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), None, None, None
