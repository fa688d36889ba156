"""Test DistributedDataParallel on a GPU: with nccl on one rank, and with gloo on two ranks that share the GPU."""

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


def network(statistics=None):
    torch.manual_seed(0)
    norms = [bn.BatchNorm2d(16, activation="relu") for _ in range(2)]
    for norm in norms:
        norm.statistics = statistics
    first, second = norms
    return nn.Sequential(nn.Conv2d(3, 16, 3), first, nn.Conv2d(16, 16, 3), second).cuda()


def images():
    return torch.randn(32, 3, 20, 20, generator=torch.Generator().manual_seed(1)).cuda()


def steps(net, x, share=1.0):
    """Take three steps and return all parameters and averages; the loss is multiplied by ``share``."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (net(x).square().mean((1, 2, 3)).sum() * share / 32).backward()
        optimizer.step()
    return [t.detach().float().cpu() for t in net.state_dict().values()]


def over_nccl(rank, world_size):
    group = distributed.new_group(backend="nccl")
    return steps(DistributedDataParallel(network(), process_group=group), images())


def shared(rank, world_size):
    net = DistributedDataParallel(network(bn.Sync()))
    return steps(net, images()[[slice(0, 20), slice(20, 32)][rank]], share=world_size)


@pytest.fixture
def expected():
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        return steps(network(), images())


def test_nccl_reduces_the_kernels_gradients(expected):
    (found,) = on_ranks(1, over_nccl)
    assert not isinstance(found, str), found
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_two_ranks_with_sync_train_as_one_process_does(expected):
    for found in on_ranks(2, shared):
        assert not isinstance(found, str), found
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
