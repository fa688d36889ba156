"""The cross-entropy loss of a batch, and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy(scores, labels, losses, gradient, classes, C: tl.constexpr):
    """Compute the loss of one example, and the example's row of the gradient of the mean loss.

    Each program processes one example. C is ``classes`` rounded up to a power of two. If the label is negative or at
    least ``classes``, the loss and the row are NaN.
    """
    example, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    here = c < classes
    label = tl.load(labels + example)
    z = tl.load(scores + example * classes + c, mask=here, other=-float("inf")).to(tl.float32)
    top = tl.max(z, 0)
    top = tl.where((label >= 0) & (label < classes), top, float("nan"))
    e = tl.exp(z - top)
    total = tl.sum(e, 0)
    tl.store(losses + example, tl.log(total) - tl.sum(tl.where(c == label, z - top, 0.0), 0))
    d = (e / total - tl.where(c == label, 1.0, 0.0)) / tl.num_programs(0)
    tl.store(gradient + example * classes + c, d.to(gradient.dtype.element_ty), mask=here)
