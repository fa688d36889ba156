"""Normalization by given statistics on CUDA, as at inference and in frozen layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composite
from ..activation import NAMES, Activation
from .layout import as_dense, dense_strides, geometry_of
from .schedule import up

BLOCK = 2048


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor:
    """Normalize a non-empty tensor (N, C, ...) whose strides the kernels know by given statistics.

    Paper: Alg. 2, l. 11
    """
    tensors = (x, mean, var, gamma, beta, residual)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _differentiable(x, mean, var, gamma, beta, eps, activation, residual)
    g = geometry_of(x)
    assert g is not None
    inner = 1 if g.nhwc else g.width  # elements before the channel changes
    if g.channels * inner > 2**31 - BLOCK:  # what the kernel counts within an example
        return composite.normalize(x, mean, var, gamma, beta, eps, activation, residual)
    from .triton.inference import normalize as kernel

    strides = dense_strides(g, tuple(x.shape))
    x, residual = as_dense(x, strides), None if residual is None else as_dense(residual, strides)
    y = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    per_channel = (None if v is None else v.float().contiguous() for v in (mean, var, gamma, beta))
    numbers = (x.numel(), g.channels, inner, float(eps), float(activation.slope))
    given = (x, y, residual, *per_channel, *numbers, NAMES.index(activation.name), BLOCK)
    with torch.cuda.device_of(x):
        kernel[(up(x.numel(), BLOCK),)](*given)
    return y


def _differentiable(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor:
    """Use torch's kernels, which have gradients."""
    rounds = residual is not None and x.dtype.itemsize < 4  # before the sum, what should be rounded after it
    if rounds or mean.requires_grad or var.requires_grad:
        return composite.normalize(x, mean, var, gamma, beta, eps, activation, residual)
    gamma, beta = (None if v is None else v.float() for v in (gamma, beta))
    y = F.batch_norm(x, mean.float(), var.float(), gamma, beta, training=False, eps=eps)
    return activation(y if residual is None else y + residual.to(y.dtype))
