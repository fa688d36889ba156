"""Images as blocks of 2x2 pixels: write the blocks, convolve them, and compute the gradient of the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

_NUMBERS = ["count", "rows", "columns", "H", "W", "before", "x_n", "x_c", "x_h", "x_w"]


@triton.jit(do_not_specialize=_NUMBERS)
def to_blocks(
    x, blocks, count, rows, columns, H, W, before, x_n, x_c, x_h, x_w,
    INPUTS: tl.constexpr, CHANNELS: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write P blocks of CHANNELS values each: the channels of the first pixel, then those of the next one, row by row.

    V is CHANNELS rounded up to a power of two.
    """
    block = tl.program_id(0) * P + tl.arange(0, P)
    line = block // columns
    image = line // rows
    value = tl.arange(0, V)
    pixel = value // INPUTS
    h = ((line - image * rows - before) * 2)[:, None] + (pixel // 2)[None, :]
    w = ((block - line * columns - before) * 2)[:, None] + (pixel % 2)[None, :]
    here = (block < count)[:, None] & (pixel < 4)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    at = image.to(tl.int64)[:, None] * x_n + ((value - pixel * INPUTS) * x_c)[None, :] + h * x_h + w * x_w
    found = tl.load(x + at, mask=here, other=0.0)
    to = block.to(tl.int64)[:, None] * CHANNELS + value[None, :]
    mask = (block < count)[:, None] & (value < CHANNELS)[None, :]
    tl.store(blocks + to, found.to(blocks.dtype.element_ty), mask=mask)


@triton.jit
def _windows(blocks, pixel, count, rows, columns, TAPS: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the windows of some output pixels, TAPS x TAPS blocks each, as the rows of a matrix."""
    line = pixel // columns
    image = line // rows
    # The blocks have TAPS - 1 more rows and columns than the output.
    width = columns + TAPS - 1
    corner = (image.to(tl.int64) * (rows + TAPS - 1) + line - image * rows) * width + pixel - line * columns
    # The blocks of one row of a window are next to each other in memory.
    value = tl.arange(0, TAPS * TAPS * CHANNELS)
    inside = value // (TAPS * CHANNELS) * (width * CHANNELS) + value % (TAPS * CHANNELS)
    return tl.load(blocks + (corner * CHANNELS)[:, None] + inside[None, :], mask=(pixel < count)[:, None], other=0.0)


@triton.jit
def _columns(value, TAPS: tl.constexpr, CHANNELS: tl.constexpr, INPUTS: tl.constexpr, SIZE: tl.constexpr,
             FRONT: tl.constexpr):  # fmt: skip
    """Return where the weights for a window's values are in a row of the kernel, and which values have a weight.

    The first FRONT rows and columns of pixels in a window have no weights.
    """
    tap, channel = value // CHANNELS, value % CHANNELS
    pixel = channel // INPUTS
    h = tap // TAPS * 2 + pixel // 2 - FRONT
    w = tap % TAPS * 2 + pixel % 2 - FRONT
    has = (pixel < 4) & (h >= 0) & (h < SIZE) & (w >= 0) & (w < SIZE)
    return (channel % INPUTS * SIZE + h) * SIZE + w, has


@triton.jit(do_not_specialize=["count", "rows", "columns"])
def convolve(
    blocks, kernel, y, count, rows, columns,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    INPUTS: tl.constexpr, SIZE: tl.constexpr, FRONT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Compute the output, P pixels at a time; ``kernel`` has the shape (OUT, INPUTS, SIZE, SIZE) and is dense."""
    out = tl.arange(0, OUT)
    column, has = _columns(tl.arange(0, TAPS * TAPS * CHANNELS), TAPS, CHANNELS, INPUTS, SIZE, FRONT)
    weights = tl.load(kernel + out[None, :] * (INPUTS * SIZE * SIZE) + column[:, None], mask=has[:, None], other=0.0)
    weights = weights.to(blocks.dtype.element_ty)
    for first in tl.range(tl.program_id(0) * P, count, tl.num_programs(0) * P):
        pixel = first + tl.arange(0, P)
        found = tl.dot(_windows(blocks, pixel, count, rows, columns, TAPS, CHANNELS), weights)
        at = pixel.to(tl.int64)[:, None] * OUT + out[None, :]
        tl.store(y + at, found.to(y.dtype.element_ty), mask=(pixel < count)[:, None])


@triton.jit(do_not_specialize=["count", "rows", "columns"])
def kernel_gradient(
    blocks, dy, partial, count, rows, columns,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr,
    INPUTS: tl.constexpr, SIZE: tl.constexpr, FRONT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Sum the kernel's gradient over every n-th group of P pixels, where n is the number of programs.

    ``partial`` has the shape (programs, OUT, INPUTS, SIZE, SIZE).
    """
    value, out = tl.arange(0, TAPS * TAPS * CHANNELS), tl.arange(0, OUT)
    total = tl.zeros((OUT, TAPS * TAPS * CHANNELS), tl.float32)
    for first in tl.range(tl.program_id(0) * P, count, tl.num_programs(0) * P):
        pixel = first + tl.arange(0, P)
        at = pixel.to(tl.int64)[:, None] * OUT + out[None, :]
        gradient = tl.load(dy + at, mask=(pixel < count)[:, None], other=0.0)
        total = tl.dot(tl.trans(gradient), _windows(blocks, pixel, count, rows, columns, TAPS, CHANNELS), total)
    column, has = _columns(value, TAPS, CHANNELS, INPUTS, SIZE, FRONT)
    at = (tl.program_id(0) * OUT + out)[:, None] * (INPUTS * SIZE * SIZE) + column[None, :]
    tl.store(partial + at, total, mask=has[None, :])
