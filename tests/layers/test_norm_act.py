"""Test the conversion of timm's BatchNormAct2d to a class that derives from both it and bn.BatchNorm2d.

The modules ``drop`` and ``act`` of the layer must still run.
"""

import copy
import pickle
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from networks import Coded, scramble_
from torch import nn

import batchnorm as bn
from batchnorm.layers.norm_act import NormAct

CLOSE = {"rtol": 1e-8, "atol": 1e-8}


class BatchNormAct2d(nn.BatchNorm2d):
    """A shorter version of timm's class."""

    def __init__(self, features, act=None, drop=None):
        super().__init__(features)
        self.drop, self.act = drop or nn.Identity(), act or nn.Identity()

    def forward(self, x):
        training = self.training or self.running_mean is None
        if self.training:
            self.num_batches_tracked.add_(1)
        mean_var = (self.running_mean, self.running_var)
        x = F.batch_norm(x, *mean_var, self.weight, self.bias, training, self.momentum, self.eps)
        return self.act(self.drop(x))


@pytest.fixture(autouse=True)
def _at_timm(monkeypatch):
    home = ModuleType("timm.layers.norm_act")
    home.BatchNormAct2d = BatchNormAct2d
    monkeypatch.setattr(BatchNormAct2d, "__module__", home.__name__)
    for name in ("timm", "timm.layers", home.__name__):
        monkeypatch.setitem(sys.modules, name, home)


def network(act=None, drop=None):
    return scramble_(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act, drop))).double()


def image():
    return torch.randn(3, 3, 5, 5, dtype=torch.double)


@pytest.mark.parametrize("act", [None, nn.SiLU(), nn.ELU()], ids=["none", "silu", "elu"])
@pytest.mark.parametrize("rewrite", [False, True])
def test_an_activation_after_it_is_fused_or_kept(act, rewrite):
    net, x = network(act).append(nn.ReLU()), image()
    converted = bn.convert(net, x, rewrite=rewrite)
    torch.testing.assert_close(converted(x), net(x), **CLOSE)


@pytest.mark.parametrize(
    ("act", "drop", "line"),
    [
        (nn.ReLU(inplace=True), None, "1 of 1"),
        (nn.SiLU(), None, "1 of 1"),
        (nn.ELU(), None, "0 of 1"),
        (nn.ReLU(), nn.Dropout(0.0), "0 of 1"),
        (None, None, "0 of 0"),
    ],
    ids=["relu", "silu", "elu", "dropout", "none"],
)
def test_it_computes_what_it_computed(act, drop, line):
    net, x = network(act, drop), image()
    converted = bn.convert(net, x)
    layer = converted[1]
    assert isinstance(layer, BatchNormAct2d)
    assert isinstance(layer, bn.BatchNorm2d)
    assert type(layer).__name__ == "BatchNormAct2d"
    assert f"{line} BN layers that feed an activation are fused" in str(converted.report)
    assert converted.state_dict().keys() == net.state_dict().keys()
    for training in (True, False):
        pair = [copy.deepcopy(n).train(training) for n in (net, converted)]
        for n in pair:
            n(x).square().sum().backward()
        for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, **CLOSE)
        torch.testing.assert_close(pair[1].state_dict(), pair[0].state_dict(), **CLOSE)
        torch.testing.assert_close(pair[1](x), pair[0](x), **CLOSE)


def test_act_and_drop_stay_usable():
    net, x = network(nn.ReLU()), image()
    converted = bn.convert(net, x)
    for change in (
        lambda n: setattr(n, "act", nn.Sigmoid()),
        lambda n: setattr(n, "act", nn.GELU()),
        lambda n: n.act.register_forward_hook(lambda m, args, out: out * 2),
        lambda n: setattr(n, "drop", nn.Tanh()),
    ):
        for n in (net, converted):
            change(n[1])
        torch.testing.assert_close(converted(x), net(x), **CLOSE)


def test_copies_and_the_way_back():
    net, x = network(nn.ReLU()), image()
    converted = bn.convert(net, x)
    assert type(copy.deepcopy(converted)[1]) is type(converted[1])
    back = bn.revert(converted, x)
    assert type(back[1]) is BatchNormAct2d
    assert repr(back) == repr(net)
    torch.testing.assert_close(back(x), net(x), **CLOSE)
    again = bn.convert(converted, x)
    assert "nothing changed: there is nothing that can be converted or fused" in again.report.notes


def test_pickles():
    converted = bn.convert(network(nn.ReLU()), image())
    loaded = pickle.loads(pickle.dumps(converted))
    assert isinstance(loaded[1], NormAct)
    assert type(loaded[1]) is type(converted[1])
    x = image()
    torch.testing.assert_close(loaded(x), converted(x))


def test_sum_and_activation_of_a_parent_go_into_a_layer_without_its_own():
    conv, norm = nn.Conv2d(3, 3, 1), BatchNormAct2d(3)
    net = scramble_(Coded(lambda n, x: n.act(n.bn(n.conv(x)) + x), conv=conv, bn=norm, act=nn.ReLU())).double()
    x = image()
    converted = bn.convert(net, x)
    assert converted.report["bn"].action == "converted with a residual and ReLU"
    torch.testing.assert_close(converted(x), net(x), **CLOSE)
    for n in (net, converted):
        n.bn.act = nn.Tanh()
    torch.testing.assert_close(converted(x), net(x), **CLOSE)


def test_fold():
    net, x = network(nn.ReLU()).eval(), image()
    for n in (bn.convert(net, x), net):
        for traced in (None, True):
            folded = bn.fold(n, x, traced=traced)
            assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
            torch.testing.assert_close(folded(x), net(x), **CLOSE)
