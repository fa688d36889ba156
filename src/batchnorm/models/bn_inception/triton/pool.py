"""Pooling of 3x3 windows, padded by 1, in channels-last tensors: each program has P pixels of V channels.

C and the strides of rows (a pixel's channels) are in units of A, so that the compiler knows how wide accesses may be.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(9)  # not a place in a window, which are 0 to 8


@triton.jit
def pixels_of(count, C, H, W, P: tl.constexpr, V: tl.constexpr):
    """Return this program's pixels [P] as image, row, column and number, which of them exist, and its channels [V]."""
    slices = (C + V - 1) // V
    program = tl.program_id(0)
    block = program // slices
    channel = (program - block * slices) * V + tl.arange(0, V)
    pixel = block * P + tl.arange(0, P)
    line = pixel // W
    image = line // H
    return image, line - image * H, pixel - line * W, pixel, pixel < count, channel


@triton.jit
def offsets(image, row, column, H, W, stride, channel):
    """Return where the channels of pixels lie, [P, V]."""
    return ((image * H + row) * W + column).to(tl.int64)[:, None] * stride + channel[None, :]


@triton.jit
def inside(row, column, exists, H, W):
    """Return which pixels are in the image."""
    return exists & (row >= 0) & (row < H) & (column >= 0) & (column < W)


_SIZES = ["count", "C", "H", "W"]
_MAPPED = [*_SIZES, "out_H", "out_W"]


