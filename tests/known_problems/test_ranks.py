"""DistributedDataParallel keeps only rank 0's statistics (timm 110); this library can combine those of all ranks."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn
from batchnorm.train.distributed import Ranks

pytestmark = pytest.mark.dist
FAR = 10.0  # difference between the means of the two ranks' data


def data(rank):
    return torch.randn(4, 32, 3, generator=torch.Generator().manual_seed(rank)).double() + FAR * rank


def one_rank(rank, world_size, way):
    net = nn.Sequential(nn.BatchNorm1d(3) if way == "torch" else bn.BatchNorm1d(3, momentum=0.5)).double()
    if way == "sync":
        net[0].statistics, net[0].momentum = bn.Sync(), 1.0
    parallel = net if way == "averaged" else DistributedDataParallel(net)
    for batch in data(rank):
        parallel(batch).sum().backward()
    if way == "torch":
        parallel(data(rank)[0])  # the buffers are copied from rank 0 when the next forward pass begins
    elif way in ("paper", "pooled"):
        bn.estimate_(parallel, list(data(rank)), rule=way)
    elif way == "averaged":  # as the command `batchnorm train` does
        Ranks(rank, world_size).average_statistics_(net)
    return net[0].running_mean, net[0].running_var


def everyone(way):
    results = on_ranks(2, one_rank, way)
    assert not any(isinstance(r, str) for r in results), results
    (mean, var), other = results
    torch.testing.assert_close(other, (mean, var), rtol=0, atol=0)
    return mean, var


def test_what_torch_keeps_knows_nothing_of_rank_1():
    (mean, _), _ = on_ranks(2, one_rank, "torch")
    assert (mean < 0.1 * FAR).all(), "torch has fixed it"


def test_population_statistics_are_those_of_all_ranks_with_the_spread_of_their_means():
    mean, var = everyone("pooled")
    samples = torch.cat([data(0), data(1)]).flatten(0, 1)
    torch.testing.assert_close(mean, samples.mean(0))
    torch.testing.assert_close(var, samples.var(0, correction=0))
    assert (var > (FAR / 2) ** 2).all(), "the variance between the ranks counts"


def test_the_papers_rule_averages_over_all_ranks_batches():
    mean, var = everyone("paper")
    batches = torch.cat([data(0), data(1)])
    torch.testing.assert_close(mean, batches.mean((0, 1)))
    torch.testing.assert_close(var, batches.var(1).mean(0))


def camera_rank(rank, world_size):
    net = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2)).double()
    cameras = [0, 1] if rank == 0 else [1, 0]
    batches = list(zip(data(rank), cameras, strict=False)) if rank < 2 else []
    bn.estimate_(net, batches, rule="pooled", upstream="population", forward=lambda net, batch: net[batch[1]](batch[0]))
    return net[0].running_mean, net[1].running_mean


def test_ranks_whose_first_batches_reach_other_layers_or_none():
    results = on_ranks(3, camera_rank)
    for found in results:
        torch.testing.assert_close(found[0], torch.cat([data(0)[0], data(1)[1]]).mean(0))
        torch.testing.assert_close(found[1], torch.cat([data(0)[1], data(1)[0]]).mean(0))


def adapted_rank(rank, world_size):
    net = nn.Sequential(bn.BatchNorm1d(3)).double()
    return bn.adapt(net, list(data(rank))[: 1 + rank], prior=3.0)[0].running_mean


def test_old_statistics_weigh_the_same_however_many_ranks_adapt_them():
    first, second = on_ranks(2, adapted_rank)
    batches = torch.cat([data(0)[:1], data(1)[:2]])
    torch.testing.assert_close(first, batches.mean((0, 1)) * 3 / (3 + 3.0))  # the old mean is 0
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_synchronized_running_averages_have_the_spread_too():
    mean, var = everyone("sync")
    last = torch.cat([data(0)[-1], data(1)[-1]])
    torch.testing.assert_close(mean, last.mean(0))
    torch.testing.assert_close(var, last.var(0))


def test_running_averages_of_the_trainer_are_averaged():
    mean, _ = everyone("averaged")
    ours = [one_process(rank) for rank in range(2)]
    torch.testing.assert_close(mean, sum(ours) / 2)


def one_process(rank):
    layer = bn.BatchNorm1d(3, momentum=0.5).double()
    for batch in data(rank):
        layer(batch)
    return layer.running_mean


def synchronized_rank(rank, world_size, upstream, surplus):
    torch.manual_seed(0)
    norms = [bn.BatchNorm1d(3, statistics=bn.Sync()) for _ in range(2)]
    net = nn.Sequential(norms[0], nn.Sigmoid(), norms[1]).double()
    before = copy.deepcopy(net.state_dict())
    try:
        bn.estimate_(net, list(data(rank)[: 2 + surplus * rank]), rule="pooled", upstream=upstream)
    except ValueError as error:
        torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
        return str(error)
    return net[2].running_mean, net[2].running_var


def test_synchronized_layers_refuse_ranks_with_different_numbers_of_batches():
    for message in on_ranks(2, synchronized_rank, "batch", 1):
        assert "rank 0 ran out of batches after 2, but rank 1 has more" in message, message


def diagnosing_rank(rank, world_size):
    net = nn.Sequential(bn.BatchNorm1d(3, statistics=bn.Sync()), nn.ReLU()).double()
    try:
        bn.diagnose(net, list(data(rank)[: 1 + rank]))
    except ValueError as error:
        return str(error)
    return "no error"


def far_rank(rank, world_size, examples):
    layer = bn.BatchNorm1d(3, momentum=None, statistics=bn.Sync()).double()
    batches = [batch[: examples[rank]] for batch in data(rank)]
    for batch in batches:
        layer(batch)
    trained = layer.running_var.clone()
    seen = bn.estimate_(nn.Sequential(layer), batches).layers[0]
    return trained, layer.running_var, layer.num_batches_tracked, seen.m


@pytest.mark.parametrize("examples", [(8, 8), (1, 7)])
def test_a_batch_of_a_synchronized_layer_is_that_of_all_ranks(examples):
    results = on_ranks(2, far_rank, examples)
    assert not any(isinstance(r, str) for r in results), results
    for trained, estimated, batches, m in results:
        torch.testing.assert_close(estimated, trained)
        assert (int(batches), m) == (4, sum(examples))


def lonely_rank(rank, world_size):
    net = bn.freeze_(nn.Sequential(bn.BatchNorm1d(3, statistics=bn.Sync()), nn.ReLU()).double())
    return rank > 0 or str(bn.diagnose(net, list(data(rank))))


def test_one_rank_alone_can_diagnose_frozen_layers():
    found, _ = on_ranks(2, lonely_rank)
    assert found.startswith("diagnose:"), found


def test_diagnose_refuses_ranks_with_different_numbers_of_batches():
    for message in on_ranks(2, diagnosing_rank):
        assert "rank 0 ran out of batches after 1, but rank 1 has more" in message, message


@pytest.mark.parametrize(("upstream", "surplus"), [("batch", 0), ("population", 1)])
def test_synchronized_layers_are_estimated_over_all_ranks(upstream, surplus):
    found, other = on_ranks(2, synchronized_rank, upstream, surplus)
    torch.testing.assert_close(found, other, rtol=0, atol=0)
    ranks = [data(rank)[: 2 + surplus * rank] for rank in range(2)]
    normalize = nn.BatchNorm1d(3, affine=False, momentum=None).double()
    if upstream == "batch":  # each step normalizes the batches of both ranks together
        steps = [normalize(torch.cat(step)) for step in zip(*ranks, strict=True)]
    else:
        samples = torch.cat(ranks).flatten(0, 1)
        steps = [(samples - samples.mean(0)) / (samples.var(0, correction=0) + normalize.eps).sqrt()]
    inputs = torch.cat(steps).sigmoid()
    torch.testing.assert_close(found, (inputs.mean(0), inputs.var(0, correction=0)))
