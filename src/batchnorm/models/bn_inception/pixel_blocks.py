"""Images as blocks of 2x2 pixels with four times the channels, and their convolution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from ...ops.cuda.autograd import DTYPES, HAS_TRITON
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_unseen

BLOCKS = 128  # blocks per program


class Tiling(NamedTuple):
    """How a kernel divides its work: pixels at a time, warps, loads in flight, and programs per multiprocessor."""

    pixels: int
    warps: int
    stages: int
    programs: int


# The fastest tilings that were tried on an H200 for the paper's stem.
FORWARD = Tiling(64, 4, 1, 3)
BACKWARD = Tiling(64, 8, 3, 1)


def pixel_blocks(x: Tensor, before: int, taps: int) -> Tensor:
    """Return images as blocks of 2x2 pixels, padded by blocks of zeros.

    Each row and each column gets ``before`` blocks in front and ``taps - 1 - before`` blocks behind. The result has the
    shape (N, channels, rows, columns) and is channels last. Its number of channels, four times that of the images, is
    rounded up to a multiple of 8 for tensor cores. Under autocast, blocks that a Triton kernel writes have autocast's
    dtype.

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


def convolve_by_blocks(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve at stride 2, with an odd kernel size K and padding K // 2, as a stride-1 convolution of 2x2 blocks.

    In half precision on a GPU, a kernel multiplies a matrix of windows, one for each output pixel, by the weights. A
    window's row of blocks is contiguous in memory, so it can be loaded at once. cuDNN loads each block separately,
    which takes longer.
    """
    inputs, size = kernel.shape[1], kernel.shape[-1]
    # Add a zero tap at the kernel's start or end, so that its size is even and its first tap meets a block's first
    # pixel.
    front = size // 2 % 2
    taps, before = (size + 1) // 2, (size // 2 + front) // 2
    blocks = pixel_blocks(x, before, taps)
    if bias is None and _can_multiply(blocks, kernel, taps):
        y: Tensor = _Convolution.apply(blocks, kernel)  # type: ignore[no-untyped-call]
        return y
    kernel = F.pad(kernel, (front, 1 - front) * 2).unflatten(3, (taps, 2)).unflatten(2, (taps, 2))
    kernel = F.pad(kernel.permute(0, 2, 4, 3, 5, 1).flatten(3), (0, blocks.shape[1] - 4 * inputs))
    return F.conv2d(blocks, kernel.permute(0, 3, 1, 2), bias)


def _can_multiply(blocks: Tensor, kernel: Tensor, taps: int) -> bool:
    if not HAS_TRITON or not blocks.is_cuda or blocks.dtype not in (torch.bfloat16, torch.float16):
        return False
    outputs, values = kernel.shape[0], taps**2 * blocks.shape[1]
    powers = outputs == power_up(outputs) and values == power_up(values) and min(outputs, values) >= 16
    same = kernel.dtype == blocks.dtype or torch.is_autocast_enabled("cuda")
    dense = blocks.movedim(1, -1).is_contiguous() and 0 < blocks.numel() < 2**31
    plain = is_unseen(blocks, kernel) and not is_forward_mode() and not blocks.requires_grad
    return powers and same and dense and plain


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(blocks, kernel)
        n, _, rows, columns = blocks.shape
        outputs, taps = len(kernel), (kernel.shape[-1] + 1) // 2
        y = blocks.new_empty(n, rows - taps + 1, columns - taps + 1, outputs)
        multiply(blocks.movedim(1, -1), kernel.contiguous(), y)
        return y.movedim(-1, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        blocks, kernel = ctx.saved_tensors
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy):  # is_grads_batched=True
            return None, _differentiable_gradient(blocks, dy, kernel)
        dy = dy.to(blocks.dtype).movedim(1, -1).contiguous()
        return None, kernel_gradient(blocks.movedim(1, -1), dy, kernel.shape).to(kernel.dtype)


def _differentiable_gradient(blocks: Tensor, dy: Tensor, kernel: Tensor) -> Tensor:
    """Return the kernel's gradient, computed by torch, without the padding that :func:`convolve_by_blocks` adds."""
    outputs, inputs, size, _ = kernel.shape
    taps, front = (size + 1) // 2, size // 2 % 2
    found: Tensor = conv2d_weight(blocks, (outputs, blocks.shape[1], taps, taps), dy)[:, : 4 * inputs]
    # A batch of gradients supports reshape, but not unflatten.
    found = found.reshape(outputs, 2, 2, inputs, taps, taps).permute(0, 3, 4, 1, 5, 2)
    found = found.reshape(outputs, inputs, 2 * taps, 2 * taps)
    return found[..., front : front + size, front : front + size].to(kernel.dtype)


def multiply(blocks: Tensor, kernel: Tensor, y: Tensor) -> None:
    """Run the Triton kernel that convolves blocks.

    Args:
        blocks: dense, of shape (N, rows, columns, channels).
        kernel: dense, of shape (outputs, inputs, K, K).
        y: where to write the output; dense, of shape (N, rows, columns, outputs).
    """
    from .triton.pixel_blocks import convolve

    _launch(convolve, FORWARD, _programs(FORWARD, y), blocks, kernel, y, y, kernel.shape)


def kernel_gradient(blocks: Tensor, dy: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the float32 gradient of a kernel of this shape; ``dy`` is the gradient of :func:`multiply`'s output."""
    from .triton import pixel_blocks

    programs = _programs(BACKWARD, dy)
    partial = torch.empty(programs, *shape, dtype=torch.float32, device=dy.device)
    _launch(pixel_blocks.kernel_gradient, BACKWARD, programs, blocks, dy, partial, dy, shape)
    return partial.sum(0)


def _programs(tiling: Tiling, y: Tensor) -> int:
    tiles = up(y.numel() // y.shape[-1], tiling.pixels)
    if not y.is_cuda:  # Triton's interpreter
        return min(tiles, tiling.programs)
    return min(tiles, tiling.programs * torch.cuda.get_device_properties(y.device).multi_processor_count)


def _launch(
    kernel: Any, tiling: Tiling, programs: int, blocks: Tensor, a: Tensor, b: Tensor, y: Tensor, shape: tuple[int, ...]
) -> None:
    outputs, inputs, size, _ = shape
    sizes = (y.numel() // outputs, *y.shape[1:3], (size + 1) // 2, blocks.shape[-1], outputs, inputs, size)
    with torch.cuda.device_of(blocks):  # Triton launches on the current device
        rest = (*sizes, size // 2 % 2, tiling.pixels)
        kernel[(programs,)](blocks, a, b, *rest, num_warps=tiling.warps, num_stages=tiling.stages)
