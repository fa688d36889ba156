"""Algorithm 1 and the gradients of Section 3 as the paper writes them; tests check every implementation against them.

The input has shape (m,) for one activation, or (m, K) for K activations. Every sum runs over the m examples. This code
is meant to be compared with the paper and run in float64; it is not fast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Algorithm1(NamedTuple):
    """Hold every quantity that Algorithm 1 computes.

    Paper: Alg. 1
    """

    y: Tensor
    x_hat: Tensor
    mu: Tensor
    var: Tensor


class Gradients(NamedTuple):
    """Hold the six derivatives of the loss in the order of Section 3.

    Paper: Sec. 3, gradients
    """

    x_hat: Tensor
    var: Tensor
    mu: Tensor
    x: Tensor
    gamma: Tensor
    beta: Tensor


def batch_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Algorithm1:
    """Apply the batch normalizing transform, Algorithm 1, to ``x`` over its first dimension.

    >>> x = torch.tensor([1.0, 3.0], dtype=torch.float64)
    >>> batch_norm(x, torch.tensor(2.0), torch.tensor(1.0), eps=0.0).y
    tensor([-1.,  3.], dtype=torch.float64)

    Paper: Alg. 1
    """
    m = x.shape[0]
    mu = x.sum(0) / m
    var = ((x - mu) ** 2).sum(0) / m
    x_hat = (x - mu) / torch.sqrt(var + eps)
    y = gamma * x_hat + beta
    return Algorithm1(y, x_hat, mu, var)


def batch_norm_backward(dl_dy: Tensor, x: Tensor, gamma: Tensor, eps: float) -> Gradients:
    """Backpropagate through Algorithm 1 by the chain rule, without simplifying the formulas.

    >>> x = torch.tensor([1.0, 3.0], dtype=torch.float64)
    >>> batch_norm_backward(torch.tensor([1.0, 0.0]), x, torch.tensor(2.0), eps=0.0).gamma
    tensor(-1., dtype=torch.float64)

    Paper: Sec. 3, gradients
    """
    m = x.shape[0]
    _, x_hat, mu, var = batch_norm(x, gamma, torch.zeros_like(gamma), eps)
    dl_dx_hat = dl_dy * gamma
    dl_dvar = (dl_dx_hat * (x - mu) * (-1 / 2) * (var + eps) ** (-3 / 2)).sum(0)
    dl_dmu = (dl_dx_hat * (-1 / torch.sqrt(var + eps))).sum(0) + dl_dvar * (-2 * (x - mu)).sum(0) / m
    dl_dx = dl_dx_hat * (1 / torch.sqrt(var + eps)) + dl_dvar * (2 * (x - mu) / m) + dl_dmu * (1 / m)
    dl_dgamma = (dl_dy * x_hat).sum(0)
    dl_dbeta = dl_dy.sum(0)
    return Gradients(dl_dx_hat, dl_dvar, dl_dmu, dl_dx, dl_dgamma, dl_dbeta)
