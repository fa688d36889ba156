"""Batch normalization for tensors without a fast kernel: several passes over memory, as one differentiable function.

A tensor is viewed as a matrix with one or more columns per channel (:class:`Matrix`), or as one plane of spatial
locations for each example and channel (:class:`Planes`). A position is one location of one example.

All buffers have x's shape and strides. Per-channel vectors are numpy arrays, mostly in float64. A call runs many
operations on these vectors, and numpy has less overhead per operation than torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import composite
from ..activation import Activation
from ..call import Call
from ..moments import statistics_dtype
from .torch_kernels import GRADIENT_ROWS, ROWS, VECTOR, apply_, stored_like

Vector = NDArray[np.float64]

# If mean^2 / (var + eps) of a channel is above this limit, the mean is subtracted from x first, because
# var = E[x^2] - mean^2 would be inaccurate. Up to the limit, the relative error of var + eps is at most about CONDITION
# times the relative error of E[x^2].
CONDITION = 16.0
# If there are few channels, a row of a `Matrix` holds several positions. Such a row has at most this many columns:
# enough for full SIMD vectors and long loops, and few enough that a row of sums stays in the L1 cache.
WIDTH = 1024
# A contiguous tensor with several channels and fewer locations than this per example is viewed as a `Matrix`, because
# loops over the locations of a plane would be too short to be fast.
SHORT = 32
# `Planes.moments` computes the norm of at most this many values of a plane at a time, so that the relative error of
# torch's norm is about 1e-6. With 64 times as many values, the error would be about 1e-4.
PIECE = 1 << 16

_aten = torch.ops.aten
_backward = _aten.native_batch_norm_backward.default
_ALL, _SUMS = (True, True, True), (False, True, True)  # which of dx, dgamma, dbeta to compute


class BatchNormFunction(torch.autograd.Function):
    """Compute (y, mean, var) from (x, gamma, beta, residual), for dense x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        eps: float,
        activation: Activation,
        layout: Layout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y and the moments, and save what the backward pass needs."""
        dtype = statistics_dtype(x)
        wide = x.to(dtype)
        with np.errstate(all="ignore"):
            mean, var = layout.moments(wide)
            shift = None
            if not (mean * mean <= CONDITION * (var + eps)).all():
                # The shift is the mean, rounded to float32 unless x is float64. Subtract the shift from x; for values
                # near the shift, the difference is exact. From here on, `wide` and `mean` are relative to the shift.
                shift = mean.astype(np.float32).astype(np.float64) if dtype == torch.float32 else mean
                wide = _shifted(layout, x, shift)
                mean, var = layout.moments(wide)
            invstd = 1 / np.sqrt(var + eps)
            scale = invstd if gamma is None else invstd * _vector(gamma)
            out = torch.empty_like(x) if wide is x else wide
            z = _transform(layout, wide, scale, beta, residual, mean, out)
            moments = _tensor(mean if shift is None else mean + shift, dtype), _tensor(var, dtype)
        y = apply_(activation, z).to(x.dtype)

        ctx.set_materialize_grads(False)
        ctx.eps, ctx.activation, ctx.layout = eps, activation, layout
        ctx.mean, ctx.invstd, ctx.scale, ctx.shift = mean, invstd, scale, shift
        ctx.dtypes = [None if v is None else v.dtype for v in (x, gamma, beta, residual)]
        ctx.needs = needs = derivative_needs(activation, x.dtype)
        at_z = (beta, residual) if needs == "z" else (None, None)
        ctx.save_for_backward(x, gamma, *at_z, y if needs == "y" else None)
        return y, *moments

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs; for double backward, compute them with differentiable operations."""
        if dy is None and dmean is None and dvar is None:
            return (None,) * 7
        backward = _plain_backward if torch.is_grad_enabled() else _fast_backward
        grads = zip(backward(ctx, dy, dmean, dvar), ctx.needs_input_grad, ctx.dtypes, strict=False)
        return *(g.to(dtype) if g is not None and needed else None for g, needed, dtype in grads), None, None, None


def _shifted(layout: Layout, x: Tensor, shift: Vector) -> Tensor:
    """Return x - shift as a new tensor in the dtype of the statistics."""
    wide = x.to(statistics_dtype(x))
    out = torch.empty_like(x) if wide is x else wide
    layout.shift(wide, shift, out)
    return out


def _transform(
    layout: Layout, x: Tensor, scale: Vector, beta: Tensor | None, residual: Tensor | None, mean: Vector, out: Tensor
) -> Tensor:
    """Return z = scale * (x - mean) + beta + residual, written to ``out``."""
    offset = -mean * scale
    if beta is not None:
        offset += _vector(beta)
    layout.affine(x, scale, offset, out)
    return out if residual is None else out.add_(residual)


