"""Compare the training loop of Section 4.1's experiments with one that is written with torch.nn's layers."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchnorm.data import Digits
from batchnorm.layers import BatchNorm1d
from batchnorm.models import perceptron
from batchnorm.reproduce.mnist.training import Setting, order, train_

STEPS = 25


def digits(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    images = (torch.rand(600, 784, generator=generator) < 0.2).to(dtype)
    return Digits(images, torch.randint(10, (600,), generator=generator))


def with_torch_layers(net):
    layers = ((name, nn.BatchNorm1d(100) if isinstance(m, BatchNorm1d) else m) for name, m in net.named_children())
    return nn.Sequential(OrderedDict(layers))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_it_is_gradient_descent_through_the_layer_on_the_stated_order(batch_norm):
    data, setting = digits(torch.float64), Setting(batch_norm, STEPS, rate=0.5)
    net = setting.network().double()
    assert any(isinstance(m, BatchNorm1d) for m in net) == batch_norm
    ((step, loss),) = train_(net, data, setting, [STEPS])
    assert step == STEPS

    plain = with_torch_layers(perceptron(batch_norm=batch_norm, seed=0)).double()
    for rows in order(setting, 600, 0, STEPS):
        expected = F.cross_entropy(plain(data.images[rows]), data.labels[rows])
        gradients = torch.autograd.grad(expected, list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


def test_splitting_a_run_changes_no_bit():
    data, setting = digits(), Setting(steps=STEPS)
    whole, split = setting.network(), setting.network()
    (last,) = train_(whole, data, setting, [STEPS])
    first, *_ = train_(split, data, setting, [4, 9])
    assert first[0] == 4
    assert list(train_(split, data, setting, [4, STEPS, STEPS + 1], start=9)) == [last]  # as after a resume
    for a, b in zip(whole.state_dict().values(), split.state_dict().values(), strict=True):
        assert torch.equal(a, b)
