"""Run the fused kernels on tensors: allocate outputs, launch kernels, and describe the launches to autograd.cpp.

:func:`forward` and :func:`backward` choose the kernel and its launch parameters, unless ``way`` specifies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..activation import NAMES, TWO_SLOPES, Activation
from ..call import Call
from . import driver, extension, resident, schedule
from .cached_pass import Pass, inference_pass, pass_of, processors
from .layout import Geometry, as_dense, geometry_of, is_dense
from .resident import Residence
from .schedule import Tiling
from .sign_bits import empty_bits, is_woven, rearrange
from .triton_launch import Tensors
from .workspace import workspace

STATS = 8  # number of rows of the statistics tensor; triton/forward.py lists the rows
NONE = (None, None, None, None)
# For each launch, its description for autograd.cpp, or None if Triton's own launcher made the launch.
Launches = list[tuple[Any, ...] | None]


def forward(
    call: Call, keep_bits: bool = False, way: Tiling | Residence | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the statistics and the sign bits, and update the running averages if the call has any.

    The statistics have the shape (STATS, C). The sign bits (see sign_bits.py) are None unless ``keep_bits`` is true.
    """
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
        if plain and way is None and (residual is None or residual.stride() == strides):
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
    """Return dx, dgamma, dbeta and, if ``residual_dtype`` is given, the residual's gradient."""
    # `residual_dtype` is None if the residual's gradient is not needed. Sign bits exist only if a residual was added.
    added = bits is not None or residual_dtype is not None
    g, strides, dense, r, tiling, launches, resident_room, room = pass_of(x, True, added, way)
    dx = torch.empty_like(x) if dense else x.new_empty_strided(x.shape, strides)
    dresidual = None if residual_dtype is None else x.new_empty_strided(x.shape, strides, dtype=residual_dtype)
    dgamma, dbeta = stats.new_empty(g.channels), stats.new_empty(g.channels)
    code = NAMES.index(activation)
    given = (dy, residual, bits)

    def teach(launches: Launches, tensors: Tensors, room: tuple[int, int]) -> None:
        described = (strides, (), *room, launches)
        if way is None:
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
    """Recompute y, bit for bit, from x, the residual and the statistics.

    The second launch of the "stream" path (see schedule.py) does this.
    """
    p = _streaming(x, residual is not None)
    y = x.new_empty_strided(x.shape, p.strides)
    residual = None if residual is None else as_dense(residual, p.strides)
    # The second launch does not use the workspace, so `stats` is passed in place of the two workspace tensors.
    tensors = (x, y, residual, None, None, None, stats, stats, stats, *NONE)
    p.launches[1](tensors, (0.0, 0.0, float(activation.slope)), (NAMES.index(activation.name), False))
    return y


def statistics(call: Call) -> Tensor:
    """Return a batch's statistics, and update the running averages if the call has any.

    The first launch of the "stream" path (see schedule.py) does this.
    """
    x, gamma, beta, eps, (activation, slope), *_, running, momentum = call
    p = _streaming(x, False)
    stats = x.new_empty((STATS, p.geometry.channels), dtype=torch.float32)
    # The first launch does not write y, so x is passed in place of y.
    tensors = (x, x, None, None, gamma, beta, stats, *workspace(x, *p.room), *(running or NONE))
    scalars = (float(eps), float(momentum or 0.0), float(slope))
    p.launches[0](tensors, scalars, (NAMES.index(activation), momentum is None))
    return stats


def _streaming(x: Tensor, residual: bool) -> Pass:
    """Return the forward pass of the "stream" path, even if another path is faster."""
    g = pass_of(x, False, residual).geometry
    return pass_of(x, False, residual, schedule.stream(g, x.element_size(), False, processors(x.device)))


def normalize(call: Call, mean: Tensor, var: Tensor) -> Tensor | None:
    """Normalize by given statistics, without gradients; return None if the kernel does not support the tensor."""
    x = call.x
    found = inference_pass(x.shape, x.stride(), x.device)
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
    """Return whether the sign bits that :func:`forward` returns are in woven order (see sign_bits.py)."""
    able = resident.runs_on(call.x.device) and _are_resident(call.x, call.gamma, call.beta, call.residual)
    return able and resident.weaves(g, call.x.element_size(), False, True)


