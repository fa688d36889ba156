"""Frozen layers of ``torch.nn`` are unfrozen by train() (pytorch 66073, 86590)."""

import torch
from torch import nn

import batchnorm as bn


def test_fine_tuning_loop_that_calls_train_every_epoch():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), bn.BatchNorm2d(4, activation="relu"), nn.Flatten(), nn.LazyLinear(2))
    net(torch.randn(8, 3, 6, 6))
    bn.freeze_(net)
    mean, weight = net[1].running_mean.clone(), net[1].weight.clone()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        net.train()
        net(torch.randn(8, 3, 6, 6) + 5).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
    torch.testing.assert_close(net[1].running_mean, mean, rtol=0, atol=0)
    torch.testing.assert_close(net[1].weight, weight, rtol=0, atol=0)


def test_torch_thaws():
    # If this fails, torch has solved the problem, and README's row about frozen layers can be dropped.
    layer = nn.BatchNorm1d(3).eval()
    nn.Sequential(layer).train()
    layer(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1
