"""The float64 oracle for tensors of any shape, and the one table of tolerances."""

from typing import NamedTuple

import torch
from torch import Tensor

from batchnorm.ops import Activation, reference
from batchnorm.ops.activation import as_activation

# How far a result in this type may lie from the float64 reference on the same inputs, of the tensor's own scale.
TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


class Expected(NamedTuple):
    y: Tensor
    mean: Tensor
    var: Tensor
    dx: Tensor
    dgamma: Tensor
    dbeta: Tensor
    dresidual: Tensor | None
    dx_terms: float  # the size of what cancels in dx: rounding is relative to it
    sum_terms: float  # and of what is summed in dgamma and dbeta


def rows(x: Tensor, feature_dims: int = 1) -> Tensor:
    """(N, *features, *locations) as (m, K): every value of a feature over the batch and its locations."""
    k = x.shape[1 : 1 + feature_dims].numel()
    return x.movedim(list(range(1, 1 + feature_dims)), list(range(-feature_dims, 0))).reshape(-1, k)


def unrows(r: Tensor, like: Tensor, feature_dims: int = 1) -> Tensor:
    features = like.shape[1 : 1 + feature_dims]
    rest = (like.shape[0], *like.shape[1 + feature_dims :])
    return r.reshape(*rest, *features).movedim(list(range(-feature_dims, 0)), list(range(1, 1 + feature_dims)))


def expect(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    dy: Tensor,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    feature_dims: int = 1,
) -> Expected:
    """Everything that a forward and a backward pass should give, in float64, by the paper's equations."""
    x64, gamma64, beta64, dy64 = (t.detach().double() for t in (x, gamma.flatten(), beta.flatten(), dy))
    out = reference.batch_norm(rows(x64, feature_dims), gamma64, beta64, eps)
    z = unrows(out.y, x, feature_dims)
    if residual is not None:
        z = z + residual.detach().double()
    z.requires_grad_()
    y = as_activation(activation)(z)
    (dz,) = torch.autograd.grad(y, z, dy64)
    grads = reference.batch_norm_backward(rows(dz, feature_dims), rows(x64, feature_dims), gamma64, eps)
    shape = x.shape[1 : 1 + feature_dims]
    return Expected(
        y.detach(),
        out.mu.reshape(shape),
        out.var.reshape(shape),
        unrows(grads.x, x, feature_dims),
        grads.gamma.reshape(shape),
        grads.beta.reshape(shape),
        None if residual is None else dz,
        float((rows(dz, feature_dims) * gamma64 / torch.sqrt(out.var + eps)).abs().max()),
        float((rows(dz, feature_dims) * out.x_hat.abs().clamp(min=1)).abs().sum(0).max()),
    )


def assert_near(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "", scale: float = 1.0, top=None
) -> None:
    """Compare in float64 with the tolerance of ``dtype``, relative to ``top`` or else the largest expected value."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    tolerance = TOLERANCE[dtype]
    if top is None:
        top = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=tolerance["rtol"] * scale,
        atol=tolerance["atol"] * max(top, 1e-3) * scale,
        msg=lambda m: f"{what}: {m}",
    )
