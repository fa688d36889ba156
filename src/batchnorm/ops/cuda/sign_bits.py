"""Sign bits: one bit per element, which says whether the activation's derivative is 1.

The forward pass saves these bits if a residual was added before relu, leaky_relu or relu6. With z = BN(x) + residual,
the derivative is 1 if z > 0 (relu, leaky_relu) or if 0 < z < 6 (relu6). For NaN, see ``passes`` in triton/tile.py.

Bits are stored in one of two orders. A 1D tensor holds the bits row by row (channels last) or channel by channel
(channels first); a row is one location of one example. Each row or channel is padded to whole bytes. A 2D tensor,
called woven, holds the bits example by example, in the order of a dense channels-first x. So a byte may hold bits of
two channels. Bits are woven only if resident.py chooses the woven form for x. The choice depends only on the tensors'
shapes, strides, dtypes and device, because torch.compile must know the shape of the bits before the kernel runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layout import Geometry, geometry_of
from .schedule import up


def empty_bits(x: Tensor, g: Geometry, woven: bool) -> Tensor:
    """Return an uninitialized tensor for the sign bits of ``x``: 2D if ``woven`` is true, else 1D."""
    if woven:
        return x.new_empty((g.rows // g.width, g.channels * g.width // 8), dtype=torch.uint8)
    size = g.rows * up(g.channels, 8) if g.nhwc else g.channels * up(g.rows, 8)
    return x.new_empty(size, dtype=torch.uint8)


def is_woven(bits: Tensor) -> bool:
    """Return whether ``bits`` are in woven order."""
    return bits.dim() == 2


def unpack(bits: Tensor, x: Tensor) -> Tensor:
    """Convert the sign bits of a forward pass over ``x`` to a bool tensor of x's shape."""
    g = geometry_of(x)
    assert g is not None
    each = bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    if is_woven(bits):
        return each.bool().reshape(x.shape)
    lines, length = (g.rows, g.channels) if g.nhwc else (g.channels, g.rows)
    flat = each.reshape(lines, -1)[:, :length].bool()
    if g.nhwc:
        return flat.reshape(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)
    return flat.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def rearrange(bits: Tensor, x: Tensor, woven: bool) -> Tensor:
    """Return the bits of ``x`` in woven order (2D) if ``woven`` is true, else in the other order (1D).

    Bits that already have this order are returned unchanged. To convert bits from one order to the other, ``x`` must be
    channels first.
    """
    if is_woven(bits) == woven:
        return bits
    each = unpack(bits, x).to(torch.uint8)
    lines = each.flatten(1) if woven else each.transpose(0, 1).flatten(1)
    eights = pad(lines, (0, -lines.shape[1] % 8)).unflatten(1, (-1, 8))
    packed: Tensor = (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)
    return packed if woven else packed.flatten()
