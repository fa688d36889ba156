"""Launch the fused kernels: allocate outputs, find the workspace, pack the arguments.

What passes over tensors of one shape have in common is found once, since on small tensors the host is the slower part.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from functools import cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation import NAMES, TWO_SLOPES, Activation
from ..call import Call
from . import driver, extension, resident, schedule
from .layout import Geometry, as_dense, dense_strides, find_geometry, geometry_of, is_dense, magic_of
from .resident import Residence
from .schedule import Tiling, up
from .sign_bits import empty_bits, is_woven, rearrange

STATS = 8  # rows of the statistics kept for the backward pass: see triton/forward.py
BLOCK = 2048  # elements of a program that normalizes by given statistics
NONE = (None, None, None, None)
Tensors = tuple[Tensor | None, ...]
Launches = list[tuple[Any, ...] | None]  # as autograd.cpp reads them


class Pass(NamedTuple):
    """Hold what a pass over tensors of one shape needs beside the tensors.

    Beyond the paper: the choices behind a call, and the launches that they lead to.
    """

    geometry: Geometry
    strides: tuple[int, ...]  # of dense tensors in x's layout
    dense: bool  # whether x has these strides
    residence: Residence | None  # None unless resident.cu is fastest
    tiling: Tiling  # for everything else
    launches: tuple[TritonLaunch, ...]  # by the tiling: one, or two phases one after the other
    resident_room: tuple[int, int]  # numbers and words of the workspace, by the residence
    room: tuple[int, int]  # by the tiling

    @property
    def path(self) -> str:
        """What ``ops.explain`` calls it."""
        return (self.residence or self.tiling).path


def forward(
    call: Call, keep_bits: bool = False, way: Tiling | Residence | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the statistics (STATS, C) and the bits that tell where the activation lets z through, if asked for."""
    x, gamma, beta, eps, (activation, slope), residual, _, running, momentum = call
    _check_devices(x, gamma, beta, residual, running)
    g, strides, dense, r, _, launches, resident_room, room = pass_of(x, False, residual is not None, way)
    y = torch.empty_like(x) if dense else x.new_empty_strided(x.shape, strides)
    stats = x.new_empty((STATS, g.channels), dtype=torch.float32)
    if r is not None and (_is_smooth(activation, residual) or not _are_resident(x, gamma, beta, residual)):
        r = None
    given = (gamma, beta, residual)
    gamma, beta = _contiguous(gamma), _contiguous(beta)
    residual = None if residual is None else as_dense(residual, strides)
    plain = gamma is given[0] and beta is given[1] and residual is given[2]
    code, cumulative = NAMES.index(activation), momentum is None

    def teach(launches: Launches, tensors: Tensors, bits: Tensor | None, room: tuple[int, int]) -> None:
        if plain and (residual is None or residual.stride() == strides):
            described = (strides, () if bits is None else tuple(bits.shape), *room, launches)
            moved = (running is not None, cumulative, code, keep_bits)
            _teach(launches, tensors, extension.module.add_forward, x, gamma, beta, residual, *moved, described)

    if r is not None and resident.takes(x, residual):
        bits = empty_bits(x, g, r.plane > 0) if keep_bits else None
        partial, words = workspace(x, *resident_room)
        tensors = (x, y, residual, bits, gamma, beta, stats, partial, words, *(running or NONE))
        scalars = (momentum or 0.0, cumulative, eps, slope)
        done = _launch_resident("forward", x, tensors, scalars, code, residual is not None, g, r, 0)
        if done is not None:
            if extension.module is not None:
                teach([done.described(range(17))], tensors, bits, resident_room)
            return y, stats, bits
    bits = empty_bits(x, g, False) if keep_bits else None
    partial, words = workspace(x, *room)
    tensors = (x, y, residual, bits, gamma, beta, stats, partial, words, *(running or NONE))
    reals = (float(eps), float(momentum or 0.0), float(slope))
    run = [launch(tensors, reals, (code, cumulative)) for launch in launches]
    woven = r is not None and r.plane > 0
    if extension.module is not None and (bits is None or not woven):
        teach([each and each.described((*each.present, 15, 13, 16)) for each in run], tensors, bits, room)
    return y, stats, None if bits is None else rearrange(bits, x, woven)


