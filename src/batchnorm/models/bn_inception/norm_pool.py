"""Batch normalization, ReLU and a 3x3 max pool at stride 2 as one function, which never stores ReLU's output.

The forward pass has two launches: one computes the statistics of the input x, and the other computes the pooled output
from x. The backward pass also has two launches, which read x, the gradient of the pooled output and the positions of
the maxima. The only tensor of x's size that the backward pass writes is dx, the gradient of x. With
``create_graph=True``, the backward pass uses differentiable operations instead of these launches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import BatchNorm2d
from ...ops import composite
from ...ops.call import Call
from ...ops.cuda.cached_pass import processors
from ...ops.cuda.launch import statistics
from ...ops.cuda.schedule import up
from ...ops.cuda.triton_launch import TritonLaunch
from ...ops.cuda.workspace import workspace
from ...ops.torch_state import is_recomputation
from .channels_last import ColumnTiles, alignment, readable
from .joined_branches import can_join, running_of
from .pooling import MaxPool2d, backward_launch, empty_maxima, empty_places, max_pool_backward, max_pool_into

PROGRAMS = 4  # the kernel that computes dgamma and dbeta has at most this many programs per multiprocessor


def can_pool(bn: BatchNorm2d, pool: nn.Module, x: Tensor) -> bool:
    """Return whether :func:`normalize_and_pool` can run these layers on ``x``."""
    return (
        type(pool) is MaxPool2d
        and pool.has_kernel
        and pool.stride == 2
        and can_join([bn], x)
        and bn.uses_batch_statistics
        and bn.activation.name == "relu"
        and x.shape[1:2] == bn.features
        and x.numel() > x.shape[1]
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def normalize_and_pool(bn: BatchNorm2d, x: Tensor) -> Tensor:
    """Return the maxima of ReLU(BN(x)) over 3x3 windows, with stride 2 and padding 1.

    The running averages are updated, except when activation checkpointing recomputes the forward pass.

    After rounding, the maximum of ReLU(BN(x)) in a window may occur at several pixels. In that case, the gradient goes
    to the pixel with the largest x or, if gamma is negative, with the smallest x.
    """
    y: Tensor = _NormalizeAndPool.apply(x, bn.weight, bn.bias, bn)  # type: ignore[no-untyped-call]
    return y


class _NormalizeAndPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, bn: BatchNorm2d) -> Tensor:
        running = None
        if not is_recomputation():
            running = running_of(bn)
            torch.autograd.graph.increment_version(running)
        stats = statistics(Call(x, gamma, beta, bn.eps, bn.activation, running=running, momentum=bn.momentum))
        y = empty_maxima(x, 2)
        where = empty_places(y)
        max_pool_into(x, y, where, 2, stats)
        ctx.options = (bn.eps, bn.activation)
        ctx.save_for_backward(x, gamma, beta, stats, where)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, stats, where = ctx.saved_tensors
        # Saved-tensor hooks such as save_on_cpu may have changed the layout, but the kernels need channels last.
        x, where = (t.contiguous(memory_format=torch.channels_last) for t in (x, where))
        if torch.is_grad_enabled():
            dz = max_pool_backward(dy, where, 2, *x.shape[2:])
            dx, dgamma, dbeta, _ = composite.backward(Call(x, gamma, beta, *ctx.options), dz)
            return dx, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), None
        dy, row = readable(dy)
        dx = torch.empty_like(x)
        dgamma, dbeta = stats.new_empty((2, x.shape[1]))
        sizes = (x.shape, alignment(dy, x), row)
        add_up, room = _sums_launch(*sizes, x.element_size(), x.device)
        add_up((dy, where, x, stats, dgamma, dbeta, *workspace(x, *room)), (), ())
        write = backward_launch(*sizes, 2, x.element_size(), x.device)
        write((dy, where, dx, x, stats, dgamma, dbeta), (), ())
        return dx, dgamma, dbeta, None


@cache
def _sums_launch(
    shape: torch.Size, align: int, dy_row: int, itemsize: int, device: torch.device
) -> tuple[TritonLaunch, tuple[int, int]]:
    """Return a launch that computes dgamma and dbeta, and how many floats and counters its workspace has."""
    from .triton.max_pool import max_sums

    t = ColumnTiles(shape, align, 2, itemsize)
    each = up(t.units, max(1, min(1024, PROGRAMS * processors(device) // t.slices)))
    parts = up(t.units, each)
    tree = parts > 32
    numbers = (*t.numbers, dy_row // align, parts, t.units, each)
    launch = TritonLaunch(max_sums, parts * t.slices, numbers, (*t.constants, tree), t.options, device)
    kept = parts + up(parts, 32) * tree
    return launch, (2 * kept * shape[1], 2 + t.slices * (33 if tree else 1))
