"""Torch's pooling modules, with this library's kernels for channels-last CUDA tensors.

For the backward pass of max pooling, torch saves an 8-byte index per maximum; these kernels save four bits.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...ops.cuda.layout import row_stride
from ...ops.cuda.schedule import up
from ...ops.cuda.triton_launch import TritonLaunch
from ...ops.torch_state import is_unseen
from .channels_last import ChannelTiles, ColumnTiles, alignment, empty, readable, takes

PIXELS, CHANNELS = 64, 128  # tile size of the kernels in triton/global_pool.py
UNROLL = 2  # unroll factor of the row loops of max_forward and max_backward_2; avoids copies between registers


class MaxPool2d(nn.MaxPool2d):
    """Apply 3x3 max pooling with padding 1.

    >>> MaxPool2d(2)(torch.arange(16.0).view(1, 1, 4, 4))
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])

    Paper: Appendix (max pool)
    """

    stride: int

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled tensor."""
        return max_pool(x, self.stride) if self.has_kernel and takes(x) else super().forward(x)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel supports the options: stride 1 or 2, and the other options as set by ``__init__``."""
        options = (self.kernel_size, self.padding, self.dilation, self.return_indices, self.ceil_mode)
        return options == (3, 1, 1, False, False) and self.stride in (1, 2)


class AvgPool2d(nn.AvgPool2d):
    """Average 3x3 windows at stride 1, counting only the pixels inside the image.

    >>> AvgPool2d()(torch.ones(1, 1, 2, 2))  # a constant image does not change, even at the border
    tensor([[[[1., 1.],
              [1., 1.]]]])

    Paper: Appendix (avg pool)
    """

    def __init__(self) -> None:
        super().__init__(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled tensor."""
        return average_pool(x) if self.has_kernel and takes(x) else super().forward(x)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel supports the options, which must have the values set by ``__init__``."""
        options = (self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)
        return options == (3, 1, 1, False, False) and self.divisor_override is None


def max_pool(x: Tensor, stride: int) -> Tensor:
    """Return the maxima of 3x3 windows of ``x``, with padding 1; ``stride`` must be 1 or 2."""
    y: Tensor = torch.ops.batchnorm.max_pool(x, stride)[0]
    return y


class GlobalAvgPool2d(nn.AdaptiveAvgPool2d):
    """Average each channel over all pixels.

    On a GPU, unlike with ``nn.AdaptiveAvgPool2d``, the gradient of the input is in channels-last format.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor | torch.fx.Proxy) -> Tensor:
        """Return means of shape (N, C, 1, 1), or (C, 1, 1) for an image without a batch dimension."""
        if isinstance(x, torch.fx.Proxy) or not x.is_cuda or x.dim() != 4:
            return super().forward(cast(Tensor, x))
        if takes(x) and not torch.compiler.is_compiling():
            means: Tensor = _GlobalAverage.apply(x)  # type: ignore[no-untyped-call]
        else:
            means = x.permute(0, 2, 3, 1).mean((1, 2))
        return means[:, :, None, None]


class _GlobalAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from .triton.global_pool import average

        ctx.shape = x.shape
        n, c, h, w = x.shape
        y = torch.empty((n, c), dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):
            average[(n * up(c, CHANNELS),)](x, y, h * w, c, row_stride(x), PIXELS, CHANNELS)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        n, c, h, w = ctx.shape
        if torch.is_grad_enabled() or not is_unseen(dy) or torch._C._functorch.is_legacy_batchedtensor(dy):
            spread_out: Tensor = (dy / (h * w))[..., None, None].expand(n, c, h, w)
            return spread_out
        from .triton.global_pool import spread

        dx = empty(dy, (n, c, h, w))
        with torch.cuda.device_of(dy):
            spread[(n * up(c, CHANNELS),)](dy.contiguous(), dx, h * w, c, PIXELS, CHANNELS)
        return dx


