"""Batch normalization as one differentiable function: passes over memory, forward and backward, on a given layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import composite
from ..activation import Activation
from ..call import Call
from ..moments import statistics_dtype
from . import nonlinear
from .layout import Layout, Vector

# Largest mean^2 / (var + eps) for which x is not shifted: it costs the variance at most this many float32 roundings.
CONDITION = 16.0


class BatchNormFunction(torch.autograd.Function):
    """(x, gamma, beta, residual) -> (y, mean, var), for x dense in a :class:`Layout`.

    Per-channel arithmetic is in float64: it costs nothing and leaves the passes over x as the only rounding.
    """

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
        """Return y and the moments; keep x and, where the derivative of the activation needs it, y."""
        dtype = statistics_dtype(x)
        wide = x.to(dtype)
        with np.errstate(all="ignore"):  # inf and NaN pass through
            mean, var = layout.moments(wide)
            shift = None
            if not (mean * mean <= CONDITION * (var + eps)).all():
                # From here on `wide` and `mean` are relative to the shift; x - shift is exact for values near it.
                shift = mean.astype(np.float32).astype(np.float64) if dtype == torch.float32 else mean
                wide = _shifted(layout, x, shift)
                mean, var = layout.moments(wide)
            invstd = 1 / np.sqrt(var + eps)
            scale = invstd if gamma is None else invstd * _vector(gamma)
            # A copy of x that is ours becomes the output.
            out = torch.empty_like(x) if wide is x else wide
            z = _transform(layout, wide, scale, beta, residual, mean, out)
        y = nonlinear.apply_(activation, z).to(x.dtype)

        ctx.set_materialize_grads(False)
        ctx.eps, ctx.activation, ctx.layout = eps, activation, layout
        ctx.mean, ctx.invstd, ctx.scale, ctx.shift = mean, invstd, scale, shift
        ctx.dtypes = [None if v is None else v.dtype for v in (x, gamma, beta, residual)]
        ctx.needs = needs = nonlinear.derivative_needs(activation, x.dtype)
        at_z = (beta, residual) if needs == "z" else (None, None)
        ctx.save_for_backward(x, gamma, *at_z, y if needs == "y" else None)
        return y, _tensor(mean if shift is None else mean + shift, dtype), _tensor(var, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> tuple[Tensor | None, ...]:
        """Go back through the activation, then through Algorithm 1; by plain operations where a graph is wanted."""
        if dy is None and dmean is None and dvar is None:
            return (None,) * 7
        backward = _plain_backward if torch.is_grad_enabled() else _fast_backward
        grads = zip(backward(ctx, dy, dmean, dvar), ctx.needs_input_grad, ctx.dtypes, strict=False)
        return *(g.to(dtype) if g is not None and needed else None for g, needed, dtype in grads), None, None, None


def _shifted(layout: Layout, x: Tensor, shift: Vector) -> Tensor:
    """Return x - shift in the type of the statistics, in new memory."""
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
    return (t.float() if t.dtype.itemsize == 2 else t).numpy()


def _tensor(v: Vector, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(v.astype(np.float32 if dtype == torch.float32 else np.float64))  # always a copy


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
        g = nonlinear.backward(ctx.activation, stored_like(dy, wide), None if at is None else at.to(wide.dtype))
        if needs[0] and dmean is None and dvar is None and layout.has_kernel(x):
            gamma = None if gamma is None else gamma.to(wide.dtype)
            return *layout.kernel(g, wide, gamma, ctx.mean, ctx.invstd), g
        sums = layout.reduce(g, wide, ctx.mean, ctx.invstd)
        dgamma, dbeta = (_tensor(v, wide.dtype) for v in sums)
    if needs[0]:
        b, c = _coefficients(ctx, x.numel() // x.shape[1], sums, dmean, dvar)
        ours = g is not None and g is not dy and not needs[3]
        dx = g if ours else torch.empty_like(wide)  # a further buffer costs more than the arithmetic
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
    """Return b and c of dx = s*g + b*x + c, the sum of Section 3's gradients, with s = gamma * invstd.

    dx = s (g - dbeta/m - x_hat dgamma/m) + dmean/m + 2 dvar (x - mean)/m
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


def stored_like(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t`` in the type and strides of ``x``."""
    return t if t.dtype == x.dtype and t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def _plain_backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> _Gradients:
    """Return what :func:`_fast_backward` does as differentiable functions of everything they depend on."""
    x, gamma, beta, residual, y = ctx.saved_tensors
    g = dbeta = None
    if dy is not None:
        plain = composite.run(Call(x, gamma, beta, ctx.eps, residual=residual))[0] if ctx.needs == "z" else y
        g = nonlinear.backward(ctx.activation, dy, plain)
        dbeta = g.sum([0, *range(2, x.dim())], dtype=statistics_dtype(x))
    # New names for x and gamma: asking for gradients of the originals would run the hooks on them a second time.
    x, gamma = x.view_as(x), None if gamma is None else gamma.view_as(gamma)
    normal, moments = composite.run(Call(x, gamma, None, ctx.eps))
    pairs = [(normal, g), (moments.mean, dmean), (moments.var, dvar)]
    outputs, grads = zip(*((v, d) for v, d in pairs if d is not None), strict=True)
    wanted = [v for v in (x, gamma) if v is not None and v.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True) if wanted else ())
    dx, dgamma = (next(found) if v is not None and v.requires_grad else None for v in (x, gamma))
    return dx, dgamma, dbeta, g
