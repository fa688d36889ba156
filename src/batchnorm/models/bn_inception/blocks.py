"""The building blocks of the appendix network: a convolution unit, a separable convolution, an Inception module.

A rearranged module merges or reorders operations to save time. This leaves its parameters unchanged and changes its
result only by rounding. By default, modules are rearranged in training on a GPU. Inception modules are also
rearranged in evaluation on a GPU, if gradients are disabled and this library's kernels support every branch. A module
that is not rearranged calls its children one after the other, so that functions such as ``fold`` see the paper's
network. Set a module's ``rearrange`` attribute to True or False to override the default.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar, cast

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from ...graph.kinds import is_quiet, is_watched
from ...layers import BatchNorm2d
from .joined_branches import (
    Concatenation,
    Part,
    are_neighbors,
    can_join,
    join_kernels,
    max_pool_beside,
    normalize_together,
)
from .norm_pool import can_pool, normalize_and_pool
from .pixel_blocks import convolve_by_blocks
from .pooling import AvgPool2d, MaxPool2d
from .separable import compose
from .weight_gradients import convolve, is_aside, note_cut

_A = TypeVar("_A")
_B = TypeVar("_B")


class InceptionRow(NamedTuple):
    """An Inception module's row of the appendix table; ``projection`` is 0 if the table says "pass through".

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
        """Return the module's number of output channels, given its number of input channels.

        Without a projection, the pooling branch outputs all input channels.
        """
        return self.one + self.three + self.double33 + (self.projection or inputs)

    def times(self, width: float) -> InceptionRow:
        """Return the row with all filter counts scaled by ``width``; see :func:`scaled`."""
        one, reduce3, three, reduce33, double33 = (scaled(n, width) for n in self[2:7])
        projection = scaled(self.projection, width)
        return InceptionRow(self.name, self.stride, one, reduce3, three, reduce33, double33, self.pool, projection)


def scaled(filters: int, width: float) -> int:
    """Return ``filters * width``, rounded and at least 1, or 0 if ``filters`` is 0."""
    return max(1, round(filters * width)) if filters else 0


class Unit(nn.Sequential):
    """Apply a convolution, and then either batch normalization fused with the nonlinearity or the nonlinearity alone.

    In a :class:`~batchnorm.models.bn_inception.network.Network`, the batch normalization of a rearranged unit and a max
    pool that follows the unit are computed together if possible.

    Paper: Sec. 3.2, z = g(BN(Wu)); z = g(Wu + b)
    """

    conv: nn.Conv2d
    bn: BatchNorm2d  # units without batch normalization lack this attribute, and their convolution has a bias
    rearrange: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution, the batch normalization if there is one, and the nonlinearity."""
        if is_aside() and _is_dense(self[0]):
            return self.finish(self.convolve(x))
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]

    def convolve(self, x: Tensor) -> Tensor:
        """Apply the convolution alone."""
        conv = self[0]
        if not _is_dense(conv):
            return cast(Tensor, conv(x))
        return convolve(x, cast(Tensor, conv.weight), conv.stride, conv.padding)

    def finish(self, product: Tensor) -> Tensor:
        """Add the convolution's bias, if it has one, and apply the modules that follow the convolution.

        ``product`` is the convolution's output without the bias.
        """
        bias = self.conv.bias
        if bias is not None:
            product = product + bias.to(product.dtype)[:, None, None]
        _, *rest = self
        for module in rest:
            product = module(product)
        return product

    def pools(self, pool: nn.Module, x: Tensor | torch.fx.Proxy) -> bool:
        """Return whether :meth:`pooled` may replace a call of the unit and a call of ``pool`` on the unit's output."""
        if torch.compiler.is_compiling() or type(pool) is not MaxPool2d:
            return False
        if len(self) != 2 or not isinstance(self[1], BatchNorm2d):
            return False
        return _rearranged(self, x) and not is_watched() and all(map(is_quiet, (self, self[1], pool)))

    def pooled(self, x: Tensor, pool: nn.Module) -> Tensor:
        """Apply the unit and then a max pool, if possible without writing the unit's output to memory."""
        bn, product = cast(BatchNorm2d, self[1]), self.convolve(x)
        if can_pool(bn, pool, product):
            return normalize_and_pool(bn, product)
        return cast(Tensor, pool(bn(product)))

    def joins(self) -> bool:
        """Return whether the unit's convolution can be merged with other convolutions of the same input.

        The convolution must be a 1x1 ``nn.Conv2d`` without stride, padding or groups. The unit and the convolution must
        have no hooks and no patched ``forward``.
        """
        conv = self[0]
        plain = type(conv) is nn.Conv2d and conv.groups == 1 and conv.kernel_size == conv.stride == (1, 1)
        return plain and conv.padding == (0, 0) and is_quiet(self) and is_quiet(conv)


