"""Compare each strategy of the CPU path with the float64 oracle, regardless of what the dispatcher would choose."""

from functools import wraps

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import KINKS, assert_near, check_the_kinks, expect, off_the_kinks, rows, spread

from batchnorm.ops import Activation, composite, cpu, reference
from batchnorm.ops.activation import NAMES
from batchnorm.ops.call import Call
from batchnorm.ops.cpu import passes, torch_kernels
from batchnorm.ops.cpu.passes import Matrix, Planes, layout_of

EPS = 1e-3
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d

# For each strategy: whether to use torch's kernel where it is accurate, and how many rows each block of passes.py has.
# passes.py runs whatever torch's kernel does not.
STRATEGIES = {
    "native": (True, 8192),
    "passes": (False, 8192),
    "passes in blocks of 3 rows": (False, 3),
}


def by_every_strategy(test):
    @wraps(test)
    def run(*args, **kwargs):
        for name in STRATEGIES:
            with pytest.MonkeyPatch.context() as patch:
                choose(patch, name)
                test(*args, **kwargs)
        passes._wide.cache_clear()

    return run


def choose(monkeypatch, name):
    native, block = STRATEGIES[name]
    for limit in ("ROWS", "IMAGE_ELEMENTS", "FEW_ELEMENTS"):
        monkeypatch.setattr(torch_kernels, limit, 1 << 30)
    if not native:
        monkeypatch.setattr(torch_kernels, "is_fast", lambda x: False)
    monkeypatch.setattr(passes, "ROWS", block)
    passes._wide.cache_clear()


def draw(*shape, dtype=torch.float32, mean=0.0, std=1.0, format=torch.contiguous_format):
    return (torch.randn(shape, dtype=torch.float64) * std + mean).to(dtype).contiguous(memory_format=format)