def paths(call: Call) -> tuple[str, str]:
    """Return the names of the forward and backward kernels for ``ops.explain``.

    The result assumes that dy has x's layout and that the residual's gradient is needed.
    """
    x, gamma, beta, _, (activation, _), residual, *_ = call
    # Without an activation, the residual's gradient is dy itself, so the backward kernel need not write it.
    added = residual is not None and activation != "identity"
    ahead, back = pass_of(x, False, residual is not None), pass_of(x, True, added)
    if _is_smooth(activation, residual) or not resident.takes(x):
        return ahead.tiling.path, back.tiling.path
    typed, r = _are_resident(x, gamma, beta, residual), back.residence
    # The backward pass of resident.cu can write the residual's gradient only in x's dtype, but the gradient has the
    # residual's dtype. If r.plane > 0, the backward pass also needs sign bits in woven order (see sign_bits.py), which
    # `forward` returns only if resident.cu supports the tensors' dtypes (`typed`).
    fits = _of_one_type(x, residual) and (typed or r is None or not r.plane)
    # A residual that is not dense is copied before the launch, and the copy is aligned.
    aligned = residual is None or resident.takes(residual) or not is_dense(residual, ahead.strides)
    return (
        ahead.path if typed and aligned else ahead.tiling.path,
        back.path if fits or not added else back.tiling.path,
    )


def _teach(launches: Launches, tensors: Tensors, add: Callable[..., None], *description: Any) -> None:
    """Describe a pass to the extension (autograd.cpp), so that the extension can run later passes of the same kind.

    Do nothing if Triton's own launcher ran one of the pass's kernels, if a tensor is not aligned to 16 bytes, or if a
    CUDA graph is being captured.
    """
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
) -> driver.Launch | None:
    """Launch a kernel of resident.cu; return the launch, or None if the device refused it."""
    index = x.get_device()
    kernel, arguments = resident.prepared(name, x.dtype, activation, residual, g, r, dy_stride, index)
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    values = (*[0 if t is None else t.data_ptr() for t in tensors], *scalars)
    try:
        arguments.launch(kernel, r.groups * r.parts, values, stream)
    except driver.Refused:
        return None
    return driver.Launch(kernel, r.groups * r.parts, arguments, values, ())


def _check_devices(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, others: tuple[Tensor, ...] | None
) -> None:
    """Raise ValueError if a tensor is not on x's device; the kernels get only addresses, so they cannot check this."""
    device = x.get_device()
    for t in (gamma, beta, residual, *(others or ())):
        if t is not None and t.get_device() != device:
            raise ValueError(
                f"the input is on {x.device}, but a parameter, statistic or residual is on {t.device}; move them to the"
                " same device"
            )


def _is_smooth(activation: str, residual: Tensor | None) -> bool:
    """Return whether the gradient needs the residual, which the backward pass of resident.cu cannot read."""
    return residual is not None and activation not in ("identity", *TWO_SLOPES)


def _of_one_type(x: Tensor, *others: Tensor | None) -> bool:
    return all(t is None or t.dtype == x.dtype for t in others)


def _are_resident(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> bool:
    """Return whether the tensors have dtypes that resident.cu supports."""
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
    """Return dy and its stride; if the kernels cannot read dy's layout, return a dense copy and the copy's stride.

    The stride is that of a row (channels last) or of an example (channels first); a row is one location of one
    example. A channels-last dy that holds only some channels of a larger tensor, such as the gradient of one input
    of a concatenation, usually need not be copied.
    """
    stride = g.channels if g.nhwc else g.channels * g.width
    if dy.stride() == strides:
        return dy, stride
    if g.nhwc:
        own = geometry_of(dy)
        if own is not None and own.nhwc and own.stride % align == 0 and not own.wide:
            return dy, own.stride
    return as_dense(dy, strides), stride
