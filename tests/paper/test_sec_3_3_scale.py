"""Section 3.3: BN((aW)u) = BN(Wu), the Jacobian with respect to u unchanged, with respect to aW divided by a.

Exact for a > 0 where eps = 0 (for a < 0 the sign flips: the paper's "for a scalar a" needs a > 0). With eps > 0 the
outputs differ by at most the bound below: y = gamma * c * v with c = a/sqrt(a^2 var + eps), and the two factors c
differ by the relative amount |sqrt((var + eps)/(var + eps/a^2)) - 1|.
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
    # The whole Jacobians, not just one product with them.
    jac = torch.func.jacrev(lambda w: layer(u, w, 0.0))
    torch.testing.assert_close(jac(a * w), jac(w) / a)


def test_a_negative_scale_flips_the_sign():
    u, w, _ = problem()
    torch.testing.assert_close(layer(u, -2 * w, 0.0), -layer(u, w, 0.0))


def test_larger_weights_get_smaller_gradients_and_stop_growing():
    # The gradient is orthogonal to the weights of each unit, so plain SGD can only make them longer, ever more slowly.
    u, w, dy = problem()
    dw = torch.func.vjp(lambda w: layer(u, w, 0.0), w)[1](dy)[0]
    torch.testing.assert_close((dw * w).sum(1), torch.zeros(4, dtype=f64), rtol=0, atol=1e-9)
