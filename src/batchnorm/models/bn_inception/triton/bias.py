"""Add a bias and apply a nonlinearity to channels-last tensors, in tiles of P pixels and V channels.

The caller divides the number of channels C and the strides between pixels by A, and the kernels multiply them by A
again, so that the compiler knows the alignment of memory accesses. Docstrings give the shapes of tensors in brackets,
such as [P, V].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(C, V: tl.constexpr):
    """Return the program's index among the programs with the same channels, and the indices [V] of these channels."""
    slices = (C + V - 1) // V
    part = tl.program_id(0) // slices
    return part, (tl.program_id(0) - part * slices) * V + tl.arange(0, V)


@triton.jit
def tile_of(first, last, C, channel, P: tl.constexpr):
    """Return the indices [P, 1] of P pixels from ``first`` on, and a mask [P, V] of the values inside the tensor."""
    pixel = first + tl.arange(0, P)
    return pixel.to(tl.int64)[:, None], (pixel < last)[:, None] & (channel < C)[None, :]


@triton.jit(do_not_specialize=["count", "C", "x_stride"])
def forward(
    x, bias, y, count, C, x_stride,
    SIGMOID: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Write one tile of g(x + bias), where g is ReLU or, if SIGMOID, the sigmoid."""
    C = C * A
    block, channel = place(C, V)
    pixel, here = tile_of(block * P, count, C, channel, P)
    value = tl.load(x + pixel * (x_stride * A) + channel[None, :], mask=here).to(tl.float32)
    value += tl.load(bias + channel, mask=channel < C).to(tl.float32)[None, :]
    # For ReLU, use tl.where, because tl.maximum would turn NaN into 0.
    result = 1 / (1 + tl.exp(-value)) if SIGMOID else tl.where(value < 0, 0.0, value)
    tl.store(y + pixel * C + channel[None, :], result.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["count", "C", "dy_stride", "tiles"])
def backward(
    dy, y, dx, partial, count, C, dy_stride, tiles,
    SIGMOID: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Write dx = g'(x + bias) dy, and this program's part of the bias's gradient: the sum of dx over its pixels."""
    C = C * A
    part, channel = place(C, V)
    total = tl.zeros([P, V], tl.float32)
    for tile in range(tiles):
        pixel, here = tile_of((part * tiles + tile) * P, count, C, channel, P)
        d = tl.load(dy + pixel * (dy_stride * A) + channel[None, :], mask=here, other=0.0).to(tl.float32)
        out = tl.load(y + pixel * C + channel[None, :], mask=here, other=0.0).to(tl.float32)
        d = d * out * (1 - out) if SIGMOID else tl.where(out <= 0, 0.0, d)
        tl.store(dx + pixel * C + channel[None, :], d.to(dx.dtype.element_ty), mask=here)
        total += d
    tl.store(partial + part * C + channel, tl.sum(total, 0), mask=channel < C)
