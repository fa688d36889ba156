"""Synchronized batch normalization on CPUs, with uneven and empty batches (pytorch 78078, 91872, 43685)."""

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import batchnorm as bn

pytestmark = pytest.mark.dist


def whole(total, mean=0.0):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(total, 3, 5, generator=generator) + mean
    dy = torch.randn(total, 3, 5, generator=generator)
    return x, dy


def layer():
    made = bn.BatchNorm1d(3, statistics=bn.Sync(), activation="relu")
    with torch.no_grad():
        made.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        made.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    return made


def one_rank(rank, world_size, sizes, mean):
    x, dy = (t.split(sizes)[rank] for t in whole(sum(sizes), mean))
    x = x.clone().requires_grad_()
    made = layer()
    y = made(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "dgamma": made.weight.grad,
        "dbeta": made.bias.grad,
        "state": dict(made.state_dict()),
    }


@pytest.mark.parametrize(
    ("sizes", "mean"),
    [
        ([6, 0], 0.0),
        ([1, 4, 2], 1e6),
        *(pytest.param(s, 0.0, marks=pytest.mark.slow) for s in ([4, 4], [5, 2], [1, 4, 2])),
        *(pytest.param(s, 1e6, marks=pytest.mark.slow) for s in ([4, 4], [5, 2], [6, 0])),
    ],
    ids=str,
)
def test_ranks_together_equal_one_process(sizes, mean):
    results = on_ranks(len(sizes), one_rank, sizes, mean)
    assert not any(isinstance(r, str) for r in results), results
    x, dy = whole(sum(sizes), mean)
    x.requires_grad_()
    alone = layer()
    y = alone(x)
    y.backward(dy)
    close = {"rtol": 1e-4, "atol": 1e-5 if mean == 0 else 1e-3}
    torch.testing.assert_close(torch.cat([r["y"] for r in results]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([r["dx"] for r in results]), x.grad, **close)
    torch.testing.assert_close(sum(r["dgamma"] for r in results), alone.weight.grad, **close)
    torch.testing.assert_close(sum(r["dbeta"] for r in results), alone.bias.grad, **close)
    for r in results:
        torch.testing.assert_close(r["state"], dict(alone.state_dict()), rtol=1e-4, atol=1e-5)


def under_ddp(rank, world_size):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), bn.BatchNorm1d(3, statistics=bn.Sync()), nn.Linear(3, 1))
    parallel = DistributedDataParallel(net)
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).split(12 // world_size)[rank]
    parallel(x).square().mean().backward()
    return {n: p.grad for n, p in net.named_parameters()}


def test_distributed_data_parallel_on_cpu():
    results = on_ranks(2, under_ddp)
    assert not any(isinstance(r, str) for r in results), results
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), bn.BatchNorm1d(3), nn.Linear(3, 1))
    net(torch.randn(12, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    for result in results:
        for name, p in net.named_parameters():
            torch.testing.assert_close(result[name], p.grad, rtol=1e-4, atol=1e-5)


LAYOUTS = {"first": torch.contiguous_format, "last": torch.channels_last}


def activations():
    return torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(7)) * torch.arange(1, 13).view(3, 2, 2)


def per_activation_rank(rank, world_size, layouts, sizes):
    x = activations().split(sizes)[rank].to(memory_format=LAYOUTS[layouts[rank]]).requires_grad_()
    made = bn.BatchNorm2d((3, 2, 2), momentum=1.0, statistics=bn.Sync())
    y = made(x)
    y.pow(3).sum().backward()
    return y.detach(), x.grad, made.weight.grad, made.running_mean, made.running_var


@pytest.mark.parametrize(("layouts", "sizes"), [(("last", "last"), [6, 0]), (("first", "last"), [3, 3])])
def test_ranks_with_other_strides(layouts, sizes):
    results = on_ranks(2, per_activation_rank, layouts, sizes)
    assert not any(isinstance(r, str) for r in results), results
    x, alone = activations().requires_grad_(), bn.BatchNorm2d((3, 2, 2), momentum=1.0)
    y = alone(x)
    y.pow(3).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-4}
    ys, dxs, dgammas, means, variances = zip(*results, strict=True)
    torch.testing.assert_close(torch.cat(ys), y.detach(), **close)
    torch.testing.assert_close(torch.cat(dxs), x.grad, **close)
    torch.testing.assert_close(sum(dgammas), alone.weight.grad, **close)
    for found, want in ((means, alone.running_mean), (variances, alone.running_var)):
        for v in found:
            torch.testing.assert_close(v, want, **close)


def compiled_rank(rank, world_size, sizes):
    made = layer()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x, dy = (t.split(sizes)[rank] for t in whole(sum(sizes)))
    x = x.clone().requires_grad_()
    y = compiled(x)
    y.backward(dy)
    return y.detach(), x.grad, made(x.detach())  # the last call runs eagerly


def test_compiled_layers():
    sizes = [5, 2]
    results = on_ranks(2, compiled_rank, sizes)
    assert not any(isinstance(r, str) for r in results), results
    x, dy = whole(sum(sizes))
    x.requires_grad_()
    y = layer()(x)
    y.backward(dy)
    for found, want in zip(zip(*results, strict=True), (y, x.grad, y), strict=True):
        torch.testing.assert_close(torch.cat(found), want, rtol=1e-4, atol=1e-5)


def evaluated_rank(rank, world_size):
    x = whole(6)[0].split([4, 2])[rank]
    made = bn.BatchNorm1d(3, track_running_stats=False, statistics=bn.Sync()).eval()
    torch.testing.assert_close(made(x), nn.BatchNorm1d(3, track_running_stats=False)(x))


def test_ranks_evaluate_alone_even_without_running_averages():
    assert on_ranks(2, evaluated_rank) == [None, None]


def grouped_rank(rank, world_size):
    group = distributed.new_group([0])
    try:
        return bn.BatchNorm1d(3, statistics=bn.Sync(group))(torch.randn(4, 3)).shape
    except ValueError as error:
        return str(error)


def test_a_rank_outside_the_group_gets_a_sentence():
    inside, outside = on_ranks(2, grouped_rank)
    assert inside == (4, 3)
    assert outside.startswith("rank 1 is not in the process group whose ranks share statistics")


def mismatched(rank, world_size):
    bn.BatchNorm1d(3 + rank, statistics=bn.Sync())(torch.randn(4, 3 + rank))


def test_ranks_that_differ_get_a_sentence():
    for result in on_ranks(2, mismatched):
        assert "RuntimeError: synchronized batch normalization needs every rank to call the same layer" in result
        assert "rank 0 calls BatchNorm1d with features (3,); rank 1 calls BatchNorm1d with features (4,)" in result
