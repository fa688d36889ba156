"""Launch the fused kernels: what they need beside the tensors, and where their programs meet."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation import NAMES
from . import resident, schedule
from .launch_cache import form_of, processors
from .layout import Geometry, as_dense, geometry_of, is_dense
from .resident import Residence
from .schedule import Plan
from .sign_bits import empty_bits, is_woven, rearrange

STATS = 8  # rows of the statistics kept for the backward pass: see triton/forward.py


def forward(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    running: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    momentum: float | None,
    eps: float,
    activation: str,
    slope: float,
    keep_bits: bool,
    p: Plan | Residence | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the statistics (STATS, C) and the bits of z > 0, None where not asked for."""
    _check_devices(x, gamma, beta, residual, *(running or ()))
    g, strides, r, q, launches = form_of(x, False, residual is not None, p)
    y = x.new_empty_strided(x.shape, strides)
    stats = x.new_empty((STATS, g.channels), dtype=torch.float32)
    if _is_smooth(activation, residual) or not _are_resident(x, gamma, beta, residual):
        r = None
    woven = r is not None and r.plane > 0
    gamma = None if gamma is None else gamma.contiguous()
    beta = None if beta is None else beta.contiguous()
    residual = None if residual is None else as_dense(residual, strides)
    if r is not None and resident.takes(x, residual):
        bits = empty_bits(x, g, woven) if keep_bits else None
        partial, words = _room(x, (2 + 2 * r.kept_parts) * g.channels, r)
        tensors = (x, y, residual, bits, gamma, beta, stats, partial, words)
        if resident.forward(tensors, running, momentum, eps, activation, slope, g, r):
            return y, stats, bits
    bits = empty_bits(x, g, False) if keep_bits else None
    partial, words = _room(x, (2 + 3 * q.kept_parts) * g.channels, q)
    tensors = (x, y, residual, bits, gamma, beta, stats, partial, words, *(running or (None, None, None, None)))
    scalars = (float(eps), float(momentum or 0.0), float(slope))
    for launch in launches:
        launch(tensors, scalars, (NAMES.index(activation), momentum is None))
    return y, stats, None if bits is None else rearrange(bits, x, woven)


def weaves_bits(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, g: Geometry) -> bool:
    """Say in which order :func:`forward` returns bits, which torch.compile has to know before it runs."""
    able = resident.runs_on(x.device) and _are_resident(x, gamma, beta, residual)
    return able and resident.weaves(g, x.element_size(), False, True)


def paths(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, activation: str
) -> tuple[str, str]:
    """Return what ``ops.explain`` calls a forward and a backward pass, dy like x and the residual's gradient wanted."""
    added = residual is not None and activation != "identity"  # else its gradient is dy
    forward, backward = form_of(x, False, residual is not None), form_of(x, True, added)
    if _is_smooth(activation, residual) or not resident.takes(x):
        return forward.plan.path, backward.plan.path
    typed, r = _are_resident(x, gamma, beta, residual), backward.residence
    # The residual's gradient has its type, and other kernels keep bits in another order than woven ones.
    fits = _of_one_type(x, residual) and (typed or r is None or not r.plane)
    aligned = residual is None or resident.takes(residual) or not is_dense(residual, forward.strides)  # else a copy is
    return (
        forward.path if typed and aligned else forward.plan.path,
        backward.path if fits or not added else backward.plan.path,
    )


