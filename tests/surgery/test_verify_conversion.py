"""Test that a network is rejected if its gradients, or only its outputs under autocast, differ from the original's."""

import copy
from importlib import import_module

import pytest
import torch
from networks import Coded
from torch import nn

import batchnorm as bn
from batchnorm.surgery.verify_conversion import verify_conversion


class Scaled(torch.autograd.Function):
    """Return x, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.001 * dy


class Net(nn.Module):
    def __init__(self, rows=None):
        super().__init__()
        self.conv, self.bn, self.rows = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), rows
        self.change = nn.Identity()

    def forward(self, x):
        y = self.change(self.bn(self.conv(x)))
        return y.flatten(1) if self.rows is None else y.view(self.rows, 4 * 4 * 4)


def verify(function, net=None):
    old = Net() if net is None else net
    new = copy.deepcopy(old)
    new.change = Coded(lambda n, x: function(x))
    return verify_conversion(old, new, torch.randn(4, 3, 6, 6), None, modes=2, step=lambda doing: None)


@pytest.mark.parametrize("rows", [None, 4])  # with rows=4, the network accepts no other batch size
def test_gradients(rows):
    assert verify(lambda x: x + 0, Net(rows)) == 0
    with pytest.raises(ValueError, match=r"the gradient of '(conv|bn)\.\w+' differs from the original's by 1\.00e-03"):
        verify(Scaled.apply, Net(rows))
    with pytest.raises(ValueError, match="no longer gets a gradient"):
        verify(lambda x: x.detach() + 0 * x.sum(0, keepdim=True).detach().requires_grad_(), Net(rows))


class OneChannelScaled(Scaled):
    @staticmethod
    def backward(ctx, dy):
        return torch.cat([1.5 * dy[:, :1], dy[:, 1:]], 1)


@pytest.mark.parametrize("seed", range(5))  # a check on only two rows would miss the error for two of these seeds
def test_a_wrong_gradient_of_one_channel_below_maps_of_one_pixel(seed):
    torch.manual_seed(seed)
    old = nn.Sequential(nn.Linear(16, 32), nn.Identity(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    new = copy.deepcopy(old)
    new[1] = Coded(lambda n, x: OneChannelScaled.apply(x) if n.training else x)
    with pytest.raises(ValueError, match="the gradient of '0"):
        verify_conversion(old, new, torch.randn(8, 16), None, modes=2, step=lambda doing: None)


class Counting(nn.Module):
    """Record the batch size of each call, by dtype and whether gradients are computed."""

    def __init__(self, seen):
        super().__init__()
        self.net, self.seen = Net(), seen

    def forward(self, x, y=None):
        self.seen[torch.is_grad_enabled()].add((x.dtype, len(x), None if y is None else len(y)))
        return self.net(x) if y is None else self.net(x) + y.mean()

    def __deepcopy__(self, memo):
        new = Counting(self.seen)
        new.load_state_dict(self.state_dict())
        return new


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_gradients_take_three_rows_of_any_example(form):
    seen = {True: set(), False: set()}
    net, x, y = Counting(seen), torch.randn(5, 3, 6, 6), torch.randn(5)
    example = {"tensor": x, "tuple": (x, y), "dict": {"x": x, "y": y}}[form]
    steps = []
    verify_conversion(net, copy.deepcopy(net), example, None, modes=2, step=steps.append)
    lengths = (3, 3) if form == "dict" else (3, None)
    assert seen[True] == {(torch.float64, *lengths)}
    assert {rows for _, rows, _ in seen[False]} == {5}
    assert len(steps) == len(set(steps)) == 5


def test_outputs_under_autocast():
    def rounded(x):
        return (x * 3).round() / 3 if torch.is_autocast_enabled("cpu") else x

    with pytest.raises(
        ValueError, match=r"outputs are \[\(torch.float32, .*, but the original's are \[\(torch.bfloat16"
    ):
        verify(lambda x: x.float() if torch.is_autocast_enabled("cpu") else x)
    with pytest.raises(ValueError, match="autocast changes the converted network's outputs too much: their"):
        verify(rounded)


def test_an_output_of_numbers():
    class Summed(Net):
        def forward(self, x):
            return float(super().forward(x).detach().sum())

    assert verify(lambda x: x + 0, Summed()) == 0
    with pytest.raises(ValueError, match="computes different results"):
        verify(lambda x: x * 1.001, Summed())


@pytest.mark.parametrize(("least", "rows"), [(0, 3), (4, 8)])
def test_gradients_are_compared_where_the_rewritten_code_runs(least, rows, monkeypatch):
    def code(n, x):
        return torch.relu(n.bn(x)) if least == 0 or x.shape[0] >= least else n.bn(x)

    module = import_module("batchnorm.surgery.verify_conversion")
    seen, compute = set(), module._gradients
    monkeypatch.setattr(module, "_gradients", lambda net, x, *rest: seen.add(len(x)) or compute(net, x, *rest))
    assert "1 of 1" in str(bn.convert(Coded(code, bn=nn.BatchNorm1d(3)), torch.randn(8, 3)).report)
    assert seen == {rows}
