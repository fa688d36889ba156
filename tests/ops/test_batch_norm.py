"""Compare the fast paths with the float64 oracle: outputs, all gradients and the moments, in easy and hard cases."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import TOLERANCE, assert_near, expect, off_the_kinks, spread

from batchnorm import ops
from batchnorm.ops.activation import NAMES

EPS = 1e-3


def draw(*shape, dtype=torch.float32, mean=0.0, std=1.0):
    return (torch.randn(shape, dtype=torch.float64) * std + mean).to(dtype)


def check(x, activation=None, with_residual=False, feature_dims=1, eps=EPS, scale=1.0):
    features = x.shape[1 : 1 + feature_dims]
    x = x.detach().requires_grad_()
    gamma = ((torch.rand(features) + 0.5) * spread(activation)).requires_grad_()
    beta = torch.randn(features).requires_grad_()
    residual = torch.randn(x.shape).to(x.dtype).requires_grad_() if with_residual else None
    dy = off_the_kinks(torch.randn(x.shape).to(x.dtype), x, gamma, beta, eps, activation, residual, feature_dims)
    y, moments = ops.batch_norm(
        x, gamma, beta, eps, activation=activation, residual=residual, feature_dims=feature_dims
    )
    want = expect(x, gamma, beta, eps, dy, activation, residual, feature_dims)
    y.backward(dy)
    m = x.numel() // features.numel()
    assert moments.count.item() == m
    want.check(y, moments, x, gamma, beta, residual, scale)
    return y


HARD = {
    "fully connected": lambda: draw(60, 100),
    "two examples: the least that has a variance": lambda: draw(2, 5, std=3),
    "one channel": lambda: draw(8, 1, 5, 5),
    "one location": lambda: draw(16, 7, 1, 1),
    "sequence": lambda: draw(4, 6, 9),
    "volume": lambda: draw(2, 3, 4, 5, 6),
    "volume, channels_last_3d": lambda: draw(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "image": lambda: draw(5, 13, 7, 9),
    "image, channels_last": lambda: draw(5, 13, 7, 9).contiguous(memory_format=torch.channels_last),
    "few channels in channels_last, where torch is slow": lambda: draw(6, 3, 17, 19).contiguous(
        memory_format=torch.channels_last
    ),
    "every other column of a larger tensor": lambda: draw(5, 8, 7, 18)[..., ::2],
    "every other channel": lambda: draw(5, 16, 7, 9)[:, ::2],
    "transposed batch and channels": lambda: draw(8, 5, 7, 9).transpose(0, 1),
    "expanded: stride 0": lambda: draw(1, 8, 7, 9).expand(5, -1, -1, -1) * 1.0 + draw(5, 8, 1, 1),
    "large mean": lambda: draw(32, 4, 11, 11, mean=100.0),
    "large values": lambda: draw(16, 4, 6, 6, std=1e10),
    "small values: eps decides": lambda: draw(16, 4, 6, 6, std=1e-6),
    "zero variance in one channel": lambda: torch.cat([torch.full((8, 1, 3, 3), 2.5), draw(8, 2, 3, 3)], 1),
    "zero variance everywhere": lambda: torch.full((8, 3), 1e3),
    "bfloat16": lambda: draw(16, 8, 7, 7, dtype=torch.bfloat16),
    "float16, channels_last": lambda: draw(16, 8, 7, 7, dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    ),
    "float64": lambda: draw(16, 8, 7, 7, dtype=torch.float64),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_case(name):
    check(HARD[name]())


@pytest.mark.parametrize("name", HARD)
def test_hard_case_with_residual_and_relu(name):
    check(HARD[name](), activation="relu", with_residual=True)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_activation(activation, layout, with_residual):
    check(draw(4, 6, 5, 7).contiguous(memory_format=layout), activation, with_residual)


def test_leaky_relu_slope():
    check(draw(4, 6, 5), ops.Activation("leaky_relu", 0.3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_per_activation(layout):
    x = draw(9, 4, 5, 3).contiguous(memory_format=layout)
    y = check(x, "relu", feature_dims=3)
    assert y.is_contiguous(memory_format=layout)
    check(x, feature_dims=2)  # statistics over batch and the last dimension


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_output_keeps_the_layout(layout):
    x = draw(4, 6, 5, 7).contiguous(memory_format=layout)
    assert ops.batch_norm(x, activation="relu")[0].is_contiguous(memory_format=layout)


def test_without_parameters():
    x = draw(6, 4, 5)
    want = expect(x, torch.ones(4), torch.zeros(4), EPS, torch.zeros_like(x))
    assert_near(ops.batch_norm(x, eps=EPS)[0], want.y, torch.float32)
    gamma = torch.rand(4)
    want = expect(x, gamma, torch.zeros(4), EPS, torch.zeros_like(x))
    assert_near(ops.batch_norm(x, gamma, eps=EPS)[0], want.y, torch.float32)


@pytest.mark.parametrize("activation", NAMES)
def test_gradcheck_and_gradgradcheck(activation):
    x = draw(3, 2, 2, dtype=torch.float64).requires_grad_()
    gamma, beta = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    residual = draw(3, 2, 2, dtype=torch.float64).requires_grad_()

    def run(x, gamma, beta, residual):
        y, moments = ops.batch_norm(x, gamma, beta, EPS, activation=activation, residual=residual)
        return y, moments.mean, moments.var

    assert torch.autograd.gradcheck(run, (x, gamma, beta, residual))
    assert torch.autograd.gradgradcheck(run, (x, gamma, beta, residual))


def test_equals_torch_where_torch_is_accurate():
    x, gamma, beta = draw(8, 5, 6, 7), torch.rand(5), torch.randn(5)
    for layout in (torch.contiguous_format, torch.channels_last):
        xx = x.contiguous(memory_format=layout)
        y = F.relu(F.batch_norm(xx, None, None, gamma, beta, training=True))
        torch.testing.assert_close(ops.batch_norm(xx, gamma, beta, activation="relu")[0], y, rtol=1e-5, atol=2e-6)


@st.composite
def arrangements(draw_):
    dims = draw_(st.integers(2, 5))
    shape = [draw_(st.integers(2, 6)), *(draw_(st.integers(1, 7)) for _ in range(dims - 1))]
    steps = [draw_(st.integers(1, 2)) for _ in range(dims)]
    order = draw_(st.permutations(range(dims)))
    return shape, steps, order


@given(
    arrangements(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from(NAMES),
    st.booleans(),
    st.floats(1e-5, 0.1),
    st.floats(-20, 20),
    st.floats(0.1, 10),
    st.integers(0, 2**31),
)
def test_any_shape_stride_type_and_value(arrangement, dtype, activation, with_residual, eps, mean, std, seed):
    torch.manual_seed(seed)
    shape, steps, order = arrangement
    # Store a dense tensor with its dimensions in this order, and take every steps[d]-th index of dimension d.
    inverse = sorted(range(len(order)), key=order.__getitem__)
    stored = [shape[d] * steps[d] for d in order]
    x = draw(*stored, dtype=dtype, mean=mean, std=std).permute(inverse)
    x = x[tuple(slice(None, None, s) for s in steps)]
    assert list(x.shape) == shape
    # If a channel's few values are almost equal, 1/std is nearly 1/sqrt(eps) and amplifies rounding errors.
    check(x, activation, with_residual, eps=eps, scale=10.0)


@pytest.mark.parametrize("shape", [(1, 2, 1024, 1024), (1, 2, 64, 128, 128), (1, 2, 1_500_000)])
@pytest.mark.parametrize(("mean", "bound"), [(1e6, 1e-4), (1e4, 1e-4), (0.0, 1e-5)])
def test_planes_of_a_million_values(shape, mean, bound):
    check_digits(draw(*shape, mean=mean), bound, 2e-5)


def check_digits(x, bound, of_variance):
    x.requires_grad_()
    dy, ones = torch.randn_like(x), torch.ones(x.shape[1])
    want = expect(x, ones, 0 * ones, 1e-5, dy)
    y, moments = ops.batch_norm(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert float((y.detach() - want.y).abs().max()) < bound
    assert float((dx - want.dx).abs().max()) < bound
    torch.testing.assert_close(moments.var.double(), want.var, rtol=of_variance, atol=0)
    return moments, want


def test_running_averages_of_other_channels_are_refused():
    zero = torch.tensor(0)
    for channels in (1, 4):
        running = ops.Running(torch.zeros(3), torch.ones(3), zero, zero.clone())
        with pytest.raises(
            ValueError, match=rf"running mean has shape \(3,\), but the features have shape \({channels},\)"
        ):
            ops.batch_norm_(torch.randn(5, channels), None, None, running)
        assert running.mean.eq(0).all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "2d", "3d", "strided"])
@pytest.mark.parametrize(("mean", "bound"), [(1e6, 1e-3), (1e4, 1e-4)])
def test_mean_far_from_zero(layout, mean, bound):
    # Near 1e6, float32 values are multiples of 1/16, so y = a*x + b would be inaccurate: both terms are that large.
    shapes = {"2d": (4096, 8), "3d": (16, 8, 33), "strided": (16, 8, 14, 28)}
    x = draw(*shapes.get(layout, (16, 8, 28, 28)), mean=mean)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        x = x[..., ::2]
    moments, want = check_digits(x, bound, 1e-4)
    torch.testing.assert_close(moments.mean.double(), want.mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_in_their_channel(bad):
    x = draw(8, 3, 4)
    x[2, 1, 0] = bad
    y, moments = ops.batch_norm(x)
    assert not moments.var[1].isfinite()
    want = expect(x[:, ::2], torch.ones(2), torch.zeros(2), 1e-5, torch.zeros(8, 2, 4))
    assert_near(y[:, ::2], want.y, torch.float32)
    assert moments.var[::2].isfinite().all()


def test_mask_equals_the_same_values_without_padding():
    lengths = [5, 3, 1, 4]
    x = draw(4, 6, 5).requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    y, moments = ops.batch_norm(x, activation="relu", mask=mask)
    packed = x.detach().movedim(1, 2)[mask].requires_grad_()
    want, want_moments = ops.batch_norm(packed, activation="relu")
    torch.testing.assert_close(y.movedim(1, 2)[mask], want)
    torch.testing.assert_close(moments, want_moments)
    assert (y.movedim(1, 2)[~mask] == 0).all()
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy.movedim(1, 2)[mask])
    torch.testing.assert_close(x.grad.movedim(1, 2)[mask], packed.grad)
    assert (x.grad.movedim(1, 2)[~mask] == 0).all()


def test_given_statistics_have_gradients():
    x, mean, var = draw(6, 3, 4), draw(3).requires_grad_(), (torch.rand(3) + 0.5).requires_grad_()
    dy = torch.randn_like(x)
    found = torch.autograd.grad(ops.normalize(x, mean, var, eps=EPS), [mean, var], dy)
    scale = (var + EPS).rsqrt()[:, None]
    expected = torch.autograd.grad((x - mean[:, None]) * scale, [mean, var], dy)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("channels", [1, 5])
def test_given_statistics_of_another_shape_are_refused(channels):
    for mean, var in ((channels, 3), (3, channels)):
        with pytest.raises(ValueError, match=r"; expected \(3,\) for an input of shape \(4, 3, 2\)"):
            ops.normalize(torch.randn(4, 3, 2), torch.zeros(mean), torch.ones(var))


def test_normalize_by_given_statistics():
    x = draw(4, 3, 5).requires_grad_()
    mean, var = torch.randn(3), torch.rand(3)
    gamma, beta, residual = torch.rand(3), torch.randn(3), torch.randn(4, 3, 5)
    y = ops.normalize(x, mean, var, gamma, beta, EPS, activation="relu", residual=residual)
    want = F.relu(F.batch_norm(x, mean, var, gamma, beta, False, 0.1, EPS) + residual)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(v.square().sum(), x)[0] for v in (y, want)))


def test_given_statistics_and_a_residual_in_half_precision():
    x, mean, var = draw(64, 16, 7, 7).bfloat16(), torch.randn(16), torch.rand(16) + 0.5
    residual = -ops.normalize(x, mean, var)  # BN(x) + residual is near 0, so BN(x) must not be rounded first
    y = ops.normalize(x, mean, var, residual=residual)
    want = ops.normalize(x.double(), mean, var, residual=residual.double())
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ops.batch_norm(torch.ones(4, 3, dtype=torch.long)), TypeError, "floating-point"),
        (lambda: ops.batch_norm(torch.ones(4, 3, dtype=torch.complex64)), TypeError, "floating-point"),
        (lambda: ops.batch_norm(torch.ones(4, 3), torch.ones(2)), ValueError, "gamma has shape"),
        (lambda: ops.batch_norm(torch.ones(4, 3), residual=torch.ones(4, 1)), ValueError, "residual has shape"),
        (lambda: ops.batch_norm(torch.ones(4, 3), mask=torch.ones(4)), ValueError, "mask must be bool"),
        (lambda: ops.batch_norm(torch.ones(4)), ValueError, "feature dimension"),
        (lambda: ops.batch_norm(torch.ones(4, 3), activation="gelu"), ValueError, "not one of"),
    ],
)
def test_wrong_arguments_get_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_tolerances_are_ordered():
    assert TOLERANCE[torch.float64]["rtol"] < TOLERANCE[torch.float32]["rtol"] < TOLERANCE[torch.float16]["rtol"]


def test_one_switch_turns_every_fast_path_off():
    code = (
        "import torch, batchnorm as bn\n"
        "from batchnorm.ops import cpu\n"
        "cpu.train_ = cpu.run = None\n"
        "layer, x = bn.BatchNorm1d(3, activation='relu'), torch.randn(8, 3)\n"
        "layer(x), layer.eval()(x)\n"
        "print(int(layer.num_batches_tracked), *bn.ops.explain(x))"
    )
    environment = {**os.environ, "BATCHNORM_FAST": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=2)[:2] == ["1", "composite"]
    assert "BATCHNORM_FAST=0" in done.stdout


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.bfloat16, marks=pytest.mark.inductor),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_inductor_compiles_the_plain_operations(device, dtype):
    x, dy, residual = (torch.randn(8, 16, 6, 6, device=device).to(dtype) for _ in range(3))
    x = (2 * x + 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    gamma, beta = (torch.randn(16, device=device, requires_grad=True) for _ in range(2))
    dy = off_the_kinks(dy, x, gamma, beta, 1e-5, "relu", residual)
    mask = torch.ones(8, 6, 6, dtype=torch.bool, device=device)  # a mask rules out the fused kernels
    compiled = torch.compile(ops.batch_norm, fullgraph=True)
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        y, moments = compiled(x, gamma, beta, activation="relu", residual=residual, mask=mask)
    dx, dgamma, dbeta = torch.autograd.grad(y, (x, gamma, beta), dy)
    e = expect(x, gamma, beta, 1e-5, dy, "relu", residual)
    assert_near(y, e.y, dtype, "y")
    assert_near(moments.mean, e.mean, torch.float32, "mean")
    e.check_gradients(dx, dgamma, dbeta, dtype)
