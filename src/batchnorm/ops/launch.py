"""Launch the fused kernels: what they need beside the tensors, and where their programs meet."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import plan, resident
from .activation import NAMES
from .geometry import Geometry, as_dense, empty_dense, geometry_of, magic_of
from .plan import Plan
from .resident import Residence

STATS = 8  # rows of the statistics kept for the backward pass: see kernels/forward.py


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the statistics (STATS, C) and the bits of z > 0 (empty where not asked for)."""
    g = _geometry(x)
    p = p or plan_of(x, False, residual is not None)
    y = empty_dense(x, g, x.dtype)
    stats = torch.empty((STATS, g.channels), dtype=torch.float32, device=x.device)
    bits = torch.empty(bytes_of_bits(g) if keep_bits else 0, dtype=torch.uint8, device=x.device)
    gamma, beta = (None if v is None else v.contiguous() for v in (gamma, beta))
    residual = None if residual is None else as_dense(residual, g)
    kept = bits if keep_bits else None
    if isinstance(p, Residence):
        smooth = residual is not None and not keep_bits and activation != "identity"
        if not smooth and _of_one_type(x, residual) and _are_float32(gamma, beta) and resident.takes(x, residual):
            partial, words = _room(x, (2 + 2 * p.kept_parts) * g.channels, p)
            tensors = (x, y, residual, kept, gamma, beta, stats, partial, words)
            if resident.forward(tensors, running, momentum, eps, activation, slope, g, p):
                return y, stats, bits
        p = _other_plan(x, False, residual is not None)
    from .kernels.forward import forward as kernel

    partial, words = _room(x, (2 + 3 * p.kept_parts) * g.channels, p)
    given = (x, y, residual, kept, gamma, beta, stats, partial, words, *(running or (None, None, None, None)))
    rest = (eps, momentum or 0.0, slope, NAMES.index(activation), momentum is None)
    _launch(kernel, given, rest, g, p, x)
    return y, stats, bits


