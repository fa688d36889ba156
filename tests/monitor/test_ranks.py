"""One rank alone can monitor a network whose layers synchronize their statistics."""

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn
from batchnorm.monitor import Monitor
from batchnorm.monitor.records import percentiles_of

pytestmark = pytest.mark.dist


def batches():
    return torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(1))


def network():
    torch.manual_seed(0)
    fused = bn.BatchNorm1d(5, activation="sigmoid", statistics=bn.Sync())
    return nn.Sequential(nn.Linear(4, 5), fused, nn.Linear(5, 4), bn.BatchNorm1d(4, statistics=bn.Sync()), nn.ReLU())


def train(rank, world_size, monitored, parallel, probe):
    net = network()
    model = DistributedDataParallel(net) if parallel else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(model, every=2, probe=batches()[0, 0, :4] if probe else None)
    if rank in monitored:
        monitor.__enter__()
    for step, batch in enumerate(batches()[rank]):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank in monitored:
            monitor.record(step, batch)
            monitor.record_gradient_change(step, lambda y, _: y.square().mean(), batch, rate=0.1)
    prefix = "module." if parallel else ""
    seen = [[record.percentiles[prefix + name].z for name in "14"] for record in monitor.records]
    return net.state_dict(), seen


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("probe", [False, True])
def test_one_rank_alone_monitors_without_changing_the_training(parallel, probe):
    expected = on_ranks(2, train, (), parallel, probe)
    found = on_ranks(2, train, (0,), parallel, probe)
    assert not any(isinstance(result, str) for result in found), found
    for (state, _), (other, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(state, other, rtol=0, atol=0)
    assert [len(seen) for _, seen in found] == [5, 0]  # two records from training passes, three from record()


@pytest.mark.parametrize("probe", [False, True])
def test_records_are_of_what_the_layers_computed(probe):
    (_, seen), _ = on_ranks(2, train, (0,), False, probe)
    net = network()
    for layer in (net[1], net[3]):
        layer.statistics = None
    # The training batch is normalized by the statistics of both ranks' first batches, the probe only by its own.
    x = net[0](batches()[0, 0, :4] if probe else batches()[:, 0].flatten(0, 1))
    z = net[1](x, activation="identity")
    own = z if probe else z[:8]
    torch.testing.assert_close(seen[0][0], percentiles_of(own, (15, 50, 85)))


def probe_torch(rank, world_size):
    net, x = nn.Sequential(nn.SyncBatchNorm(4), nn.ReLU()), batches()[0, 0]
    seen = Monitor(net).record(0, x).percentiles["1"].z if rank == 0 else None
    return seen, "forward" in vars(net[0])


def test_a_probe_of_torchs_synchronized_layers():
    (seen, changed), _ = on_ranks(2, probe_torch)
    torch.testing.assert_close(seen, percentiles_of(nn.BatchNorm1d(4)(batches()[0, 0]), (15, 50, 85)))
    assert not changed
