"""Rearrange images into blocks of 2x2 pixels."""

from __future__ import annotations

import triton
import triton.language as tl

_NUMBERS = ["count", "rows", "columns", "H", "W", "before", "x_n", "x_c", "x_h", "x_w"]


@triton.jit(do_not_specialize=_NUMBERS)
def to_blocks(
    x, blocks, count, rows, columns, H, W, before, x_n, x_c, x_h, x_w,
    INPUTS: tl.constexpr, CHANNELS: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write P blocks of CHANNELS values: the INPUTS channels of each of the block's four pixels, then zeros.

    A block's pixels are in row-major order. Pixels outside the image are written as 0. V is CHANNELS rounded up to a
    power of two.
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