def backward(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bits: Tensor | None,
    stats: Tensor,
    activation: str,
    slope: float,
    residual_dtype: torch.dtype | None,
    way: Tiling | Residence | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dx, dgamma, dbeta and, if a type is given for it, the residual's gradient."""
    # Bits tell of a residual as well, though its gradient may not be wanted.
    added = bits is not None or residual_dtype is not None
    g, strides, dense, r, tiling, launches, resident_room, room = pass_of(x, True, added, way)
    dx = torch.empty_like(x) if dense else x.new_empty_strided(x.shape, strides)
    dresidual = None if residual_dtype is None else x.new_empty_strided(x.shape, strides, dtype=residual_dtype)
    dgamma, dbeta = stats.new_empty(g.channels), stats.new_empty(g.channels)
    code = NAMES.index(activation)
    given = (dy, residual, bits)

    def teach(launches: Launches, tensors: Tensors, room: tuple[int, int]) -> None:
        described = (strides, (), *room, launches)
        _teach(launches, tensors, extension.module.add_backward, dy, x, residual, bits, dresidual, code, described)

    if r is not None and residual is None and (bits is None or is_woven(bits) == (r.plane > 0)):
        dy_, dy_stride = _rows_of(dy, g, strides, resident.WIDTH // x.element_size())
        if _of_one_type(x, dy_, dresidual) and resident.takes(x, dy_):
            partial, words = workspace(x, *resident_room)
            tensors: Tensors = (dy_, x, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)
            done = _launch_resident("backward", x, tensors, (slope,), code, added, g, r, dy_stride)
            if done is not None:
                if extension.module is not None and dy_ is dy:
                    teach([done.described((0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11))], tensors, resident_room)
                return dx, dgamma, dbeta, dresidual
    partial, words = workspace(x, *room)
    residual = None if residual is None else as_dense(residual, strides)
    dy, dy_stride = _rows_of(dy, g, strides, tiling.align)
    bits = None if bits is None else rearrange(bits, x, False)
    tensors = (dy, x, residual, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)
    run = [launch(tensors, (float(slope), dy_stride // tiling.align), (code,)) for launch in launches]
    plain = dy is given[0] and residual is given[1] and bits is given[2]
    if extension.module is not None and plain and (residual is None or residual.stride() == strides):
        teach([each and each.described((*each.present, 11, None)) for each in run], tensors, room)
    return dx, dgamma, dbeta, dresidual


def recompute(x: Tensor, residual: Tensor | None, stats: Tensor, activation: Activation) -> Tensor:
    """Return a forward pass's y again, from its statistics: streaming's second launch alone, the same bits."""
    g = pass_of(x, False, residual is not None).geometry
    way = schedule.stream(g, x.element_size(), False, processors(x.device))
    p = pass_of(x, False, residual is not None, way)
    strides, launches = p.strides, p.launches
    y = x.new_empty_strided(x.shape, strides)
    residual = None if residual is None else as_dense(residual, strides)
    # Nothing is merged or moved: what the first launch works with is not read.
    tensors = (x, y, residual, None, None, None, stats, stats, stats, *NONE)
    launches[1](tensors, (0.0, 0.0, float(activation.slope)), (NAMES.index(activation.name), False))
    return y


def normalize(call: Call, mean: Tensor, var: Tensor) -> Tensor | None:
    """Normalize by given statistics, without gradients; None if the kernel cannot count so far."""
    x = call.x
    found = _inference(x.shape, x.stride(), x.device)
    if found is None:
        return None
    strides, dense, launch = found
    _check_devices(x, call.gamma, call.beta, call.residual, (mean, var))
    if not dense:
        x = as_dense(x, strides)
    residual = None if call.residual is None else as_dense(call.residual, strides)
    y = torch.empty_like(x)
    vectors = [_as_float(v) for v in (mean, var, call.gamma, call.beta)]
    scalars = (float(call.eps), float(call.activation.slope))
    launch((x, y, residual, *vectors), scalars, (NAMES.index(call.activation.name),))
    return y


def weaves_bits(call: Call, g: Geometry) -> bool:
    """Say in which order :func:`forward` returns bits, which torch.compile has to know before it runs."""
    able = resident.runs_on(call.x.device) and _are_resident(call.x, call.gamma, call.beta, call.residual)
    return able and resident.weaves(g, call.x.element_size(), False, True)


def paths(call: Call) -> tuple[str, str]:
    """Return what ``ops.explain`` calls a forward and a backward pass, dy like x and the residual's gradient wanted."""
    x, gamma, beta, _, (activation, _), residual, *_ = call
    added = residual is not None and activation != "identity"  # else its gradient is dy
    ahead, back = pass_of(x, False, residual is not None), pass_of(x, True, added)
    if _is_smooth(activation, residual) or not resident.takes(x):
        return ahead.tiling.path, back.tiling.path
    typed, r = _are_resident(x, gamma, beta, residual), back.residence
    # The residual's gradient has its type, and other kernels keep bits in another order than woven ones.
    fits = _of_one_type(x, residual) and (typed or r is None or not r.plane)
    aligned = residual is None or resident.takes(residual) or not is_dense(residual, ahead.strides)  # else a copy is
    return (
        ahead.path if typed and aligned else ahead.tiling.path,
        back.path if fits or not added else back.tiling.path,
    )


def pass_of(x: Tensor, backward: bool, residual: bool, way: Tiling | Residence | None = None) -> Pass:
    """Return what a pass over ``x`` needs, by the best way or a given one."""
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
        raise ValueError(f"the fused kernels cannot take strides {stride}; ops.batch_norm chooses another path")
    r = way if isinstance(way, Residence) else None
    if way is None and resident.runs_on(device):
        r = resident.choose(g, itemsize, backward, residual, processors(device))
    if isinstance(way, Tiling):
        tiling = way
    elif is_tuned(device):
        tiling = schedule.choose(g, itemsize, backward, residual, processors(device))
    else:
        tiling = schedule.stream(g, itemsize, backward, processors(device))
    strides = dense_strides(g, shape)
    launches = _launches(g, tiling, backward, device)
    # A part leaves two sums of each channel, Triton's forward pass three; statistics take two more places.
    room = ((2 * tiling.kept_parts if backward else 2 + 3 * tiling.kept_parts) * g.channels, tiling.words)
    kept = 0 if r is None else 2 * r.kept_parts
    resident_room = ((kept if backward else 2 + kept) * g.channels, 0 if r is None else r.words)
    return Pass(g, strides, stride == strides, r, tiling, launches, resident_room, room)


_pass = cache(_find_pass)


@cache
def is_tuned(device: torch.device) -> bool:
    """Say whether programs may wait for each other: known to be right only on Hopper, where the rules were measured."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; some, if kernels are interpreted."""
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
    """Return the launches of a kernel by a plan: one, or two phases one after the other."""
    on_device = device.type == "cuda"

    def launch(
        p: Tiling, phase: int, alone: bool, last: bool, tree: bool, ticket: bool, registers: int
    ) -> TritonLaunch:
        form = (g.nhwc, p.R, p.V, p.align, g.wide)
        constants = (form, p.T, phase, alone, last, tree, ticket, p.stages, on_device)
        options = {"num_warps": p.warps, "maxnreg": registers or None}
        return TritonLaunch(kernel, p.slices * p.parts, numbers(p), constants, options, device)

    # Interpreted programs run one after the other: none may wait for the next.
    if p.alone or (on_device and p.path != "stream"):
        last = p.parts > schedule.MERGED_BY_ALL
        return (launch(p, 3, p.alone, last, last, p.ticket and not p.alone, p.registers),)
    q = p.second(g.rows // (1 if g.nhwc else p.V)) if p.path == "stream" else p
    return launch(p, 1, False, True, p.tree, False, p.registers), launch(q, 2, False, True, False, False, 0)


def numbers(g: Geometry, p: Tiling) -> tuple[int, ...]:
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


@cache
def _inference(
    shape: torch.Size, stride: tuple[int, ...], device: torch.device
) -> tuple[tuple[int, ...], bool, TritonLaunch] | None:
    from .triton.inference import normalize as kernel

    g = find_geometry(shape, stride)
    inner = 1 if g is None or g.nhwc else g.width  # elements before the channel changes
    if g is None or g.channels * inner > 2**31 - BLOCK:  # what the kernel counts within an example
        return None
    strides = dense_strides(g, shape)
    programs = up(shape.numel(), BLOCK)
    return (
        strides,
        stride == strides,
        TritonLaunch(kernel, programs, (shape.numel(), g.channels, inner), (BLOCK,), {}, device),
    )


Launched = Callable[[list[int], tuple[float, ...]], "DriverLaunch | None"]  # addresses, scalars


class TritonLaunch:
    """Launch a Triton kernel over tensors of one geometry.

    Triton looks at every argument to find the code that it compiled for such arguments, and wraps each launch in more
    Python; together they take several times as long as the launch. All that its choice depends on is fixed by this
    object and the key below.

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
        self.compiled: dict[tuple[Any, ...], Launched] = {}

    def __call__(self, tensors: Tensors, scalars: tuple[float, ...], choices: tuple[int, ...]) -> DriverLaunch | None:
        """Run the programs; ``choices`` are the kernel's constants that the geometry leaves open.

        Returns the launch if the driver did it.
        """
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        key: tuple[Any, ...] = (choices, *[None if t is None else t.dtype for t in tensors])
        if reduce(or_, addresses) & 15:  # Triton compiles other code for pointers that are not aligned
            key = (*key, *[a % 16 for a in addresses])
        run = self.compiled.get(key)
        if run is not None:
            return run(addresses, scalars)
        if self.device is not None and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # Triton launches on the current one
                return self(tensors, scalars, choices)
        rest = (*choices, *self.constants)
        compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, *scalars, *rest, **self.options)
        if compiled is not None:  # None: interpreted
            absent = [t is None for t in tensors]
            self.compiled[key] = self._past_triton(compiled, absent, scalars) or self._by_triton(compiled, absent, rest)
        return None

    def _by_triton(self, compiled: Any, absent: list[bool], rest: tuple[Any, ...]) -> Launched:
        launch = compiled[(self.programs, 1, 1)]

        def run(addresses: list[int], scalars: tuple[float, ...]) -> None:
            given = [None if no else a for a, no in zip(addresses, absent, strict=True)]
            if self.device is not None and self.device != torch.cuda.current_device():
                with torch.cuda.device(self.device):
                    launch(*given, *self.numbers, *scalars, *rest)
            else:
                launch(*given, *self.numbers, *scalars, *rest)

        return run

    def _past_triton(self, compiled: Any, absent: list[bool], scalars: tuple[float, ...]) -> Launched | None:
        """Return a launch by the driver; None if the compiled code takes other arguments than this Triton's do."""
        try:
            meta, index = compiled.metadata, self.device
            types = [compiled.src.signature[name] for name in compiled.src.fn.arg_names]
            declared = re.search(r"\.entry[^(]*\(([^)]*)\)", compiled.asm["ptx"])
            required = re.search(r"\.reqntid (\d+)", compiled.asm["ptx"])
            special = meta.num_ctas != 1 or meta.launch_cooperative_grid or meta.launch_pdl
            scratch = meta.global_scratch_size or meta.profile_scratch_size
            function, threads, shared = compiled.function, 32 * meta.num_warps, meta.shared
        except (AttributeError, KeyError):
            return None
        if declared is None or special or scratch or index is None or not function:
            return None
        if required is not None and int(required[1]) != threads:
            return None
        values = (*absent, *self.numbers, *scalars)
        fields: list[Any] = []
        for i, (kind, value) in enumerate(zip(types, values, strict=False)):
            if i < len(absent):
                known = kind == "constexpr" if value else kind[:1] == "*"
                fields += [] if value else ["P"]
            elif i < len(absent) + len(self.numbers):
                known = kind in INTEGERS or kind == "constexpr"
                fields += [INTEGERS[kind](value)] if kind in INTEGERS else []
            else:
                known = kind == ("fp32" if isinstance(value, float) else "i32")
                fields.append("f" if isinstance(value, float) else "i")
            if not known:
                return None
        # After a kernel's own arguments come pointers to scratch memory, which these kernels do not use.
        extra = declared[1].count(".param") - len(fields)
        if extra not in (0, 1, 2) or any(kind != "constexpr" for kind in _flat(types[len(values) :])):
            return None
        arguments = driver.Arguments(*fields, *[ctypes.c_void_p(None)] * extra)
        kernel = driver.Kernel(function, threads, shared, index, cooperative=False)
        present = tuple(i for i, no in enumerate(absent) if not no)
        pick = itemgetter(*present)

        def run(addresses: list[int], scalars: tuple[float, ...]) -> DriverLaunch:
            stream = torch._C._cuda_getCurrentRawStream(index)
            values = (*pick(addresses), *scalars)
            arguments.launch(kernel, self.programs, values, stream)
            return DriverLaunch(kernel, self.programs, arguments, values, present)

        return run


INTEGERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def _flat(types: list[Any]) -> list[Any]:
    return [kind for t in types for kind in (_flat(list(t)) if isinstance(t, tuple) else [t])]


class DriverLaunch(NamedTuple):
    """Hold what one launch through the driver was given.

    Beyond the paper: what the extension repeats.
    """

    kernel: driver.Kernel
    programs: int
    arguments: driver.Arguments
    values: tuple[Any, ...]  # of the arguments that change from launch to launch
    present: tuple[int, ...]  # which tensors of the pass come first among them

    def described(self, slots: Iterable[int | None]) -> tuple[Any, ...]:
        """Return the launch for autograd.cpp; ``slots``: where it finds each changing value, None if that is fixed."""
        k = self.kernel
        image, starts, changing = self.arguments.layout(self.values)
        writes = [(*at, slot) for at, slot in zip(changing, slots, strict=True) if slot is not None]
        return k.function, self.programs, k.threads, k.shared, k.cooperative, image, starts, writes


def _teach(launches: Launches, tensors: Tensors, add: Callable[..., None], *description: Any) -> None:
    """Describe a pass to the extension, unless Triton launched it or tensors are not aligned."""
    x = next(t for t in tensors if t is not None)
    aligned = not any(t is not None and t.data_ptr() & 15 for t in tensors)
    if all(launches) and aligned and not torch._C._cuda_isCurrentStreamCapturing():
        add(*description)
        workspace.share(x.get_device())


def _launch_resident(
    name: str,
    x: Tensor,
    tensors: Tensors,
    scalars: tuple[float, ...],
    activation: int,
    residual: bool,
    g: Geometry,
    r: Residence,
    dy_stride: int,
) -> DriverLaunch | None:
    """Run resident.cu; return None if the device refuses the launch."""
    index = x.get_device()
    kernel, arguments = resident.prepared(name, x.dtype, activation, residual, g, r, dy_stride, index)
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    values = (*[0 if t is None else t.data_ptr() for t in tensors], *scalars)
    try:
        arguments.launch(kernel, r.groups * r.parts, values, stream)
    except driver.Refused:
        return None
    return DriverLaunch(kernel, r.groups * r.parts, arguments, values, ())


def _check_devices(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, others: tuple[Tensor, ...] | None
) -> None:
    """Refuse what a kernel could not read: launches are given addresses."""
    device = x.get_device()
    for t in (gamma, beta, residual, *(others or ())):
        if t is not None and t.get_device() != device:
            raise ValueError(f"the input is on {x.device}, a parameter, statistic or residual on {t.device}; move it")


def _is_smooth(activation: str, residual: Tensor | None) -> bool:
    """Say whether the gradient needs the residual itself, which resident.cu does not read there."""
    return residual is not None and activation not in ("identity", *TWO_SLOPES)


def _of_one_type(x: Tensor, *others: Tensor | None) -> bool:
    return all(t is None or t.dtype == x.dtype for t in others)


def _are_resident(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> bool:
    """Say whether tensors have the types that resident.cu takes."""
    return (
        (residual is None or residual.dtype is x.dtype)
        and (gamma is None or gamma.dtype is torch.float32)
        and (beta is None or beta.dtype is torch.float32)
    )


def _contiguous(v: Tensor | None) -> Tensor | None:
    return v if v is None or v.is_contiguous() else v.contiguous()


def _as_float(v: Tensor | None) -> Tensor | None:
    return _contiguous(v if v is None or v.dtype is torch.float32 else v.float())


def _rows_of(dy: Tensor, g: Geometry, strides: tuple[int, ...], align: int) -> tuple[Tensor, int]:
    """Return the gradient and the stride of its rows or examples, copied only if it is not in x's order.

    It comes as a slice of channels if the layer's output was concatenated with others.
    """
    stride = g.channels if g.nhwc else g.channels * g.width
    if dy.stride() == strides:
        return dy, stride
    if g.nhwc:
        own = geometry_of(dy)
        if own is not None and own.nhwc and own.stride % align == 0 and not own.wide:
            return dy, own.stride
    return as_dense(dy, strides), stride


class Workspace:
    """Keep each stream's memory for parts' sums, and the words at which programs meet.

    The words are zero between launches. Launches on one stream run one after the other, so they share; a captured one
    has its own, since its graph may be replayed beside anything.

    Beyond the paper: spares every launch two allocations.
    """

    ARENA = 1 << 22

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.arenas: dict[int, tuple[Tensor, int]] = {}

    def __call__(self, x: Tensor, floats: int, words: int) -> tuple[Tensor, Tensor]:
        """Return room for so many numbers, and so many words."""
        index = x.get_device()
        if index < 0:
            return x.new_empty(floats, dtype=torch.float32), torch.zeros(words, dtype=torch.int32)
        if torch._C._cuda_isCurrentStreamCapturing():
            return x.new_empty(floats, dtype=torch.float32), self.captured(x.device, up(words, 32) * 32)
        key = (index, torch._C._cuda_getCurrentRawStream(index))
        found = self.by_stream.get(key)
        if found is None or found[0].shape[0] < floats or found[1].shape[0] < words:
            found = self.by_stream[key] = self.grown(x.device, floats, words, found)
            self.share(index)
        return found

    def share(self, index: int) -> None:
        """Tell the extension of the current stream's memory."""
        stream = torch._C._cuda_getCurrentRawStream(index)
        found = self.by_stream.get((index, stream))
        if extension.module is not None and found is not None:
            floats, words = found
            rooms = (floats.data_ptr(), floats.numel(), words.data_ptr(), words.numel())
            extension.module.set_room(index, stream, *rooms)

    def grown(self, device: torch.device, floats: int, words: int, old: Any) -> tuple[Tensor, Tensor]:
        """Return a stream's memory, at least as large as it was."""
        floats = max(floats, 0 if old is None else old[0].shape[0], 1 << 16)
        words = max(up(words, 32) * 32, 0 if old is None else old[1].shape[0], 4096)  # whole cache lines
        if device.index not in self.arenas:
            self.arenas[device.index] = (torch.zeros(self.ARENA, dtype=torch.int32, device=device), 0)
            torch.cuda.current_stream(device).synchronize()  # once: graphs may be replayed on any stream
        return (
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(words, dtype=torch.int32, device=device),
        )

    def captured(self, device: torch.device, n: int) -> Tensor:
        """Return words for a launch that is being captured."""
        arena, used = self.arenas.get(device.index, (None, 0))
        if arena is None or used + n > arena.numel():
            return torch.zeros(n, dtype=torch.int32, device=device)  # set to zero at every replay
        self.arenas[device.index] = (arena, used + n)
        return arena[used : used + n]


workspace = Workspace()
