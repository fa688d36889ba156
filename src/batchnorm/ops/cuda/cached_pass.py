"""Choose and cache the kernels, launches and workspace sizes for a pass over tensors of one shape and layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import resident, schedule
from .layout import Geometry, dense_strides, find_geometry, magic_of
from .resident import Residence
from .schedule import Tiling, up
from .triton_launch import TritonLaunch

BLOCK = 2048  # elements per program when normalizing by given statistics


class Pass(NamedTuple):
    """Hold what a forward or backward pass over tensors of one shape and layout needs, except the tensors."""

    geometry: Geometry
    strides: tuple[int, ...]  # the strides of dense tensors in x's layout
    dense: bool  # whether x has these strides
    residence: Residence | None  # resident.cu's launch parameters, or None to use the Triton kernels
    tiling: Tiling  # the Triton kernels' launch parameters
    launches: tuple[TritonLaunch, ...]  # the launches of the Triton kernel: one, or one for sums and one for outputs
    resident_room: tuple[int, int]  # the numbers of floats and counters in the workspace of resident.cu
    room: tuple[int, int]  # the numbers of floats and counters in the workspace of the Triton kernels

    @property
    def path(self) -> str:
        """The kernel's name in ``ops.explain``."""
        return (self.residence or self.tiling).path


def pass_of(x: Tensor, backward: bool, residual: bool, way: Tiling | Residence | None = None) -> Pass:
    """Return the Pass over ``x`` with the best launch parameters, or with the parameters ``way``, if given."""
    given = (x.shape, x.stride(), x.element_size(), x.device, backward, residual)
    return _pass(*given) if way is None else _find_pass(*given, way)


def _find_pass(
    shape: torch.Size,
    stride: tuple[int, ...],
    itemsize: int,
    device: torch.device,
    backward: bool,
    residual: bool,
    way: Tiling | Residence | None = None,
) -> Pass:
    g = find_geometry(shape, stride)
    if g is None:
        raise ValueError(
            f"the fused kernels do not support shape {tuple(shape)} with strides {stride}; call ops.batch_norm, which"
            " falls back to another path"
        )
    r = way if isinstance(way, Residence) else None
    if way is None and resident.runs_on(device):
        r = resident.choose(g, itemsize, backward, residual, processors(device))
    tiling = way if isinstance(way, Tiling) else best_tiling(g, itemsize, backward, residual, device)
    strides = dense_strides(g, shape)
    launches = _launches(g, tiling, backward, device)
    # For each channel, a workspace has `kept_parts` sets of floats: three moments in the Triton kernels' forward pass,
    # or two sums in their backward pass and in both passes of resident.cu. A forward pass needs two more floats per
    # channel for the old running averages.
    room = ((2 * tiling.kept_parts if backward else 2 + 3 * tiling.kept_parts) * g.channels, tiling.words)
    kept = 0 if r is None else 2 * r.kept_parts
    resident_room = ((kept if backward else 2 + kept) * g.channels, 0 if r is None else r.words)
    return Pass(g, strides, stride == strides, r, tiling, launches, resident_room, room)


_pass = cache(_find_pass)


def best_tiling(g: Geometry, itemsize: int, backward: bool, residual: bool, device: torch.device) -> Tiling:
    """Return the fastest tiling that is known to be correct on a device."""
    if is_tuned(device):
        return schedule.choose(g, itemsize, backward, residual, processors(device))
    return schedule.stream(g, itemsize, backward, processors(device))


@cache
def is_tuned(device: torch.device) -> bool:
    """Return whether to allow kernels whose programs wait for each other.

    The result is False for GPUs other than Hopper, because such kernels were tested only on Hopper GPUs.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Return a device's number of multiprocessors, or an arbitrary number on the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _launches(g: Geometry, p: Tiling, backward: bool, device: torch.device) -> tuple[TritonLaunch, ...]:
    if backward:
        from .triton.backward import backward as kernel
    else:
        from .triton.forward import forward as kernel
    return launches_of(kernel, lambda p: numbers(g, p), g, p, device)


def launches_of(
    kernel: Any, numbers: Callable[[Tiling], tuple[int, ...]], g: Geometry, p: Tiling, device: torch.device
) -> tuple[TritonLaunch, ...]:
    """Return the launches of a kernel with tiling ``p``: one for everything, or one for sums and one for outputs.

    ``numbers`` returns the kernel's integer arguments for a tiling.
    """
    on_device = device.type == "cuda"

    def launch(
        p: Tiling, phase: int, alone: bool, last: bool, tree: bool, ticket: bool, registers: int
    ) -> TritonLaunch:
        form = (g.nhwc, p.R, p.V, p.align, g.wide)
        constants = (form, p.T, phase, alone, last, tree, ticket, p.stages, on_device)
        options = {"num_warps": p.warps, "maxnreg": registers or None}
        return TritonLaunch(kernel, p.slices * p.parts, numbers(p), constants, options, device)

    # On the CPU, Triton's interpreter runs the programs one after the other. A program that waits for a later program
    # would wait forever, so use two launches.
    if p.alone or (on_device and p.path != "stream"):
        last = p.parts > schedule.MERGED_BY_ALL
        return (launch(p, 3, p.alone, last, last, p.ticket and not p.alone, p.registers),)
    q = p.second(g.rows // (1 if g.nhwc else p.V)) if p.path == "stream" else p
    return launch(p, 1, False, True, p.tree, False, p.registers), launch(q, 2, False, True, False, False, 0)


def numbers(g: Geometry, p: Tiling) -> tuple[int, ...]:
    """Return the integer arguments that the Triton kernels "forward" and "backward" have in common.

    The arguments are C, units, slices, parts, share, beside, x_stride, x_plane, y_stride, y_plane, width, magic and
    shift. Of these, x_stride, x_plane, y_stride, y_plane and, for channels last, C are divided by ``p.align``.
    The argument width is the number of units of a channel in one example (0 for channels last). Slices, parts and units
    are defined in triton/tile.py.
    """
    a = p.align
    mine = (p.slices, p.parts, p.share, p.beside)
    if g.nhwc:
        return g.channels // a, g.rows, *mine, g.stride // a, 0, g.channels // a, 0, 0, 0, 0
    width = g.width // p.V
    magic, shift = magic_of(width)
    magic = magic - 2**32 if magic >= 2**31 else magic
    strides = g.stride // a, g.plane // a, g.channels * g.width // a, g.width // a
    return g.channels, g.rows // p.V, *mine, *strides, width, magic, shift


@cache
def inference_pass(
    shape: torch.Size, stride: tuple[int, ...], device: torch.device
) -> tuple[tuple[int, ...], bool, TritonLaunch] | None:
    """Return the strides of a dense tensor, whether ``stride`` equals them, and a kernel launch.

    The launch normalizes a dense tensor of the given shape by given statistics. The result is None if the kernel does
    not support the shape or the strides.
    """
    from .triton.inference import normalize as kernel

    g = find_geometry(shape, stride)
    inner = 1 if g is None or g.nhwc else g.width  # how many adjacent elements of a dense tensor share a channel
    if g is None or g.channels * inner > 2**31 - BLOCK:  # the kernel's int32 indices are less than C * inner + BLOCK
        return None
    strides = dense_strides(g, shape)
    programs = up(shape.numel(), BLOCK)
    return (
        strides,
        stride == strides,
        TritonLaunch(kernel, programs, (shape.numel(), g.channels, inner), (BLOCK,), {}, device),
    )
