"""The float64 oracle for tensors of any shape, and the table of tolerances by type."""

from typing import NamedTuple

import torch
from torch import Tensor

from batchnorm.ops import Activation, reference
from batchnorm.ops.activation import as_activation
from batchnorm.ops.call import Call

# How far results of each type may be from the float64 reference: rtol is relative to each expected value, and atol is
# relative to the tensor's largest expected value (see `assert_near`).
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
    dx_terms: float  # size of the terms that cancel in dx; its rounding error is relative to them
    sum_terms: float  # size of the terms that are summed in dgamma and dbeta

    def check(self, y, moments, x, gamma, beta, residual, scale):
        """Compare y, the moments and the gradients of x, gamma, beta and the residual; ``scale`` widens tolerances."""
        stats = torch.float64 if x.dtype == torch.float64 else torch.float32
        assert y.dtype == x.grad.dtype == x.dtype
        assert moments.mean.dtype == moments.var.dtype == moments.count.dtype == stats
        assert_near(y, self.y, x.dtype, "y", scale)
        assert_near(moments.mean, self.mean, stats, "mean")
        assert_near(moments.var, self.var, stats, "var", 5 * scale)
        # The parameters are float32. But if the activation's derivative is computed from y, the terms of the
        # parameters' gradients also contain the rounding errors of y.
        wide = torch.float32 if x.dtype == torch.float64 else x.dtype
        self.check_gradients(x.grad, gamma.grad, beta.grad, x.dtype, wide, scale)
        if residual is not None:
            assert_near(residual.grad, self.dresidual, x.dtype, "dresidual", scale)

    def check_gradients(self, dx, dgamma, dbeta, dtype, sums=torch.float32, scale=1.0):
        """Compare gradients; ``dtype`` gives the tolerance of dx, and ``sums`` that of dgamma and dbeta."""
        assert_near(dx, self.dx, dtype, "dx", scale, self.dx_terms)
        assert_near(dgamma, self.dgamma, sums, "dgamma", scale, self.sum_terms)
        assert_near(dbeta, self.dbeta, sums, "dbeta", scale, self.sum_terms)


def rows(x: Tensor, feature_dims: int = 1) -> Tensor:
    """Reshape (N, *features, *locations) to (m, K), with one column for each feature."""
    k = x.shape[1 : 1 + feature_dims].numel()
    return x.movedim(list(range(1, 1 + feature_dims)), list(range(-feature_dims, 0))).reshape(-1, k)


def unrows(r: Tensor, like: Tensor, feature_dims: int = 1) -> Tensor:
    features = like.shape[1 : 1 + feature_dims]
    rest = (like.shape[0], *like.shape[1 + feature_dims :])
    return r.reshape(*rest, *features).movedim(list(range(-feature_dims, 0)), list(range(1, 1 + feature_dims)))


# Where relu6's and hardswish's derivatives jump. If rounding moves z across one of these values, the gradient differs.
KINKS = {"relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}


def spread(activation: str | Activation | None) -> float:
    """Return a factor for gamma with which z has values on all pieces of the activation."""
    return 4.0 if as_activation(activation).name in KINKS else 1.0


def check_the_kinks(run, activation: str, device: str = "cpu") -> None:
    """Compare ``run(call)`` with torch's activation and derivative at and near the jumps of the derivative.

    Gamma is 0, so that z is exactly the residual or beta.
    """
    zs = [v for k in KINKS[activation] for v in (k, k - 1 / 8, k + 1 / 8)] * 4
    z = torch.tensor(zs, device=device).requires_grad_()
    gamma = torch.zeros(len(zs), device=device).requires_grad_()
    x, dy = torch.randn(4, len(zs), device=device), torch.randn(4, len(zs), device=device)
    want = as_activation(activation)(z.expand(4, -1))
    (dz,) = torch.autograd.grad(want, z, dy, retain_graph=True)
    y = run(Call(x, gamma, z, activation=Activation(activation)))
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, z, dy)[0], dz)

    residual = z.detach().expand(4, -1).contiguous().requires_grad_()
    (dz,) = torch.autograd.grad(as_activation(activation)(residual), residual, dy)
    y = run(Call(x, gamma, None, activation=Activation(activation), residual=residual))
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, residual, dy)[0], dz)


def off_the_kinks(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    activation: str | Activation | None,
    residual: Tensor | None = None,
    feature_dims: int = 1,
) -> Tensor:
    """Return ``dy``, with zeros where z is so near a kink that rounding to x's type may move it across."""
    z = expect(x, gamma, beta, eps, dy, None, residual, feature_dims).y
    tolerance = 2 * TOLERANCE[x.dtype]["atol"]
    for kink in KINKS.get(as_activation(activation).name, ()):
        dy = torch.where((z - kink).abs() < tolerance * max(1.0, abs(kink)), 0, dy)
    return dy


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
    """Return the expected results of a forward and a backward pass, by the paper's equations in float64."""
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
    """Compare in float64; atol of ``dtype`` is relative to ``top``, by default the largest expected value."""
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
