"""The memory layouts of (N, C, ...) tensors that the fused kernels support: channels last and channels first."""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor


class Geometry(NamedTuple):
    """Describe a tensor's shape and layout to the kernels; a row is one location of one example."""

    nhwc: bool  # whether the layout is channels last
    channels: int
    rows: int  # values per channel, called m in the paper
    width: int  # locations per example
    stride: int  # stride of a row (channels last) or of an example (channels first)
    plane: int  # stride of a channel
    wide: bool  # whether offsets need 64 bits


def geometry_of(x: Tensor) -> Geometry | None:
    """Return x's geometry, or None if the kernels do not support its strides or size."""
    shape, stride = x.shape, x.stride()
    if torch.compiler.is_compiling():
        return find_geometry(shape, stride)
    try:
        return _geometry(shape, stride)
    except TypeError:  # symbolic sizes are not hashable, so the cached function `_geometry` does not accept them
        return find_geometry(shape, stride)


def _collapse(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Return the stride of the dimensions after flattening (0 for a single value), or None if they cannot be flattened.

    The result is also None if a dimension with several values has a stride of 0.
    """
    expected = step = 0
    for size, s in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if expected == 0:
            step = s
        elif s != expected:
            return None
        expected = s * size
        if s <= 0:
            return None
    return step


def find_geometry(shape: tuple[int, ...], stride: tuple[int, ...]) -> Geometry | None:
    """Return the geometry of tensors of this shape and stride, or None if the kernels do not support them."""
    n, c, *locations = shape
    width = 1
    for size in locations:
        width *= size
    reach = 1 + sum((size - 1) * s for size, s in zip(shape, stride, strict=True))
    wide = max(reach, n * c * width) >= 2**31
    if n * width >= 2**31 - 2**16:
        return None
    if width > 1 and _collapse(shape[2:], stride[2:]) == 1 and (c == 1 or stride[1] != 1):
        return Geometry(False, c, n * width, width, stride[0] if n > 1 else 0, stride[1] if c > 1 else 0, wide)
    row = _collapse((n, *locations), (stride[0], *stride[2:]))
    if row is None or (c > 1 and stride[1] != 1):
        return None
    return Geometry(True, c, n * width, width, row, 1, wide)


_geometry = cache(find_geometry)


def row_stride(x: Tensor) -> int:
    """Return the stride between the rows of a channels-last tensor; a row is one location of one example.

    Raises:
        ValueError: if the tensor is not channels last, or has too many values per channel.
    """
    g = geometry_of(x)
    if (
        g is not None and g.channels == 1 and (g.nhwc or g.stride in (0, g.width))
    ):  # a tensor with a single channel is both channels first and channels last
        return g.stride if g.nhwc else 1
    if g is None or not g.nhwc:
        raise ValueError(
            "this operation needs channels-last tensors with fewer than 2**31 - 2**16 values per channel; got shape"
            f" {tuple(x.shape)} with strides {x.stride()}"
        )
    return g.stride


def dense_strides(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape in this geometry's layout."""
    order = [0, *range(2, len(shape)), 1] if geometry.nhwc else list(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


def empty_dense(x: Tensor, geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor of x's shape, dense in the geometry's layout."""
    return torch.empty_strided(x.shape, dense_strides(geometry, tuple(x.shape)), dtype=dtype, device=x.device)


def is_dense(t: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether ``t`` has these strides, ignoring dimensions of size 1."""
    return t.stride() == strides or all(n == 1 or s == d for n, s, d in zip(t.shape, t.stride(), strides, strict=True))


def as_dense(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return ``t`` with these strides; copy it unless it already has them."""
    return t if is_dense(t, strides) else t.new_empty_strided(t.shape, strides).copy_(t)


def vector(geometry: Geometry, itemsize: int) -> int:
    """Return how many adjacent values of a channels-first tensor a kernel loads in one access."""
    v = gcd(gcd(geometry.width, geometry.stride), gcd(geometry.plane, 16 // itemsize))
    while geometry.width // v < 2:
        v //= 2
    return v


def magic_of(divisor: int) -> tuple[int, int]:
    """Return m and s such that n // divisor == (n * m >> 32) >> s, if n < 2^31 and divisor > 1 (Granlund & Montgomery).

    >>> m, s = magic_of(7)
    >>> (100 * m >> 32) >> s
    14
    """
    bits = (divisor - 1).bit_length()
    return (1 << (31 + bits)) // divisor + 1, bits - 1
