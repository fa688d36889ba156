"""Shared by all kernels for channels-last CUDA tensors: which tensors they support, and how these are tiled."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import dispatch
from ...ops.cuda.autograd import DTYPES, HAS_TRITON
from ...ops.cuda.layout import geometry_of, row_stride
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_observed, is_transformed


def takes(x: Tensor | torch.fx.Proxy) -> bool:
    """Return whether there is a kernel for ``x``.

    >>> takes(torch.zeros(1, 8, 4, 4))  # not on a GPU
    False
    """
    if isinstance(x, torch.fx.Proxy):  # torch.fx is tracing
        return False
    if not x.is_cuda or x.dim() != 4 or x.dtype not in DTYPES or not HAS_TRITON or x.numel() == 0:
        return False
    if not dispatch.FAST or torch.version.hip is not None:  # the kernels were never run on ROCm
        return False
    if is_forward_mode() or (not torch.compiler.is_compiling() and (is_transformed() or is_observed(x))):
        return False
    g = geometry_of(x)
    return g is not None and g.nhwc


class ChannelTiles:
    """Divide the pixels and channels of a tensor among programs, in tiles of P pixels and V channels."""

    def __init__(self, x: Tensor, strides: tuple[int, ...], pixels: int) -> None:
        channels = x.shape[1]
        self.align = 1
        while self.align < 16 and all(n % (2 * self.align) == 0 for n in (channels, *strides)):
            self.align *= 2
        self.channels = min(power_up(channels), 128 // x.element_size())
        self.pixels = 1024 // self.channels
        self.slices = up(channels, self.channels)
        self.programs = up(pixels, self.pixels) * self.slices

    @property
    def constants(self) -> tuple[int, int, int]:
        """P, V and the number of elements that all strides are multiples of."""
        return self.pixels, self.channels, self.align


def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an uninitialized channels-last tensor."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def readable(dy: Tensor) -> tuple[Tensor, int]:
    """Return a gradient and the stride of its rows, copied unless it is channels last."""
    g = geometry_of(dy)
    if g is None or not g.nhwc:
        dy = dy.contiguous(memory_format=torch.channels_last)
    return dy, row_stride(dy)
