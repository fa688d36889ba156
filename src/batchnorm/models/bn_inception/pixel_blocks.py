"""Compute a convolution with stride 2 as a convolution with stride 1, on blocks of 2x2 pixels.

A block is treated as one pixel with four times as many channels. In this file, "block" always means such a block of
pixels; a thread block of a CUDA or Triton kernel is called a program.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from ...ops import dispatch
from ...ops.cuda import driver
from ...ops.cuda.autograd import DTYPES
from ...ops.cuda.cached_pass import processors
from ...ops.cuda.resident import KINDS
from ...ops.cuda.schedule import power_up, up
from ...ops.torch_state import is_forward_mode, is_unseen
from . import channels_last

BLOCKS = 128  # number of pixel blocks that a program of the Triton kernel writes


SOURCE = Path(__file__).with_name("pixel_blocks.cu")
# The shape (outputs, inputs, height, width) of the weights of the paper's first convolution. pixel_blocks.cu supports
# no other shape.
STEM = (64, 3, 7, 7)
VALUES = 256  # number of values in the blocks that an output pixel of the first convolution depends on
PIXELS = 256  # number of output pixels that a program of pixel_blocks.cu processes at a time
THREADS = {"convolve": 128, "kernel_gradient": 256, "add_parts": 256}  # threads per program, for each CUDA kernel
EACH = {"convolve": 2, "kernel_gradient": 1}  # maximum number of programs per multiprocessor


class Window(NamedTuple):
    """The blocks that one output pixel depends on, for a convolution at stride 2 with an odd kernel size."""

    taps: int  # height and width of the window, in blocks
    front: int  # 1 if the kernel needs a leading row and column of zeros, to align it with the blocks; else 0
    before: int  # number of blocks of padding above the image, and also to the left of it

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

    There are ``before`` blocks of padding above and to the left of each image, and ``taps - 1 - before`` blocks below
    and to the right. The result has the shape (N, channels, rows, columns) and is channels last. It has four times as
    many channels as the images, rounded up to a multiple of 8 for tensor cores. If a Triton kernel writes the blocks
    under autocast, they have autocast's dtype.

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
    usual = dispatch.has_kernels(x) and x.dtype in DTYPES and x.numel() > 0
    return usual and not x.requires_grad and is_unseen(x) and not is_forward_mode()


def write_blocks(x: Tensor, blocks: Tensor, before: int) -> None:
    """Write the images ``x`` to ``blocks``, a contiguous tensor of shape (N, rows, columns, channels), with Triton.

    There are ``before`` blocks of padding above and to the left of each image.
    """
    from .triton.pixel_blocks import to_blocks

    n, rows, columns, channels = blocks.shape
    count = n * rows * columns
    numbers = (count, rows, columns, *x.shape[2:], before, *x.stride())
    with torch.cuda.device_of(x):
        to_blocks[(up(count, BLOCKS),)](x, blocks, *numbers, x.shape[1], channels, BLOCKS, power_up(channels))


def convolve_by_blocks(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve at stride 2, with odd kernel size K and padding K // 2, by a stride-1 convolution on blocks of pixels.

    In half precision on a GPU, the kernels of pixel_blocks.cu compute the paper's first convolution and the gradient of
    its weights, if possible.

    Raises:
        RuntimeError: if the image and the kernel have different numbers of channels.
    """
    inputs, size = kernel.shape[1], kernel.shape[-1]
    if x.shape[1] != inputs:
        raise RuntimeError(
            f"the convolution's weight has {inputs} input channels, but the image has {x.shape[1]}: pass images with"
            f" {inputs} channels"
        )
    taps, front, before = Window.of(size)
    blocks = pixel_blocks(x, before, taps)
    if bias is None and _can_convolve(blocks, kernel):
        y: Tensor = _Convolution.apply(blocks, kernel)  # type: ignore[no-untyped-call]
        return y
    # Pad the kernel with a row and a column of zeros, so that it covers whole blocks.
    kernel = F.pad(kernel, (front, 1 - front) * 2).unflatten(3, (taps, 2)).unflatten(2, (taps, 2))
    kernel = F.pad(kernel.permute(0, 2, 4, 3, 5, 1).flatten(3), (0, blocks.shape[1] - 4 * inputs))
    return F.conv2d(blocks, kernel.permute(0, 3, 1, 2), bias)


def _can_convolve(blocks: Tensor, kernel: Tensor) -> bool:
    # Call is_unseen() first: under torch.compile, it returns False, so that Dynamo does not trace the checks below.
    if not is_unseen(blocks, kernel) or not dispatch.has_kernels(blocks) or kernel.shape != STEM:
        return False
    device = blocks.device
    if driver.unavailable() is not None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    needed = max(_shared_memory(name, blocks.shape[3]) for name in ("convolve", "kernel_gradient"))
    fits = min(blocks.shape[2:]) >= Window.of(STEM[-1]).taps and needed <= _available(device)
    half = blocks.dtype in (torch.bfloat16, torch.float16) and kernel.device == device
    cast = torch.is_autocast_enabled("cuda") and kernel.dtype in DTYPES
    plain = not is_forward_mode() and not blocks.requires_grad
    return fits and half and plain and (cast or kernel.dtype == blocks.dtype) and 0 < blocks.numel() < 2**31


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(blocks, kernel)
        n, _, rows, columns = blocks.shape
        more = Window.of(kernel.shape[-1]).taps - 1
        y = channels_last.empty(blocks, (n, len(kernel), rows - more, columns - more))
        run_convolve(blocks.movedim(1, -1), kernel.float().contiguous(), y.movedim(1, -1))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        blocks, kernel = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # true with is_grads_batched=True
        if torch.is_grad_enabled() or batched or not is_unseen(dy, blocks, kernel):
            return None, _differentiable_gradient(blocks, dy, kernel)
        found = run_kernel_gradient(aligned(blocks.movedim(1, -1)), aligned(dy.movedim(1, -1)))
        return None, found.to(kernel.dtype)


