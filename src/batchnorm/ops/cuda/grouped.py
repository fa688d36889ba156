"""Normalize the inputs of several layers together; all tensors are channels last and have the same number of rows.

A row is one location of one example. An input, an output or a gradient may be a view of some channels of a larger
tensor. So the layers can write their outputs into one concatenated tensor without a copy. If all inputs are views of
one convolution's output, the layers can also write the inputs' gradients directly into the gradient of that output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation import NAMES, Activation
from ..running import Kept
from . import driver, resident, schedule
from .cached_pass import best_tiling, launches_of, processors
from .launch import STATS
from .layout import Geometry, geometry_of, row_stride
from .resident import Residence
from .schedule import Tiling, up
from .triton_launch import TritonLaunch
from .workspace import workspace

MOST = 4  # maximum number of layers in a launch
# If all inputs together have more bytes than this, `forward` launches one layer at a time, which is faster on an H200.
ONE_BY_ONE = 60e6


class _Sizes(NamedTuple):
    """Hold the sizes that a launch depends on; each tuple has one number per layer, and the strides are row strides."""

    rows: int
    channels: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]  # in the backward pass, the strides of dx
    dy_strides: tuple[int, ...]  # empty in the forward pass
    itemsize: int

    @property
    def all_channels(self) -> Geometry:
        """The geometry of one tensor that has the channels of all layers' inputs."""
        wide = self.rows * max(*self.x_strides, *self.y_strides, *self.dy_strides) >= 2**31
        return Geometry(True, sum(self.channels), self.rows, self.rows, sum(self.channels), 1, wide)


class _Plan(NamedTuple):
    residence: Residence | None  # resident.cu's launch parameters, or None to use the Triton kernels
    launches: tuple[TritonLaunch, ...]
    resident_room: tuple[int, int]  # the size of resident.cu's workspace: floats per channel, and counters
    room: tuple[int, int]  # the size of the Triton kernels' workspace: floats per channel, and counters


def forward(
    xs: Sequence[Tensor],
    gammas: Sequence[Tensor],
    betas: Sequence[Tensor],
    running: Sequence[Kept] | None,
    ys: Sequence[Tensor],
    eps: float,
    momentum: float | None,
    activation: Activation,
    way: Tiling | Residence | None = None,
) -> Tensor:
    """Write the outputs ``ys``, update the running averages if given, and return the layers' concatenated statistics.

    Inputs and outputs are channels last and have the same dtype. Parameters and averages are dense float32 tensors.
    """
    channels = [x.shape[1] for x in xs]
    stats = xs[0].new_empty(STATS * sum(channels), dtype=torch.float32)
    if way is None and _is_large(xs[0], channels):
        for k, own in enumerate(stats.split([STATS * c for c in channels])):
            one = slice(k, k + 1)
            moved = None if running is None else running[one]
            _forward(xs[one], gammas[one], betas[one], moved, ys[one], eps, momentum, activation, None, own)
    else:
        _forward(xs, gammas, betas, running, ys, eps, momentum, activation, way, stats)
    return stats


def _is_large(x: Tensor, channels: Sequence[int]) -> bool:
    return x.is_cuda and x.numel() // x.shape[1] * sum(channels) * x.element_size() > ONE_BY_ONE


def _forward(
    xs: Sequence[Tensor],
    gammas: Sequence[Tensor],
    betas: Sequence[Tensor],
    running: Sequence[Kept] | None,
    ys: Sequence[Tensor],
    eps: float,
    momentum: float | None,
    activation: Activation,
    way: Tiling | Residence | None,
    stats: Tensor,
) -> None:
    sizes, code, cumulative = _sizes(xs, ys, ()), NAMES.index(activation.name), momentum is None
    plan = _plan(sizes, xs[0].device, False, way)
    averages = [[None if running is None else kept[i] for kept in running or xs] for i in range(4)]
    each = (xs, ys, gammas, betas, *averages)
    if plan.residence is not None and resident.takes(*xs, *ys):
        floats, words = _workspace(xs[0], sizes, plan.resident_room)
        shared = [(stats, STATS), (floats, plan.resident_room[0])]
        scalars: tuple[float, ...] = (momentum or 0.0, cumulative, eps, activation.slope)
        if _launch_resident("forward_layers", sizes, plan.residence, each, shared, words, scalars, code):
            return
    floats, words = _workspace(xs[0], sizes, plan.room)
    pointers = [t for tensors in each for t in _four(tensors)]
    scalars = (float(eps), float(momentum or 0.0), float(activation.slope))
    for launch in plan.launches:
        launch((*pointers, stats, floats, words), scalars, (code, cumulative))


def backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    stats: Tensor,
    dxs: Sequence[Tensor],
    activation: Activation,
    way: Tiling | Residence | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Write the gradients ``dxs``, and return a list of the gammas' gradients and a list of the betas' gradients."""
    dys = [dy if _takes_rows(dy, x) else _dense(dy) for dy, x in zip(dys, xs, strict=True)]
    sizes, code = _sizes(xs, dxs, dys), NAMES.index(activation.name)
    plan = _plan(sizes, xs[0].device, True, way)
    dgamma, dbeta = stats.new_empty((2, sum(sizes.channels)))
    gradients = (list(dgamma.split(sizes.channels)), list(dbeta.split(sizes.channels)))
    if plan.residence is not None and resident.takes(*dys, *xs, *dxs):
        floats, words = _workspace(xs[0], sizes, plan.resident_room)
        shared = [(stats, STATS), (dgamma, 1), (dbeta, 1), (floats, plan.resident_room[0])]
        scalars = (activation.slope,)
        if _launch_resident("backward_layers", sizes, plan.residence, (xs, dxs, dys), shared, words, scalars, code):
            return gradients
    floats, words = _workspace(xs[0], sizes, plan.room)
    pointers = [t for each in (xs, dxs, dys) for t in _four(each)]
    for launch in plan.launches:
        launch((*pointers, stats, dgamma, dbeta, floats, words), (float(activation.slope),), (code,))
    return gradients


def infer(
    x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, y: Tensor, eps: float, activation: Activation
) -> None:
    """Normalize one layer's input by the layer's running averages, and write the result to ``y``."""
    launch = _inference(x.numel() // x.shape[1], x.shape[1], row_stride(x), row_stride(y), x.element_size(), x.device)
    scalars = (float(eps), float(activation.slope))
    launch((x, y, mean, var, gamma, beta), scalars, (NAMES.index(activation.name),))


@cache
def _inference(
    rows: int, channels: int, x_stride: int, y_stride: int, itemsize: int, device: torch.device
) -> TritonLaunch:
    from .triton.inference import normalize_rows

    align = gcd(16, channels, x_stride, y_stride)
    lanes = min(schedule.power_up(channels), 128 // itemsize)
    tall = 2048 // lanes
    programs = up(rows, tall) * up(channels, lanes)
    numbers = (rows, channels // align, x_stride // align, y_stride // align)
    return TritonLaunch(normalize_rows, programs, numbers, (tall, lanes, align), {}, device)


def _launch_resident(
    name: str,
    sizes: _Sizes,
    r: Residence,
    each: Sequence[Sequence[Tensor | None]],
    shared: Sequence[tuple[Tensor, int]],
    words: Tensor,
    scalars: tuple[float, ...],
    code: int,
) -> bool:
    """Launch a kernel of resident.cu, and return whether the device accepted the launch.

    Each list in ``each`` has one tensor per layer. Each pair in ``shared`` is a tensor and its number of floats per
    channel. The tensor holds the values of all layers, one layer after the other.
    """
    x = each[0][0]
    assert x is not None
    index = x.get_device()
    kernel, arguments, shapes, slices = _prepared(name, x.dtype, code, sizes, r, index)
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    values: list[float] = []
    for k, (shape, c, s) in enumerate(zip(shapes, _starts(sizes.channels), _starts(slices), strict=True)):
        values += [0 if t is None else t.data_ptr() for t in (tensors[k] for tensors in each)]
        values += [t.data_ptr() + 4 * c * numbers for t, numbers in shared]
        values += [words.data_ptr() + 4 * (2 * k + s), *shape]
    try:
        arguments.launch(kernel, r.groups * r.parts, (*values, *scalars), stream)
    except driver.Refused:
        return False
    return True


@cache
def _prepared(
    name: str, dtype: torch.dtype, code: int, sizes: _Sizes, r: Residence, index: int
) -> tuple[driver.Kernel, driver.Arguments, list[tuple[int, ...]], list[int]]:
    """Return a kernel, its arguments, the fields of each layer's struct Shape, and each layer's number of slices."""
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    count, b = len(sizes.channels), dtype.itemsize
    kernel = resident.layers_kernel(name, dtype, code, r, count, device)
    slices = [up(c * b, r.lanes * resident.WIDTH) for c in sizes.channels]
    passing = int(sizes.rows * sum(sizes.channels) * b > resident.CACHE)
    shapes: list[tuple[int, ...]] = []
    for k, c in enumerate(sizes.channels):
        dy = sizes.dy_strides[k] * b if sizes.dy_strides else 0
        strides = (sizes.x_strides[k] * b, 0, sizes.y_strides[k] * b, 0, dy)
        shapes.append((c, sizes.rows, slices[k], r.parts, *strides, 0, 0, 0, passing))
    pointers = 11 if name == "forward_layers" else 8
    layers = ("P" * pointers + "iiiiqqqqqIIII") * count
    return kernel, driver.Arguments(layers, *(("f", "i", "f", "f") if pointers == 11 else ("f",))), shapes, slices


@cache
def _plan(sizes: _Sizes, device: torch.device, backward: bool, way: Tiling | Residence | None) -> _Plan:
    from .triton.layers import backward_layers, forward_layers

    g, b, count = sizes.all_channels, sizes.itemsize, len(sizes.channels)
    r = way if isinstance(way, Residence) else None
    if way is None and resident.runs_on(device):
        r = resident.choose_layers(g, sizes.channels, _strides(sizes), b, backward, processors(device))
    p = way if isinstance(way, Tiling) else best_tiling(g, b, backward, False, device)
    slices = [up(c, p.V) for c in sizes.channels]
    align = gcd(16, *sizes.channels, *_strides(sizes))
    # A slice has channels of only one layer, so there can be more slices than `best_tiling` planned. Then their
    # programs might not all run at the same time, and tickets (take_ticket in triton/barrier.py) prevent a deadlock.
    ticket = p.ticket or sum(slices) > p.slices
    p = p._replace(
        slices=sum(slices), beside=sum(slices) if p.path == "stream" else p.beside, align=align, ticket=ticket
    )
    room = 2 * p.kept_parts if backward else 2 + 3 * p.kept_parts
    firsts = [*_starts(slices)[1:], *[p.slices] * (MOST - count)]

    def numbers(p: Tiling) -> tuple[int, ...]:
        strides = (sizes.x_strides, sizes.y_strides, *([sizes.dy_strides] if backward else []))
        each = [n // align for numbers in (sizes.channels, *strides) for n in (*numbers, *[0] * (MOST - count))]
        return sizes.rows, p.slices, p.parts, p.share, p.beside, room, *firsts, *each

    kernel = backward_layers if backward else forward_layers
    kept = 0 if r is None else 2 * r.kept_parts
    return _Plan(
        r,
        launches_of(kernel, numbers, g, p, device),
        (kept if backward else 2 + kept, 0 if r is None else 2 * count + r.slices),
        (room, 2 * count + p.slices * (33 if p.tree else 1)),
    )


def _strides(sizes: _Sizes) -> tuple[int, ...]:
    return (*sizes.x_strides, *sizes.y_strides, *sizes.dy_strides)


def _sizes(xs: Sequence[Tensor], ys: Sequence[Tensor], dys: Sequence[Tensor]) -> _Sizes:
    of_x, of_y, of_dy = (tuple([row_stride(t) for t in tensors]) for tensors in (xs, ys, dys))
    x, channels = xs[0], tuple([t.shape[1] for t in xs])
    return _Sizes(x.numel() // x.shape[1], channels, of_x, of_y, of_dy, x.element_size())


def _takes_rows(dy: Tensor, x: Tensor) -> bool:
    g = geometry_of(dy)
    return g is not None and g.nhwc and dy.dtype == x.dtype


def _dense(dy: Tensor) -> Tensor:
    return dy.movedim(1, -1).contiguous().movedim(-1, 1)


def _starts(numbers: Sequence[int]) -> list[int]:
    return list(accumulate(numbers, initial=0))[:-1]


def _four(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*tensors, *[None] * (MOST - len(tensors))]


def _workspace(x: Tensor, sizes: _Sizes, room: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return workspace(x, room[0] * sum(sizes.channels), room[1])
