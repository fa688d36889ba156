"""Large batches in training: the same as the oracle, nothing moved where another way is due."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_near, expect

from batchnorm import layers, ops
from batchnorm.ops import Activation, Running, cpu
from batchnorm.ops.activation import IDENTITY
from batchnorm.ops.cpu import sums

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
EPS = 1e-3
RELU = Activation("relu")

SHAPES = {
    "images": lambda: torch.randn(4, 6, 8, 8),
    "sequences": lambda: torch.randn(3, 5, 40),
    "volumes": lambda: torch.randn(2, 3, 4, 5, 6),
    "one channel": lambda: torch.randn(4, 1, 8, 8),
    "channels_last": lambda: torch.randn(4, 16, 6, 6).contiguous(memory_format=LAST),
    "channels_last, an odd number of channels": lambda: torch.randn(4, 19, 3, 5).contiguous(memory_format=LAST),
    "volumes, channels_last": lambda: torch.randn(2, 16, 3, 4, 5).contiguous(memory_format=LAST_3D),
    "many rows": lambda: torch.randn(50, 16),
    "a mean of 3 deviations": lambda: torch.randn(4, 6, 8, 8) + 3,
    "zero variance in one channel": lambda: torch.randn(4, 2, 8, 8) * torch.tensor([0.0, 1.0]).view(2, 1, 1),
}


@pytest.fixture(autouse=True)
def from_the_smallest_batch_on(monkeypatch):
    monkeypatch.setattr(sums, "IMAGE_ELEMENTS", 0)
    monkeypatch.setattr(sums, "ROWS", 0)


def new_running(channels):
    return Running(torch.randn(channels), torch.rand(channels) + 0.5, torch.tensor(3), torch.tensor(0))


def copy_of(running):
    return Running(*(v.clone() for v in running))


def run(x, running, momentum=0.1, activation=IDENTITY, gamma=None, beta=None):
    assert sums.fast_layout(x, activation) is not None
    return cpu.normalize_batch_(x, gamma, beta, running, momentum, EPS, activation)


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("activation", [IDENTITY, RELU], ids=lambda a: a.name)
@pytest.mark.parametrize("name", SHAPES)
def test_output_gradients_and_averages(name, activation, momentum):
    x = SHAPES[name]().requires_grad_()
    gamma, beta = ((torch.rand(x.shape[1]) + 0.5).requires_grad_() for _ in range(2))
    dy, running = torch.randn_like(x), new_running(x.shape[1])
    want_running = copy_of(running)
    want = expect(x, gamma, beta, EPS, dy, activation)
    ops.batch_norm_(x.detach(), gamma, beta, want_running, momentum, EPS, activation=activation)

    y = run(x, running, momentum, activation, gamma, beta)
    y.backward(dy, retain_graph=True)
    first, x.grad, gamma.grad, beta.grad = x.grad, None, None, None
    y.backward(dy)
    assert torch.equal(first, x.grad)
    assert y.stride() == x.stride()
    assert_near(y, want.y, x.dtype, "y")
    assert_near(x.grad, want.dx, x.dtype, "dx", top=want.dx_terms)
    assert_near(gamma.grad, want.dgamma, x.dtype, "dgamma", top=want.sum_terms)
    assert_near(beta.grad, want.dbeta, x.dtype, "dbeta", top=want.sum_terms)
    for found, expected in zip(running, want_running, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["images", "channels_last"])
@pytest.mark.parametrize("activation", [IDENTITY, RELU], ids=lambda a: a.name)
def test_gradients_that_lie_otherwise_in_memory(name, activation):
    x = SHAPES[name]().requires_grad_()
    ones, zeros = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    for dy in (torch.randn(1, 1, 1, 1).expand(x.shape), torch.randn(x.shape[::-1]).permute(3, 2, 1, 0)):
        want = expect(x, ones, zeros, EPS, dy, activation)
        (dx,) = torch.autograd.grad(run(x, new_running(x.shape[1]), activation=activation), x, dy)
        assert_near(dx, want.dx, x.dtype, "dx", top=want.dx_terms)


@pytest.mark.parametrize("name", ["images", "channels_last"])
def test_only_what_is_wanted_gets_a_gradient(name):
    x = SHAPES[name]()
    gamma, beta = torch.ones(x.shape[1]), torch.zeros(x.shape[1], requires_grad=True)
    y = run(x, new_running(x.shape[1]), gamma=gamma, beta=beta)
    y.sum().backward()
    torch.testing.assert_close(beta.grad, torch.full_like(beta, x.numel() // x.shape[1]))
    assert gamma.grad is None
    with torch.no_grad():
        assert not run(x, new_running(x.shape[1]), gamma=gamma, beta=beta).requires_grad


@pytest.mark.parametrize("name", ["images", "channels_last"])
@pytest.mark.parametrize("activation", [IDENTITY, RELU], ids=lambda a: a.name)
def test_second_derivatives_are_torchs(name, activation):
    def ours(x, gamma, beta):
        return run(x, new_running(x.shape[1]), activation=activation, gamma=gamma, beta=beta)

    def torchs(x, gamma, beta):
        y = F.batch_norm(x, None, None, gamma, beta, training=True, eps=EPS)
        return F.relu(y) if activation is RELU else y

    leaf, dy = SHAPES[name](), torch.randn_like(SHAPES[name]())
    found = []
    for forward in (ours, torchs):
        torch.manual_seed(0)
        x, d = leaf.clone().requires_grad_(), dy.clone().requires_grad_()
        gamma, beta = (torch.rand(x.shape[1]).add(0.5).requires_grad_() for _ in range(2))
        first = torch.autograd.grad(forward(x, gamma, beta), (x, gamma, beta), d, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, gamma, d)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def with_value(value):
    return torch.randn(4, 6, 8, 8).index_put(tuple(torch.tensor(i) for i in (1, 2, 3, 4)), torch.tensor(value))


LEFT = {
    "NaN": lambda: with_value(torch.nan),
    "inf": lambda: with_value(torch.inf),
    "a variance beyond float32, of mean 0": lambda: torch.tensor([1e25, -1e25]).repeat(4, 6, 8, 4),
    "a mean of 1e6 deviations": lambda: torch.randn(4, 6, 8, 8) + 1e6,
    "NaN in channels_last": lambda: (torch.randn(4, 16, 6, 6) / torch.zeros(6)).contiguous(memory_format=LAST),
}


@pytest.mark.parametrize("name", LEFT)
def test_nothing_moves_where_another_way_is_due(name):
    x = LEFT[name]()
    running = new_running(x.shape[1])
    before = copy_of(running)
    assert run(x, running) is None
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


@pytest.mark.parametrize("name", [name for name in LEFT if "mean of" not in name])
def test_a_batch_that_is_not_finite_is_skipped_and_counted(name):
    x = LEFT[name]()
    layer = layers.BatchNorm2d(x.shape[1])
    layer(torch.randn_like(x))
    before = layer.running_mean.clone(), layer.running_var.clone()
    layer(x)
    assert torch.equal(layer.running_mean, before[0])
    assert torch.equal(layer.running_var, before[1])
    assert (layer.num_batches_tracked, layer.num_batches_skipped) == (1, 1)


@pytest.mark.parametrize(("mean", "bound"), [(1e6, 1e-3), (1e4, 1e-4)])
@pytest.mark.parametrize("format", [torch.contiguous_format, LAST])
def test_layer_is_accurate_far_from_zero(mean, bound, format):
    x = (torch.randn(8, 16, 6, 6) + mean).contiguous(memory_format=format)
    want = expect(x.requires_grad_(), torch.ones(16), torch.zeros(16), 1e-5, torch.ones_like(x)).y
    assert float((layers.BatchNorm2d(16)(x).detach() - want).abs().max()) < bound


@pytest.mark.parametrize("name", ["images", "channels_last"])
@pytest.mark.parametrize("activation", [IDENTITY, RELU], ids=lambda a: a.name)
def test_outputs_are_computed_again(name, activation):
    x = SHAPES[name]()
    weight, running = torch.randn(1, x.shape[1], 1, 1), new_running(x.shape[1])
    gradients = []
    for context in (nullcontext, ops.recompute):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        kept = copy_of(running)
        with context():
            loss = (run(leaf, kept, activation=activation) * w).sum()
        loss.backward()
        gradients.append((leaf.grad, w.grad, *kept))
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_other_batches_are_left_to_others(monkeypatch):
    assert sums.fast_layout(torch.randn(4, 6, 8, 8).double(), RELU) is None
    assert sums.fast_layout(torch.randn(4, 6, 8, 8).bfloat16(), RELU) is None
    assert sums.fast_layout(torch.randn(4, 6, 8, 8), Activation("silu")) is None
    assert sums.fast_layout(torch.randn(4, 3, 8, 8).contiguous(memory_format=LAST), RELU) is None  # few channels
    assert sums.fast_layout(torch.randn(4, 6, 8, 16)[..., ::2], RELU) is None
    monkeypatch.undo()
    assert sums.fast_layout(torch.randn(4, 6, 8, 8), RELU) is None
    assert sums.fast_layout(torch.randn(4, 16, 6, 6).contiguous(memory_format=LAST), RELU) is None