def _differentiable_gradient(blocks: Tensor, dy: Tensor, kernel: Tensor) -> Tensor:
    """Return the gradient of the unpadded kernel, computed with differentiable operations of torch."""
    outputs, inputs, size, _ = kernel.shape
    taps, front, _ = Window.of(size)
    found: Tensor = conv2d_weight(blocks, (outputs, blocks.shape[1], taps, taps), dy)[:, : 4 * inputs]
    # Use reshape, because unflatten does not support the batched gradients of is_grads_batched=True.
    found = found.reshape(outputs, 2, 2, inputs, taps, taps).permute(0, 3, 4, 1, 5, 2)
    found = found.reshape(outputs, inputs, 2 * taps, 2 * taps)
    return found[..., front : front + size, front : front + size].to(kernel.dtype)


def run_convolve(blocks: Tensor, kernel: Tensor, y: Tensor) -> None:
    """Run the CUDA kernel that convolves blocks.

    All tensors must be contiguous and start at multiples of 16 bytes.

    Args:
        blocks: the images' blocks, of shape (N, rows + 3, columns + 3, channels).
        kernel: the weights, of shape ``STEM``, in float32.
        y: the tensor to write the output to, of shape (N, rows, columns, outputs).
    """
    _run("convolve", blocks, y, kernel, y)


def run_kernel_gradient(blocks: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of the weights, in float32, given the gradient ``dy`` of the output of :func:`run_convolve`.

    Both tensors must be contiguous and start at multiples of 16 bytes.
    """
    programs = _programs("kernel_gradient", dy)
    partial = torch.empty(programs, STEM[0], VALUES, dtype=torch.float32, device=dy.device)
    _run("kernel_gradient", blocks, dy, dy, partial)
    total = torch.empty(STEM, dtype=torch.float32, device=dy.device)
    kernel, arguments = _kernel("add_parts", dy.dtype, 4 * THREADS["add_parts"], dy.device)
    pointers = (partial.data_ptr(), total.data_ptr())
    arguments.launch(kernel, STEM[0] * VALUES // 32, (*pointers, programs), _stream(dy))
    return total


def aligned(t: Tensor) -> Tensor:
    """Return a contiguous tensor that starts at a multiple of 16 bytes: ``t`` itself if possible, else a copy."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _run(name: str, blocks: Tensor, y: Tensor, *others: Tensor) -> None:
    n, rows, columns, _ = y.shape
    width = blocks.shape[2]
    kernel, arguments = _kernel(name, blocks.dtype, _shared_memory(name, width), blocks.device)
    values = (*(t.data_ptr() for t in (blocks, *others)), n, rows, columns, _tile_bytes(width))
    arguments.launch(kernel, _programs(name, y), values, _stream(y))


@cache
def _kernel(name: str, dtype: torch.dtype, shared: int, device: torch.device) -> tuple[driver.Kernel, driver.Arguments]:
    definitions = {"KIND": KINDS[dtype], "PIXELS": PIXELS, "THREADS": THREADS[name], "EACH": EACH.get(name, 1)}
    if name == "convolve":
        definitions["FORWARD"] = 1
    fields = "PPi" if name == "add_parts" else "PPPiiii"
    kernel = driver.load(SOURCE, name, tuple(definitions.items()), THREADS[name], shared, device)
    return kernel, driver.Arguments(*fields)


def _stream(t: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(t.get_device()) if t.is_cuda else 0


def _programs(name: str, y: Tensor) -> int:
    n, rows, columns, _ = y.shape
    return min(n * up(rows * columns, PIXELS), EACH[name] * processors(y.device))


def _tile_bytes(width: int) -> int:
    """Return the maximum size in bytes of the blocks that PIXELS output pixels need, with ``width`` blocks per row."""
    more = Window.of(STEM[-1]).taps - 1
    columns = width - more
    rows = (columns + PIXELS - 2) // columns + 1  # the maximum number of rows that PIXELS output pixels span
    return (rows + more) * width * 32


def _shared_memory(name: str, width: int) -> int:
    """Return how many bytes of shared memory a program needs; ``name`` is "convolve" or "kernel_gradient"."""
    # A tile is PIXELS output pixels. For two tiles, both kernels store the blocks and, for each pixel, the index of its
    # window's top left block. In addition, convolve stores the padded weights, and kernel_gradient stores dy for two
    # tiles.
    others = STEM[0] * (VALUES + 8) * 2 if name == "convolve" else 2 * PIXELS * STEM[0] * 2
    return 8 * PIXELS + 2 * _tile_bytes(width) + others


def _available(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))
