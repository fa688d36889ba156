"""Algorithm 1 in plain torch operations, which support every device and memory layout.

These operations also support autograd, forward-mode differentiation, ``torch.func`` and ``torch.compile``. The kernels
in ``cpu`` and ``cuda`` are faster, but support fewer cases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import apply
from .call import Call
from .moments import Moments, batch_moments, statistics_dtype
from .running import update_


def refusal(call: Call) -> str | None:
    """Return None: this path supports every call."""
    return None


def describe(call: Call) -> str | None:
    """Return None: there is nothing to add to the dispatcher's reason."""
    return None


def run(call: Call) -> tuple[Tensor, Moments]:
    """Normalize by the batch's own statistics.

    Paper: Alg. 1
    """
    moments, centered = batch_moments(call.x, call.reduced_dims, call.mask)
    y = finish(call, scale_and_shift(call, centered, moments.var))
    moments = Moments(moments.count, moments.mean.flatten(), moments.var.flatten())
    if call.running is not None:
        moments = Moments(*(v.detach() for v in moments))
        update_(call.running, moments, call.momentum)
    return y, moments


def normalize(call: Call, mean: Tensor, var: Tensor) -> Tensor:
    """Normalize by given statistics.

    Paper: Alg. 2, l. 11
    """
    dtype = statistics_dtype(call.x)
    x = call.x if call.mask is None else torch.where(call.mask, call.x, 0)
    centered = x.to(dtype) - per_channel(mean.to(dtype), x)
    return finish(call, scale_and_shift(call, centered, per_channel(var.to(dtype), x)))


def backward(call: Call, dy: Tensor, passes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dx, dgamma, dbeta and dz by the formulas in Section 3 of the paper, with differentiable operations.

    dx = gamma / sigma * (dz - mean(dz) - x_hat mean(dz x_hat)), where z is the activation's input and
    sigma = sqrt(var + eps). ``passes`` is True where the activation's derivative is 1. If ``passes`` is given, z is not
    recomputed, so the residual is not needed.

    Paper: Sec. 3, gradients
    """
    dims = call.reduced_dims
    moments, centered = batch_moments(call.x, dims)
    invstd = torch.rsqrt(moments.var + call.eps)
    x_hat = centered * invstd
    dz = dy.to(x_hat.dtype)
    if passes is not None:
        dz = torch.where(
            passes.bool(), dz, dz * (call.activation.slope if call.activation.name == "leaky_relu" else 0.0)
        )
    elif call.activation.name != "identity":
        z = scale_and_shift(call, centered, moments.var)
        z = z if call.residual is None else z + call.residual.to(z.dtype)
        dz = call.activation.backward(dz, z)
    scale = invstd if call.gamma is None else invstd * per_channel(call.gamma.to(invstd.dtype), x_hat)
    weighted = dz * x_hat
    dx = scale * (dz - dz.mean(dims, keepdim=True) - x_hat * weighted.mean(dims, keepdim=True))
    return dx.to(call.x.dtype), weighted.sum(dims), dz.sum(dims), dz


def moments_backward(x: Tensor, dmean: Tensor | None, dvar: Tensor | None, mean: Tensor | None = None) -> Tensor | None:
    """Return dl/dx = dl/dmu * 1/m + dl/dvar * 2 (x - mu)/m, or None if both gradients are None.

    Here, mu is the mean and m is the number of values per channel. If ``mean`` is None, it is computed from ``x``.

    Paper: Sec. 3, gradients
    """
    m = x.numel() // x.shape[1]
    dx = None
    if dvar is not None:
        centered = batch_moments(x, [0, *range(2, x.dim())])[1] if mean is None else x - per_channel(mean, x)
        dx = centered * per_channel(dvar * (2 / m), x)
    if dmean is not None:
        each = per_channel(dmean / m, x)
        dx = each.expand(x.shape) if dx is None else dx + each
    return None if dx is None else dx.to(x.dtype)


def scale_and_shift(call: Call, centered: Tensor, var: Tensor) -> Tensor:
    """Return gamma * x_hat + beta, computed from the centered values in their dtype."""
    scale = torch.rsqrt(var + call.eps)
    if call.gamma is not None:
        scale = scale * per_channel(call.gamma.to(centered.dtype), centered)
    z = centered * scale
    return z if call.beta is None else z + per_channel(call.beta.to(centered.dtype), centered)


def finish(call: Call, z: Tensor) -> Tensor:
    """Add the residual, apply the nonlinearity, zero masked positions and cast to the input's dtype."""
    if call.residual is not None:
        # Zero the residual at masked positions: a NaN there would make the activation's gradient NaN (0 * NaN).
        residual = call.residual if call.mask is None else torch.where(call.mask, call.residual, 0)
        z = z + residual.to(z.dtype)
    y = apply(call.activation, z)
    if call.mask is not None:
        y = torch.where(call.mask, y, 0)
    return y.to(call.x.dtype)


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """Reshape a (C,) vector so that it broadcasts over (N, C, ...)."""
    return v.reshape(1, -1, *[1] * (x.dim() - 2))
