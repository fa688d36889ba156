"""EMA and SWA leave statistics that do not fit the averaged weights (Lightning 14866, pytorch 84053)."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import batchnorm as bn


def test_one_call_after_averaging():
    net = nn.Sequential(nn.Linear(8, 16), bn.BatchNorm1d(16, activation="relu"), nn.Linear(16, 2))
    data = [torch.randn(64, 8) for _ in range(8)]
    averaged = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for batch in data:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(net)
    stale = copy.deepcopy(averaged).eval()
    weights = [p.clone() for p in averaged.parameters()]

    bn.estimate_(averaged, data, rule="pooled")

    everything = torch.cat(data)
    inputs = averaged.module[0](everything)
    torch.testing.assert_close(averaged.module[1].running_mean, inputs.mean(0).detach(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(p, q) for p, q in zip(weights, averaged.parameters(), strict=True))
    trained = copy.deepcopy(averaged).train()(everything)
    error, stale_error = ((n(everything) - trained).abs().max() for n in (averaged.eval(), stale))
    assert error < 1e-3 < stale_error
