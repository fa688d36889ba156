"""Section 5: how BN differs from the standardization layer, which normalizes the output of the nonlinearity."""

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.data import mnist
from batchnorm.models import perceptron
from batchnorm.reproduce.mnist.placement import shape
from batchnorm.reproduce.mnist.training import Setting, train_


@pytest.mark.parametrize("batch_norm", [False, True])
def test_inputs_of_nonlinearities_are_not_sparse_but_their_outputs_are(batch_norm):
    train, test = mnist()
    layers = perceptron(batch_norm=batch_norm, seed=0).named_children()
    net = nn.Sequential(*(nn.ReLU() if isinstance(m, nn.Sigmoid) else m for _, m in layers))
    for _ in train_(net, train, Setting(batch_norm, steps=200, rate=0.1), [200]):
        pass
    found = []
    for m in net:
        if isinstance(m, nn.ReLU):
            m.register_forward_hook(lambda m, args, y: found.append((args[0], y)))
    with torch.no_grad():
        net.double().eval()(test.images[:1000].double())
    assert len(found) == 3
    for z, u in found:
        assert shape(z)["sparsity"] < 0.3  # about 0.2 for Gaussian values
        assert shape(u)["sparsity"] > 0.4
        assert (z == 0).double().mean() < 0.01
        assert (u == 0).double().mean() > 0.3


def test_a_linear_layer_behind_the_normalization_absorbs_scale_and_shift():
    x = torch.randn(20, 4, dtype=torch.float64)
    gamma, beta = torch.randn(2, 4, dtype=torch.float64)
    next_layer, absorbed = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        absorbed.weight.copy_(next_layer.weight * gamma)
        absorbed.bias.copy_(next_layer(beta))
    y, x_hat = bn.ops.batch_norm(x, gamma, beta)[0], bn.ops.batch_norm(x)[0]
    torch.testing.assert_close(absorbed(x_hat), next_layer(y))
    assert not torch.allclose(torch.sigmoid(x_hat) @ absorbed.weight.T, torch.sigmoid(y) @ next_layer.weight.T)
