"""Section 3.3: if the covariance of x_hat and of z_hat = J x_hat is the identity, all singular values of J are 1."""

import torch

f64 = torch.float64


def unit_covariance(n=500, features=6):
    """Return values whose covariance is the identity matrix, up to rounding."""
    x = torch.randn(n, features, dtype=f64, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(x - x.mean(0))[0] * n**0.5


def covariance(values):
    return torch.cov(values.T, correction=0)


def test_the_covariance_of_the_outputs_is_j_j_transposed():
    x_hat, unit = unit_covariance(), torch.eye(6, dtype=f64)
    torch.testing.assert_close(covariance(x_hat), unit)
    any_j = torch.randn(6, 6, dtype=f64)
    torch.testing.assert_close(covariance(x_hat @ any_j.T), any_j @ any_j.T)
    assert not torch.allclose(covariance(x_hat @ any_j.T), unit, atol=0.1)
    # Choose J so that the covariance of the outputs is the identity. Then all singular values of J are 1, and J keeps
    # the norm of a gradient.
    j = torch.linalg.solve_triangular(torch.linalg.cholesky(any_j @ any_j.T), any_j, upper=False)
    torch.testing.assert_close(covariance(x_hat @ j.T), unit)
    torch.testing.assert_close(torch.linalg.svdvals(j), torch.ones(6, dtype=f64))
    gradient = torch.randn(6, dtype=f64)
    torch.testing.assert_close((j.T @ gradient).norm(), gradient.norm())
