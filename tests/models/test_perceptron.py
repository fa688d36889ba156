import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.models import perceptron


@pytest.mark.parametrize("batch_norm", [False, True])
def test_it_is_the_network_of_section_4_1(batch_norm):
    net = perceptron(batch_norm=batch_norm)
    weights = [m.weight.shape for m in net if isinstance(m, nn.Linear)]
    assert weights == [(100, 784), (100, 100), (100, 100), (10, 100)]
    assert sum(isinstance(m, nn.Sigmoid) for m in net) == 3
    assert sum(isinstance(m, bn.BatchNorm1d) for m in net) == 3 * batch_norm
    assert net(torch.rand(60, 784)).shape == (60, 10)


def test_the_bias_before_normalization_is_left_out():
    net = perceptron()
    assert [net.get_submodule(f"linear{k}").bias for k in (1, 2, 3)] == [None] * 3
    assert net.output.bias is not None


def test_both_networks_start_from_the_same_weights():
    plain, normalized = (perceptron(batch_norm=b, seed=3) for b in (False, True))
    for name in ("linear1", "linear2", "linear3", "output"):
        torch.testing.assert_close(
            plain.get_submodule(name).weight, normalized.get_submodule(name).weight, rtol=0, atol=0
        )


def test_std_is_the_width_of_the_gaussians():
    assert perceptron(std=0.02, seed=0).linear1.weight.std().item() == pytest.approx(0.02, rel=0.02)
