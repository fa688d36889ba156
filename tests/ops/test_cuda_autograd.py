"""Test the registered operators: gradients, double gradients, saved tensors, torch.compile, checkpoints, fallbacks."""

from contextlib import nullcontext

import pytest
import torch
from oracle import KINKS, assert_near, check_the_kinks, expect
from torch.utils.checkpoint import checkpoint

from batchnorm.ops import Activation, Choice, Running, composite, dispatch
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import autograd, cached_pass, launch

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape):
    return torch.randn(shape, device=DEVICE)


def leaves(residual=True, shape=(3, 10, 4, 4)):
    x = draw(*shape).requires_grad_()
    gamma, beta = (draw(shape[1]).requires_grad_() for _ in range(2))
    return x, gamma, beta, draw(*shape).requires_grad_() if residual else None


def fresh(c):
    zero = torch.zeros((), dtype=torch.long, device=DEVICE)
    return Running(torch.zeros(c, device=DEVICE), torch.ones(c, device=DEVICE), zero, zero.clone())


@pytest.mark.parametrize(
    ("activation", "has_residual"),
    [
        *((name, True) for name in ("identity", "leaky_relu", "silu")),
        *((name, False) for name in ("relu", "sigmoid", "tanh")),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("relu", "sigmoid", "tanh")),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("identity", "leaky_relu", "silu")),
    ],
)
def test_gradients(activation, has_residual):
    x, gamma, beta, residual = leaves(has_residual)
    dy = torch.randn_like(x)
    y, _ = autograd.run(Call(x, gamma, beta, EPS, Activation(activation, 0.1), residual))
    y.backward(dy)
    e = expect(x, gamma, beta, EPS, dy, Activation(activation, 0.1), residual)
    assert_near(y, e.y, torch.float32, "y")
    e.check_gradients(x.grad, gamma.grad, beta.grad, torch.float32)
    if has_residual:
        assert_near(residual.grad, e.dresidual, torch.float32, "dresidual")


