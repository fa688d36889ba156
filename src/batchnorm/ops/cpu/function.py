"""Batch normalization as one differentiable function: passes over memory, forward and backward, on a given layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import composite
from ..activation import Activation
from ..moments import statistics_dtype
from . import nonlinear
from .layout import Layout

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
        mean, var = layout.moments(wide)
        shift = None
        if not bool((mean * mean <= CONDITION * (var + eps)).all()):
            # From here on `wide` and `mean` are relative to the shift; x - shift is exact for values near it.
            shift = mean.to(dtype)
            wide = layout.shift(wide, shift)
            mean, var = layout.moments(wide)
        invstd = torch.rsqrt(var + eps)
        z = _transform(layout, wide, gamma, beta, residual, mean, invstd)
        y = nonlinear.apply_(activation, z).to(x.dtype)

        ctx.set_materialize_grads(False)
        ctx.eps, ctx.activation, ctx.layout = eps, activation, layout
        needs = nonlinear.derivative_needs(activation)
        ctx.save_for_backward(
            x,
            gamma,
            beta if needs == "z" else None,
            residual if needs == "z" else None,
            y if needs == "y" else None,
            mean,
            invstd,
            shift,
        )
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.beta_dtype = None if beta is None else beta.dtype
        return y, (mean if shift is None else mean + shift).to(dtype), var.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> tuple[Tensor | None, ...]:
        """Go back through the activation, then through Algorithm 1; by plain operations where a graph is wanted."""
        if torch.is_grad_enabled():
            dx, dgamma, dbeta, g = _plain_backward(ctx, dy, dmean, dvar)
        else:
            dx, dgamma, dbeta, g = _fast_backward(ctx, dy, dmean, dvar)
        x, gamma = ctx.saved_tensors[:2]
        needs = ctx.needs_input_grad
        return (
            dx.to(x.dtype) if needs[0] and dx is not None else None,
            dgamma.to(gamma.dtype) if needs[1] and dgamma is not None else None,
            dbeta.to(ctx.beta_dtype) if needs[2] and dbeta is not None else None,
            g.to(ctx.residual_dtype) if needs[3] and g is not None else None,
            None,
            None,
            None,
        )


def _transform(
    layout: Layout,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """Return z = gamma * (x - mean) * invstd + beta + residual."""
    scale = invstd if gamma is None else invstd * gamma
    offset = -mean * scale if beta is None else beta - mean * scale
    z = torch.empty_like(x)
    layout.affine(x, scale, offset, out=z)
    return z if residual is None else z.add_(residual)


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _fast_backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> _Gradients:
    """Return dx, dgamma, dbeta and dz. With dgamma = sum(g x_hat), dbeta = sum(g) and s = gamma * invstd:

    dx = s (g - dbeta/m - x_hat dgamma/m) + dmean/m + 2 dvar (x - mean)/m = s*g + b*x + c, per channel.
    """
    x, gamma, beta, residual, y, mean, invstd, shift = ctx.saved_tensors
    layout, m = ctx.layout, x.numel() // x.shape[1]
    wide = x.to(statistics_dtype(x))
    if shift is not None:
        wide = layout.shift(wide, shift)
    scale = invstd if gamma is None else invstd * gamma
    b, c = torch.zeros_like(mean), torch.zeros_like(mean)
    g = dgamma = dbeta = None
    if dy is not None:
        at = y if y is None else y.to(wide.dtype)
        if nonlinear.derivative_needs(ctx.activation) == "z":
            at = _transform(layout, wide, gamma, beta, residual, mean, invstd)
        g = nonlinear.backward(ctx.activation, _stored_like(dy.to(wide.dtype), wide), at)
        dgamma, dbeta = layout.reduce(g, wide, mean, invstd)
        b.addcmul_(scale * invstd, dgamma, value=-1 / m)
        c.addcmul_(scale, dbeta, value=-1 / m).addcmul_(b, mean, value=-1)
    if dvar is not None:
        b.add_(dvar, alpha=2 / m)
        c.addcmul_(dvar, mean, value=-2 / m)
    if dmean is not None:
        c.add_(dmean, alpha=1 / m)
    if not ctx.needs_input_grad[0]:
        return None, dgamma, dbeta, g
    if g is None:
        dx = torch.empty_like(wide)
        layout.affine(wide, b, c, out=dx)
    elif g is dy or ctx.needs_input_grad[3]:
        dx = torch.empty_like(wide)
        layout.affine(wide, b, c, out=dx)
        layout.add_scaled_(dx, g, scale)
    else:  # g is ours alone: no third buffer
        dx = g
        layout.affine(g, scale, c, out=dx)
        layout.add_scaled_(dx, wide, b)
    return dx, dgamma, dbeta, g


def _stored_like(t: Tensor, x: Tensor) -> Tensor:
    return t if t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def _plain_backward(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> _Gradients:
    """Return what :func:`_fast_backward` does as differentiable functions of everything they depend on."""
    x, gamma, beta, residual, y, *_ = ctx.saved_tensors
    identity = Activation()
    g = dgamma = dbeta = None
    if dy is not None:
        at = y
        if nonlinear.derivative_needs(ctx.activation) == "z":
            at = composite.batch_norm(x, gamma, beta, ctx.eps, identity, residual)[0]
        g = nonlinear.backward(ctx.activation, dy, at)
        dbeta = g.sum([0, *range(2, x.dim())], dtype=statistics_dtype(x))
    # New names for x and gamma: asking for gradients of the originals would run the hooks on them twice.
    inputs = [None if v is None else v.view_as(v) for v in (x, gamma)]
    outputs = composite.batch_norm(inputs[0], inputs[1], None, ctx.eps, identity, None)
    pairs = zip((outputs[0], outputs[1].mean, outputs[1].var), (g, dmean, dvar), strict=True)
    used = [(value, grad) for value, grad in pairs if grad is not None and value.requires_grad]
    wanted = [v for v in inputs if v is not None and v.requires_grad]
    found = iter(
        torch.autograd.grad(*zip(*used, strict=True), create_graph=True, inputs=wanted, allow_unused=True)
        if used and wanted
        else ()
    )
    dx, dgamma = (next(found, None) if v is not None and v.requires_grad else None for v in inputs)
    return dx, dgamma, dbeta, g
