"""Large batches in training, with as little as there can be around the passes over memory.

The statistics are a :class:`Layout`'s: torch's own are a scalar loop where images are contiguous, which takes longer
than all the rest, and lose digits where many rows of channels are added up. The transform and the backward pass are
torch's kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..activation import Activation
from .function import CONDITION, stored_like
from .layout import ROWS, Layout, Planes, layout_of

# From here on, per thread that has a channel to work on, the time gained on contiguous images' statistics is more than
# what Python takes for a backward pass.
IMAGE_ELEMENTS = 100_000
# A variance below this fits float32 with room for m/(m-1).
LARGEST = 1e38

_kernel = torch.native_batch_norm
_backward = torch.ops.aten.native_batch_norm_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default


def fast_layout(x: Tensor, activation: Activation) -> Layout | None:
    """Return the layout of ``x`` where this is the fastest way for it."""
    if x.dtype is not torch.float32 or activation.name not in ("identity", "relu"):
        return None
    layout, channels, elements = layout_of(x), x.shape[1], x.numel()
    images = isinstance(layout, Planes)
    least = IMAGE_ELEMENTS * min(channels, torch.get_num_threads()) if images else ROWS * channels
    return layout if layout is not None and elements > least and layout.has_kernel(x) else None


class Statistics(NamedTuple):
    """What the kernels and the running averages take."""

    mean: Tensor
    var: Tensor
    invstd: Tensor
    unbiased_var: Tensor


@np.errstate(all="ignore")  # inf and NaN are refused below
def statistics(x: Tensor, layout: Layout, eps: float) -> Statistics | None:
    """Return the statistics of each channel; None where they are not finite, or where x has to be shifted first."""
    m = x.numel() // x.shape[1]
    mean, var = layout.moments(x.detach())
    spread = var + eps
    if not ((mean * mean <= CONDITION * spread) & (spread < LARGEST)).all():  # NaN is not
        return None
    kept = np.empty((4, len(mean)), np.float32)
    kept[0], kept[1], kept[2], kept[3] = mean, var, spread**-0.5, var * (m / (m - 1))
    return Statistics(*torch.from_numpy(kept).unbind())


def normalized(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float, relu: bool
) -> Tensor:
    """Return y by torch's kernel for given statistics."""
    y, _, _ = _kernel(x, gamma, beta, mean, var, False, 0.0, eps)
    return y.relu_() if relu else y


class KnownStatistics(torch.autograd.Function):
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
        dz = stored_like(dy, x)
        if y is not None:
            dz = _threshold_backward(dz, y, 0)
        needs = ctx.needs_input_grad[:3]
        grads = _backward(dz, x, gamma, None, None, mean, invstd, True, ctx.eps, needs)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), None, None, None