def test_many_gradients_at_once():
    inputs = leaves()
    x, gamma, beta, residual = inputs
    y, _ = autograd.run(Call(x, gamma, beta, EPS, Activation("relu"), residual))
    several = draw(3, *y.shape)
    one_by_one = [torch.autograd.grad(y, inputs, dy, retain_graph=True) for dy in several]
    together = torch.autograd.grad(y, inputs, several, is_grads_batched=True)
    for found, expected in zip(together, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", KINKS)
def test_gradients_where_the_derivative_jumps_are_torchs(activation):
    check_the_kinks(lambda call: autograd.run(call)[0], activation, DEVICE)


@pytest.mark.parametrize("offset", [8, 3])  # with 3, rows are not aligned to whole vectors
@pytest.mark.parametrize("shape", [(3, 16, 4, 4), (40, 16), (3, 5, 4, 4)])
def test_a_gradient_that_is_a_slice_of_channels(shape, offset):
    n, c, *locations = shape
    x, gamma, beta, _ = leaves(False, shape)
    wide = draw(n, c + 2 * offset, *locations)
    if locations:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        wide = wide.contiguous(memory_format=torch.channels_last)
    dy = wide[:, offset : offset + c]
    y, _ = autograd.run(Call(x, gamma, beta, EPS, Activation("relu"), None))
    sliced, dense = (torch.autograd.grad(y, (x, gamma, beta), g, retain_graph=True) for g in (dy, dy.clone()))
    torch.testing.assert_close(sliced, dense, rtol=0, atol=0)


def plain(x, gamma, beta, activation, residual):
    return composite.run(Call(x, gamma, beta, EPS, Activation(activation), residual))


@pytest.mark.parametrize("activation", ["identity", "relu", "silu"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_double_backward_matches_plain_operations(activation, has_residual):
    given = leaves(has_residual, (3, 4, 3, 3))
    x, gamma, beta, residual = given
    wanted = [t for t in given if t is not None]
    dy, weight = draw(3, 4, 3, 3).requires_grad_(), draw(3, 4, 3, 3)
    results = []
    for y in (
        autograd.run(Call(x, gamma, beta, EPS, Activation(activation), residual))[0],
        plain(x, gamma, beta, activation, residual)[0],
    ):
        first = torch.autograd.grad(y, wanted, dy, create_graph=True)
        loss = (first[0] * weight).sum() + first[1].square().sum()
        results.append([*first, *torch.autograd.grad(loss, [x, gamma, dy])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_moments_are_differentiable():
    x, gamma, beta, _ = leaves(False)
    results = []
    for _, moments in (
        autograd.run(Call(x, gamma, beta, EPS, Activation("relu"), None)),
        plain(x, gamma, beta, "relu", None),
    ):
        loss = (moments.mean * gamma.detach()).sum() + moments.var.square().sum()
        results.append(torch.autograd.grad(loss, x)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("activation", "bytes_per_value"),
    [("relu", 1 / 8), ("relu6", 1 / 8), ("leaky_relu", 1 / 8), ("identity", 0), ("hardswish", 4)],
)
def test_saved_for_backward(activation, bytes_per_value):
    x, gamma, beta, residual = leaves(shape=(4, 16, 8, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        autograd.run(Call(x, gamma, beta, EPS, Activation(activation), residual))
    large = [t for t in saved if t.numel() > launch.STATS * 16]
    assert any(t.data_ptr() == x.data_ptr() for t in large)
    rest = [t for t in large if t.data_ptr() != x.data_ptr()]
    assert sum(t.numel() * t.element_size() for t in rest) == x.numel() * bytes_per_value


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_that_lose_the_layout_of_what_is_saved(create_graph):
    x, gamma, beta, residual = leaves(shape=(3, 16, 4, 5))
    x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    dy, results = torch.randn_like(x), []
    for context in (nullcontext(), torch.autograd.graph.save_on_cpu(pin_memory=True)):
        with context:
            y, _ = autograd.run(Call(x, gamma, beta, EPS, Activation("relu"), residual))
        results.append(torch.autograd.grad(y, (x, gamma, beta, residual), dy, create_graph=create_graph))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", pytest.param("silu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("has_residual", "where"), [(False, "x"), (True, "x"), (True, "residual")])
def test_what_is_no_number_has_the_gradients_of_plain_operations(activation, has_residual, where):
    given = x, gamma, beta, residual = leaves(has_residual, (3, 5, 4, 4))
    with torch.no_grad():
        (x if where == "x" or residual is None else residual)[1, 3, 0, 2] = float("nan")
    dy, wanted, results = torch.randn_like(x), [t for t in given if t is not None], []
    for y, _ in (
        autograd.run(Call(x, gamma, beta, EPS, Activation(activation), residual)),
        plain(x, gamma, beta, activation, residual),
    ):
        results.append((y, *torch.autograd.grad(y, wanted, dy)))
    torch.testing.assert_close(*results, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["views", "int32 counts", "float64", "another length"])
def test_running_averages_that_kernels_cannot_move(monkeypatch, kind):
    monkeypatch.setattr(dispatch, "choose", lambda call: Choice("cuda", "interpreted"))
    x = draw(8, 6) + 5
    running = fresh(6)
    if kind == "views":
        running = Running(*(torch.stack([t, t], 1)[:, 0] for t in running[:2]), *running[2:])
    elif kind == "int32 counts":
        running = Running(*running[:2], *(t.int() for t in running[2:]))
    elif kind == "float64":
        running = Running(*(t.double() for t in running[:2]), *running[2:])
    else:
        running = Running(*(t[:5] for t in running[:2]), *running[2:])
    assert autograd.train_(Call(x, None, None, EPS, Activation(), None, None, running, 0.1)) is None
    if kind == "another length":
        with pytest.raises(ValueError, match="the running mean has shape"):
            dispatch.batch_norm_(x, None, None, running)
        return
    dispatch.batch_norm_(x, None, None, running, momentum=1.0)
    torch.testing.assert_close(running.mean, x.mean(0).to(running.mean.dtype))
    assert int(running.num_batches) == 1


@pytest.mark.parametrize("has_residual", [False, True])
def test_operators_are_registered_soundly(has_residual):
    x, gamma, beta, residual = leaves(has_residual, (3, 4, 3, 3))
    args = (x, gamma, beta, residual, EPS, "relu", 0.0, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.batchnorm.fused.default, args, test_utils=checks)
    running = fresh(4)
    args = (x.detach(), gamma.detach(), beta.detach(), residual, *running, 0.1, EPS, "relu", 0.0, False)
    torch.library.opcheck(torch.ops.batchnorm.fused_.default, args, test_utils=("test_faketensor",))


def step(call, running):
    given = leaves()
    torch.manual_seed(5)
    for t in given:
        t.data.copy_(torch.randn_like(t))
    y = call(*given, running)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in given), *running]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def call(x, gamma, beta, residual, running):
        return autograd.run(Call(x, gamma, beta, EPS, Activation("relu"), residual, None, running, 0.1))[0] * 2

    expected = step(call, fresh(10))
    got = step(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic), fresh(10))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert int(got[-2]) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_does_not_update(use_reentrant):
    running = fresh(10)

    def call(x, gamma, beta, residual):
        return autograd.run(Call(x, gamma, beta, EPS, Activation("relu"), residual, None, running, 0.1))[0]

    checkpoint(call, *leaves(), use_reentrant=use_reentrant).sum().backward()
    assert int(running.num_batches) == 1


def test_update_is_known_to_autograd():
    running = fresh(10)
    x, gamma, beta, _ = leaves(False)
    before = [t._version for t in running]
    autograd.run(Call(x, gamma, beta, EPS, Activation(), None, None, running, 0.1))
    assert all(t._version > v for t, v in zip(running, before, strict=True))


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.randn(4, 3, 2, 2, dtype=torch.float64), "float64"),
        (torch.randn(4, 2, 6, 3).transpose(2, 3), "strides"),
        (torch.randn(5, 4).t(), "strides"),
        (torch.empty(2, 2**15, 3, device="meta"), "32767 channels"),
        (torch.empty(2, 2**16, device="meta"), "65535 channels"),
    ],
)
def test_what_the_kernels_refuse(x, reason):
    assert reason in autograd.refusal(Call(x))


def test_many_channels():
    assert autograd.refusal(Call(torch.empty(2, 2**15 - 1, 3, device="meta"))) is None
    assert autograd.refusal(Call(torch.empty(2, 2**15, device="meta"))) is None


def test_launching_what_is_refused_says_so():
    with pytest.raises(ValueError, match="strides"):
        launch.forward(Call(torch.randn(5, 4).t()))


def test_rocm_takes_plain_operations(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    autograd._refusal.cache_clear()
    assert "ROCm" in autograd.refusal(Call(torch.randn(4, 3)))
    autograd._refusal.cache_clear()


def test_programs_do_not_wait_for_each_other_on_other_gpus(monkeypatch):
    x = torch.randn(64, 8, 4, 4)
    assert cached_pass._find_pass(x.shape, x.stride(), 4, x.device, False, False).path == "once"
    monkeypatch.setattr(cached_pass, "is_tuned", lambda _: False)
    assert cached_pass._find_pass(x.shape, x.stride(), 4, x.device, False, False).path == "stream"
