"""Test the update of the running averages, by the operator and by the plain operations that transforms need."""

import pytest
import torch
from torch import nn

from batchnorm.layers import BatchNorm1d
from batchnorm.ops import Moments, Running
from batchnorm.ops import running as module

PATHS = {"without synchronization": module._update, "operator": None}


@pytest.fixture(params=PATHS)
def update_(request):
    path = PATHS[request.param]
    if path is None:
        return module.update_
    return lambda running, moments, momentum: path(*running, *moments, momentum)


def fresh(k=3):
    return Running(torch.zeros(k), torch.ones(k), torch.tensor(0), torch.tensor(0))


def moments_of(x):
    return Moments(torch.tensor(float(len(x))), x.mean(0), x.var(0, correction=0))


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, None])
def test_equals_torch(update_, momentum):
    running, layer = fresh(), nn.BatchNorm1d(3, momentum=momentum)
    for _ in range(4):
        x = torch.randn(6, 3) * 3 + 1
        layer(x)
        update_(running, moments_of(x), momentum)
    torch.testing.assert_close(running.mean, layer.running_mean)
    torch.testing.assert_close(running.var, layer.running_var)
    assert running.num_batches == layer.num_batches_tracked


@pytest.mark.parametrize("momentum", [1.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_batch_replaces_the_initial_values_exactly(update_, momentum, dtype):
    running, x = fresh(), torch.randn(6, 3, dtype=dtype) * 1e-6  # 1 + (var - 1) would be 0 in float32
    update_(running, moments_of(x), momentum)
    torch.testing.assert_close(running.mean, x.mean(0).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(running.var, x.var(0).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["mean", "var"])
def test_non_finite_moments_change_nothing_but_their_count(update_, momentum, bad, where):
    running = fresh()
    update_(running, moments_of(torch.randn(6, 3)), momentum)
    before = [r.clone() for r in running]
    moments = moments_of(torch.randn(6, 3))
    getattr(moments, where)[1] = bad
    update_(running, moments, momentum)
    torch.testing.assert_close(list(running[:3]), before[:3], rtol=0, atol=0)
    assert running.num_skipped == 1
    update_(running, moments_of(torch.randn(6, 3)), momentum)
    assert running.num_batches == 2
    assert running.mean.isfinite().all()


@pytest.mark.parametrize("count", [0.0, 1.0])
def test_too_few_values_are_no_information(update_, count):
    running = fresh()
    update_(running, Moments(torch.tensor(count), torch.full((3,), 7.0), torch.zeros(3)), 0.1)
    torch.testing.assert_close(list(running), list(fresh()), rtol=0, atol=0)


def test_nothing_moves_inside_a_backward_pass(update_):
    running, seen = fresh(), []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append(module.is_recomputation())
            update_(running, moments_of(torch.randn(6, 3)), 0.1)
            return dy

    Again.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [True]
    assert not module.is_recomputation()
    torch.testing.assert_close(list(running), list(fresh()), rtol=0, atol=0)


def test_operator_is_well_formed():
    running, moments = fresh(), moments_of(torch.randn(6, 3))
    torch.library.opcheck(
        torch.ops.batchnorm.update_running_.default,
        (*running, *moments, 0.1),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_averages_that_are_only_partly_on_meta_raise():
    running, moments = fresh(), moments_of(torch.randn(6, 3))
    with pytest.raises(RuntimeError, match=r"averages and the counters must all be on the meta device.*assign=True"):
        module.update_(running._replace(num_skipped=torch.tensor(0, device="meta")), moments, 0.1)
    assert running.num_batches == 0
    everything = (*running, *moments)
    module.update_([t.to("meta") for t in everything[:4]], Moments(*(t.to("meta") for t in everything[4:])), 0.1)
    layer = BatchNorm1d(3)
    layer.num_batches_tracked = torch.tensor(0, device="meta")
    with pytest.raises(RuntimeError, match="averages and the counters must all be on the meta device"):
        layer(torch.randn(6, 3))
    assert (layer.running_mean == 0).all()
