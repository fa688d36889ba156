"""Test the layers' fast path with torch's kernel: it is accurate and, if it does not apply, moves no averages."""

import gc
from functools import partial

import pytest
import torch
from fast_path import assert_checkpoints, assert_recomputes, assert_skips, copy_of, new_running
from oracle import assert_near, expect
from torch import nn

from batchnorm import layers, ops
from batchnorm.ops import Activation, cpu
from batchnorm.ops.activation import IDENTITY, NAMES
from batchnorm.ops.call import Call
from batchnorm.ops.cpu import autograd, torch_kernels

LAST = torch.channels_last
EPS = 1e-3


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(autograd, "form_of", lambda *_: None)


def run(x, running, momentum=0.1, activation=IDENTITY, gamma=None, beta=None):
    return cpu.train_(Call(x, gamma, beta, EPS, activation, None, None, running, momentum))


TAKEN = {
    "fully connected": lambda: torch.randn(60, 100),
    "two examples": lambda: torch.randn(2, 5) * 3,
    "sequence": lambda: torch.randn(4, 6, 9),
    "volume": lambda: torch.randn(2, 3, 4, 5, 6),
    "channels_last": lambda: torch.randn(4, 16, 7, 5).contiguous(memory_format=LAST),
    "few channels in channels_last": lambda: torch.randn(10, 3, 12, 12).contiguous(memory_format=LAST),
    "wide, means of half a deviation: the sharper test": lambda: torch.randn(64, 512) + 0.5,
    "a mean of 60 deviations": lambda: torch.randn(64, 1) + 60,
    "zero variance in one feature": lambda: torch.cat([torch.full((8, 1), 0.5), torch.randn(8, 2)], 1),
    "bfloat16": lambda: torch.randn(16, 8, 7, 7).bfloat16(),
    "float16, channels_last": lambda: torch.randn(16, 20, 7, 7).half().contiguous(memory_format=LAST),
}


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("name", TAKEN)
def test_output_gradients_and_averages(name, momentum):
    x = TAKEN[name]().requires_grad_()
    gamma, beta = ((torch.rand(x.shape[1]) + 0.5).requires_grad_() for _ in range(2))
    dy, running = torch.randn_like(x), new_running(x.shape[1])
    want_running = copy_of(running)
    want = expect(x, gamma, beta, EPS, dy, Activation("relu"))
    ops.batch_norm_(x.detach(), gamma, beta, want_running, momentum, EPS, activation="relu")

    y = run(x, running, momentum, Activation("relu"), gamma, beta)
    y.backward(dy)
    assert_near(y, want.y, x.dtype, "y")
    want.check_gradients(x.grad, gamma.grad, beta.grad, x.dtype, x.dtype)
    for found, expected in zip(running, want_running, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("shape", [(30, 20), (150, 200)])  # ReLU runs in place only for the larger shape
def test_activation(activation, shape):
    x = torch.randn(shape, requires_grad=True)
    dy = torch.randn(shape)
    want = expect(x, torch.ones(shape[1]), torch.zeros(shape[1]), EPS, dy, Activation(activation))
    y = run(x, new_running(shape[1]), activation=Activation(activation))
    y.backward(dy)
    assert_near(y, want.y, torch.float32)
    assert_near(x.grad, want.dx, torch.float32, top=want.dx_terms)


LEFT = {
    "inf": lambda: torch.full((8, 3), float("inf")),
    "NaN in one feature": lambda: torch.randn(8, 3).index_put(
        (torch.tensor(2), torch.tensor(1)), torch.tensor(torch.nan)
    ),
    "a variance beyond float32, of mean 0": lambda: torch.tensor([[1e25], [-1e25]]).expand(2, 3).contiguous(),
    "a mean of 1e6 deviations": lambda: torch.randn(64, 3) + 1e6,
    "a mean of 300 deviations in one of many features": lambda: torch.randn(64, 500) + 300 * torch.eye(500)[7],
    "one value per feature": lambda: torch.randn(1, 3),
    "empty": lambda: torch.randn(0, 3),
    "float64": lambda: torch.randn(8, 3).double(),
    "no batch dimension": lambda: torch.randn(3),
    "few channels in channels_last": lambda: torch.randn(32, 3, 50, 50).contiguous(memory_format=LAST),
}


@pytest.mark.parametrize("name", LEFT)
def test_nothing_moves_where_another_way_is_due(name):
    x = LEFT[name]()
    running = new_running(x.shape[-1] if x.dim() == 1 else x.shape[1])
    before = copy_of(running)
    assert run(x, running) is None
    assert run(x, running) is None  # again, because the first call may have cached its checks of the shapes
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


@pytest.mark.parametrize("name", ["inf", "NaN in one feature", "a variance beyond float32, of mean 0"])
def test_a_batch_that_is_not_finite_is_skipped_and_counted(name):
    assert_skips(layers.BatchNorm1d(3), LEFT[name]())


@pytest.mark.parametrize(("mean", "bound"), [(1e6, 1e-3), (1e4, 1e-4)])
@pytest.mark.parametrize("format", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("channels", [3, 16])
def test_layer_is_accurate_far_from_zero(mean, bound, format, channels):
    x = (torch.randn(8, channels, 6, 6) + mean).contiguous(memory_format=format)
    want = expect(x.requires_grad_(), torch.ones(channels), torch.zeros(channels), 1e-5, torch.ones_like(x)).y
    assert float((layers.BatchNorm2d(channels)(x).detach() - want).abs().max()) < bound


def other_type(layer):
    layer.half()


def other_memory(layer):
    layer.running_mean.data, layer.running_var.data = torch.zeros(3), torch.ones(3)


def other_buffers(layer):
    layer.running_var = torch.full((3,), 2.0)


def other_count(layer):
    layer.num_batches_tracked = torch.tensor(7)


@pytest.mark.parametrize("change", [nn.Module.share_memory, other_memory, other_buffers, other_count, other_type])
def test_what_was_remembered_does_not_outlive_a_change(change):
    layer = layers.BatchNorm1d(3)
    layer(torch.randn(8, 3))
    change(layer)
    before = layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone()
    layer(torch.full((8, 3), torch.nan))
    now = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    x = torch.randn(8, 3)
    layer(x)
    torch.testing.assert_close(layer.running_mean, before[0] + 0.1 * (x.mean(0) - before[0]))
    torch.testing.assert_close(layer.running_var, before[1] + 0.1 * (x.var(0) - before[1]))
    assert layer.num_batches_tracked == before[2] + 1


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("length", [2, 8])
def test_a_parameter_cut_after_the_first_batch_is_refused(name, length):
    layer, x = layers.BatchNorm1d(4), torch.randn(8, 4)
    layer(x)
    getattr(layer, name).data = torch.ones(length)
    with pytest.raises(ValueError, match="has shape"):
        layer(x)


CHECKPOINTED = {
    "small": lambda: torch.randn(8, 4, 5, 5),
    "images, another way": lambda: torch.randn(8, 4, 64, 400),
    "rows, another way": lambda: torch.randn(10, 16, 32, 32).contiguous(memory_format=LAST),
    "bfloat16": lambda: torch.randn(8, 4, 5, 5).bfloat16(),
    "far from zero: another way after this one": lambda: torch.randn(8, 4, 5, 5) + 1e4,
    "large and far from zero": lambda: torch.randn(8, 4, 64, 400) + 1e4,
    "NaN": lambda: torch.full((8, 4, 5, 5), float("nan")),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("activation", ["identity", "relu"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_computed_again_in_a_checkpoint(name, activation, reentrant):
    x = CHECKPOINTED[name]()
    assert_checkpoints(layers.BatchNorm2d(x.shape[1], activation=activation), x, reentrant)


def test_nothing_is_remembered_of_what_is_gone():
    gc.collect()
    before = len(autograd._memories)
    layer = layers.BatchNorm1d(3)
    layer(torch.randn(8, 3))
    assert len(autograd._memories) == before + 1
    del layer
    gc.collect()
    assert len(autograd._memories) == before


def test_a_computed_weight_is_used():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer, plain = layers.BatchNorm1d(3), layers.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    x = torch.randn(8, 3)
    torch.testing.assert_close(layer(x), 2 * plain(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_relu_on_bit_patterns_is_relu_on_values(dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)  # zeros, subnormals, infinities, NaN
    z = every.clone().requires_grad_()
    y = torch_kernels.HalfRelu.apply(z * 1)
    torch.testing.assert_close(y, torch.relu(every), rtol=0, atol=0, equal_nan=True)
    number = ~every.isnan()
    y.backward(torch.full_like(y, 3))
    torch.testing.assert_close(z.grad[number], 3 * (every[number] > 0).to(dtype), rtol=0, atol=0)


def test_relu_on_bit_patterns_can_be_differentiated_twice():
    z = torch.tensor([-1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    dy = torch.tensor([1.0, 3.0], dtype=torch.bfloat16, requires_grad=True)
    (dz,) = torch.autograd.grad(torch_kernels.HalfRelu.apply(z * 1), z, dy, create_graph=True)
    (back,) = torch.autograd.grad(dz.sum(), dy)
    assert dz.tolist() == [0, 3]
    assert back.tolist() == [0, 1]


def test_the_moments_are_not_views():
    _, moments = torch_kernels.run(Call(torch.randn(8, 4), eps=EPS), constant_moments=True)
    assert not moments.mean._is_view()
    assert not moments.var._is_view()


def test_large_half_precision_batches_take_it():
    x = torch.randn(16, 16, 64, 64).bfloat16().requires_grad_()
    assert x.numel() >= torch_kernels.LARGE_HALF
    y = run(x, new_running(16), activation=Activation("relu"))
    assert type(y.grad_fn).__name__ == "HalfReluBackward"
    dy = torch.randn_like(x)
    want = expect(x, torch.ones(16), torch.zeros(16), EPS, dy, Activation("relu"))
    y.backward(dy)
    assert_near(y, want.y, torch.bfloat16)
    assert_near(x.grad, want.dx, torch.bfloat16, top=want.dx_terms)


def test_large_half_precision_outputs_are_computed_again():
    assert_recomputes(partial(run, activation=Activation("relu")), torch.randn(16, 16, 64, 64).bfloat16())


def test_few_channels_in_six_dimensions_stay_as_they_lie():
    x = torch.randn(40, 12, 12, 2, 2, 4).movedim(-1, 1)
    y, _ = ops.batch_norm(x, None, None, EPS)
    assert y.stride() == x.stride()
    want = expect(x, torch.ones(4), torch.zeros(4), EPS, torch.ones_like(x)).y
    assert_near(y, want, torch.float32)
