"""Images as blocks of 2x2 pixels with four times the channels, and their convolution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from ...ops import dispatch
from ...ops.cuda.autograd import DTYPES, HAS_TRITON
from ...ops.cuda.cached_pass import processors
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_unseen
from . import channels_last

BLOCKS = 128  # blocks per program


class PixelTiling(NamedTuple):
    """How a kernel divides its work: pixels at a time, warps, loads in flight, and programs per multiprocessor."""

    pixels: int
    warps: int
    stages: int
    programs: int


# The fastest tilings that were tried on an H200 for the paper's stem.
FORWARD = PixelTiling(64, 4, 1, 3)
BACKWARD = PixelTiling(64, 8, 3, 1)
# With more outputs, or more values in a window, a program might need more shared memory than a GPU has.
MAX_OUTPUTS, MAX_VALUES = 128, 256


class Window(NamedTuple):
    """The blocks that one output pixel depends on, for a convolution at stride 2 with an odd kernel size."""

    taps: int  # blocks per side
    front: int  # 1 if the kernel needs a zero in front, so that it starts at a block's first pixel; else 0
    before: int  # blocks of padding before the image

    @classmethod
    def of(cls, size: int) -> Window:
        """Return the window for a kernel of this size.

        >>> Window.of(7)
        Window(taps=4, front=1, before=2)
        """
        front = size // 2 % 2
        return cls((size + 1) // 2, front, (size // 2 + front) // 2)


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
    usual = _has_kernels(x) and x.dtype in DTYPES and x.numel() > 0
    return usual and not x.requires_grad and is_unseen(x) and not is_forward_mode()


def _has_kernels(x: Tensor) -> bool:
    """Return whether Triton's kernels may run on the device of ``x``; they are untested on ROCm."""
    return HAS_TRITON and dispatch.FAST and x.is_cuda and torch.version.hip is None


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

    In half precision on a GPU, this is a matrix product with the windows of the output pixels as rows. A row of a
    window is contiguous in memory, so it can be loaded at once. cuDNN loads each block separately, which takes longer.

    Raises:
        RuntimeError: if the image and the kernel have different numbers of channels.
    """
    inputs, size = kernel.shape[1], kernel.shape[-1]
    if x.shape[1] != inputs:
        raise RuntimeError(f"the kernel is for {inputs} input channels, but the image has {x.shape[1]}")
    taps, front, before = Window.of(size)
    blocks = pixel_blocks(x, before, taps)
    if bias is None and _can_convolve(blocks, kernel):
        y: Tensor = _Convolution.apply(blocks, kernel)  # type: ignore[no-untyped-call]
        return y
    # Add the zero tap at the kernel's start or end, so that its size is even.
    kernel = F.pad(kernel, (front, 1 - front) * 2).unflatten(3, (taps, 2)).unflatten(2, (taps, 2))
    kernel = F.pad(kernel.permute(0, 2, 4, 3, 5, 1).flatten(3), (0, blocks.shape[1] - 4 * inputs))
    return F.conv2d(blocks, kernel.permute(0, 3, 1, 2), bias)


def _can_convolve(blocks: Tensor, kernel: Tensor) -> bool:
    if not _has_kernels(blocks) or torch.cuda.get_device_capability(blocks.device) < (8, 0):
        return False
    outputs, taps = len(kernel), Window.of(kernel.shape[-1]).taps
    values = taps**2 * blocks.shape[1]
    powers = outputs == power_up(outputs) and values == power_up(values)
    fits = 16 <= outputs <= MAX_OUTPUTS and 16 <= values <= MAX_VALUES and taps <= min(blocks.shape[2:])
    half = blocks.dtype in (torch.bfloat16, torch.float16) and kernel.device == blocks.device
    cast = torch.is_autocast_enabled("cuda") and kernel.dtype in DTYPES
    plain = is_unseen(blocks, kernel) and not is_forward_mode() and not blocks.requires_grad
    return powers and fits and half and plain and (cast or kernel.dtype == blocks.dtype) and blocks.numel() < 2**31


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(blocks, kernel)
        n, _, rows, columns = blocks.shape
        more = Window.of(kernel.shape[-1]).taps - 1
        y = channels_last.empty(blocks, (n, len(kernel), rows - more, columns - more))
        run_convolve(blocks.movedim(1, -1), kernel.contiguous(), y.movedim(1, -1))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        blocks, kernel = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # is_grads_batched=True
        if torch.is_grad_enabled() or batched or not is_unseen(dy, blocks, kernel):
            return None, _differentiable_gradient(blocks, dy, kernel)
        # Saved-tensor hooks such as save_on_cpu may change the layout of blocks.
        found = run_kernel_gradient(blocks.movedim(1, -1).contiguous(), dy.movedim(1, -1).contiguous(), kernel.shape)
        return None, found.to(kernel.dtype)


def _differentiable_gradient(blocks: Tensor, dy: Tensor, kernel: Tensor) -> Tensor:
    """Return the kernel's gradient by operations of torch; this undoes the padding in :func:`convolve_by_blocks`."""
    outputs, inputs, size, _ = kernel.shape
    taps, front, _ = Window.of(size)
    found: Tensor = conv2d_weight(blocks, (outputs, blocks.shape[1], taps, taps), dy)[:, : 4 * inputs]
    # A batch of gradients supports reshape, but not unflatten.
    found = found.reshape(outputs, 2, 2, inputs, taps, taps).permute(0, 3, 4, 1, 5, 2)
    found = found.reshape(outputs, inputs, 2 * taps, 2 * taps)
    return found[..., front : front + size, front : front + size].to(kernel.dtype)


