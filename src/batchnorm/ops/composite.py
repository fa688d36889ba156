"""Algorithm 1 in plain torch operations: every transform, layout and device takes it; the other paths are faster.

Autograd, forward mode, ``torch.func`` and ``torch.compile`` differentiate it by themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import Activation
from .moments import Moments, batch_moments, statistics_dtype


def batch_norm(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalize ``x`` of shape (N, C, ...) by its own statistics; ``mask`` (N, 1, ...) says what counts.

    Paper: Alg. 1
    """
    dims = [0, *range(2, x.dim())]
    moments, centred = batch_moments(x, dims, mask)
    z = scale_and_shift(centred, moments.var, gamma, beta, eps)
    y = finish(z, x.dtype, activation, residual, mask)
    return y, Moments(moments.count, moments.mean.flatten(), moments.var.flatten())


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize ``x`` of shape (N, C, ...) by given statistics.

    Paper: Alg. 2, l. 11
    """
    dtype = statistics_dtype(x)
    if mask is not None:
        x = torch.where(mask, x, 0)
    centred = x.to(dtype) - per_channel(mean.to(dtype), x)
    z = scale_and_shift(centred, per_channel(var.to(dtype), x), gamma, beta, eps)
    return finish(z, x.dtype, activation, residual, mask)


def scale_and_shift(centred: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """Return gamma * x_hat + beta from centred values, in their type."""
    scale = torch.rsqrt(var + eps)
    if gamma is not None:
        scale = scale * per_channel(gamma.to(centred.dtype), centred)
    z = centred * scale
    return z if beta is None else z + per_channel(beta.to(centred.dtype), centred)


def finish(
    z: Tensor, dtype: torch.dtype, activation: Activation, residual: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Add the residual, apply the nonlinearity, clear what is masked, return to the input's type."""
    if residual is not None:
        z = z + residual.to(z.dtype)
    y = activation(z)
    if mask is not None:
        y = torch.where(mask, y, 0)
    return y.to(dtype)


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """Shape a (C,) vector so that it broadcasts over (N, C, ...)."""
    return v.reshape(1, -1, *[1] * (x.dim() - 2))