def normalize(x: Tensor, residual: Tensor | None, stats: Tensor, activation: str, slope: float) -> Tensor:
    """Return a forward pass's y again, from its statistics: streaming's second launch alone, the same bits."""
    g = form_of(x, False, residual is not None).geometry
    stream = schedule.stream(g, x.element_size(), False, processors(x.device))
    _, strides, *_, launches = form_of(x, False, residual is not None, stream)
    y = x.new_empty_strided(x.shape, strides)
    residual = None if residual is None else as_dense(residual, strides)
    # Nothing is merged, met or moved: what the first launch works with is not read.
    tensors = (x, y, residual, None, None, None, stats, stats, stats, None, None, None, None)
    launches[1](tensors, (0.0, 0.0, float(slope)), (NAMES.index(activation), False))
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bits: Tensor | None,
    stats: Tensor,
    activation: str,
    slope: float,
    residual_dtype: torch.dtype | None,
    p: Plan | Residence | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dx, dgamma, dbeta and, where a type is given for it, the residual's gradient."""
    # Bits tell of a residual as well, though its gradient may not be wanted.
    added = bits is not None or residual_dtype is not None
    g, strides, r, q, launches = form_of(x, True, added, p)
    dx = x.new_empty_strided(x.shape, strides)
    dresidual = None if residual_dtype is None else x.new_empty_strided(x.shape, strides, dtype=residual_dtype)
    dgamma = x.new_empty(g.channels, dtype=torch.float32)
    dbeta = x.new_empty(g.channels, dtype=torch.float32)
    if r is not None and residual is None and (bits is None or is_woven(bits) == (r.plane > 0)):
        dy_, dy_stride = _rows_of(dy, g, strides, resident.WIDTH // x.element_size())
        if _of_one_type(x, dy_, dresidual) and resident.takes(x, dy_):
            partial, words = _room(x, 2 * r.kept_parts * g.channels, r)
            tensors = (dy_, x, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)
            if resident.backward(tensors, dy_stride, activation, slope, added, g, r):
                return dx, dgamma, dbeta, dresidual
    partial, words = _room(x, 2 * q.kept_parts * g.channels, q)
    residual = None if residual is None else as_dense(residual, strides)
    dy, dy_stride = _rows_of(dy, g, strides, q.align)
    bits = None if bits is None else rearrange(bits, x, False)
    given = (dy, x, residual, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)
    for launch in launches:
        launch(given, (float(slope), dy_stride // q.align), (NAMES.index(activation),))
    return dx, dgamma, dbeta, dresidual


def _room(x: Tensor, numbers: int, p: Plan | Residence) -> tuple[Tensor, Tensor]:
    """Return where the parts' sums go, and the words at which programs meet."""
    return x.new_empty(numbers, dtype=torch.float32), _words.get(x.device, p.words)


def _check_devices(x: Tensor, *others: Tensor | None) -> None:
    """Refuse what a kernel could not read: launches are given addresses."""
    device = x.get_device()
    for t in others:
        if t is not None and t.get_device() != device:
            raise ValueError(f"the input is on {x.device}, a parameter, statistic or residual on {t.device}; move it")


def _is_smooth(activation: str, residual: Tensor | None) -> bool:
    """Say whether the gradient needs the residual itself, which resident.cu does not read there."""
    return residual is not None and activation not in ("identity", "relu", "leaky_relu")


def _of_one_type(x: Tensor, *others: Tensor | None) -> bool:
    return all(t is None or t.dtype == x.dtype for t in others)


def _are_resident(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> bool:
    """Say whether tensors have the types that resident.cu takes."""
    return _of_one_type(x, residual) and all(t is None or t.dtype == torch.float32 for t in (gamma, beta))


def _rows_of(dy: Tensor, g: Geometry, strides: tuple[int, ...], align: int) -> tuple[Tensor, int]:
    """Return the gradient and the stride of its rows or examples, copied only where it is not in x's order.

    It comes as a slice of channels where the layer's output was concatenated with others.
    """
    if g.nhwc and dy.stride() != strides:
        own = geometry_of(dy)
        if own is not None and own.nhwc and own.stride % align == 0 and not own.wide:
            return dy, own.stride
    return as_dense(dy, strides), g.channels if g.nhwc else g.channels * g.width


class _Words:
    """Keep the words at which programs meet: zero between launches, never shared by two that may overlap."""

    ARENA = 1 << 22

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], Tensor] = {}
        self.arenas: dict[int, tuple[Tensor, int]] = {}

    def get(self, device: torch.device, n: int) -> Tensor:
        n = -(-n // 32) * 32  # whole cache lines
        if device.type != "cuda":
            return torch.zeros(n, dtype=torch.int32)
        index = device.index
        if torch.cuda.is_current_stream_capturing():
            return self.captured(device, n)
        key = (index, torch._C._cuda_getCurrentRawStream(index))
        words = self.by_stream.get(key)
        if words is None or words.numel() < n:
            words = self.by_stream[key] = torch.zeros(max(n, 4096), dtype=torch.int32, device=device)
            if index not in self.arenas:
                self.arenas[index] = (torch.zeros(self.ARENA, dtype=torch.int32, device=device), 0)
                torch.cuda.current_stream(device).synchronize()  # once: graphs may be replayed on any stream
        return words

    def captured(self, device: torch.device, n: int) -> Tensor:
        """Give a captured launch words of its own: its graph may be replayed beside anything."""
        arena, used = self.arenas.get(device.index, (None, 0))
        if arena is None or used + n > arena.numel():
            return torch.zeros(n, dtype=torch.int32, device=device)  # set to zero at every replay
        self.arenas[device.index] = (arena, used + n)
        return arena[used : used + n]


_words = _Words()
