"""On the CPU, if a dimension has size 1, gradients of ``torch.nn`` can be off by 100%; this library's are right."""

import pytest
import torch
from oracle import assert_near, expect

import batchnorm as bn
from batchnorm.ops.cpu import autograd

N, C, T = 3, 4, 5


def loss_of(norm, x, weight):
    """Normalize an image of width 1, then apply a linear layer to its channels, so that the gradient is transposed."""
    return (norm(x).squeeze(3).transpose(1, 2) @ weight.T).square().sum()


def error(norm, dtype):
    """Return the relative error of dgamma."""
    x, weight = torch.randn(N, C, T, 1, dtype=dtype), torch.randn(2, C, dtype=dtype)
    norm = norm.to(dtype)
    (found,) = torch.autograd.grad(loss_of(norm, x, weight), norm.weight)
    y = expect(x, norm.weight, norm.bias, norm.eps, torch.zeros_like(x)).y.requires_grad_()
    (dy,) = torch.autograd.grad((y.squeeze(3).transpose(1, 2) @ weight.double().T).square().sum(), y)
    want = expect(x, norm.weight, norm.bias, norm.eps, dy)
    return float((found - want.dgamma).abs().max() / want.dgamma.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_compiler", [True, False])
def test_gradients_are_right(dtype, with_compiler, monkeypatch):
    if not with_compiler:
        monkeypatch.setattr(autograd, "form_of", lambda *_: None)
    assert error(bn.BatchNorm2d(C), dtype) < 1e-5


@pytest.mark.xfail(reason="torch.nn takes a channels_last gradient for a contiguous one", strict=False)
def test_torch():
    assert error(torch.nn.BatchNorm2d(C), torch.float64) < 1e-5


def test_a_frozen_layer():
    norm = bn.BatchNorm2d(C)
    bn.freeze_(norm, affine=False)
    x, weight = torch.randn(N, C, T, 1), torch.randn(2, C)
    found = torch.autograd.grad(loss_of(norm, x, weight), (norm.weight, norm.bias))
    dy = 2 * (norm(x).squeeze(3).transpose(1, 2) @ weight.T) @ weight
    x_hat = x.squeeze(3).transpose(1, 2) / (1 + norm.eps) ** 0.5
    assert_near(found[0], (dy * x_hat).sum((0, 1)).detach(), torch.float32)
    assert_near(found[1], dy.sum((0, 1)).detach(), torch.float32)
