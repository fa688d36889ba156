"""Helpers for kernels on channels-last CUDA tensors: which tensors are supported, and how they are tiled."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ...ops import dispatch
from ...ops.cuda.autograd import DTYPES
from ...ops.cuda.layout import geometry_of, row_stride
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_observed, is_transformed


def takes(x: Tensor | torch.fx.Proxy) -> bool:
    """Return whether the kernels for channels-last CUDA tensors support ``x``.

    >>> takes(torch.zeros(1, 8, 4, 4))  # a tensor on the CPU
    False
    """
    if isinstance(x, torch.fx.Proxy):
        return False
    if not dispatch.has_kernels(x) or x.dim() != 4 or x.dtype not in DTYPES or x.numel() == 0:
        return False
    if is_forward_mode() or (not torch.compiler.is_compiling() and (is_transformed() or is_observed(x))):
        return False
    g = geometry_of(x)
    return g is not None and g.nhwc


class ChannelTiles:
    """Divide a tensor among Triton programs, in tiles of P pixels and V channels."""

    def __init__(self, x: Tensor, strides: tuple[int, ...], pixels: int) -> None:
        channels = x.shape[1]
        self.align = gcd(16, channels, *strides)
        self.channels = min(power_up(channels), 128 // x.element_size())
        self.pixels = 1024 // self.channels
        self.slices = up(channels, self.channels)
        self.programs = up(pixels, self.pixels) * self.slices

    @property
    def constants(self) -> tuple[int, int, int]:
        """The kernels' constants P, V and A; A divides the number of channels and all strides."""
        return self.pixels, self.channels, self.align


class ColumnTiles:
    """Divide the windows of a max pool among Triton programs.

    A unit consists of one or more rows of windows, with P windows in each row. A program processes V channels of one
    or more units, row by row from top to bottom. The columns of windows in all images are numbered consecutively, so
    that a unit can extend over several images.
    """

    THREADS = 128

    def __init__(self, shape: tuple[int, ...], align: int, stride: int, itemsize: int) -> None:
        n, c, h, w = shape
        height, width = up(h, stride), up(w, stride)  # windows per column and per row of an image
        self.align = align
        self.channels = min(max(power_up(c), 2), 128 // itemsize)
        self.columns = 16 * self.THREADS // itemsize // self.channels  # each thread handles 16 bytes per row of windows
        self.slices = up(c, self.channels)
        blocks = up(n * width, self.columns)
        # With more rows per unit, fewer rows of pixels are read twice. But there are also fewer units, and too few
        # units would not fill the GPU.
        rows = max(1, min(8, blocks * self.slices * height // 2048))
        share = up(height, up(height, rows))
        self.units = blocks * up(height, share)
        self.numbers = (n * width, c // self.align, h, w, height, width, share)

    @property
    def constants(self) -> tuple[int, int, int]:
        """The kernels' constants P, V and A; A divides the number of channels and all strides."""
        return self.columns, self.channels, self.align

    @property
    def options(self) -> dict[str, int]:
        """Triton's options: if ``align`` >= 8, limit registers so that four programs fit on a multiprocessor."""
        return {"maxnreg": 128} if self.align >= 8 else {}


def alignment(*tensors: Tensor | None) -> int:
    """Return the largest of 1, 2, 4, 8 and 16 that divides all channel counts, pixel strides and element addresses.

    >>> alignment(torch.zeros(1, 24, 4, 4).contiguous(memory_format=torch.channels_last))
    8
    """
    found = [t for t in tensors if t is not None]
    return gcd(16, *(n for t in found for n in (t.shape[1], row_stride(t), t.data_ptr() // t.element_size())))


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized channels-last tensor on the device of ``like``, by default with the same dtype."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def readable(dy: Tensor) -> tuple[Tensor, int]:
    """Return ``dy``, copied unless it is already channels last, and the stride between its pixels."""
    g = geometry_of(dy)
    if g is None or not g.nhwc:
        dy = dy.contiguous(memory_format=torch.channels_last)
    return dy, row_stride(dy)
