"""Section 3.2: over feature maps, BN's effective mini-batch has m p q values; a bias before BN has no effect."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


def test_a_feature_map_is_a_fully_connected_batch_of_all_its_locations():
    x = torch.randn(4, 3, 5, 6)
    y, moments = bn.ops.batch_norm(x)
    flat, flat_moments = bn.ops.batch_norm(x.movedim(1, -1).reshape(-1, 3))
    assert moments.count == 4 * 5 * 6
    torch.testing.assert_close(y.movedim(1, -1).reshape(-1, 3), flat)
    torch.testing.assert_close(moments, flat_moments)


def test_convolutional_property():
    # Shifting the input of a convolution shifts the normalized output: all locations are treated alike.
    conv, layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", bias=False), bn.BatchNorm2d(3)
    u = torch.randn(4, 2, 8, 8)
    shifted = layer(conv(u.roll((2, 3), (2, 3))))
    torch.testing.assert_close(shifted, layer(conv(u)).roll((2, 3), (2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_bias_before_bn_is_canceled(scale):
    conv, layer = nn.Conv2d(2, 3, 3).double(), bn.BatchNorm2d(3).double()
    u = torch.randn(4, 2, 8, 8).double()
    with_bias = layer(F.conv2d(u, conv.weight, conv.bias * scale))
    torch.testing.assert_close(with_bias, layer(F.conv2d(u, conv.weight)), rtol=1e-8, atol=1e-8)
    layer(F.conv2d(u, conv.weight, conv.bias)).square().sum().backward()
    assert conv.bias.grad.abs().max() < 1e-9


def test_at_inference_all_locations_of_a_map_get_the_same_linear_transform():
    layer = bn.BatchNorm2d(3).double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    layer(torch.randn(8, 3, 5, 6).double() * 2 + 1)
    x = torch.randn(4, 3, 5, 6).double()
    scale = layer.weight / torch.sqrt(layer.running_var + layer.eps)
    shift = layer.bias - scale * layer.running_mean
    torch.testing.assert_close(layer.eval()(x), x * scale[:, None, None] + shift[:, None, None])


def test_two_moments_fix_the_distribution_of_wu_but_not_of_a_nonlinearitys_output():
    z = torch.randn(100_000, 1).double()
    moved = 2 * z + 1.5  # if Wu stays Gaussian, changes in the layers below only scale and shift it

    def normalized(x):
        return bn.ops.batch_norm(x, eps=0.0)[0]

    torch.testing.assert_close(normalized(moved), normalized(z))
    before, after = (normalized(F.relu(x)).pow(3).mean() for x in (z, moved))
    assert before - after > 0.5  # the skewness