def _is_dense(conv: nn.Module) -> bool:
    if type(conv) is not nn.Conv2d or conv.bias is not None or not is_quiet(conv) or is_watched():
        return False
    return (
        conv.groups == 1
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


# The arguments are: input channels, output channels, kernel size, stride, output height, and the name of the Inception
# module, such as "3a".
MakeUnit = Callable[[int, int, int, int, int, str], Unit]


class SeparableConv2d(nn.Sequential):
    """Convolve each input channel with its own ``multiplier`` filters, then mix the results with a 1x1 convolution.

    Let D[i, m] be the m-th depthwise filter of input channel i, and P[o, i, m] the weight of that filter's output in
    output channel o. The dense convolution with the weights W[o, i] = sum_m P[o, i, m] D[i, m] has the same result. A
    rearranged module computes this dense convolution, which needs more multiply-adds, but runs as one matrix product
    and stores no depthwise activations for the backward pass.

    If the stride is 2 and the kernel is square and of odd size, the dense convolution treats each block of 2x2 pixels
    as one pixel with four times as many channels. Blocks are faster, because tensor cores are slow with only the three
    channels of an image. To disable the use of blocks, set the attribute ``by_blocks`` to False.

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
        self.by_blocks = True

    def composed_weight(self) -> Tensor:
        """Return the dense convolution's weight W as a differentiable tensor; autocast does not lower its precision."""
        return compose(self.pointwise.weight, self.depthwise.weight, self.depthwise.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the dense convolution if the module is rearranged, and otherwise the two convolutions in order."""
        if not _rearranged(self, x) or not self._is_as_built():
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        weight, bias, stride = self.composed_weight(), self.pointwise.bias, self.depthwise.stride
        height, width = weight.shape[2:]
        if self.by_blocks and x.dim() == 4 and stride == (2, 2) and height == width and height % 2:
            y = convolve_by_blocks(x, weight, bias)
        else:
            y = F.conv2d(x, weight, bias, stride, self.depthwise.padding)
        if not x.requires_grad:
            note_cut(y)
        return y

    def _is_as_built(self) -> bool:
        if len(self) != 2 or is_watched() or not all(type(conv) is nn.Conv2d and is_quiet(conv) for conv in self):
            return False
        first, second = self.depthwise, self.pointwise
        return (
            first.bias is None
            and first.groups == first.in_channels
            and first.padding == tuple(n // 2 for n in first.kernel_size)
            and first.dilation == (1, 1)
            and first.padding_mode == "zeros"
            and second.groups == 1
            and second.kernel_size == second.stride == (1, 1)
            and second.padding == (0, 0)
        )


class InceptionModule(nn.Module):
    """Apply a 1x1, a 3x3, a double 3x3 and a pooling branch to the same input, and concatenate their outputs.

    A rearranged module computes the 1x1 convolutions of its input as one convolution with concatenated weights. In an
    average pooling branch, a rearranged module pools after the projection instead of before it, because the projection
    reduces the number of channels. The result is the same, because avg(Wx) = W avg(x).

    If this library's kernels support every branch of a rearranged module, the branches write directly to their channels
    of the module's output, and in training several branches are normalized together. If the attribute ``side_by_side``
    is True, a rearranged module runs parts of different branches at the same time, on two CUDA streams.

    Args:
        inputs: the number of input channels.
        row: the module's row of the appendix table.
        size: height of the input.
        unit: function that makes a :class:`Unit`.

    Paper: Appendix, Inception architecture
    """

    def __init__(self, inputs: int, row: InceptionRow, size: int, unit: MakeUnit) -> None:
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
        pool: nn.Module = AvgPool2d() if row.pool == "avg" else MaxPool2d(row.stride)
        self.pool = nn.Sequential(OrderedDict(pool=pool))
        if row.projection:
            self.pool.add_module("project", unit(inputs, row.projection, 1, 1, out, row.name))
        self.projects_first = row.pool == "avg" and bool(row.projection)
        self.rearrange: bool | None = None
        self.side_by_side = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of the branches."""
        rearranged = _rearranged(self, x)
        if (rearranged or _is_evaluated(self, x)) and self._is_as_built():
            heads = self._heads()
            containers = (self.three, self.double33, self.pool)
            unheard = not is_watched() and all(map(is_quiet, (*containers, self.pool[0])))
            if unheard and all(head.joins() for head in heads.values()):
                if self._is_fused(x, heads):
                    return self._fused(x, heads)
                if rearranged:
                    return self._joined(x, heads)
        branches = [branch for branch in (self.one, self.three, self.double33, self.pool) if branch is not None]
        return torch.cat([branch(x) for branch in branches], 1)

    def _is_as_built(self) -> bool:
        lengths = [len(b) if type(b) is nn.Sequential else 0 for b in (self.three, self.double33, self.pool)]
        if lengths[:2] != [2, 3] or lengths[2] not in (1, 2):
            return False
        # Average pooling can be swapped with the projection because it is linear. The projection's bias is still added
        # after pooling. Other pools may be nonlinear.
        if self.projects_first and not isinstance(self.pool[0], nn.AvgPool2d):
            return False
        units = [*self.three, *self.double33, *list(self.pool)[1:], *([] if self.one is None else [self.one])]
        return all(type(unit) is Unit for unit in units)

    def _heads(self) -> dict[str, Unit]:
        """Return the units that convolve the module's input, including a projection that can precede the pool."""
        heads = {"one": self.one, "three": self.three[0], "double": self.double33[0]}
        if self.projects_first:
            heads["project"] = self.pool[1]
        return {name: cast(Unit, head) for name, head in heads.items() if head is not None}

    def joined_kernels(self) -> list[Tensor]:
        """Return the kernels of the 1x1 convolutions that a rearranged module merges, in order.

        The list is empty if the convolutions cannot be merged.
        """
        heads = self._heads().values() if self._is_as_built() else ()
        return [head.conv.weight for head in heads] if all(head.joins() for head in heads) else []

    def _joined(self, x: Tensor, units: dict[str, Unit]) -> Tensor:
        convolutions = [unit.conv for unit in units.values()]
        wide = F.conv2d(x, join_kernels([conv.weight for conv in convolutions]))
        parts = dict(zip(units, wide.split([conv.out_channels for conv in convolutions], 1), strict=True))

        def deep() -> Tensor:
            y: Tensor = self.double33[2](self.double33[1](units["double"].finish(parts["double"])))
            return y

        def others() -> tuple[list[Tensor], Tensor]:
            first = [units["one"].finish(parts["one"])] if "one" in units else []
            first.append(self.three[1](units["three"].finish(parts["three"])))
            if not self.projects_first:
                return first, self.pool(x)
            return first, units["project"].finish(self.pool[0](parts["project"]))

        double, (first, pooled) = both(deep, others) if self.side_by_side else (deep(), others())
        return torch.cat([*first, double, pooled], 1)

    def _is_fused(self, x: Tensor, units: dict[str, Unit]) -> bool:
        used = [*units.values(), *self._ends(), *cast(list[Unit], list(self.pool)[1:])]
        if not all(len(unit) == 2 and isinstance(unit[1], BatchNorm2d) for unit in used):
            return False
        layers = [cast(BatchNorm2d, unit[1]) for unit in used]
        pool, stride = self.pool[0], self._ends()[0].conv.stride[0]
        if not isinstance(pool, AvgPool2d | MaxPool2d) or type(pool) not in (AvgPool2d, MaxPool2d):
            return False
        if not pool.has_kernel or pool.stride != stride:
            return False
        if any(unit.conv.bias is not None for unit in units.values()):
            return False
        autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != x.dtype
        several = x.numel() > x.shape[1] * stride**2  # if so, each output channel has more than one value
        return several and not autocast and all(map(is_quiet, (*used, *layers))) and can_join(layers, x)

    def _ends(self) -> tuple[Unit, Unit]:
        """Return the last units of the 3x3 branch and of the double 3x3 branch."""
        return cast(Unit, self.three[1]), cast(Unit, self.double33[2])

    def _fused(self, x: Tensor, units: dict[str, Unit]) -> Tensor:
        """Compute all branches with kernels that write directly to the module's output: see ``joined_branches.py``."""
        three, double = self._ends()
        _, *project = self.pool
        stride = int(three.conv.stride[0])
        channels = {name: unit.conv.out_channels for name, unit in units.items() if name == "one"}
        channels |= {"three": three.conv.out_channels, "double": double.conv.out_channels}
        channels["project"] = cast(Unit, project[0]).conv.out_channels if project else x.shape[1]
        y = Concatenation(x, list(channels.values()), tuple(-(-n // stride) for n in x.shape[2:]))
        to = dict(zip(channels, y.parts, strict=True))
        passed = not self.projects_first
        if passed:
            x, pooled = max_pool_beside(x, stride, None if project else to["project"])
        kernels = [unit.conv.weight for unit in units.values()]
        kernel = join_kernels(kernels)
        sources = [convolve(x, kernel, (1, 1), (0, 0)) if are_neighbors(kernels) else F.conv2d(x, kernel)]
        # The units "three" and "double" feed further convolutions, so their outputs are not part of the module's
        # output.
        places = {"one": to.get("one"), "project": to["project"]}
        starts = accumulate((unit.conv.out_channels for unit in units.values()), initial=0)
        heads = [
            Part(unit.bn, 0, start, places.get(name), averaged=name == "project")
            for (name, unit), start in zip(units.items(), starts, strict=False)
        ]
        if project and passed:
            unit = cast(Unit, project[0])
            sources.append(unit.convolve(pooled))
            heads.append(Part(unit.bn, 1, 0, to["project"]))
        done = dict(zip([*units, "project"], normalize_together(heads, *sources), strict=False))
        if not project:
            done["project"] = pooled

        def run_three() -> Tensor:
            return three.convolve(done["three"])

        def run_double() -> Tensor:
            return double.convolve(self.double33[1](done["double"]))

        ends = both(run_three, run_double) if self.side_by_side else (run_three(), run_double())
        parts = [Part(three.bn, 0, 0, to["three"]), Part(double.bn, 1, 0, to["double"])]
        done["three"], done["double"] = normalize_together(parts, *ends)
        return y.join([done[name] for name in channels])


def both(first: Callable[[], _A], second: Callable[[], _B]) -> tuple[_A, _B]:
    """Call ``first`` on a side stream and ``second`` on the current stream, and return both results.

    The kernels of the two functions can overlap in the forward and the backward pass. Before the calls, the side stream
    waits for the current stream; after the calls, the current stream waits for the side stream. Therefore, tensors that
    both streams use need no ``record_stream``.
    """
    main = torch.cuda.current_stream()
    side = _side_stream(main.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        a = first()
    b = second()
    main.wait_stream(side)
    return a, b


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # the same priority as the stream that runs training steps in train/step.py
    return torch.cuda.Stream(device, priority=-1)


def _rearranged(module: Unit | SeparableConv2d | InceptionModule, x: Tensor | torch.fx.Proxy) -> bool:
    if isinstance(x, torch.fx.Proxy):  # torch.fx must record the paper's network
        return False
    return module.training and x.is_cuda if module.rearrange is None else module.rearrange


def _is_evaluated(module: InceptionModule, x: Tensor | torch.fx.Proxy) -> bool:
    if isinstance(x, torch.fx.Proxy) or module.rearrange is not None:
        return False
    return x.is_cuda and not module.training and not torch.is_grad_enabled()
