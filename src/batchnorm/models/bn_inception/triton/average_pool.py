"""Average pooling of 3x3 windows in channels-last tensors; each program computes P pixels of V channels.

The caller divides the number of channels C and the strides between pixels by A, and the kernels multiply them by A
again, so that the compiler knows the alignment of memory accesses. Docstrings give the shapes of tensors in brackets,
such as [P, V].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pixels_of(count, C, H, W, P: tl.constexpr, V: tl.constexpr):
    """Return the program's pixels and channels.

    Returns:
        The pixels' images, rows, columns and indices, each [P]; a mask of the pixels that exist [P]; the indices of the
        channels [V].
    """
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
    """Return the memory offsets [P, V] of the pixels' values."""
    return ((image * H + row) * W + column).to(tl.int64)[:, None] * stride + channel[None, :]


@triton.jit
def inside(row, column, exists, H, W):
    """Return a mask of the existing pixels whose row and column are inside the image."""
    return exists & (row >= 0) & (row < H) & (column >= 0) & (column < W)


@triton.jit
def share(row, column, H, W):
    """Return 1 / n for each pixel, where n is how many pixels of its 3x3 window are inside the image."""
    rows = tl.minimum(row + 1, H - 1) - tl.maximum(row - 1, 0) + 1
    columns = tl.minimum(column + 1, W - 1) - tl.maximum(column - 1, 0) + 1
    return 1.0 / (rows * columns).to(tl.float32)


@triton.jit(do_not_specialize=["count", "C", "H", "W", "x_stride", "y_stride"])
def average(
    x, y, count, C, H, W, x_stride, y_stride,
    BACKWARD: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Write the average of each window, counting only the pixels inside the image.

    If BACKWARD, x is the gradient of the averages, and the kernel writes the gradient of the pooling's input to y.
    """
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
