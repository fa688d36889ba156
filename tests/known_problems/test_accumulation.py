"""Gradient accumulation does not enlarge BN's batches (pytorch 46516).

Each forward pass is a batch of its own; reports show its size m.
"""

import copy

import pytest
import torch
from torch import nn

import batchnorm as bn

N, PARTS = 24, 3


def net(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), bn.BatchNorm1d(6, activation="sigmoid", **options), nn.Linear(6, 2))


def accumulated(model, x, parts):
    for part in x.chunk(parts):
        (model(part).square().mean() / parts).backward()
    return [p.grad for p in model.parameters()]


def test_accumulating_over_parts_is_a_batch_of_ghost_batches():
    x = torch.randn(N, 4)
    small = accumulated(net(), x, PARTS)
    ghost = accumulated(net(statistics=bn.Ghost(N // PARTS)), x, 1)
    torch.testing.assert_close(small, ghost)
    whole = accumulated(net(), x, 1)
    assert (small[0] - whole[0]).abs().max() > 1e-3, "accumulated gradients are those of the whole batch"


def test_the_effective_m_is_reported():
    x = torch.randn(N, 4)
    assert bn.ops.batch_norm(x.chunk(PARTS)[0])[1].count == N // PARTS
    report = bn.estimate_(net(), x.chunk(PARTS))
    (layer,) = report.layers
    assert (layer.batches, layer.m, layer.count) == (PARTS, N // PARTS, N)
    assert f"{N // PARTS}" in str(report).splitlines()[1].split()


def test_running_averages_move_once_per_part():
    model, slower = net(momentum=0.1), net(momentum=1 - 0.9 ** (1 / PARTS))
    x = torch.randn(N // PARTS, 4)
    once = copy.deepcopy(model)
    once(x)
    for _ in range(PARTS):
        model(x)
        slower(x)
    assert model[1].num_batches_tracked == PARTS
    # With the smaller momentum, the parts of a step together move the averages as far as one batch at momentum 0.1.
    torch.testing.assert_close(slower[1].running_mean, once[1].running_mean)
    assert (model[1].running_mean - once[1].running_mean).abs().max() > 1e-3


@pytest.mark.parametrize("rule", ["paper", "pooled"])
def test_population_statistics_do_not_depend_on_how_a_step_was_cut(rule):
    x = torch.randn(N, 4, dtype=torch.float64) + 3
    means = []
    for parts in (1, PARTS):
        model = net().double()
        bn.estimate_(model, x.chunk(parts), rule=rule)
        means.append(model[1].running_mean)
    torch.testing.assert_close(*means, rtol=1e-12, atol=1e-12)