def run_convolve(blocks: Tensor, kernel: Tensor, y: Tensor) -> None:
    """Run the Triton kernel that convolves blocks.

    Args:
        blocks: dense, of shape (N, rows, columns, channels).
        kernel: dense, of shape (outputs, inputs, K, K).
        y: where to write the output; dense, of shape (N, rows, columns, outputs).
    """
    from .triton.pixel_blocks import convolve

    numbers = (*_numbers(y), *_constants(blocks, kernel.shape), FORWARD.pixels)
    with torch.cuda.device_of(y):  # Triton launches on the current device
        convolve[(_programs(FORWARD, y),)](blocks, kernel, y, *numbers, **_options(FORWARD))


def run_kernel_gradient(blocks: Tensor, dy: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient, in float32, of a kernel of this shape.

    Args:
        blocks: dense, of shape (N, rows, columns, channels).
        dy: the gradient of the output of :func:`run_convolve`; dense.
        shape: (outputs, inputs, K, K).
    """
    from .triton.pixel_blocks import kernel_gradient

    programs = _programs(BACKWARD, dy)
    partial = torch.empty(programs, *shape, dtype=torch.float32, device=dy.device)
    numbers = (*_numbers(dy), *_constants(blocks, shape), BACKWARD.pixels)
    with torch.cuda.device_of(dy):
        kernel_gradient[(programs,)](blocks, dy, partial, *numbers, **_options(BACKWARD))
    return partial.sum(0)


def _programs(tiling: PixelTiling, y: Tensor) -> int:
    tiles = up(y.numel() // y.shape[-1], tiling.pixels)
    return min(tiles, tiling.programs * processors(y.device))


def _numbers(y: Tensor) -> tuple[int, int, int]:
    n, rows, columns, _ = y.shape
    return n * rows * columns, rows, columns


def _constants(blocks: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    outputs, inputs, size, _ = shape
    taps, front, _ = Window.of(size)
    return taps, blocks.shape[-1], outputs, inputs, size, front


def _options(tiling: PixelTiling) -> dict[str, int]:
    return {"num_warps": tiling.warps, "num_stages": tiling.stages}