def normalize(x: Tensor, residual: Tensor | None, stats: Tensor, activation: str, slope: float) -> Tensor:
    """Return a forward pass's y again, from its statistics: streaming's second launch alone, the same bits."""
    from .kernels.forward import forward as kernel

    g = _geometry(x)
    p = plan.stream(g, x.element_size(), False, _processors(x.device))
    y = empty_dense(x, g, x.dtype)
    residual = None if residual is None else as_dense(residual, g)
    # Nothing is merged, met or moved: what the first launch works with is not read.
    tensors = (x, y, residual, None, None, None, stats, stats, stats, None, None, None, None)
    _launch_second(kernel, tensors, (0.0, 0.0, slope, NAMES.index(activation), False), g, p, x)
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
    g = _geometry(x)
    p = p or plan_of(x, True, residual_dtype is not None)
    dx = empty_dense(x, g, x.dtype)
    dresidual = None if residual_dtype is None else empty_dense(x, g, residual_dtype)
    dgamma, dbeta = (torch.empty(g.channels, dtype=torch.float32, device=x.device) for _ in range(2))
    if isinstance(p, Residence):
        dy_, dy_stride = _rows_of(dy, g, resident.WIDTH // x.element_size())
        if residual is None and _of_one_type(x, dy_, dresidual) and resident.takes(x, dy_):
            partial, words = _room(x, 2 * p.kept_parts * g.channels, p)
            tensors = (dy_, x, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)
            added = bits is not None or dresidual is not None
            if resident.backward(tensors, dy_stride, activation, slope, added, g, p):
                return dx, dgamma, dbeta, dresidual
        p = _other_plan(x, True, residual_dtype is not None)
    from .kernels.backward import backward as kernel

    partial, words = _room(x, 2 * p.kept_parts * g.channels, p)
    residual = None if residual is None else as_dense(residual, g)
    dy, dy_stride = _rows_of(dy, g, p.align)
    given = (dy, x, residual, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)
    _launch(kernel, given, (slope, dy_stride // p.align, NAMES.index(activation)), g, p, x)
    return dx, dgamma, dbeta, dresidual


def _room(x: Tensor, numbers: int, p: Plan | Residence) -> tuple[Tensor, Tensor]:
    """Return where the parts' sums go, and the words at which programs meet."""
    return torch.empty(numbers, dtype=torch.float32, device=x.device), _words.get(x.device, p.words)


def _of_one_type(x: Tensor, *others: Tensor | None) -> bool:
    return all(t is None or t.dtype == x.dtype for t in others)


def _are_float32(*parameters: Tensor | None) -> bool:
    return all(t is None or t.dtype == torch.float32 for t in parameters)


def _rows_of(dy: Tensor, g: Geometry, align: int) -> tuple[Tensor, int]:
    """Return the gradient and the stride of its rows or examples, copied only where it is not in x's order.

    It comes as a slice of channels where the layer's output was concatenated with others.
    """
    if g.nhwc:
        own = geometry_of(dy)
        if own is not None and own.nhwc and own.stride % align == 0 and not own.wide:
            return dy, own.stride
        return as_dense(dy, g), g.channels
    return as_dense(dy, g), g.channels * g.width


def _geometry(x: Tensor) -> Geometry:
    g = geometry_of(x)
    if g is None:
        raise ValueError(f"the fused kernels cannot take strides {x.stride()}; ops.batch_norm chooses another path")
    return g


def bytes_of_bits(g: Geometry) -> int:
    """Return how many bytes hold a bit per element: rows, or channels, rounded up to whole bytes."""
    return g.rows * plan.up(g.channels, 8) if g.nhwc else g.channels * plan.up(g.rows, 8)


def plan_of(x: Tensor, backward: bool, residual: bool) -> Plan | Residence:
    """Return the plan by which a pass over ``x`` runs."""
    if x.is_cuda and resident.runs_on(x.device):
        found = resident.choose(_geometry(x), x.element_size(), backward, residual, _processors(x.device))
        if found is not None:
            return found
    return _other_plan(x, backward, residual)


def _other_plan(x: Tensor, backward: bool, residual: bool) -> Plan:
    return plan.choose(_geometry(x), x.element_size(), backward, residual, _processors(x.device))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _numbers(g: Geometry, p: Plan) -> tuple[int, ...]:
    """Return C, units, slices, parts, share, beside, x_stride, x_plane, y_stride, y_plane, width, magic, shift."""
    a = p.align
    if g.nhwc:
        return (
            g.channels // a,
            g.rows,
            p.slices,
            p.parts,
            p.share,
            p.beside,
            g.stride // a,
            0,
            g.channels // a,
            0,
            0,
            0,
            0,
        )
    width = g.width // p.V
    magic, shift = magic_of(width)
    magic = magic - 2**32 if magic >= 2**31 else magic
    strides = g.stride // a, g.plane // a, g.channels * g.width // a, g.width // a
    return g.channels, g.rows // p.V, p.slices, p.parts, p.share, p.beside, *strides, width, magic, shift


def _launch(kernel: Any, tensors: tuple[Any, ...], rest: tuple[Any, ...], g: Geometry, p: Plan, x: Tensor) -> None:
    """Run the kernel once, or its two phases one after the other."""
    on_device = x.is_cuda
    form = (g.nhwc, p.R, p.V, p.align, g.wide)
    # Interpreted programs run one after the other: none may wait for the next.
    if p.alone or (on_device and p.path != "stream"):
        last = p.parts > plan.MERGED_BY_ALL
        kernel[(p.slices * p.parts,)](
            *tensors, *_numbers(g, p), *rest, form, p.T, 3, p.alone, last, last, p.ticket and not p.alone,
            p.stages, on_device, num_warps=p.warps, maxnreg=p.registers or None,
        )  # fmt: skip
        return
    kernel[(p.slices * p.parts,)](
        *tensors, *_numbers(g, p), *rest, form, p.T, 1, False, True, p.tree, False,
        p.stages, on_device, num_warps=p.warps, maxnreg=p.registers or None,
    )  # fmt: skip
    _launch_second(kernel, tensors, rest, g, p, x)


def _launch_second(
    kernel: Any, tensors: tuple[Any, ...], rest: tuple[Any, ...], g: Geometry, p: Plan, x: Tensor
) -> None:
    q = p.second(g.rows // (1 if g.nhwc else p.V)) if p.path == "stream" else p
    kernel[(q.slices * q.parts,)](
        *tensors, *_numbers(g, q), *rest, (g.nhwc, p.R, p.V, p.align, g.wide), p.T, 2, False, True, False, False,
        p.stages, x.is_cuda, num_warps=p.warps,
    )  # fmt: skip


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
