"""fvcore's ``update_bn_stats`` computes a wrong variance if the mean is large, and leaves Dropout on.

``estimate_`` does neither. The tests that call fvcore run only if it is installed; in CI, only a weekly job
installs it.
"""

import pytest
import torch
from torch import nn

import batchnorm as bn


def far_from_zero():
    """Return batches with a mean of 10,000 standard deviations."""
    return [torch.randn(64, 1, generator=torch.Generator().manual_seed(i)) + 1e4 for i in range(4)]


def behind_dropout():
    return nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1)).train()


ONES = [torch.ones(64, 1)] * 4


def test_the_variance_next_to_a_large_mean():
    net, batches = nn.Sequential(nn.BatchNorm1d(1)), far_from_zero()
    bn.estimate_(net, batches, rule="pooled")
    exact = torch.cat(batches).double().var(correction=0)
    torch.testing.assert_close(net[0].running_var[0].double(), exact, rtol=1e-3, atol=0)


def test_dropout_is_off():
    net = behind_dropout()
    bn.estimate_(net, ONES, rule="pooled")
    assert (net[1].running_mean.item(), net[1].running_var.item()) == (1, 0)
    assert net[0].training


def test_fvcore_loses_the_variance():
    update_bn_stats = pytest.importorskip("fvcore.nn.precise_bn").update_bn_stats
    net, batches = nn.Sequential(nn.BatchNorm1d(1)), far_from_zero()
    update_bn_stats(net, batches, len(batches))
    assert not 0.5 < net[0].running_var.item() < 2


def test_fvcore_leaves_dropout_on():
    update_bn_stats = pytest.importorskip("fvcore.nn.precise_bn").update_bn_stats
    net = behind_dropout()
    update_bn_stats(net, ONES, len(ONES))
    assert net[1].running_var.item() > 0.5
