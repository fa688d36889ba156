"""Normalize by given statistics: a kernel for dense tensors, and one for channels-last tensors with any row stride."""

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
    """Write g(gamma (x - mean) / sqrt(var + eps) + beta + residual) to y, where g is the activation.

    The tensors are dense and have ``count`` elements. Each run of ``inner`` consecutive elements belongs to one
    channel.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    element = tl.arange(0, BLOCK)
    exists = element < count - start
    channel = (((start % (C * inner)).to(tl.int32) + element) // inner) % C
    centered = tl.load(x + start + element, mask=exists, other=0.0).to(tl.float32) - tl.load(mean + channel)
    scale = tl.rsqrt(tl.load(var + channel) + eps) * load_or(gamma, channel, C, 1.0)
    z = centered * scale + load_or(beta, channel, C, 0.0)
    if residual is not None:
        z += tl.load(residual + start + element, mask=exists, other=0.0).to(tl.float32)
    tl.store(y + start + element, activate(z, slope, ACT).to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["rows", "C", "x_stride", "y_stride", "eps", "slope"])
def normalize_rows(
    x, y, mean, var, gamma, beta, rows, C, x_stride, y_stride, eps, slope,
    ACT: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Normalize channels-last rows by given statistics; each program processes V channels of P rows.

    A row has the values of all channels at one location of one example. C and the row strides are multiples of A. The
    caller divides them by A, and the kernel multiplies them by A again. So the compiler knows that they are multiples
    of A, and can use wide loads and stores.
    """
    C = C * A
    slices = (C + V - 1) // V
    block = tl.program_id(0) // slices
    channel = (tl.program_id(0) - block * slices) * V + tl.arange(0, V)
    row = block * P + tl.arange(0, P)
    here = channel < C
    exists = (row < rows)[:, None] & here[None, :]
    row = row.to(tl.int64)[:, None]
    value = tl.load(x + row * (x_stride * A) + channel[None, :], mask=exists, other=0.0).to(tl.float32)
    centered = value - tl.load(mean + channel, mask=here, other=0.0)[None, :]
    scale = tl.rsqrt(tl.load(var + channel, mask=here, other=1.0) + eps) * load_or(gamma, channel, C, 1.0)
    z = centered * scale[None, :] + load_or(beta, channel, C, 0.0)[None, :]
    result = activate(z, slope, ACT).to(y.dtype.element_ty)
    tl.store(y + row * (y_stride * A) + channel[None, :], result, mask=exists)
