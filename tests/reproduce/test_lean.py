"""The written-out training step against autograd and torch.optim.SGD on the same module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchnorm.data import Digits
from batchnorm.models import perceptron
from batchnorm.reproduce.mnist.lean import LeanSGD


def digits(n=600):
    generator = torch.Generator().manual_seed(1)
    images = (torch.rand(n, 784, generator=generator) < 0.2).float()
    return Digits(images, torch.randint(10, (n,), generator=generator))


def train_with_autograd(net, data, batches, rate):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for rows in batches:
        loss = F.cross_entropy(net(data.images[rows].to(net.output.weight.dtype)), data.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"),
    [(torch.float64, 30, 1e-9), (torch.float32, 5, 1e-4)],
    ids=["float64", "float32"],
)
def test_step_equals_autograd_and_sgd(batch_norm, dtype, steps, tolerance):
    data = digits()
    batches = torch.arange(600).reshape(-1, 60).repeat(3, 1)[:steps]
    lean = perceptron(batch_norm=batch_norm, seed=0).to(dtype)
    eager = copy.deepcopy(lean)
    loss = LeanSGD(lean, data, rate=0.5).run_(batches)
    expected = train_with_autograd(eager, data, batches, rate=0.5)
    assert loss == pytest.approx(expected, rel=tolerance)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(lean.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_splitting_a_run_changes_no_bit():
    data, batches = digits(), torch.arange(600).reshape(-1, 60)
    whole, split = (perceptron(seed=0) for _ in range(2))
    LeanSGD(whole, data, rate=0.3).run_(batches)
    LeanSGD(split, data, rate=0.3).run_(batches[:4])
    LeanSGD(split, data, rate=0.3).run_(batches[4:])  # a new object, as after a resume
    for a, b in zip(whole.state_dict().values(), split.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Linear(784, 9), nn.ReLU(), nn.Linear(9, 10)), "must be Linear, BatchNorm1d or nothing"),
        (nn.Sequential(nn.Linear(784, 9), nn.Sigmoid()), "must end in a linear layer"),
    ],
)
def test_another_network_is_refused(net, message):
    with pytest.raises(TypeError, match=message):
        LeanSGD(net, digits(), rate=0.1)
