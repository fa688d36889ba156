"""Compose the depthwise and pointwise weights of a separable convolution into the weight of one dense convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import dispatch
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_unseen

CHANNELS = 8  # number of output channels per program of the forward kernel
# Each program of the backward kernel loads a tile: the composed weight's gradient for one input channel, which has one
# filter per output channel. The number of filters and their size are padded to powers of two. A padded tile may have
# at most LARGEST values.
LARGEST = 2**14


def compose(pointwise: Tensor, depthwise: Tensor, inputs: int) -> Tensor:
    """Return the composed weight W[o, i] = sum_m P[o, i, m] D[i, m]; autocast does not lower its precision.

    Here o is an output channel, i is an input channel, and m is one of the input channel's depthwise filters.

    Args:
        pointwise: P, the weight of the 1x1 convolution, of shape (outputs, inputs * multiplier, 1, 1).
        depthwise: D, the weight of the depthwise convolution, of shape (inputs * multiplier, 1, height, width).
        inputs: the number of input channels.
    """
    if torch.compiler.is_compiling() or not _takes(pointwise, depthwise):
        return _composed(pointwise, depthwise, inputs)
    weight: Tensor = _Composition.apply(pointwise, depthwise, inputs)  # type: ignore[no-untyped-call]
    return weight


def _composed(pointwise: Tensor, depthwise: Tensor, inputs: int) -> Tensor:
    p = pointwise.unflatten(1, (inputs, -1))
    d = depthwise.squeeze(1).unflatten(0, (inputs, -1))
    weight: Tensor = (p * d.unsqueeze(0)).sum(2)
    return weight


def _takes(p: Tensor, d: Tensor) -> bool:
    if not dispatch.has_kernels(p):
        return False
    same = p.device == d.device and p.dtype == d.dtype == torch.float32 and p.is_contiguous() and d.is_contiguous()
    fits = power_up(len(p)) * power_up(d[0].numel()) <= LARGEST
    return same and fits and is_unseen(p, d) and not is_forward_mode()


class _Composition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pointwise: Tensor, depthwise: Tensor, inputs: int) -> Tensor:
        ctx.save_for_backward(pointwise, depthwise)
        ctx.inputs = inputs
        return run_compose(pointwise, depthwise, inputs)

    @staticmethod
    def backward(ctx: Any, dweight: Tensor) -> tuple[Tensor, Tensor, None]:
        p, d = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(dweight)  # true with is_grads_batched=True
        if torch.is_grad_enabled() or batched or not is_unseen(dweight, p, d):
            g = dweight.unsqueeze(2)
            dp = (g * d.reshape(1, ctx.inputs, -1, *d.shape[2:])).sum((-2, -1))
            dd = (g * p.reshape(len(p), ctx.inputs, -1, 1, 1)).sum(0)
            return dp.reshape(p.shape), dd.reshape(d.shape), None
        dp, dd = run_compose_backward(dweight.contiguous(), p.contiguous(), d.contiguous(), ctx.inputs)
        return dp, dd, None


def run_compose(pointwise: Tensor, depthwise: Tensor, inputs: int) -> Tensor:
    """Return the composed weight, computed with Triton; both tensors must be contiguous and float32."""
    from .triton.separable import compose as kernel

    outputs, wide = pointwise.shape[:2]
    weight = torch.empty((outputs, inputs, *depthwise.shape[2:]), dtype=torch.float32, device=pointwise.device)
    area = depthwise[0].numel()
    constants = (outputs, inputs, wide // inputs, area, power_up(area), CHANNELS)
    with torch.cuda.device_of(pointwise):
        kernel[(inputs * up(outputs, CHANNELS),)](pointwise, depthwise, weight, *constants)
    return weight


def run_compose_backward(dweight: Tensor, pointwise: Tensor, depthwise: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the pointwise and depthwise weights.

    ``dweight`` is the gradient of the composed weight. All tensors must be contiguous and float32.
    """
    from .triton.separable import compose_backward as kernel

    outputs, wide = pointwise.shape[:2]
    dpointwise, ddepthwise = torch.empty_like(pointwise), torch.empty_like(depthwise)
    area = depthwise[0].numel()
    constants = (outputs, inputs, wide // inputs, area, power_up(area), power_up(outputs))
    with torch.cuda.device_of(pointwise):
        kernel[(wide,)](dweight, pointwise, depthwise, dpointwise, ddepthwise, *constants)
    return dpointwise, ddepthwise
