"""Compose the depthwise and pointwise weights of a separable convolution into the weight of one dense convolution.

There are OUT output channels, IN input channels, and M depthwise filters per input channel. A filter has A weights;
B is A rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compose(
    pointwise, depthwise, dense, OUT: tl.constexpr, IN: tl.constexpr, M: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write the composed weight's filters for one input channel and P output channels."""
    i = tl.program_id(0) % IN
    o, k = tl.program_id(0) // IN * P + tl.arange(0, P), tl.arange(0, B)
    total = tl.zeros([P, B], tl.float32)
    for m in range(i * M, i * M + M):
        p = tl.load(pointwise + o * (IN * M) + m, mask=o < OUT, other=0.0)
        d = tl.load(depthwise + m * A + k, mask=k < A, other=0.0)
        total += p[:, None] * d[None, :]
    tl.store(dense + (o * IN + i)[:, None] * A + k[None, :], total, mask=(o < OUT)[:, None] & (k < A)[None, :])


@triton.jit
def compose_backward(
    gradient, pointwise, depthwise, dpointwise, ddepthwise, OUT: tl.constexpr, IN: tl.constexpr, M: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a depthwise filter and of its pointwise weights; P is OUT rounded up to a power of two."""
    m = tl.program_id(0)
    o, k = tl.arange(0, P), tl.arange(0, B)
    here = (o < OUT)[:, None] & (k < A)[None, :]
    g = tl.load(gradient + (o * IN + m // M)[:, None] * A + k[None, :], mask=here, other=0.0)
    p = tl.load(pointwise + o * (IN * M) + m, mask=o < OUT, other=0.0)
    d = tl.load(depthwise + m * A + k, mask=k < A, other=0.0)
    tl.store(dpointwise + o * (IN * M) + m, tl.sum(g * d[None, :], 1), mask=o < OUT)
    tl.store(ddepthwise + m * A + k, tl.sum(g * p[:, None], 0), mask=k < A)
