"""Section 3: the effects of normalizing each feature on its own over a mini-batch, compared with whitening."""

import torch

import batchnorm as bn

f64 = torch.float64


def features(n=200):
    """Return correlated features of different scales."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, 4, dtype=f64, generator=generator)
    mixing = 0.5 * torch.randn(4, 4, dtype=f64, generator=generator) + torch.eye(4, dtype=f64)
    return z @ mixing * torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=f64)


def whitened(x):
    c = x - x.mean(0)
    values, vectors = torch.linalg.eigh(c.T @ c / len(c))
    return c @ vectors / values.sqrt()


def loss_after(x, steps):
    """Return the loss of linear regression after gradient descent at the best constant rate."""
    generator = torch.Generator().manual_seed(1)
    x = x - x.mean(0)
    target = x @ torch.linalg.lstsq(x, torch.randn(len(x), 1, dtype=f64, generator=generator)).solution
    target = target / target.norm()
    curvature = torch.linalg.eigvalsh(x.T @ x)
    rate, w = 2 / (curvature[0] + curvature[-1]), torch.zeros(4, 1, dtype=f64)
    for _ in range(steps):
        w -= rate * x.T @ (x @ w - target)
    return (x @ w - target).square().sum().item()


def test_normalization_speeds_up_convergence_and_whitening_does_even_more():
    x = features()
    normalized, _ = bn.ops.batch_norm(x, eps=0.0)
    correlation = normalized.T @ normalized / len(x) - torch.eye(4, dtype=f64)
    assert correlation.abs().max() > 0.3  # the features are still correlated
    plain, normalized, white = (loss_after(v, steps=20) for v in (x, normalized, whitened(x)))
    assert white < 1e-20
    assert normalized < 0.5 * plain


def test_normalized_inputs_of_a_sigmoid_stay_in_its_linear_regime_unless_gamma_is_large():
    x = torch.randn(2000, 1, dtype=f64, generator=torch.Generator().manual_seed(0)) * 20 + 7

    def correlation(gamma):
        z, _ = bn.ops.batch_norm(x, torch.tensor([gamma], dtype=f64), eps=0.0)
        return torch.corrcoef(torch.cat([z, torch.sigmoid(z)], 1).T)[0, 1].item()

    assert correlation(1.0) > 0.99
    assert correlation(20.0) < 0.9


def test_a_mini_batch_smaller_than_the_number_of_activations_has_a_singular_covariance():
    x = torch.randn(60, 100, dtype=f64)
    assert torch.linalg.matrix_rank(torch.cov(x.T, correction=0)) == 59
    assert (bn.ops.batch_norm(x)[1].var > 0.1).all()


def test_the_statistics_take_part_in_the_gradient():
    # If the mean and variance were constants in the gradient, it would not be orthogonal to 1 and to x_hat.
    x = torch.randn(10, 3, dtype=f64, requires_grad=True)
    y, _ = bn.ops.batch_norm(x, eps=0.0)
    (gradient,) = torch.autograd.grad(y, x, torch.randn(10, 3, dtype=f64))
    assert gradient.norm() > 0.1
    torch.testing.assert_close(gradient.sum(0), torch.zeros(3, dtype=f64), rtol=0, atol=1e-12)
    torch.testing.assert_close((gradient * y).sum(0), torch.zeros(3, dtype=f64), rtol=0, atol=1e-12)
