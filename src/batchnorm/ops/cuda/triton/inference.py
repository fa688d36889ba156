"""Normalization by given statistics: one pass over memory in its own order, whatever the layout."""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import load_or
from .tile import activate


@triton.jit
def normalize(
    x, y, residual, mean, var, gamma, beta, count, C, inner, eps, slope,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write g(gamma (x - mean) / sqrt(var + eps) + beta + residual); channels change every ``inner`` elements."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    element = tl.arange(0, BLOCK)
    exists = element < count - start
    channel = (((start % (C * inner)).to(tl.int32) + element) // inner) % C
    centred = tl.load(x + start + element, mask=exists, other=0.0).to(tl.float32) - tl.load(mean + channel)
    scale = tl.rsqrt(tl.load(var + channel) + eps) * load_or(gamma, channel, C, 1.0)
    z = centred * scale + load_or(beta, channel, C, 0.0)
    if residual is not None:
        z += tl.load(residual + start + element, mask=exists, other=0.0).to(tl.float32)
    tl.store(y + start + element, activate(z, slope, ACT).to(y.dtype.element_ty), mask=exists)
