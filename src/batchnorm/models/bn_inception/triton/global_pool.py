"""Average each channel over all pixels of an image; the tensors are channels last.

A program processes V channels of one image, P pixels at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(C, V: tl.constexpr):
    slices = (C + V - 1) // V
    image = tl.program_id(0) // slices
    return image.to(tl.int64), (tl.program_id(0) - image * slices) * V + tl.arange(0, V)


@triton.jit
def average(x, y, pixels, C, stride, P: tl.constexpr, V: tl.constexpr):
    """Write the averages; ``stride`` is the number of elements from one pixel to the next."""
    image, channel = _place(C, V)
    total = tl.zeros([V], tl.float32)
    for first in range(0, pixels, P):
        pixel = first + tl.arange(0, P)
        here = (pixel < pixels)[:, None] & (channel < C)[None, :]
        at = (image * pixels + pixel)[:, None] * stride + channel[None, :]
        total += tl.sum(tl.load(x + at, mask=here, other=0.0).to(tl.float32), 0)
    tl.store(y + image * C + channel, (total / pixels).to(y.dtype.element_ty), mask=channel < C)


@triton.jit
def spread(dy, dx, pixels, C, P: tl.constexpr, V: tl.constexpr):
    """Write the gradient of the input, given the gradient of the averages."""
    image, channel = _place(C, V)
    d = tl.load(dy + image * C + channel, mask=channel < C, other=0.0).to(tl.float32) / pixels
    d = tl.broadcast_to(d.to(dx.dtype.element_ty)[None, :], [P, V])
    for first in range(0, pixels, P):
        pixel = first + tl.arange(0, P)
        here = (pixel < pixels)[:, None] & (channel < C)[None, :]
        tl.store(dx + (image * pixels + pixel)[:, None] * C + channel[None, :], d, mask=here)
