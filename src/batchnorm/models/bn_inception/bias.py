"""Add a convolution's bias and apply the nonlinearity in one pass, on channels-last CUDA tensors.

The variants of the network without batch normalization use :func:`bias_act`. Torch would add the bias in one pass over
the tensor and apply the nonlinearity in another. In the backward pass, torch would need an additional pass to sum the
bias's gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...ops.cuda.layout import row_stride
from ...ops.cuda.schedule import up
from .channels_last import ChannelTiles, empty, readable

# The backward pass runs at least this many Triton programs if the tensor has enough tiles, because fewer programs would
# not fill a GPU.
PARTS = 256


def bias_act(x: Tensor, bias: Tensor, activation: Literal["relu", "sigmoid"]) -> Tensor:
    """Return g(x + bias), where g is the activation; ``x`` has shape (N, C, H, W), and ``bias`` has shape (C,).

    Paper: Sec. 3.2, z = g(Wu + b)
    """
    y: Tensor = _BiasAct.apply(x, bias, activation == "sigmoid")  # type: ignore[no-untyped-call]
    return y


class _BiasAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, sigmoid: bool) -> Tensor:
        from .triton.bias import forward

        n, c, h, w = x.shape
        row, y = row_stride(x), empty(x, tuple(x.shape))
        t = ChannelTiles(x, (row, c), n * h * w)
        numbers = (n * h * w, c // t.align, row // t.align)
        with torch.cuda.device_of(x):
            forward[(t.programs,)](x, bias.contiguous(), y, *numbers, sigmoid, *t.constants)
        ctx.save_for_backward(y, bias)
        ctx.sigmoid = sigmoid
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        y, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            dz = dy * (y * (1 - y) if ctx.sigmoid else y > 0)
            return dz, dz.sum((0, 2, 3)).to(bias.dtype), None
        from .triton.bias import backward

        n, c, h, w = y.shape
        dy, row = readable(dy)
        # Saved-tensor hooks such as save_on_cpu may have changed the layout, but the kernel needs channels last.
        y = y.contiguous(memory_format=torch.channels_last)
        dx, pixels = empty(y, tuple(y.shape)), n * h * w
        t = ChannelTiles(y, (row, c), pixels)
        tiles = max(1, t.programs // PARTS)
        parts = up(pixels, t.pixels * tiles)
        partial = torch.empty((parts, c), dtype=torch.float32, device=y.device)
        numbers = (pixels, c // t.align, row // t.align, tiles)
        backward[(parts * t.slices,)](dy, y, dx, partial, *numbers, ctx.sigmoid, *t.constants)
        return dx, partial.sum(0).to(bias.dtype), None