def _vector(t: Tensor) -> NDArray[Any]:
    t = t.detach()
    # Do not call numpy() on a parameter itself: FSDP2 could not free its memory afterwards.
    return (t.float() if t.dtype.itemsize == 2 else t.clone()).numpy()


def _tensor(v: Vector, dtype: torch.dtype) -> Tensor:
    # `astype` always copies, so writing to the tensor cannot change `v`, which may be saved for the backward pass.
    return torch.from_numpy(v.astype(np.float32 if dtype == torch.float32 else np.float64))


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@np.errstate(all="ignore")
def _fast_backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> _Gradients:
    """Return dx, dgamma, dbeta and dz."""
    x, gamma, beta, residual, y = ctx.saved_tensors
    layout, needs = ctx.layout, ctx.needs_input_grad
    wide = x.to(statistics_dtype(x)) if ctx.shift is None else _shifted(layout, x, ctx.shift)
    g = sums = dgamma = dbeta = dx = None
    if dy is not None:
        at = y
        if ctx.needs == "z":
            at = _transform(layout, wide, ctx.scale, beta, residual, ctx.mean, torch.empty_like(wide))
        g = _activation_backward(ctx.activation, stored_like(dy, wide), None if at is None else at.to(wide.dtype))
        if needs[0] and dmean is None and dvar is None and layout.has_kernel(x):
            gamma = None if gamma is None else gamma.to(wide.dtype).contiguous()
            return *layout.kernel(g, wide, gamma, ctx.mean, ctx.invstd), g
        sums = layout.reduce(g, wide, ctx.mean, ctx.invstd)
        dgamma, dbeta = (_tensor(v, wide.dtype) for v in sums)
    if needs[0]:
        b, c = _coefficients(ctx, x.numel() // x.shape[1], sums, dmean, dvar)
        # Write dx over `g` (dz) if `g` is a new tensor and is not returned as the residual's gradient. This is faster,
        # because writing to a new buffer takes longer than the arithmetic.
        ours = g is not None and g is not dy and not needs[3]
        dx = g if ours else torch.empty_like(wide)
        if ours:
            layout.affine(g, ctx.scale, c, out=dx)
            layout.add_scaled_(dx, wide, b)
        else:
            layout.affine(wide, b, c, out=dx)
            if g is not None:
                layout.add_scaled_(dx, g, ctx.scale)
    return dx, dgamma, dbeta, g


def _coefficients(
    ctx: Any, m: int, sums: tuple[Vector, Vector] | None, dmean: Tensor | None, dvar: Tensor | None
) -> tuple[Vector, Vector]:
    """Return b and c of dx = s*dz + b*x + c, where s = gamma * invstd.

    They follow from the gradients in Section 3 of the paper, where ``m`` is the number of values per channel:
    dx = s (dz - dbeta/m - x_hat dgamma/m) + dmean/m + 2 dvar (x - mean)/m
    """
    b, c = np.zeros_like(ctx.mean), np.zeros_like(ctx.mean)
    if sums is not None:
        dgamma, dbeta = sums
        b -= ctx.scale * ctx.invstd * dgamma / m
        c -= ctx.scale * dbeta / m
    if dvar is not None:
        b += 2 / m * _vector(dvar)
    if dmean is not None:
        c += _vector(dmean) / m
    c -= b * ctx.mean
    return b, c


def _plain_backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> _Gradients:
    """Return the same gradients as :func:`_fast_backward`, computed by differentiable operations."""
    x, gamma, beta, residual, y = ctx.saved_tensors
    call = Call(x, gamma, beta, ctx.eps, ctx.activation, residual)
    dx = dgamma = dbeta = dz = None
    if dy is not None:
        if ctx.needs != "z":
            dy, call = _activation_backward(ctx.activation, dy, y), Call(x, gamma, None, ctx.eps)
        dx, dgamma, dbeta, dz = composite.backward(call, dy)
    extra = composite.moments_backward(x, dmean, dvar)
    if extra is not None:
        dx = extra if dx is None else dx + extra
    return dx, dgamma, dbeta, dz


def derivative_needs(activation: Activation, dtype: torch.dtype) -> str | None:
    """Return "y" if y = g(z) determines g'(z) precisely, "z" if z itself is needed, and None for the identity."""
    match activation.name:
        case "identity":
            return None
        case "silu" | "hardswish":
            return "z"
        case "leaky_relu" if activation.slope < 0:
            return "z"
        case "relu6" if dtype.itemsize == 2:  # half precision rounds values just below 6 to 6
            return "z"
    return "y"


def _activation_backward(activation: Activation, dy: Tensor, at: Tensor | None) -> Tensor:
    """Return dz = g'(z) dy; :func:`derivative_needs` says whether ``at`` is y, z or None."""
    match activation.name:
        case "identity":
            return dy
        case "relu":
            return _aten.threshold_backward(dy, at, 0)  # type: ignore[no-any-return]
        case "relu6":
            return _aten.hardtanh_backward(dy, at, 0, 6)  # type: ignore[no-any-return]
        case "leaky_relu":
            return _aten.leaky_relu_backward(dy, at, activation.slope, activation.slope >= 0)  # type: ignore[no-any-return]
    return getattr(_aten, f"{activation.name}_backward")(dy, at)  # type: ignore[no-any-return]


class _Dense(ABC):
    """Per-channel arithmetic on tensors of one memory layout."""

    @abstractmethod
    def view(self, x: Tensor) -> Tensor:
        """Return a view of x in memory order."""

    @abstractmethod
    def spread(self, v: Vector, x: Tensor) -> Tensor:
        """Return the per-channel numbers ``v`` in x's dtype, shaped to broadcast over ``view(x)``."""

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Write a*x + b to ``out``, which may be ``x``."""
        torch.addcmul(self.spread(b, x), self.view(x), self.spread(a, x), out=self.view(out))

    def shift(self, x: Tensor, s: Vector, out: Tensor) -> None:
        """Write x - s to ``out``, which may be ``x``."""
        torch.sub(self.view(x), self.spread(s, x), out=self.view(out))

    def add_scaled_(self, out: Tensor, x: Tensor, a: Vector) -> None:
        """Add a*x to ``out``."""
        self.view(out).addcmul_(self.view(x), self.spread(a, x))


@dataclass(frozen=True, slots=True)
class Matrix(_Dense):
    """View memory as a matrix in which each column belongs to one channel; a row has the shape (period, C, run).

    If the channels are adjacent (channels_last), ``run`` is 1, and a row holds the channels of ``period`` positions.
    So rows can be long even if there are few channels. In a contiguous tensor with few locations, ``period`` is 1,
    ``run`` is the number of locations, and each channel has ``run`` adjacent columns.
    """

    period: int
    channels: int
    run: int

    def view(self, x: Tensor) -> Tensor:
        """Return the matrix."""
        memory = x.movedim(1, -1) if self.run == 1 else x
        return memory.view(-1, self.period * self.channels * self.run)

    def spread(self, v: Vector, x: Tensor) -> Tensor:
        """Return a row that repeats each channel's number in all columns of that channel."""
        return torch.from_numpy(v.astype(_numpy_type(x)).take(_owners(self.period, self.channels, self.run)))

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return the channels' mean and variance, merged from the moments of blocks of rows (Chan, Golub & LeVeque)."""
        # Put as many positions into a row as WIDTH allows: the matrix then has fewer rows, and torch's kernel is called
        # on fewer blocks of rows.
        wide = Matrix(_wide(x.numel() // self.channels, self.channels), self.channels, 1) if self.run == 1 else self
        blocks = wide.view(x).split(ROWS)
        parts = [torch.batch_norm_update_stats(b, None, None, 0.0) for b in blocks]
        mean, var = wide._columns([p[0] for p in parts]), wide._columns([p[1] for p in parts])
        weight = np.array([len(b) * self.channels / x.numel() for b in blocks])
        total = np.einsum("b,bpcr->c", weight, mean)
        mean -= total[:, None]
        var += np.square(mean, out=mean)
        return total, np.einsum("b,bpcr->c", weight, var)

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Return dgamma and dbeta: torch's kernel sums each block of rows; the blocks' sums are added in float64."""
        statistics = self.spread(mean, x), self.spread(invstd, x)
        blocks = zip(self.view(g).split(ROWS), self.view(x).split(ROWS), strict=True)
        parts = [_backward(*b, None, None, None, *statistics, True, 0.0, _SUMS) for b in blocks]
        return self._columns([p[1] for p in parts]).sum((0, 1, 3)), self._columns([p[2] for p in parts]).sum((0, 1, 3))

    def has_kernel(self, x: Tensor) -> bool:
        """Return whether torch's backward kernel, which adds rows in float32, is fast and accurate enough."""
        return self.run == 1 and self.channels >= VECTOR and x.numel() <= GRADIENT_ROWS * self.channels

    def kernel(
        self, g: Tensor, x: Tensor, gamma: Tensor | None, mean: Vector, invstd: Vector
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dx, dgamma and dbeta from torch's backward kernel, called on a matrix with one column per channel."""
        rows = Matrix(1, self.channels, 1)
        statistics = rows.spread(mean, x), rows.spread(invstd, x)
        dx, dgamma, dbeta = _backward(rows.view(g), rows.view(x), gamma, None, None, *statistics, True, 0.0, _ALL)
        return dx.view(x.movedim(1, -1).shape).movedim(-1, 1), dgamma, dbeta

    def _columns(self, parts: list[Tensor]) -> Vector:
        rows = np.array([p.numpy() for p in parts], dtype=np.float64)
        return rows.reshape(-1, self.period, self.channels, self.run)


@dataclass(frozen=True, slots=True)
class Planes(_Dense):
    """View memory as N times C planes of contiguous locations."""

    channels: int

    def view(self, x: Tensor) -> Tensor:
        """Return a view of shape (N, C, locations)."""
        return x.view(x.shape[0], self.channels, -1)

    def spread(self, v: Vector, x: Tensor) -> Tensor:
        """Return ``v`` in x's dtype as a column of shape (C, 1)."""
        return torch.from_numpy(v.astype(_numpy_type(x))[:, None])

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return the channels' mean and variance; sums of x and x^2 over each plane are added up in float64.

        If the variance is small compared with mean^2, E[x^2] - mean^2 loses precision; the caller then calls this
        method again on x minus a shift.
        """
        planes = self.view(x)
        m = planes.shape[0] * planes.shape[2]
        mean = np.add.reduce(planes.sum(2).numpy(), 0, np.float64) / m
        square = np.zeros(self.channels)
        for piece in planes.split(PIECE, 2) if planes.shape[2] > PIECE else (planes,):
            norms = torch.linalg.vector_norm(piece, dim=2).numpy()
            square += np.einsum("nc,nc->c", norms, norms, dtype=np.float64)
        return mean, np.maximum(square / m - mean * mean, 0)

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Return dgamma and dbeta from torch's kernel, which sums plane by plane."""
        statistics = (self.spread(v, x).view(-1) for v in (mean, invstd))
        _, dgamma, dbeta = _backward(self.view(g), self.view(x), None, None, None, *statistics, True, 0.0, _SUMS)
        return dgamma.numpy().astype(np.float64), dbeta.numpy().astype(np.float64)

    def has_kernel(self, x: Tensor) -> bool:
        """Return True: torch's backward kernel sums plane by plane, which is fast and accurate."""
        return True

    def kernel(
        self, g: Tensor, x: Tensor, gamma: Tensor | None, mean: Vector, invstd: Vector
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dx, dgamma and dbeta from torch's backward kernel."""
        statistics = (self.spread(v, x).view(-1) for v in (mean, invstd))
        dx, dgamma, dbeta = _backward(self.view(g), self.view(x), gamma, None, None, *statistics, True, 0.0, _ALL)
        return dx.view(x.shape), dgamma, dbeta

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Write a*x + b to ``out`` in two passes: torch vectorizes operations with one broadcast operand, not two."""
        torch.mul(self.view(x), self.spread(a, x), out=self.view(out)).add_(self.spread(b, x))


Layout = Matrix | Planes


def layout_of(x: Tensor) -> Matrix | Planes | None:
    """Return the layout of a tensor (N, C, ...), or None if the tensor is neither contiguous nor channels_last."""
    channels, locations = x.shape[1], prod(x.shape[2:])
    if x.is_contiguous() and locations > 1:
        return Matrix(1, channels, locations) if locations < SHORT and channels > 1 else Planes(channels)
    if x.movedim(1, -1).is_contiguous():
        return Matrix(1 if channels >= VECTOR else _wide(x.numel() // channels, channels), channels, 1)
    return None


@lru_cache(maxsize=1024)
def _wide(m: int, channels: int) -> int:
    """Return how many positions to put into a row: the largest divisor of ``m`` that gives at most WIDTH columns.

    ``m`` is the tensor's number of positions. The result is 1 if ``channels`` is larger than WIDTH.
    """
    return next(k for k in range(max(1, WIDTH // channels), 0, -1) if m % k == 0)


@lru_cache(maxsize=64)
def _owners(period: int, channels: int, run: int) -> NDArray[np.intp]:
    """Return the channel of each column.

    >>> _owners(2, 3, 1)
    array([0, 1, 2, 0, 1, 2])
    """
    return np.tile(np.arange(channels).repeat(run), period)


def _numpy_type(x: Tensor) -> type[np.float32] | type[np.float64]:
    return np.float32 if x.dtype == torch.float32 else np.float64
