"""Max pooling that keeps one byte per output for its backward pass, where torch's keeps its input and eight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten


class MaxPool2d(nn.MaxPool2d):
    """Pool as ``torch.nn.MaxPool2d`` does; in training keep of each window only which of its values was largest.

    At stride 2 in bfloat16, torch's indices take as much memory as the input, which is kept as well. ``lean`` (None:
    on CUDA in training) decides; results and gradients are the same. What torch.compile compiles is left to it.

    >>> pool = MaxPool2d(3, 2, 1)
    >>> x, pool.lean = torch.randn(2, 4, 9, 9, requires_grad=True), True
    >>> torch.equal(pool(x), nn.functional.max_pool2d(x, 3, 2, 1))
    True

    Beyond the paper: memory.
    """

    kernel_size: int
    stride: int
    padding: int

    def __init__(self, kernel_size: int, stride: int, padding: int = 0) -> None:
        super().__init__(kernel_size, stride, padding)
        self.lean: bool | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the largest value of each window."""
        lean = self.training and input.is_cuda if self.lean is None else self.lean
        kept = input.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not (lean and kept and self.kernel_size <= 16):  # 16 x 16 places in a byte
            return super().forward(input)  # type: ignore[no-any-return]
        return _LeanMaxPool.apply(input, self.kernel_size, self.stride, self.padding)  # type: ignore[no-any-return, no-untyped-call]


class _LeanMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        y, index = _aten.max_pool2d_with_indices(x, [kernel], [stride], [padding])
        ctx.windows = kernel, stride, padding
        ctx.like = x.shape, x.stride(), x.dtype
        width = x.shape[-1]
        # A position counted from its window's corner is row * width + column: row * kernel + column fits a byte.
        index = index.sub_(_corners(index, width, stride, padding)).to(torch.int32)
        ctx.save_for_backward(index.sub_((index // width).mul_(width - kernel)).to(torch.uint8))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        kernel, stride, padding = ctx.windows
        shape, strides, dtype = ctx.like
        index = place.to(torch.int64)
        index.add_(place // kernel, alpha=shape[-1] - kernel)
        index.add_(_corners(index, shape[-1], stride, padding))
        like = torch.empty_strided(shape, strides, dtype=dtype, device=dy.device)  # read for its shape alone
        windows = ([kernel], [stride], [padding], [1], False)
        return _aten.max_pool2d_with_indices_backward(dy, like, *windows, index), None, None, None


def _corners(index: Tensor, width: int, stride: int, padding: int) -> Tensor:
    """Return where each output's window starts in a plane of this width; outside it at a padded border."""
    rows, columns = (torch.arange(n, device=index.device).mul_(stride).sub_(padding) for n in index.shape[-2:])
    return rows[:, None] * width + columns