def average_pool(x: Tensor) -> Tensor:
    """Return the mean of each 3x3 window (stride 1), counting only the pixels inside the image."""
    y: Tensor = torch.ops.batchnorm.average_pool(x, False)
    return y


def _max_pool(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    y, where = _fake_max_pool(x, stride)
    max_pool_into(x, y, where, stride)
    return y, where


def max_pool_into(x: Tensor, y: Tensor, where: Tensor, stride: int, stats: Tensor | None = None) -> None:
    """Write the maxima of 3x3 windows of ``x`` to ``y``, and the positions of the maxima to ``where``.

    ``y`` may be a range of the channels of a larger tensor. If ``stats`` is given, normalize by these batch
    statistics and apply ReLU before pooling.
    """
    row, y_row = row_stride(x), row_stride(y)
    align = gcd(alignment(x), y_row)
    launch = _forward_launch(x.shape, align, row, y_row, stride, x.element_size(), x.device)
    launch((x, y, where, stats), (), ())


@cache
def _forward_launch(
    shape: torch.Size, align: int, row: int, y_row: int, stride: int, itemsize: int, device: torch.device
) -> TritonLaunch:
    from .triton.max_pool import max_forward

    t = ColumnTiles(shape, align, stride, itemsize)
    numbers = (*t.numbers, row // align, y_row // align)
    return TritonLaunch(max_forward, t.units * t.slices, numbers, (stride, *t.constants, UNROLL), t.options, device)


def empty_places(y: Tensor) -> Tensor:
    """Return an uninitialized tensor for the positions of maxima; one byte stores the positions of two channels."""
    n, c, h, w = y.shape
    return empty(y, (n, up(c, 2), h, w), torch.uint8)


def empty_maxima(x: Tensor, stride: int) -> Tensor:
    """Return an uninitialized tensor for the maxima of windows of ``x``."""
    n, c, h, w = x.shape
    return empty(x, (n, c, up(h, stride), up(w, stride)))


def _fake_max_pool(x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    y = empty_maxima(x, stride)
    return y, empty_places(y)


def max_pool_gradient(
    dy: Tensor, where: Tensor, stride: int, height: int, width: int, plus: Tensor | None = None
) -> Tensor:
    """Return the gradient of max pooling's input, or its sum with ``plus`` if ``plus`` is given.

    The result is not differentiable.
    """
    dy, row = readable(dy)
    # Saved-tensor hooks such as save_on_cpu may have changed the layout, but the kernel needs channels last.
    where = where.contiguous(memory_format=torch.channels_last)
    dx = _fake_max_pool_backward(dy, where, stride, height, width)
    plus = None if plus is None else plus.contiguous(memory_format=torch.channels_last)
    launch = backward_launch(dx.shape, alignment(dy, plus), row, stride, dx.element_size(), dx.device)
    launch((dy, where, dx, plus, *([None] * 3 if stride == 2 else [])), (), ())
    return dx


@cache
def backward_launch(
    shape: torch.Size, align: int, dy_row: int, stride: int, itemsize: int, device: torch.device
) -> TritonLaunch:
    """Return the launch of max pooling's backward kernel, which writes a gradient of shape ``shape``."""
    from .triton.max_pool import max_backward_1, max_backward_2

    t = ColumnTiles(shape, align, stride, itemsize)
    kernel, constants = (max_backward_1, t.constants) if stride == 1 else (max_backward_2, (*t.constants, UNROLL))
    return TritonLaunch(kernel, t.units * t.slices, (*t.numbers, dy_row // align), constants, t.options, device)


def _fake_max_pool_backward(dy: Tensor, where: Tensor, stride: int, height: int, width: int) -> Tensor:
    return empty(dy, (*dy.shape[:2], height, width))


def _average_pool(x: Tensor, backward: bool) -> Tensor:
    x, _ = readable(x)
    y = _fake_average_pool(x, backward)
    average_into(x, y, backward)
    return y


def average_into(x: Tensor, y: Tensor, backward: bool) -> None:
    """Write the averages of 3x3 windows of ``x`` to ``y``.

    If ``backward``, ``x`` is the gradient of the averages, and the gradient of the pooling's input is written to ``y``.
    Each of the two tensors may be a range of the channels of a larger tensor.
    """
    from .triton.average_pool import average

    row, y_row = row_stride(x), row_stride(y)
    n, c, h, w = x.shape
    t = ChannelTiles(x, (row, y_row), n * h * w)
    numbers = (n * h * w, c // t.align, h, w, row // t.align, y_row // t.align)
    with torch.cuda.device_of(x):
        average[(t.programs,)](x, y, *numbers, backward, *t.constants)


def _fake_average_pool(x: Tensor, backward: bool) -> Tensor:
    return empty(x, tuple(x.shape))


def _keep_max(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.stride = inputs
    ctx.size = x.shape[2:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def max_pool_backward(dy: Tensor, where: Tensor, stride: int, height: int, width: int) -> Tensor:
    """Return the gradient of max pooling's input, which can be differentiated again."""
    dx: Tensor = torch.ops.batchnorm.max_pool_backward(dy, where, stride, height, width)
    return dx


def _max_gradient(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
    (where,) = ctx.saved_tensors
    if dy is None:
        return None, None
    return max_pool_backward(dy, where, ctx.stride, *ctx.size), None


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, where, ctx.stride, *_ = inputs
    ctx.save_for_backward(where)


def _second_max_gradient(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of dy: the values of ``ddx`` at the maxima, and 0 for windows that pass no gradient on."""
    (where,) = ctx.saved_tensors
    bits = torch.stack((where & 15, where >> 4), 2).flatten(1, 2)[:, : ddx.shape[1]].long()
    # triton/max_pool.py defines the bits of a position. UP and LEFT become the offset -1, and DOWN and RIGHT become 1.
    # NOWHERE (15) marks windows that pass no gradient on. It has all bits set, so both of its offsets become 0.
    row, column = (bits >> 3 & 1) - (bits >> 2 & 1), (bits >> 1 & 1) - (bits & 1)
    rows, columns = (torch.arange(n, device=where.device) * ctx.stride for n in where.shape[2:])
    at = (rows[:, None] + row) * ddx.shape[3] + columns + column
    found = ddx.flatten(2).gather(2, at.flatten(2)).view(at.shape)
    return found.where(bits != 15, 0), None, None, None, None


def _average_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    # Average pooling is linear. Its backward pass is the transposed map, whose own backward pass is average pooling.
    return torch.ops.batchnorm.average_pool(dy, not ctx.backward), None


def _keep_average(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backward = inputs[1]


_library = torch.library.Library("batchnorm", "FRAGMENT")
_library.define("max_pool(Tensor x, int stride) -> (Tensor, Tensor)")
_library.define("max_pool_backward(Tensor dy, Tensor where, int stride, int height, int width) -> Tensor")
_library.define("average_pool(Tensor x, bool backward) -> Tensor")
for _name, _kernel, _fake in (
    ("max_pool", _max_pool, _fake_max_pool),
    ("max_pool_backward", max_pool_gradient, _fake_max_pool_backward),
    ("average_pool", _average_pool, _fake_average_pool),
):
    # Register for every backend, not only for CUDA, because Triton's interpreter can run the kernels on CPU tensors.
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"batchnorm::{_name}", _fake, lib=_library)
torch.library.register_autograd("batchnorm::max_pool", _max_gradient, setup_context=_keep_max, lib=_library)
torch.library.register_autograd(
    "batchnorm::max_pool_backward", _second_max_gradient, setup_context=_keep_places, lib=_library
)
torch.library.register_autograd("batchnorm::average_pool", _average_gradient, setup_context=_keep_average, lib=_library)
