"""Accuracy drops at evaluation because running averages are stale (pytorch 19902, 3122, 100048, keras 7177)."""

import torch
from torch import nn

import batchnorm as bn


def test_running_averages_lag_and_population_statistics_do_not():
    net = nn.Sequential(nn.BatchNorm1d(4))
    data = [torch.randn(64, 4) * 3 + 10 for _ in range(20)]
    for batch in data:
        net(batch)
    everything = torch.cat(data)
    converged = (net[0].running_mean / everything.mean(0)).mean()
    assert 0.86 < converged < 0.9, "after 20 batches, the average is at 1 - 0.9**20 = 88% of the mean"
    report = bn.estimate_(net, data, rule="pooled")
    torch.testing.assert_close(net[0].running_mean, everything.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net[0].running_var, everything.var(0, correction=0), rtol=1e-5, atol=1e-5)
    (layer,) = report.layers
    assert 0.3 < layer.mean_gap < 0.5, "a gap of 1.2, divided by the standard deviation of 3"
    assert bn.estimate_(net, data, rule="pooled").layers[0].mean_gap < 1e-5


def test_evaluation_agrees_with_training_once_weights_have_moved():
    net = nn.Sequential(nn.Linear(8, 16), bn.BatchNorm1d(16, activation="relu"), nn.Linear(16, 1))
    x = torch.randn(512, 8)
    net(x)
    with torch.no_grad():
        net[0].weight.mul_(5).add_(1)
    trained = net(x).detach()
    stale = (net.eval()(x) - trained).abs().max()
    bn.estimate_(net, [x], rule="pooled")
    exact = (net.eval()(x) - trained).abs().max()
    assert stale > 0.5
    assert exact < 1e-4