@triton.jit(do_not_specialize=[*_MAPPED, "x_stride", "y_stride"])
def max_forward(
    x, y, where, count, C, H, W, out_H, out_W, x_stride, y_stride,
    STRIDE: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Write each window's largest value and its place, 0 to 8: the first of equal ones, or the last NaN."""
    C = C * A
    image, row, column, pixel, exists, channel = pixels_of(count, C, out_H, out_W, P, V)
    best = tl.full([P, V], float("-inf"), tl.float32)
    # Start at the first place inside the image: if all values are -inf, none is greater.
    first = tl.where(row == 0, 3, 0) + tl.where(column == 0, 1, 0)
    place = tl.zeros([P, V], tl.int32) + first[:, None]
    for k in tl.static_range(9):
        h = row * STRIDE + (k // 3 - 1)
        w = column * STRIDE + (k % 3 - 1)
        here = inside(h, w, exists, H, W)[:, None] & (channel < C)[None, :]
        at = offsets(image, h, w, H, W, x_stride * A, channel)
        value = tl.load(x + at, mask=here, other=float("-inf")).to(tl.float32)
        take = (value > best) | (value != value)
        best = tl.where(take, value, best)
        place = tl.where(take, k, place)
    here = exists[:, None] & (channel < C)[None, :]
    at = pixel.to(tl.int64)[:, None]
    tl.store(y + at * (y_stride * A) + channel[None, :], best.to(y.dtype.element_ty), mask=here)
    tl.store(where + at * C + channel[None, :], place.to(tl.uint8), mask=here)


@triton.jit
def load_window(dy, where, image, row, column, exists, channel, C, H, W, stride):
    """Return a window's gradient, 0 if there is no such window, and the place it belongs to."""
    here = inside(row, column, exists, H, W)[:, None] & (channel < C)[None, :]
    d = tl.load(dy + offsets(image, row, column, H, W, stride, channel), mask=here, other=0.0)
    place = tl.load(where + offsets(image, row, column, H, W, C, channel), mask=here, other=NONE)
    return d.to(tl.float32), place


@triton.jit(do_not_specialize=[*_SIZES, "dy_stride"])
def max_backward_1(
    dy, where, dx, plus, count, C, H, W, dy_stride,
    P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Sum at each pixel the gradients of the nine windows around it, and ``plus`` if it is given; stride 1."""
    C = C * A
    image, row, column, _, exists, channel = pixels_of(count, C, H, W, P, V)
    total = tl.zeros([P, V], tl.float32)
    for k in tl.static_range(9):
        d, place = load_window(
            dy, where, image, row + (1 - k // 3), column + (1 - k % 3), exists, channel, C, H, W, dy_stride * A
        )
        total += tl.where(place == k, d, 0.0)
    store_pixel(dx, plus, total, image, row, column, exists, channel, C, H, W)


@triton.jit
def store_pixel(dx, plus, total, image, row, column, exists, channel, C, H, W):
    """Write the gradient of one pixel of each block, after adding another if it is given."""
    here = inside(row, column, exists, H, W)[:, None] & (channel < C)[None, :]
    at = offsets(image, row, column, H, W, C, channel)
    if plus is not None:
        total += tl.load(plus + at, mask=here, other=0.0).to(tl.float32)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=[*_MAPPED, "dy_stride"])
def max_backward_2(
    dy, where, dx, plus, count, C, H, W, out_H, out_W, dy_stride,
    P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Sum gradients at stride 2 in blocks of 2x2 pixels, which four windows reach; add ``plus`` if it is given."""
    C = C * A
    i, r, c, _, exists, channel = pixels_of(count, C, out_H, out_W, P, V)
    stride = dy_stride * A
    a, at_a = load_window(dy, where, i, r, c, exists, channel, C, out_H, out_W, stride)
    b, at_b = load_window(dy, where, i, r, c + 1, exists, channel, C, out_H, out_W, stride)
    d, at_d = load_window(dy, where, i, r + 1, c, exists, channel, C, out_H, out_W, stride)
    e, at_e = load_window(dy, where, i, r + 1, c + 1, exists, channel, C, out_H, out_W, stride)
    # The block's first pixel is the middle of its own window.
    store_pixel(dx, plus, tl.where(at_a == 4, a, 0.0), i, 2 * r, 2 * c, exists, channel, C, H, W)
    right = tl.where(at_a == 5, a, 0.0) + tl.where(at_b == 3, b, 0.0)
    store_pixel(dx, plus, right, i, 2 * r, 2 * c + 1, exists, channel, C, H, W)
    below = tl.where(at_a == 7, a, 0.0) + tl.where(at_d == 1, d, 0.0)
    store_pixel(dx, plus, below, i, 2 * r + 1, 2 * c, exists, channel, C, H, W)
    corner = tl.where(at_a == 8, a, 0.0) + tl.where(at_b == 6, b, 0.0)
    corner += tl.where(at_d == 2, d, 0.0) + tl.where(at_e == 0, e, 0.0)
    store_pixel(dx, plus, corner, i, 2 * r + 1, 2 * c + 1, exists, channel, C, H, W)


@triton.jit
def share(row, column, H, W):
    """Return the reciprocal of the number of image pixels in the window around each pixel."""
    rows = tl.minimum(row + 1, H - 1) - tl.maximum(row - 1, 0) + 1
    columns = tl.minimum(column + 1, W - 1) - tl.maximum(column - 1, 0) + 1
    return 1.0 / (rows * columns).to(tl.float32)


@triton.jit(do_not_specialize=[*_SIZES, "x_stride", "y_stride"])
def average(
    x, y, count, C, H, W, x_stride, y_stride,
    BACKWARD: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Average the window around each pixel, inside the image only; backward, distribute each window's gradient."""
    C = C * A
    image, row, column, pixel, exists, channel = pixels_of(count, C, H, W, P, V)
    total = tl.zeros([P, V], tl.float32)
    for k in tl.static_range(9):
        h = row + (k // 3 - 1)
        w = column + (k % 3 - 1)
        here = inside(h, w, exists, H, W)[:, None] & (channel < C)[None, :]
        value = tl.load(x + offsets(image, h, w, H, W, x_stride * A, channel), mask=here, other=0.0).to(tl.float32)
        if BACKWARD:
            value = value * share(h, w, H, W)[:, None]
        total += value
    if not BACKWARD:
        total = total * share(row, column, H, W)[:, None]
    here = exists[:, None] & (channel < C)[None, :]
    at = pixel.to(tl.int64)[:, None] * (y_stride * A) + channel[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=here)
