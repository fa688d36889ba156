"""Avoid or find weight decay of gamma and beta, biases that BN cancels, and wrong momenta (about 20 issues)."""

import torch
from torch import nn

import batchnorm as bn


def test_gamma_and_beta_do_not_decay():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(bn.param_groups(net, weight_decay=0.5), lr=0.1)
    net(torch.randn(8, 4)).sum().mul(0).backward()
    optimizer.step()
    torch.testing.assert_close(net[1].weight.detach(), torch.ones(4))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_insert_leaves_no_dead_bias():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    inserted = bn.insert(net, torch.zeros(2, 4))
    assert inserted[0].affine.bias is None
    assert inserted[2].bias is not None


def test_diagnose_names_each_of_these_mistakes():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.99), nn.ReLU(), nn.Linear(4, 2))
    batches = [torch.randn(64, 4) for _ in range(4)]
    bn.estimate_(net, batches)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)
    found = bn.diagnose(net, batches, optimizer=optimizer)
    assert [(finding.rule, finding.path) for finding in found] == [
        ("momentum", "1"),
        ("weight_decay", "1"),
        ("bias_without_effect", "0"),
    ]


def test_momentum_is_torchs_weight_of_the_new_value():
    layer = bn.insert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 4))[0].norm
    assert layer.momentum == 0.1
