"""Compare Ghost and Renorm with their definitions; test Sync in one process (several ranks: test_synchronized.py)."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn


def test_ghost_is_a_layer_per_group():
    x, residual = torch.randn(12, 3, 4), torch.randn(12, 3, 4)
    layer = bn.BatchNorm1d(3, statistics=bn.Ghost(4), activation="relu", momentum=1.0)
    plain = bn.BatchNorm1d(3, activation="relu")
    want = torch.cat([plain(a, residual=b) for a, b in zip(x.split(4), residual.split(4), strict=True)])
    torch.testing.assert_close(layer(x, residual=residual), want)
    # The running statistics are those of Alg. 2, l. 10, with the groups as batches.
    groups = x.reshape(3, 4, 3, 4)
    torch.testing.assert_close(layer.running_mean, groups.mean((1, 3)).mean(0))
    torch.testing.assert_close(layer.running_var, groups.var((1, 3)).mean(0))
    assert layer.num_batches_tracked == 1


def test_ghost_with_a_tail():
    # 10 examples in groups of at most 4: 4, 3, 3, and never a group of one.
    x = torch.randn(10, 2, dtype=torch.float64)
    layer = bn.BatchNorm1d(2, statistics=bn.Ghost(4), momentum=1.0).double()
    layer(x)
    parts = x.tensor_split(3)
    weighted = sum(len(p) * p.var(0, correction=0) for p in parts) / sum(len(p) - 1 for p in parts)
    torch.testing.assert_close(layer.running_var, weighted)


@pytest.mark.parametrize("examples", [3, 5, 7])
def test_ghost_leaves_no_group_of_one_value(examples):
    x = torch.randn(examples, 2, dtype=torch.float64)
    layer = bn.BatchNorm1d(2, statistics=bn.Ghost(2), momentum=1.0).double()
    parts = x.tensor_split(examples // 2)
    torch.testing.assert_close(layer(x), torch.cat([nn.BatchNorm1d(2).double()(part) for part in parts]))
    weighted = sum(len(p) * p.var(0, correction=0) for p in parts) / sum(len(p) - 1 for p in parts)
    torch.testing.assert_close(layer.running_var, weighted)
    # A group of a single image is valid, because an image has many values per channel.
    images = torch.randn(examples, 2, 4)
    want = torch.cat([nn.BatchNorm1d(2)(part) for part in images.split(2)])
    torch.testing.assert_close(bn.BatchNorm1d(2, statistics=bn.Ghost(2))(images), want)


def test_ghost_with_a_mask_that_leaves_a_group_one_value():
    x, residual = torch.randn(6, 2, 3, dtype=torch.float64), torch.randn(6, 2, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]).bool()
    layer = bn.BatchNorm1d(2, statistics=bn.Ghost(2), on_single="running", activation="silu", momentum=1.0).double()
    layer.running_mean.normal_()
    evaluated = copy.deepcopy(layer).eval()(x, residual, mask)
    plain = bn.BatchNorm1d(2, activation="silu", momentum=1.0).double()
    want = plain(x[:2], residual[:2], mask[:2])
    y = layer(x, residual, mask)
    torch.testing.assert_close(y[:2], want)
    torch.testing.assert_close(y[2:], evaluated[2:], rtol=0, atol=0)
    # Groups with one value or none have no unbiased variance, so they do not count.
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, plain.running_var)
    with pytest.raises(ValueError, match=r"only one unmasked value in a group of Ghost\(size=2\). Use a larger group"):
        bn.BatchNorm1d(2, statistics=bn.Ghost(2)).double()(x, mask=mask)


def test_ghost_larger_than_the_batch_is_algorithm_1():
    x = torch.randn(8, 3)
    a, b = bn.BatchNorm1d(3, statistics=bn.Ghost(100)), bn.BatchNorm1d(3)
    torch.testing.assert_close(a(x), b(x))
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()))


def test_renorm_by_its_definition():
    layer = bn.BatchNorm2d(3, statistics=bn.Renorm(1.5, 0.3), activation="tanh").double()
    nn.init.uniform_(layer.weight)
    nn.init.normal_(layer.bias)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    x = (torch.randn(6, 3, 4, 4).double() * 2 + 0.3).requires_grad_()
    sigma = torch.sqrt(layer.running_var + layer.eps)
    mu_b, sigma_b = x.mean((0, 2, 3)), torch.sqrt(x.var((0, 2, 3), correction=0) + layer.eps)
    r = (sigma_b.detach() / sigma).clamp(1 / 1.5, 1.5)
    d = ((mu_b.detach() - layer.running_mean) / sigma).clamp(-0.3, 0.3)
    shape = (1, 3, 1, 1)
    x_hat = (x - mu_b.view(shape)) / sigma_b.view(shape) * r.view(shape) + d.view(shape)
    want = torch.tanh(layer.weight.view(shape) * x_hat + layer.bias.view(shape))
    dy = torch.randn_like(x)
    (dx_want,) = torch.autograd.grad(want, x, dy)
    y = layer(x)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], dx_want)


def test_renorm_without_room_is_algorithm_1():
    x = torch.randn(8, 3)
    a, b = bn.BatchNorm1d(3, statistics=bn.Renorm(1, 0)), bn.BatchNorm1d(3)
    torch.testing.assert_close(a(x), b(x))
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()))


def test_renorm_per_activation():
    layer = bn.BatchNorm2d((3, 2, 2), statistics=bn.Renorm())
    x = torch.randn(6, 3, 2, 2)
    flat = bn.BatchNorm1d(12, statistics=bn.Renorm())
    torch.testing.assert_close(layer(x).flatten(1), flat(x.flatten(1)))


@pytest.mark.parametrize("twice", [False, True])
def test_compiled_renorm_has_the_gradients_of_eager_mode(twice):
    eager = bn.BatchNorm1d(4, statistics=bn.Renorm())
    eager.running_mean.normal_()
    eager.running_var.uniform_(0.3, 3)
    layer = copy.deepcopy(eager)
    x, results = torch.randn(32, 4), []
    for net, call in ((eager, eager), (layer, torch.compile(layer, backend="aot_eager", fullgraph=True))):
        a = x.clone().requires_grad_()
        y = call(a) + call(2 * a) if twice else call(a)
        y.pow(3).sum().backward()
        results.append((y.detach(), a.grad, net.weight.grad, net.running_var))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_ghost_on_the_meta_device():
    layer = bn.BatchNorm2d(4, statistics=bn.Ghost(2), device="meta")
    assert layer(torch.empty(4, 4, 2, 2, device="meta")).shape == (4, 4, 2, 2)


def test_ghost_under_autocast_takes_half_precision():
    layer, x = bn.BatchNorm1d(3, statistics=bn.Ghost(4)), torch.randn(8, 3).half()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float16


def test_sync_in_one_process_is_algorithm_1():
    x = torch.randn(8, 3)
    a, b = bn.BatchNorm1d(3, statistics=bn.Sync()), bn.BatchNorm1d(3)
    torch.testing.assert_close(a(x), b(x))
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()))


@pytest.mark.parametrize("statistics", [bn.Sync(), bn.Ghost(4), bn.Renorm()])
def test_evaluation_does_not_depend_on_them(statistics):
    x = torch.randn(8, 3)
    a, b = bn.BatchNorm1d(3, statistics=statistics).eval(), nn.BatchNorm1d(3).eval()
    torch.testing.assert_close(a(x), b(x))
    assert f"statistics={statistics}" in repr(a)


def test_wrong_values():
    with pytest.raises(ValueError, match="at least 2"):
        bn.Ghost(1)
    with pytest.raises(ValueError, match="r_max"):
        bn.Renorm(0.5)
    with pytest.raises(ValueError, match="running statistics"):
        bn.BatchNorm1d(3, statistics=bn.Renorm(), track_running_stats=False)(torch.randn(4, 3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_renorm_is_not_recomputed_with_averages_that_have_moved(reentrant):
    layer, x = bn.BatchNorm1d(3, statistics=bn.Renorm()), torch.randn(8, 3, requires_grad=True)
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        y = checkpoint(call, x, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match=r"leave it out of torch\.utils\.checkpoint"):
            y.square().sum().backward()
    plain = bn.BatchNorm1d(3, statistics=bn.Renorm(1, 0))  # does not use the running averages
    checkpoint(plain, x, use_reentrant=reentrant).square().sum().backward()
    assert plain.num_batches_tracked == 1
