"""What passes over tensors of one shape have in common, found once: on small tensors the host is the slower part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import resident, schedule
from .layout import Geometry, dense_strides, find_geometry, magic_of
from .resident import Residence
from .schedule import Plan


class Launch:
    """Launch a Triton kernel over tensors of one geometry.

    Triton looks at every argument to find the code it compiled for such arguments, which takes several times as long
    as the launch itself. All that its choice depends on is what a ``Launch`` stands for and the key below.

    Beyond the paper: speed.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.kernel, self.programs, self.options = kernel, programs, options
        self.numbers, self.constants, self.device = numbers, constants, device.index
        self.compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(
        self, tensors: tuple[Tensor | None, ...], scalars: tuple[float, ...], choices: tuple[int, ...]
    ) -> None:
        """Run the programs; ``choices`` are the kernel's constants that the geometry leaves open."""
        if self.device is not None and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # Triton launches on the current one
                self(tensors, scalars, choices)
            return
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        kinds = [None if t is None else t.dtype for t in tensors]
        key = (*choices, *kinds, *[None if a is None else a % 16 for a in addresses])
        run = self.compiled.get(key)
        rest = (*self.numbers, *scalars, *choices, *self.constants)
        if run is not None:
            run(*addresses, *rest)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *rest, **self.options)
        if compiled is not None:  # None: interpreted
            self.compiled[key] = compiled[(self.programs, 1, 1)]


class Form(NamedTuple):
    """Hold what a pass needs beside tensors.

    Beyond the paper: the choices behind a call, and the launches that they lead to.
    """

    geometry: Geometry
    strides: tuple[int, ...]  # of dense tensors in x's layout
    residence: Residence | None  # where that is fastest
    plan: Plan  # for all else
    launches: tuple[Launch, ...]  # by the plan: one, or two phases one after the other

    @property
    def path(self) -> str:
        """What ``ops.explain`` calls it."""
        return (self.residence or self.plan).path


def form_of(x: Tensor, backward: bool, residual: bool, p: Plan | Residence | None = None) -> Form:
    """Return the form of a pass over ``x``, by the best plan or a given one."""
    given = (x.shape, x.stride(), x.element_size(), x.device, backward, residual)
    return _form(*given) if p is None else _find_form(*given, p)


def _find_form(
    shape: torch.Size,
    stride: tuple[int, ...],
    itemsize: int,
    device: torch.device,
    backward: bool,
    residual: bool,
    p: Plan | Residence | None = None,
) -> Form:
    g = _geometry(shape, stride)
    given = (g, itemsize, backward, residual, processors(device))
    r = p if isinstance(p, Residence) else None
    if p is None and resident.runs_on(device):
        r = resident.choose(*given)
    q = p if isinstance(p, Plan) else schedule.choose(*given)
    return Form(g, dense_strides(g, shape), r, q, _launches(g, q, backward, device))


_form = cache(_find_form)


def _geometry(shape: torch.Size, stride: tuple[int, ...]) -> Geometry:
    g = find_geometry(shape, stride)
    if g is None:
        raise ValueError(f"the fused kernels cannot take strides {stride}; ops.batch_norm chooses another path")
    return g


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; some, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _launches(g: Geometry, p: Plan, backward: bool, device: torch.device) -> tuple[Launch, ...]:
    if backward:
        from .triton.backward import backward as kernel
    else:
        from .triton.forward import forward as kernel
    on_device = device.type == "cuda"

    def launch(p: Plan, phase: int, alone: bool, last: bool, tree: bool, ticket: bool, registers: int) -> Launch:
        form = (g.nhwc, p.R, p.V, p.align, g.wide)
        constants = (form, p.T, phase, alone, last, tree, ticket, p.stages, on_device)
        options = {"num_warps": p.warps, "maxnreg": registers or None}
        return Launch(kernel, p.slices * p.parts, numbers(g, p), constants, options, device)

    # Interpreted programs run one after the other: none may wait for the next.
    if p.alone or (on_device and p.path != "stream"):
        last = p.parts > schedule.MERGED_BY_ALL
        return (launch(p, 3, p.alone, last, last, p.ticket and not p.alone, p.registers),)
    q = p.second(g.rows // (1 if g.nhwc else p.V)) if p.path == "stream" else p
    return launch(p, 1, False, True, p.tree, False, p.registers), launch(q, 2, False, True, False, False, 0)


def numbers(g: Geometry, p: Plan) -> tuple[int, ...]:
    """Return C, units, slices, parts, share, beside, x_stride, x_plane, y_stride, y_plane, width, magic, shift."""
    a = p.align
    mine = (p.slices, p.parts, p.share, p.beside)
    if g.nhwc:
        return g.channels // a, g.rows, *mine, g.stride // a, 0, g.channels // a, 0, 0, 0, 0
    width = g.width // p.V
    magic, shift = magic_of(width)
    magic = magic - 2**32 if magic >= 2**31 else magic
    strides = g.stride // a, g.plane // a, g.channels * g.width // a, g.width // a
    return g.channels, g.rows // p.V, *mine, *strides, width, magic, shift
