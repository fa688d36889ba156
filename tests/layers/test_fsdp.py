"""Test layers under FSDP2 on a CPU, which frees the memory of a layer's parameters after its forward pass."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import batchnorm as bn

pytestmark = pytest.mark.dist


def sharded(net):
    """Shard each layer by itself, so that FSDP2 frees its parameters before the next layer runs."""
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def gradients(net):
    return [getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for p in net.parameters()]


def compared(rank, world_size, layer, mean, recompute):
    torch.manual_seed(0)
    net = nn.Sequential(layer, nn.Conv2d(4, 2, 1)).to(layer.weight.dtype)
    nn.init.constant_(layer.weight, 3.0)
    x = torch.randn(8, 4, 16, 16, dtype=layer.weight.dtype) + mean
    alone = copy.deepcopy(net)
    alone(x).square().sum().backward()
    sharded(net)
    if recompute:
        with bn.recompute():
            loss = net(x).square().sum()
    else:
        loss = net(x).square().sum()
    loss.backward()
    return gradients(net), gradients(alone)


@pytest.mark.parametrize(
    ("layer", "mean", "recompute"),
    [
        (bn.BatchNorm2d(4, activation="relu"), 0.0, True),
        (bn.BatchNorm2d(4, activation="silu"), 0.0, True),
        (bn.BatchNorm2d(4).double(), 0.0, False),
        (bn.BatchNorm2d(4, statistics=bn.Ghost(4)), 1000.0, False),
    ],
    ids=["relu, recomputed", "silu, recomputed", "float64", "ghost, large mean"],
)
def test_gradients_are_those_of_one_process(layer, mean, recompute):
    (found,) = on_ranks(1, compared, layer, mean, recompute)
    assert not isinstance(found, str), found
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
