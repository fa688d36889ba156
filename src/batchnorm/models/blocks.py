"""The parts that the appendix network is built of: a convolution unit, the separable stem, an Inception module.

Where linear maps follow each other with nothing between, their order is free. On CUDA in training these modules take
the cheaper order; everywhere else they run as drawn, one child after the other, so that surgery and folding see the
network of the paper. ``rearrange`` (None: on CUDA in training) decides; the parameters are the same either way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pooling import MaxPool2d


class Row(NamedTuple):
    """One Inception row of the appendix table: numbers of filters, 0 where the table has none.

    Paper: Appendix, Inception architecture
    """

    name: str
    stride: int
    one: int
    reduce3: int
    three: int
    reduce33: int
    double33: int
    pool: Literal["avg", "max"]
    projection: int

    def outputs(self, inputs: int) -> int:
        """Return the channels of the concatenation; a pool without projection passes its input through."""
        return self.one + self.three + self.double33 + (self.projection or inputs)

    def times(self, width: float) -> Row:
        """Return the row with all numbers of filters times ``width``."""
        one, reduce3, three, reduce33, double33 = (scaled(n, width) for n in self[2:7])
        projection = scaled(self.projection, width)
        return Row(self.name, self.stride, one, reduce3, three, reduce33, double33, self.pool, projection)


def scaled(filters: int, width: float) -> int:
    """Return a number of filters times ``width``, rounded, but never none of some."""
    return max(1, round(filters * width)) if filters else 0


class Unit(nn.Sequential):
    """A convolution, then its normalization with the nonlinearity fused, or the nonlinearity alone.

    Paper: Sec. 3.2, z = g(BN(Wu))
    """

    conv: nn.Conv2d


# (inputs, outputs, kernel, stride, height of the output map, row) -> unit
MakeUnit = Callable[[int, int, int, int, int, str], Unit]


class SeparableConv2d(nn.Sequential):
    """Convolve each input channel with ``multiplier`` filters of its own, then mix them with a 1x1 convolution.

    W[o, i] = sum_m P[o, i, m] D[i, m] is one dense convolution with the same result; ``rearrange`` uses it: it has
    more multiply-adds, but runs as one matrix product and keeps no depthwise activations. Where its stride is 2,
    ``by_blocks`` reads the image as blocks of 2x2 pixels with four times the channels: the same products again, in an
    order that suits matrix units better than three channels do.

    >>> conv = SeparableConv2d(3, 64, 7, stride=2, multiplier=8)
    >>> x, conv.rearrange = torch.randn(1, 3, 16, 16), True
    >>> torch.allclose(conv(x), conv.pointwise(conv.depthwise(x)), atol=1e-5)
    True

    Paper: Appendix (separable convolution with depth multiplier 8)
    """

    depthwise: nn.Conv2d
    pointwise: nn.Conv2d

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, multiplier: int = 8, bias: bool = True
    ) -> None:
        wide = inputs * multiplier
        depthwise = nn.Conv2d(inputs, wide, kernel, stride, kernel // 2, groups=inputs, bias=False)
        pointwise = nn.Conv2d(wide, outputs, 1, bias=bias)
        super().__init__(OrderedDict(depthwise=depthwise, pointwise=pointwise))
        self.rearrange: bool | None = None
        self.by_blocks = False

    def composed_weight(self) -> Tensor:
        """Return the dense kernel W, differentiable and in the parameters' precision (autocast leaves it alone)."""
        inputs = self.depthwise.groups
        p = self.pointwise.weight.unflatten(1, (inputs, -1))
        d = self.depthwise.weight.squeeze(1).unflatten(0, (inputs, -1))
        weight: Tensor = (p * d.unsqueeze(0)).sum(2)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, in one step or two."""
        if not _rearranged(self, x):
            return self.pointwise(self.depthwise(x))  # type: ignore[no-any-return]
        weight, bias, stride = self.composed_weight(), self.pointwise.bias, self.depthwise.stride
        if self.by_blocks and stride == (2, 2):
            return _convolve_blocks(x, weight, bias)
        return F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2)


def _convolve_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve at stride 2 with an odd kernel k, padded by k // 2, as stride 1 over blocks of 2x2 pixels."""
    k = weight.shape[-1]
    before = k // 2 + 1  # one tap of zeros in front makes the kernel even
    weight = F.pad(weight, (1, 0, 1, 0))
    taps = (k + 1) // 2
    blocks = [-(-n // 2) + taps - 1 for n in x.shape[-2:]]
    after = [2 * b - n - before for b, n in zip(blocks, x.shape[-2:], strict=True)]
    x = F.pad(x, (before, after[1], before, after[0]))
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    x = F.pixel_unshuffle(x, 2)
    weight = weight.unflatten(-1, (taps, 2)).unflatten(2, (taps, 2)).movedim((3, 5), (2, 3)).flatten(1, 3)
    return F.conv2d(x.contiguous(memory_format=torch.channels_last) if channels_last else x, weight, bias)


class InceptionModule(nn.Module):
    """Concatenate a 1x1, a 3x3, a double 3x3 and a pooling branch over the same input.

    ``rearrange`` computes the 1x1 convolutions that read the module's input as one, with their weights side by side,
    and averages after the projection, on its fewer channels, instead of before: avg(Wx) = W avg(x).

    Args:
        inputs: input channels.
        row: the table's row.
        size: height of the input map.
        unit: makes convolution, normalization and nonlinearity.

    Paper: Appendix, Inception architecture
    """

    def __init__(self, inputs: int, row: Row, size: int, unit: MakeUnit) -> None:
        super().__init__()
        out = -(-size // row.stride)
        self.one = unit(inputs, row.one, 1, 1, size, row.name) if row.one else None
        self.three = nn.Sequential(
            OrderedDict(
                reduce=unit(inputs, row.reduce3, 1, 1, size, row.name),
                conv=unit(row.reduce3, row.three, 3, row.stride, out, row.name),
            )
        )
        self.double33 = nn.Sequential(
            OrderedDict(
                reduce=unit(inputs, row.reduce33, 1, 1, size, row.name),
                conv1=unit(row.reduce33, row.double33, 3, 1, size, row.name),
                conv2=unit(row.double33, row.double33, 3, row.stride, out, row.name),
            )
        )
        # A constant stays one at the border, which is what lets the average and a biased projection change places.
        pool: nn.Module = nn.AvgPool2d(3, row.stride, 1, count_include_pad=False)
        if row.pool == "max":
            pool = MaxPool2d(3, row.stride, 1)
        self.pool = nn.Sequential(OrderedDict(pool=pool))
        if row.projection:
            self.pool.add_module("project", unit(inputs, row.projection, 1, 1, out, row.name))
        self.projects_first = row.pool == "avg" and bool(row.projection)
        self.rearrange: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated branches."""
        if _rearranged(self, x):
            return self._joined(x)
        branches = [branch for branch in (self.one, self.three, self.double33, self.pool) if branch is not None]
        return torch.cat([branch(x) for branch in branches], 1)

    def _joined(self, x: Tensor) -> Tensor:
        heads = [self.one, self.three.get_submodule("reduce"), self.double33.get_submodule("reduce")]
        if self.projects_first:
            heads.append(self.pool.get_submodule("project"))
        units = [cast(Unit, head) for head in heads if head is not None]
        bias = None if units[0].conv.bias is None else torch.cat([unit.conv.bias for unit in units])  # type: ignore[misc]
        wide = F.conv2d(x, torch.cat([unit.conv.weight for unit in units]), bias)
        parts = list(wide.split([unit.conv.out_channels for unit in units], 1))
        pooled = units.pop()[1](self.pool[0](parts.pop())) if self.projects_first else self.pool(x)
        *one, three, double = (unit[1](part) for unit, part in zip(units, parts, strict=True))
        return torch.cat([*one, self.three[1](three), self.double33[2](self.double33[1](double)), pooled], 1)


def _rearranged(module: SeparableConv2d | InceptionModule, x: Tensor) -> bool:
    return module.training and x.is_cuda if module.rearrange is None else module.rearrange
