"""Section 3.1: at inference, BN by population statistics is one linear transform; the stored variance is unbiased."""

import torch

import batchnorm as bn


def test_inference_is_one_linear_transform_per_activation():
    layer = bn.BatchNorm1d(3).double()
    torch.nn.init.uniform_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    for _ in range(5):
        layer(torch.randn(8, 3).double() * 2 + 1)
    layer.eval()
    scale = layer.weight / torch.sqrt(layer.running_var + layer.eps)
    shift = layer.bias - layer.weight * layer.running_mean / torch.sqrt(layer.running_var + layer.eps)
    x = torch.randn(20, 3).double()
    torch.testing.assert_close(layer(x), scale * x + shift)


def test_stored_variance_is_unbiased():
    # The mean of m/(m-1) sigma_B^2 over batches is Var[x]; without the factor, it is a quarter too small at m = 4.
    population = torch.randn(4096, 1, dtype=torch.float64) * 3
    layer = bn.BatchNorm1d(1, momentum=None).double()
    for batch in population.split(4):
        layer(batch)
    torch.testing.assert_close(layer.running_mean, population.mean(0))
    assert abs(layer.running_var / population.var(0) - 1).item() < 0.05
    biased = layer.running_var * 3 / 4
    assert abs(biased / population.var(0) - 1).item() > 0.2


def test_population_statistics_keep_mean_0_and_variance_1():
    # The mean is 0 up to rounding, and the variance is 1 up to the noise of the unbiased estimate.
    population = torch.randn(4096, 3, dtype=torch.float64) * 3 + 5
    layer = bn.BatchNorm1d(3, eps=0.0, affine=False).double()
    bn.estimate_(layer, population.split(64))
    x_hat = layer.eval()(population)
    torch.testing.assert_close(x_hat.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (x_hat.var(0) - 1).abs().max() < 0.02
