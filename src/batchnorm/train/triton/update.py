"""SGD with momentum on many tensors in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(table, chunks, momentum, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """Update up to CHUNK elements of a weight tensor, its momentum buffer (velocity) and its bfloat16 copy, if any.

    ``table`` has a row of seven numbers for each weight tensor. The first five are the addresses of the weights, the
    velocity, the gradient, the bfloat16 copy (0 if there is none) and the learning rate. The last two are the number of
    elements, and the weight decay as the bits of a float32. The gradient is bfloat16 if there is a copy, and float32
    otherwise. If ALIGNED, all addresses are multiples of 16, and all numbers of elements are multiples of 8. ``chunks``
    has two numbers for each program: the index of a row of ``table``, and the index of the first element that the
    program updates.
    """
    row = table + 7 * tl.load(chunks + 2 * tl.program_id(0))
    at = tl.load(chunks + 2 * tl.program_id(0) + 1)
    weight = tl.load(row).to(tl.pointer_type(tl.float32))
    velocity = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    gradient, copy, count = tl.load(row + 2), tl.load(row + 3), tl.load(row + 5)
    rate = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    decay = tl.load(row + 6).to(tl.int32).to(tl.float32, bitcast=True)
    narrow_gradient, narrow_weight = gradient.to(tl.pointer_type(tl.bfloat16)), copy.to(tl.pointer_type(tl.bfloat16))
    wide_gradient = gradient.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        weight, velocity = tl.multiple_of(weight, 16), tl.multiple_of(velocity, 16)
        narrow_gradient, narrow_weight = tl.multiple_of(narrow_gradient, 16), tl.multiple_of(narrow_weight, 16)
        wide_gradient, count = tl.multiple_of(wide_gradient, 16), tl.multiple_of(count, 8)
    at = tl.multiple_of(at, CHUNK) + tl.arange(0, CHUNK)
    here = at < count
    w = tl.load(weight + at, mask=here)
    v = tl.load(velocity + at, mask=here)
    if copy == 0:
        g = tl.load(wide_gradient + at, mask=here)
    else:
        g = tl.load(narrow_gradient + at, mask=here).to(tl.float32)
    v = momentum * v + (g + decay * w)
    w -= rate * v
    tl.store(velocity + at, v, mask=here)
    tl.store(weight + at, w, mask=here)
    if copy != 0:
        tl.store(narrow_weight + at, w.to(tl.bfloat16), mask=here)
