"""Compare the reference with numbers worked out by hand, and with autograd's derivative of Algorithm 1."""

import torch
import torch.nn.functional as F

from batchnorm.ops import reference

X = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)


def test_algorithm_1_by_hand():
    # mu = 9/3 = 3; var = (4 + 1 + 9)/3 = 14/3; eps = 1/3, so sqrt(var + eps) = sqrt(5).
    out = reference.batch_norm(X, torch.tensor(2.0), torch.tensor(-1.0), eps=1 / 3)
    root5 = 5**0.5
    assert out.mu.item() == 3
    torch.testing.assert_close(out.var, torch.tensor(14 / 3, dtype=torch.float64))
    torch.testing.assert_close(out.x_hat, torch.tensor([-2 / root5, -1 / root5, 3 / root5], dtype=torch.float64))
    expected = torch.tensor([-4 / root5 - 1, -2 / root5 - 1, 6 / root5 - 1], dtype=torch.float64)
    torch.testing.assert_close(out.y, expected)


def test_gradients_by_hand():
    # With dl/dy = (1, 0, 0), gamma = 2, sqrt(var + eps) = sqrt(5), x - mu = (-2, -1, 3), m = 3:
    # dl/dx_hat = (2, 0, 0); dl/dvar = 2 * (-2) * (-1/2) * 5^(-3/2) = 2 * 5^(-3/2); dl/dmu = -2/sqrt(5);
    # dl/dx_i = dl/dx_hat_i / sqrt(5) + dl/dvar * 2 (x_i - mu)/3 + dl/dmu / 3.
    dy = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    grads = reference.batch_norm_backward(dy, X, torch.tensor(2.0, dtype=torch.float64), eps=1 / 3)
    root5, dvar = 5**0.5, 2 * 5**-1.5
    torch.testing.assert_close(grads.x_hat, torch.tensor([2.0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(grads.var.item(), dvar)
    torch.testing.assert_close(grads.mu.item(), -2 / root5)
    expected = [
        2 / root5 + dvar * 2 * -2 / 3 - 2 / root5 / 3,
        dvar * 2 * -1 / 3 - 2 / root5 / 3,
        dvar * 2 * 3 / 3 - 2 / root5 / 3,
    ]
    torch.testing.assert_close(grads.x, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(grads.gamma.item(), -2 / root5)
    assert grads.beta.item() == 1


def inputs(m: int = 5, k: int = 3):
    x = torch.randn(m, k, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(k, dtype=torch.float64, requires_grad=True)
    beta = torch.randn(k, dtype=torch.float64, requires_grad=True)
    return x, gamma, beta


def test_gradcheck_and_gradgradcheck():
    assert torch.autograd.gradcheck(lambda *a: reference.batch_norm(*a, 1e-3).y, inputs())
    assert torch.autograd.gradgradcheck(lambda *a: reference.batch_norm(*a, 1e-3).y, inputs())


def test_the_six_equations_are_the_derivatives():
    x, gamma, beta = inputs()
    dy = torch.randn_like(x)
    out = reference.batch_norm(x, gamma, beta, 1e-3)
    grads = reference.batch_norm_backward(dy, x.detach(), gamma.detach(), 1e-3)
    wanted = torch.autograd.grad(out.y, (x, gamma, beta), dy)
    torch.testing.assert_close((grads.x, grads.gamma, grads.beta), wanted)
    # The three intermediate gradients are partial derivatives, with the other intermediate results held fixed.
    mu, var = out.mu.detach().requires_grad_(), out.var.detach().requires_grad_()
    y = gamma * ((x - mu) / torch.sqrt(var + 1e-3)) + beta
    dvar, dmu = torch.autograd.grad(y, (var, mu), dy)
    torch.testing.assert_close(grads.var, dvar)
    # dl/dmu also has the path through var; its factor sum(-2 (x - mu)) / m vanishes.
    torch.testing.assert_close(grads.mu, dmu)
    torch.testing.assert_close(grads.x_hat, dy * gamma)


def test_next_rung_torch():
    x, gamma, beta = inputs(7, 4)
    y = F.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-3)
    torch.testing.assert_close(reference.batch_norm(x, gamma, beta, 1e-3).y, y)
