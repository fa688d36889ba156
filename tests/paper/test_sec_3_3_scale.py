"""Section 3.3: BN((aW)u) = BN(Wu), and the Jacobian with respect to u does not change.

The Jacobian with respect to aW is that with respect to W, divided by a. If eps = 0, all this is exact for a > 0. For
a < 0, the output changes its sign, so the paper's "for a scalar a" needs a > 0. If eps > 0, the output without gamma
and beta is v * a/sqrt(a^2 var + eps), where v is Wu minus its mean, and var is Wu's variance. This is c times the
output at a = 1, with c = sqrt((var + eps)/(var + eps/a^2)), so the relative difference is |c - 1|.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batchnorm as bn

f64 = torch.float64


def layer(u, w, eps):
    return bn.ops.batch_norm(u @ w.T, eps=eps)[0]


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(12, 5, dtype=f64, generator=generator),
        torch.randn(4, 5, dtype=f64, generator=generator),
        torch.randn(12, 4, dtype=f64, generator=generator),
    )


@given(st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_scale_of_the_weights_does_not_matter(a, seed):
    u, w, _ = problem(seed)
    torch.testing.assert_close(layer(u, a * w, 0.0), layer(u, w, 0.0), rtol=1e-7, atol=1e-8)


@given(st.floats(1e-2, 1e2), st.floats(1e-6, 1.0), st.integers(0, 2**31))
def test_with_eps_within_its_bound(a, eps, seed):
    u, w, _ = problem(seed)
    y, y_a = layer(u, w, eps), layer(u, a * w, eps)
    var = (u @ w.T).var(0, correction=0)
    bound = (torch.sqrt((var + eps) / (var + eps / a**2)) - 1).abs()
    gap = (y_a - y).abs()
    assert (gap <= bound * y.abs() + 1e-9).all()


@pytest.mark.parametrize("a", [0.01, 0.5, 3.0, 100.0])
def test_jacobians(a):
    u, w, dy = problem()
    du, dw = torch.func.vjp(lambda u, w: layer(u, w, 0.0), u, w)[1](dy)
    du_a, dw_a = torch.func.vjp(lambda u, w: layer(u, w, 0.0), u, a * w)[1](dy)
    torch.testing.assert_close(du_a, du)
    torch.testing.assert_close(dw_a, dw / a)
    # Compare the whole Jacobians, not only their product with one vector.
    jac = torch.func.jacrev(lambda w: layer(u, w, 0.0))
    torch.testing.assert_close(jac(a * w), jac(w) / a)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("a", [0.01, 0.5, 3.0, 100.0])
def test_jacobians_with_eps(a, eps):
    # sqrt(a^2 Var + eps) = a sqrt(Var + eps / a^2): the layer with aW and eps is the layer with W and eps / a^2.
    u, w, dy = problem()
    du, dw = torch.func.vjp(lambda u, w: layer(u, w, eps / a**2), u, w)[1](dy)
    du_a, dw_a = torch.func.vjp(lambda u, w: layer(u, w, eps), u, a * w)[1](dy)
    torch.testing.assert_close(du_a, du)
    torch.testing.assert_close(dw_a, dw / a)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("a", [0.01, 0.5, 3.0, 100.0])
def test_jacobians_with_eps_within_their_bound(a, eps):
    # dy_i/dx_j = (delta_ij - 1/m) / s - v_i v_j / (m s^3) with v = x - mu and s = sqrt(var + eps). With aW, the
    # first term is multiplied by c, which is also the factor of the outputs, and the second term by c^3.
    u, w, _ = problem()
    x, m = u @ w.T, len(u)
    v, var = x - x.mean(0), x.var(0, correction=0)
    c = torch.sqrt((var + eps) / (var + eps / a**2))
    s = torch.sqrt(var + eps)
    first = (torch.eye(m, dtype=f64) - 1 / m)[..., None].abs() / s
    second = (v[:, None] * v[None]).abs() / (m * s**3)
    bound = (c - 1).abs() * first + (c**3 - 1).abs() * second  # dimensions: i, j, feature
    du, du_a = (torch.func.jacrev(lambda u, k=k: layer(u, k * w, eps))(u) for k in (1.0, a))  # i, feature, j, input
    assert ((du_a - du).abs() <= torch.einsum("ijf,fk->ifjk", bound, w.abs()) + 1e-12).all()
    dw, dw_a = (torch.func.jacrev(lambda w: layer(u, w, eps))(k * w) for k in (1.0, a))  # i, feature, feature, input
    assert ((a * dw_a - dw).abs() <= torch.einsum("ijf,jk->ifk", bound, u.abs())[:, :, None] + 1e-12).all()


def test_a_negative_scale_flips_the_sign():
    u, w, _ = problem()
    torch.testing.assert_close(layer(u, -2 * w, 0.0), -layer(u, w, 0.0))


def test_larger_weights_get_smaller_gradients_and_stop_growing():
    # Each unit's gradient is orthogonal to its weight vector, so a step of plain SGD lengthens this vector. A longer
    # vector has a smaller gradient, so its growth slows down.
    u, w, dy = problem()
    dw = torch.func.vjp(lambda w: layer(u, w, 0.0), w)[1](dy)[0]
    torch.testing.assert_close((dw * w).sum(1), torch.zeros(4, dtype=f64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("a", [0.5, 3.0, 100.0])
def test_without_bn_the_scale_of_the_weights_scales_the_gradient(a):
    u, w, dy = problem()
    du, du_a = (torch.func.vjp(lambda u, k=k: u @ (k * w).T, u)[1](dy)[0] for k in (1.0, a))
    torch.testing.assert_close(du_a, a * du)