def check(x, activation="identity", with_residual=False, eps=EPS, scale=1.0):
    """Compare y, every gradient and the moments with the oracle, and check that the inputs do not change."""
    x = x.detach().requires_grad_()
    activation = activation if isinstance(activation, Activation) else Activation(activation)
    gamma = ((torch.rand(x.shape[1]) + 0.5) * spread(activation)).requires_grad_()
    beta = torch.randn(x.shape[1]).requires_grad_()
    residual = torch.randn(x.shape).to(x.dtype).requires_grad_() if with_residual else None
    dy = off_the_kinks(torch.randn(x.shape).to(x.dtype), x, gamma, beta, eps, activation, residual)
    want = expect(x, gamma, beta, eps, dy, activation, residual)
    given_ = [None if v is None else v.detach().clone() for v in (x, gamma, beta, residual, dy)]

    y, moments = cpu.run(Call(x, gamma, beta, eps, activation, residual))
    y.backward(dy, retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    for p in (gamma, beta, residual):
        if p is not None:
            p.grad = None
    y.backward(dy)  # the first backward pass has overwritten nothing that the second needs
    assert torch.equal(first, x.grad)
    for before, after in zip(given_, (x, gamma, beta, residual, dy), strict=True):
        assert before is None or torch.equal(before, after)

    assert moments.count.item() == x.numel() // x.shape[1]
    want.check(y, moments, x, gamma, beta, residual, scale)
    return y


HARD = {
    "fully connected": lambda: draw(60, 100),
    "two examples: the least that has a variance": lambda: draw(2, 5, std=3),
    "one example, two locations": lambda: draw(1, 5, 2),
    "one value per channel: variance 0": lambda: draw(1, 5),
    "one channel": lambda: draw(8, 1, 7, 9),
    "one channel, channels_last: both layouts at once": lambda: draw(8, 1, 7, 9, format=LAST),
    "one channel, a prime number of values": lambda: draw(251, 1),
    "one location": lambda: draw(16, 7, 1, 1),
    "sequence shorter than a vector": lambda: draw(9, 6, 3),
    "sequence": lambda: draw(4, 6, 65),
    "sequence from (N, L, C)": lambda: draw(4, 65, 6).transpose(1, 2),
    "volume": lambda: draw(2, 3, 4, 5, 6),
    "volume, channels_last_3d": lambda: draw(2, 3, 4, 5, 6, format=LAST_3D),
    "image": lambda: draw(5, 13, 7, 9),
    "image, channels_last": lambda: draw(5, 13, 7, 9, format=LAST),
    "image, channels_last, many channels": lambda: draw(3, 70, 5, 3, format=LAST),
    "few channels, positions that divide into rows": lambda: draw(6, 3, 16, 16, format=LAST),
    "few channels, a prime number of positions": lambda: draw(1, 3, 1, 1009, format=LAST),
    "every other column of a larger tensor": lambda: draw(5, 8, 7, 18)[..., ::2],
    "every other channel": lambda: draw(5, 16, 7, 9)[:, ::2],
    "half of the channels, channels_last": lambda: draw(5, 16, 7, 9, format=LAST)[:, :8],
    "transposed batch and channels": lambda: draw(8, 5, 7, 9).transpose(0, 1),
    "transposed locations": lambda: draw(8, 5, 7, 9).transpose(2, 3),
    "expanded: stride 0 along the batch": lambda: draw(1, 8, 7, 9).expand(5, -1, -1, -1),
    "a mean of 3 deviations: not shifted": lambda: draw(32, 4, 11, 11, mean=3.0),
    "a mean of 100 deviations: shifted": lambda: draw(32, 4, 11, 11, mean=100.0),
    "shifted, channels_last": lambda: draw(32, 4, 11, 11, mean=-100.0, format=LAST),
    "large values": lambda: draw(16, 4, 6, 6, std=1e10),
    "small values: eps decides": lambda: draw(16, 4, 6, 6, std=1e-6),
    "zero variance in one channel": lambda: torch.cat([torch.full((8, 1, 3, 3), 2.5), draw(8, 2, 3, 3)], 1),
    "zero variance everywhere": lambda: torch.full((8, 3), 1e3),
    "bfloat16": lambda: draw(16, 8, 7, 7, dtype=torch.bfloat16),
    "bfloat16, few channels in channels_last": lambda: draw(16, 3, 8, 8, dtype=torch.bfloat16, format=LAST),
    "bfloat16, mean of 30 deviations": lambda: draw(16, 8, 7, 7, dtype=torch.bfloat16, mean=30.0),
    "float16, channels_last": lambda: draw(16, 20, 7, 7, dtype=torch.float16, format=LAST),
    "float64": lambda: draw(16, 8, 7, 7, dtype=torch.float64),
    "float64, channels_last": lambda: draw(16, 8, 7, 7, dtype=torch.float64, format=LAST),
}


@pytest.mark.parametrize("name", HARD)
@by_every_strategy
def test_hard_case(name):
    check(HARD[name]())


@pytest.mark.parametrize("name", HARD)
@by_every_strategy
def test_hard_case_with_residual_and_relu(name):
    check(HARD[name](), "relu", with_residual=True)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", [*NAMES, *(Activation("leaky_relu", slope) for slope in (0.3, 0.0, -0.5))])
@pytest.mark.parametrize("format", [torch.contiguous_format, LAST])
@by_every_strategy
def test_activation(activation, format, with_residual):
    check(draw(4, 6, 7, 5, format=format), activation, with_residual)


@pytest.mark.parametrize("activation", KINKS)
@by_every_strategy
def test_gradients_where_the_derivative_jumps_are_torchs(activation):
    for path in (cpu, composite):
        check_the_kinks(lambda call, path=path: path.run(call)[0], activation)


@pytest.mark.parametrize(
    "x",
    [
        draw(4, 6, 7, 5),
        draw(4, 6, 7, 5, format=LAST),
        draw(4, 1, 7, 5, format=LAST),
        draw(2, 3, 4, 5, 6, format=LAST_3D),
        draw(4, 65, 6).transpose(1, 2),
        draw(4, 16, 7, 5, format=LAST)[:, :8],
        draw(4, 6, 7, 5).transpose(2, 3),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
@by_every_strategy
def test_output_and_gradient_lie_in_memory_as_the_input_does(x):
    x = x.requires_grad_()
    y, _ = cpu.run(Call(x, None, None, EPS, Activation("relu")))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.stride() == torch.empty_like(x).stride()
    assert dx.stride() == y.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parameters", [torch.float32, torch.float16, torch.float64, None])
@by_every_strategy
def test_parameters_of_another_type(dtype, parameters):
    x = draw(6, 4, 5, 8, dtype=dtype).requires_grad_()
    gamma, beta = (None, None) if parameters is None else (draw(4, dtype=parameters).requires_grad_() for _ in "12")
    wide = (torch.ones(4), torch.zeros(4)) if gamma is None else (gamma, beta)
    dy = draw(6, 4, 5, 8, dtype=dtype)
    want = expect(x, *wide, EPS, dy)
    y, _ = cpu.run(Call(x, gamma, beta, EPS))
    y.backward(dy)
    assert_near(y, want.y, dtype)
    assert_near(x.grad, want.dx, dtype, "dx", top=want.dx_terms)
    if gamma is not None:
        assert gamma.grad.dtype == beta.grad.dtype == parameters
        coarse = max(dtype, parameters, key=lambda t: torch.finfo(t).eps)
        assert_near(gamma.grad, want.dgamma, coarse, "dgamma", top=want.sum_terms)


@pytest.mark.parametrize("wanted", ["x", "gamma", "beta", "residual"])
@by_every_strategy
def test_only_one_gradient_is_wanted(wanted):
    tensors = {"x": draw(4, 6, 7, 5), "gamma": draw(6), "beta": draw(6), "residual": draw(4, 6, 7, 5)}
    tensors[wanted].requires_grad_()
    dy = draw(4, 6, 7, 5)
    want = expect(tensors["x"], tensors["gamma"], tensors["beta"], EPS, dy, "tanh", tensors["residual"])
    y, _ = cpu.run(Call(**tensors, eps=EPS, activation=Activation("tanh")))
    (found,) = torch.autograd.grad(y, tensors[wanted], dy)
    assert_near(found, getattr(want, f"d{wanted}"), torch.float32)


FORMATS = {
    "contiguous": lambda dtype: draw(3, 2, 2, 2, dtype=dtype, mean=1.0),
    "planes": lambda dtype: draw(2, 2, 33, dtype=dtype, mean=1.0)[..., :33].contiguous(),
    "channels_last": lambda dtype: draw(3, 2, 2, 2, dtype=dtype, mean=1.0, format=LAST),
    "fully connected": lambda dtype: draw(5, 3, dtype=dtype, mean=1.0),
    "shifted": lambda dtype: draw(3, 2, 2, 2, dtype=dtype, mean=30.0),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("loss", ["moments alone", "moments and output"])
@pytest.mark.parametrize("activation", ["identity", "relu"])
@by_every_strategy
def test_gradients_through_the_moments(format, loss, activation):
    x = FORMATS[format](torch.float32).requires_grad_()
    gamma, beta = torch.rand(x.shape[1]), torch.randn(x.shape[1])
    dy = torch.randn_like(x) if loss == "moments and output" else torch.zeros_like(x)
    dmean, dvar = torch.randn(x.shape[1]), torch.randn(x.shape[1])

    y, moments = cpu.run(Call(x, gamma, beta, EPS, Activation(activation)))
    total = (moments.mean * dmean).sum() + (moments.var * dvar).sum()
    if loss == "moments and output":
        total = total + (y * dy).sum()
    (dx,) = torch.autograd.grad(total, x)

    x64 = x.detach().double().requires_grad_()
    out = reference.batch_norm(rows(x64), gamma.double(), beta.double(), EPS)
    z = Activation(activation)(out.y)
    (want,) = torch.autograd.grad((z * rows(dy)).sum() + (out.mu * dmean).sum() + (out.var * dvar).sum(), x64)
    assert_near(dx, want, torch.float32, scale=5.0)


@pytest.mark.parametrize("name", ["native", "passes"])
@pytest.mark.parametrize(
    ("format", "activation"),
    [
        *((f, "tanh") for f in FORMATS),
        *(pytest.param("channels_last", g, marks=pytest.mark.slow) for g in NAMES if g != "tanh"),
    ],
)
def test_gradcheck_and_gradgradcheck(format, activation, name, monkeypatch):
    choose(monkeypatch, name)
    x = FORMATS[format](torch.float64)[:, :2].requires_grad_()
    gamma, beta = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    residual = torch.randn_like(x).requires_grad_()

    def run(x, gamma, beta, residual):
        y, moments = cpu.run(Call(x, gamma, beta, EPS, Activation(activation), residual))
        return y, moments.mean, moments.var

    assert torch.autograd.gradcheck(run, (x, gamma, beta, residual), fast_mode=x.numel() > 24)
    assert torch.autograd.gradgradcheck(run, (x, gamma, beta, residual), fast_mode=x.numel() > 24)


@by_every_strategy
def test_hooks_on_the_input_run_once_in_a_gradient_of_a_gradient():
    x = draw(4, 3, 5, 7).requires_grad_()
    calls = []
    h = x * 1
    h.register_hook(calls.append)
    y, _ = cpu.run(Call(h, torch.ones(3), None, EPS, Activation("tanh")))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert len(calls) == 1
    dx.square().sum().backward()


@pytest.mark.parametrize("format", ["contiguous", "channels_last", "2d", "3d", "strided", "channels_last_3d"])
@pytest.mark.parametrize(("mean", "bound"), [(1e6, 1e-3), (1e4, 1e-4)])
@by_every_strategy
def test_mean_far_from_zero(format, mean, bound):
    # Near 1e6, float32 values are multiples of 1/16, so y = a*x + b would be inaccurate: both terms are that large.
    shape = {"2d": (512, 8), "3d": (16, 8, 33), "channels_last_3d": (4, 8, 3, 9, 9)}.get(format, (16, 8, 14, 28))
    x = draw(*shape, mean=mean)
    if format == "strided":
        x = x[..., ::2]
    elif "last" in format:
        x = x.contiguous(memory_format=LAST if x.dim() == 4 else LAST_3D)
    x.requires_grad_()
    dy, gamma, beta = torch.randn_like(x), torch.rand(8), torch.randn(8)
    y, moments = cpu.run(Call(x, gamma, beta, 1e-5))
    want = expect(x, gamma, beta, 1e-5, dy)
    assert float((y.detach().double() - want.y).abs().max()) < bound
    torch.testing.assert_close(moments.var.double(), want.var, rtol=1e-5, atol=0)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert float((dx.double() - want.dx).abs().max()) < bound


@pytest.mark.parametrize("format", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("shape", [(64, 16, 56, 56), (4, 2, 512, 400), (8, 96, 72, 72)])
def test_many_values_per_channel(shape, format):
    # If 200,000 values of mean 3 were added one by one in float32, the relative error would be about 1e-5. In
    # channels_last, at most 8192 rows are added in this way, so the error is about 1e-6 even with one thread.
    x = draw(*shape, mean=3.0, format=format)
    _, moments = cpu.run(Call(x, None, None, EPS))
    x64 = rows(x.double())
    torch.testing.assert_close(moments.mean.double(), x64.mean(0), rtol=6e-6, atol=0)
    torch.testing.assert_close(moments.var.double(), x64.var(0, correction=0), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_more_half_precision_values_than_float32_can_count_one_by_one():
    # torch's kernel has one float32 sum per SIMD lane, and adding 1 to a sum of 2^24 no longer changes it.
    x = torch.ones(2**13 + 8, 1, 2**7, 2**8, dtype=torch.bfloat16)
    x[-(2**12) :] = 3
    share = 2**12 / len(x)
    with torch.no_grad():
        _, moments = cpu.run(Call(x, None, None, EPS))
    torch.testing.assert_close(moments.mean.item(), 1 + 2 * share, rtol=1e-5, atol=0)
    torch.testing.assert_close(moments.var.item(), 4 * share * (1 - share), rtol=1e-5, atol=0)


@pytest.mark.parametrize("format", [torch.contiguous_format, LAST])
def test_gradients_of_one_sign_over_many_values(format):
    # Each channel has 200,000 gradients near 1. Adding them up one by one in float32 would lose precision.
    x, gamma, beta = draw(64, 16, 56, 56, format=format).requires_grad_(), torch.ones(16), torch.zeros(16)
    dy = (draw(64, 16, 56, 56) * 0.1 + 1).contiguous(memory_format=format)
    y, _ = cpu.run(Call(x, gamma, beta, EPS))
    (dx,) = torch.autograd.grad(y, x, dy)
    want = expect(x, gamma, beta, EPS, dy)
    assert_near(dx, want.dx, torch.float32, top=want.dx_terms)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("x", [draw(8, 3), draw(8, 3, 5, 7), draw(8, 3, 5, 7, format=LAST)], ids=lambda x: x.stride())
@by_every_strategy
def test_a_value_that_is_not_finite_stays_in_its_channel(bad, x):
    whole = x.clone().requires_grad_()
    broken = x.clone()
    broken[2, 1] = bad
    broken.requires_grad_()
    y, moments = cpu.run(Call(broken, torch.ones(3), torch.zeros(3), EPS, Activation("relu")))
    want, good = cpu.run(Call(whole, torch.ones(3), torch.zeros(3), EPS, Activation("relu")))
    assert (moments.mean.isfinite() & moments.var.isfinite()).tolist() == [True, False, True]
    assert not y[:, 1].isfinite().all()
    for channel in (0, 2):
        torch.testing.assert_close(y[:, channel], want[:, channel])
        torch.testing.assert_close(moments.var[channel], good.var[channel])
    y.sum().backward()
    assert broken.grad[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "x", [draw(8, 3), draw(4, 64, 64, 64), draw(4, 64, 64, 64, format=LAST)], ids=lambda x: x.stride()
)
@pytest.mark.parametrize("huge", [1e20, 3e38, float("inf")])
@by_every_strategy
def test_overflow_gives_no_warning(x, huge):  # the tests turn warnings into errors
    for values in (torch.full_like(x, huge), x.sign() * huge):
        cpu.run(Call(values.requires_grad_(), None, None, EPS))[0].sum().backward()


def test_constant_moments_carry_no_gradient(monkeypatch):
    choose(monkeypatch, "native")
    x = draw(6, 4).requires_grad_()
    assert cpu.run(Call(x, None, None, EPS))[1].var.requires_grad
    y, moments = torch_kernels.run(Call(x, eps=EPS), constant_moments=True)
    assert y.requires_grad
    assert not moments.var.requires_grad


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (torch.empty(2, 8, 7, 7), Planes(8)),  # 49 locations are enough for a loop of their own
        (torch.empty(2, 8, 2, 2), Matrix(1, 8, 4)),  # 4 locations are too few: use rows of 8 * 4 values
        (torch.empty(2, 64, 8, 8).contiguous(memory_format=LAST), Matrix(1, 64, 1)),  # 64 channels fill vectors
        (torch.empty(2, 3, 16, 16).contiguous(memory_format=LAST), Matrix(256, 3, 1)),  # 3 do not: use rows of 256 * 3
        (torch.empty(1, 3, 1, 1009).contiguous(memory_format=LAST), Matrix(1, 3, 1)),  # 1009 is prime
        (torch.empty(9000, 7), Matrix(125, 7, 1)),  # 125 is the largest divisor of 9000 with 125 * 7 <= WIDTH
        (torch.empty(60, 100), Matrix(1, 100, 1)),  # the output of a linear layer
        (torch.empty(8, 5, 7).transpose(0, 1), None),  # the channels have the largest stride, as in no network
    ],
)
def test_layout(x, want):
    assert layout_of(x) == want


@st.composite
def arrangements(draw_):
    dims = draw_(st.integers(2, 5))
    shape = [draw_(st.integers(2, 6)), *(draw_(st.integers(1, 9)) for _ in range(dims - 1))]
    steps = [draw_(st.sampled_from([1, 1, 1, 2])) for _ in range(dims)]
    others = [0, *range(2, dims)]
    order = draw_(st.sampled_from([list(range(dims)), [*others, 1], draw_(st.permutations(range(dims)))]))
    return shape, steps, order


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    arrangement=arrangements(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    activation=st.sampled_from(NAMES),
    with_residual=st.booleans(),
    eps=st.floats(1e-4, 0.1),
    mean=st.floats(-20, 20),
    std=st.floats(0.1, 10),
    seed=st.integers(0, 2**31),
)
def test_any_shape_stride_type_and_value(name, arrangement, dtype, activation, with_residual, eps, mean, std, seed):
    torch.manual_seed(seed)
    shape, steps, order = arrangement
    # Take every step-th element of a dense tensor whose dimensions are stored in this order.
    inverse = sorted(range(len(order)), key=order.__getitem__)
    stored = [shape[d] * steps[d] for d in order]
    x = draw(*stored, dtype=dtype, mean=mean, std=std).permute(inverse)[tuple(slice(None, None, s) for s in steps)]
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, name)
        # If a channel's few values are almost equal, 1/std is nearly 1/sqrt(eps) and amplifies rounding errors.
        check(x, activation, with_residual, eps=eps, scale=10.0)
