"""Test that fold(net) computes what net.eval() computes, and reports where it folded and where it did not."""

import copy

import pytest
import torch
from networks import KEEP, ZOO, scramble_
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import batchnorm as bn


@pytest.mark.parametrize("name", ZOO)
def test_fold_equals_eval(name):
    make, example, expected = ZOO[name]
    net, x = scramble_(make()).double().train(), example().double()
    before = copy.deepcopy(net.state_dict())
    folded = bn.fold(net, x)
    assert [site.action.split()[0] for site in folded.report] == expected
    assert net.training
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    net.eval()
    for batch in (x, example().double()):
        torch.testing.assert_close(folded(batch), net(batch), rtol=1e-10, atol=1e-10)
    assert folded.report.relative_error < 1e-12
    assert not any(isinstance(m, _BatchNorm) for m in folded.modules())


@pytest.mark.parametrize("name", ["residual", "dense", "inverted_residual", "functional", "own_forward", "shared_conv"])
def test_traced_form_folds_the_rest(name):
    make, example, _ = ZOO[name]
    net, x = scramble_(make()).double(), example().double()
    folded = bn.fold(net, x, traced=True)
    assert not folded.report.paths(KEEP)
    torch.testing.assert_close(folded(x), net.eval()(x), rtol=1e-10, atol=1e-10)
    if name in ("functional", "own_forward", "shared_conv"):
        assert all(site.action.startswith("folded") for site in folded.report)


def test_a_network_that_was_never_trained_is_noted():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()), torch.randn(8, 3)
    assert bn.fold(net, x).report.notes == (
        "1 batch norm has never been updated: train the network, load its weights, or call bn.estimate_ first",
    )
    net(x)
    assert bn.fold(net, x).report.notes == ()
