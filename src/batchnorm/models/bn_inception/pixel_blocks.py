"""Rearrange images into blocks of 2x2 pixels with four times the channels, for a convolution at stride 2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.cuda.autograd import DTYPES, HAS_TRITON
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_unseen

BLOCKS = 128  # blocks per program


def pixel_blocks(x: Tensor, before: int, taps: int) -> Tensor:
    """Return images as blocks of 2x2 pixels, padded by blocks of zeros.

    Each row and each column gets ``before`` blocks in front and ``taps - 1 - before`` blocks behind. The result has the
    shape (N, channels, rows, columns) and is channels last. Its number of channels, four times that of the images, is
    rounded up to a multiple of 8 for tensor cores. If a kernel writes the blocks under autocast, they have
    autocast's dtype.

    >>> pixel_blocks(torch.arange(16.0).view(1, 1, 4, 4), 0, 1)[0, :4, 0, 0]
    tensor([0., 1., 4., 5.])
    """
    n, inputs, h, w = x.shape
    rows, columns, channels = up(h, 2), up(w, 2), up(4 * inputs, 8) * 8
    shape = (n, rows + taps - 1, columns + taps - 1, channels)
    if _takes(x):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        blocks = torch.empty(shape, dtype=dtype, device=x.device)
        write_blocks(x, blocks, before)
    else:
        x = F.pad(x, (0, w % 2, 0, h % 2)) if h % 2 or w % 2 else x
        blocks = x.new_zeros(shape)
        inside = blocks[:, before : before + rows, before : before + columns, : 4 * inputs].unflatten(3, (2, 2, inputs))
        inside.copy_(x.permute(0, 2, 3, 1).unflatten(2, (columns, 2)).unflatten(1, (rows, 2)).transpose(2, 3))
    return blocks.permute(0, 3, 1, 2)


def _takes(x: Tensor) -> bool:
    usual = HAS_TRITON and x.is_cuda and x.dtype in DTYPES and x.numel() > 0
    return usual and not x.requires_grad and is_unseen(x) and not is_forward_mode()


def write_blocks(x: Tensor, blocks: Tensor, before: int) -> None:
    """Run the kernel that writes images to the dense tensor ``blocks`` of shape (N, rows, columns, channels)."""
    from .triton.pixel_blocks import to_blocks

    n, rows, columns, channels = blocks.shape
    count = n * rows * columns
    numbers = (count, rows, columns, *x.shape[2:], before, *x.stride())
    with torch.cuda.device_of(x):  # Triton launches on the current device
        to_blocks[(up(count, BLOCKS),)](x, blocks, *numbers, x.shape[1], channels, BLOCKS, power_up(channels))
