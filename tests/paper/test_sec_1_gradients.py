"""Section 1: gradients vanish in saturated sigmoids and depend on the scale of the weights; BN prevents both."""

import pytest
import torch
from torch import nn

import batchnorm as bn

f64 = torch.float64


def layers(depth, batch_norm, scale=1.0, bias=0.0, nonlinearity=nn.Sigmoid):
    """Build layers of 20 units with Gaussian weights; eps is 0, so that BN's output does not depend on the scale."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(depth):
        linear = nn.Linear(20, 20, dtype=f64)
        nn.init.normal_(linear.weight, std=scale / 20**0.5, generator=generator)
        nn.init.constant_(linear.bias, bias)
        found += [linear, *([bn.BatchNorm1d(20, eps=0.0, dtype=f64)] if batch_norm else []), nonlinearity()]
    return nn.Sequential(*found)


def inputs():
    return torch.randn(50, 20, dtype=f64, generator=torch.Generator().manual_seed(1))


def gradient(depth, batch_norm, **changes):
    """Return the norm of the gradient with respect to the input, for a fixed random output gradient."""
    u = inputs().requires_grad_()
    cotangent = torch.randn(50, 20, dtype=f64, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad(layers(depth, batch_norm, **changes)(u), u, cotangent)[0].norm().item()


def test_the_gradient_of_a_sigmoid_vanishes_far_from_zero():
    x = torch.tensor([0.0, 2.0, 5.0, 10.0, 20.0], dtype=f64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.sigmoid(x).sum(), x)
    assert (slope[1:] < 0.5 * slope[:-1]).all()
    assert slope[-1] < 1e-8


def test_a_change_of_b_moves_sigmoids_into_the_saturated_regime_but_not_with_bn():
    assert gradient(1, batch_norm=False, bias=20.0) < 1e-6 * gradient(1, batch_norm=False)
    assert gradient(1, batch_norm=True, bias=20.0) == pytest.approx(gradient(1, batch_norm=True), rel=1e-9)


def test_saturation_slows_down_more_as_the_depth_increases():
    plain, normalized = (
        [gradient(depth, batch_norm, bias=4.0) / gradient(depth, batch_norm) for depth in (1, 2, 4)]
        for batch_norm in (False, True)
    )
    assert 0.3 > plain[0] > 4 * plain[1] > 16 * plain[2]
    assert normalized == pytest.approx([1.0] * 3, rel=1e-6)


def test_the_gradient_depends_on_the_scale_of_the_weights_but_not_with_bn():
    assert gradient(3, batch_norm=False, scale=10.0) > 10 * gradient(3, batch_norm=False)
    assert gradient(3, batch_norm=True, scale=10.0) == pytest.approx(gradient(3, batch_norm=True), rel=1e-9)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_small_changes_of_the_weights_amplify_with_depth_but_not_with_bn(batch_norm):
    # All weights grow by 5%. Only changes of scale are tested; BN does not cancel other changes.
    changes = []
    for depth in (5, 10, 20):
        one, other = (layers(depth, batch_norm, scale, nonlinearity=nn.ReLU)(inputs()) for scale in (1.4, 1.05 * 1.4))
        changes.append(((other - one).norm() / one.norm()).item())
    expected = [0.0] * 3 if batch_norm else [1.05**depth - 1 for depth in (5, 10, 20)]
    assert changes == pytest.approx(expected, rel=1e-9, abs=1e-9)
