"""A last batch of one example (pytorch 7716) raises a helpful error; ``on_single`` or a sampler avoids it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchnorm as bn

SINGLE = [
    (bn.BatchNorm1d, (1, 3)),
    (bn.BatchNorm1d, (1, 3, 1)),
    (bn.BatchNorm2d, (1, 3, 1, 1)),
    (bn.BatchNorm3d, (1, 3, 1, 1, 1)),
]


@pytest.mark.parametrize(("kind", "shape"), SINGLE)
def test_error_names_the_layer_and_the_ways_out(kind, shape):
    net = nn.Sequential(nn.Identity(), kind(3))
    with pytest.raises(ValueError, match="layer '1'") as info:
        net(torch.randn(shape))
    for way_out in ("larger batch", "BalancedBatches", "freeze_", "on_single='running'"):
        assert way_out in str(info.value)
    assert net[1].num_batches_tracked == 0


def test_sync_in_a_single_process():
    with pytest.raises(ValueError, match="expected more than 1 value per channel"):
        bn.BatchNorm1d(3, statistics=bn.Sync())(torch.randn(1, 3))
    layer, x = bn.BatchNorm1d(3, statistics=bn.Sync(), on_single="running"), torch.randn(1, 3)
    torch.testing.assert_close(layer(x), layer.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "shape"), SINGLE)
def test_policy_running(kind, shape):
    layer = kind(3, on_single="running")
    layer(torch.randn(4, *shape[1:]))
    before = layer.state_dict()["running_var"].clone()
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), layer.eval()(x), rtol=0, atol=0)
    torch.testing.assert_close(layer.running_var, before, rtol=0, atol=0)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_later_batch_does_not_change_the_gradients_of_a_single_example(dtype, compiled):
    layer = bn.BatchNorm1d(3, on_single="running", eps=0)
    layer.running_var.fill_(4.0)
    x, batch = torch.randn(1, 3, dtype=dtype, requires_grad=True), torch.randn(64, 3, dtype=dtype) * 10

    def forward(x):
        y = layer(x)
        return y, layer(batch)

    y, _ = (torch.compile(forward, backend="aot_eager") if compiled else forward)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.5))
    torch.testing.assert_close(layer.weight.grad, x.detach()[0].float() / 2, rtol=1e-2, atol=1e-2)


def test_evaluation_before_training_keeps_its_gradients():
    layer, x = bn.BatchNorm1d(3).eval(), torch.randn(8, 3, requires_grad=True)
    y = layer(x)
    layer.train()(torch.randn(64, 3) * 10 + 5)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, (1 + layer.eps) ** -0.5))


def test_policy_running_needs_statistics():
    with pytest.raises(ValueError, match="track_running_stats"):
        bn.BatchNorm1d(3, on_single="running", track_running_stats=False)


def test_a_mask_that_leaves_one_value():
    x, mask = torch.randn(2, 3, 4), torch.zeros(2, 4, dtype=torch.bool)
    mask[0, 0] = True
    with pytest.raises(ValueError, match="with only one unmasked value"):
        bn.BatchNorm1d(3)(x, mask=mask)
    layer = bn.BatchNorm1d(3)
    assert layer(x, mask=torch.zeros_like(mask)).eq(0).all()
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 5, 5), (2, 3, 0, 5)])
def test_empty_batch_changes_nothing_and_has_gradients(shape, activation):
    layer = (bn.BatchNorm1d if len(shape) == 2 else bn.BatchNorm2d)(3, activation=activation)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert layer.weight.grad.eq(0).all()
    assert layer.bias.grad.eq(0).all()
    assert (layer.num_batches_tracked, layer.num_batches_skipped) == (0, 0)
    torch.testing.assert_close(layer.running_var, torch.ones(3), rtol=0, atol=0)


@given(st.integers(2, 200), st.integers(2, 40), st.booleans())
def test_balanced_batches_cover_all_examples_and_leave_none_alone(n, batch_size, shuffle):
    if batch_size == 2 and n % 2:
        with pytest.raises(ValueError, match="leave a batch of one"):
            bn.data.BalancedBatches(n, batch_size)
        return
    sampler = bn.data.BalancedBatches(n, batch_size, shuffle=shuffle)
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-n // batch_size)
    assert sorted(i for b in batches for i in b) == list(range(n))
    sizes = [len(b) for b in batches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 2


def test_balanced_loader_trains_where_the_plain_one_fails():
    data = TensorDataset(torch.randn(33, 3))
    layer = bn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="more than 1 value"):
        [layer(x) for (x,) in DataLoader(data, batch_size=32)]
    for (x,) in DataLoader(data, batch_sampler=bn.data.BalancedBatches(33, 32, shuffle=True)):
        assert layer(x).isfinite().all()


def test_balanced_batches_reproduce():
    a, b = (
        list(bn.data.BalancedBatches(20, 6, shuffle=True, generator=torch.Generator().manual_seed(3))) for _ in range(2)
    )
    assert a == b
    with pytest.raises(ValueError, match="at least 2"):
        bn.data.BalancedBatches(1, 4)
