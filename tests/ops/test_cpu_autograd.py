"""Compare the compiled CPU kernel with the oracle on many shapes, and test which calls are left to other paths."""

import ctypes
from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F
from fast_path import assert_checkpoints, assert_recomputes, assert_skips, copy_of, new_running
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import KINKS, assert_near, check_the_kinks, expect, off_the_kinks, spread
from torch.autograd import forward_ad

from batchnorm import layers, ops
from batchnorm.ops import Activation, cpu
from batchnorm.ops.activation import IDENTITY, NAMES
from batchnorm.ops.call import Call
from batchnorm.ops.cpu import autograd, compiler

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
EPS = 1e-3
RELU = Activation("relu")
ALL = [*map(Activation, NAMES)]

pytestmark = pytest.mark.skipif(compiler.kernels() is None, reason=f"no compiled kernel: {compiler.unavailable()}")


def last(x):
    return x.contiguous(memory_format=LAST if x.dim() == 4 else LAST_3D)


SHAPES = {
    "vectors": lambda: torch.randn(60, 100),
    "two vectors": lambda: torch.randn(2, 5) * 3,
    "one feature": lambda: torch.randn(300, 1),
    "many rows": lambda: torch.randn(3000, 70),
    "many features of few rows": lambda: torch.randn(200, 1025),
    "many features of many rows": lambda: torch.randn(700, 1024),
    "images": lambda: torch.randn(4, 6, 8, 8),
    "images, more than are added up at a time": lambda: torch.randn(515, 3, 5, 7),
    "images of one row at most": lambda: torch.randn(3, 2, 32, 32),
    "images of several rows and a rest": lambda: torch.randn(3, 5, 33, 41),
    "images of several rows and no rest": lambda: torch.randn(3, 5, 32, 40),
    "one example, more than is added up at a time": lambda: torch.randn(1, 2, 300, 300),
    "late images": lambda: torch.randn(8, 40, 7, 7),
    "sequences": lambda: torch.randn(3, 5, 40),
    "volumes": lambda: torch.randn(2, 3, 4, 5, 6),
    "one channel": lambda: torch.randn(4, 1, 30, 30),
    "channels_last": lambda: last(torch.randn(4, 16, 6, 6)),
    "channels_last, an odd number of channels": lambda: last(torch.randn(4, 67, 3, 5)),
    "channels_last, few channels and a rest": lambda: last(torch.randn(7, 3, 11, 13)),
    "channels_last, fewer values than a row": lambda: last(torch.randn(1, 7, 2, 2)),
    "channels_last, several blocks and a rest": lambda: last(torch.randn(3, 3, 161, 163)),
    "volumes, channels_last": lambda: last(torch.randn(2, 16, 3, 4, 5)),
    "a mean of 3 deviations": lambda: torch.randn(4, 6, 8, 8) + 3,
    "zero variance in one channel": lambda: torch.randn(4, 2, 8, 8) * torch.tensor([0.0, 1.0]).view(2, 1, 1),
    "values of 1e15": lambda: torch.randn(4, 6, 8, 8) * 1e15,
}


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    monkeypatch.setattr(autograd, "LARGE", 1 << 40)


def run(x, running, momentum=0.1, activation=IDENTITY, gamma=None, beta=None, residual=None):
    assert autograd.form_of(x, activation) is not None
    y = cpu.train_(Call(x, gamma, beta, EPS, activation, residual, None, running, momentum))
    if y is not None and y.requires_grad:
        assert type(y.grad_fn).__name__ == "CompiledFunctionBackward"
    return y


def compare(x, activation=IDENTITY, momentum=0.1, with_residual=False):
    x = x.requires_grad_()
    gamma, beta = ((torch.rand(x.shape[1]) + 0.5).mul_(spread(activation)).requires_grad_() for _ in range(2))
    residual = torch.randn_like(x).requires_grad_() if with_residual else None
    dy, running = torch.randn_like(x), new_running(x.shape[1])
    dy = off_the_kinks(dy, x, gamma, beta, EPS, activation, residual)
    want_running = copy_of(running)
    want = expect(x, gamma, beta, EPS, dy, activation, residual)
    ops.batch_norm_(x.detach(), gamma, beta, want_running, momentum, EPS, activation=activation)

    y = run(x, running, momentum, activation, gamma, beta, residual)
    leaves = [v for v in (x, gamma, beta, residual) if v is not None]
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    y.backward(dy)
    for found, leaf in zip(first, leaves, strict=True):
        assert torch.equal(found, leaf.grad)
    assert y.stride() == x.stride() == x.grad.stride()
    assert_near(y, want.y, x.dtype, "y")
    want.check_gradients(x.grad, gamma.grad, beta.grad, x.dtype)
    if residual is not None:
        assert_near(residual.grad, want.dresidual, x.dtype, "dresidual")
    for found, expected in zip(running, want_running, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * max(1, float(x.detach().abs().max())))


@pytest.mark.parametrize("activation", [IDENTITY, RELU], ids=lambda a: a.name)
@pytest.mark.parametrize("name", SHAPES)
def test_output_gradients_and_averages(name, activation):
    compare(SHAPES[name](), activation)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", [*ALL, Activation("leaky_relu", -0.5)], ids=str)
@pytest.mark.parametrize("name", ["vectors", "channels_last, few channels and a rest", "late images"])
def test_activation(name, activation, with_residual):
    compare(SHAPES[name](), activation, with_residual=with_residual)


@pytest.mark.parametrize("name", SHAPES)
def test_a_residual_on_every_shape(name):
    if name != "values of 1e15":
        compare(SHAPES[name](), RELU, with_residual=True)


@pytest.mark.parametrize("activation", KINKS)
def test_gradients_where_the_derivative_jumps_are_torchs(activation):
    running = new_running(24)
    check_the_kinks(lambda call: cpu.train_(call._replace(running=running, momentum=0.1)), activation)


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "silu"])
def test_smooth_activations_are_torchs_far_out_and_near_zero(activation):
    z = torch.tensor([0.0, 1e-6, -1e-4, 0.01, -0.29, 0.31, 3.0, -9.0, 20.0, -88.0, 200.0, -1e4])
    y = run(torch.randn(2, len(z)), new_running(len(z)), 0.1, Activation(activation), torch.zeros(len(z)), z)
    torch.testing.assert_close(y[0], Activation(activation)(z), rtol=1e-6, atol=1e-30)


def test_a_residual_that_lies_otherwise_in_memory_or_has_another_type():
    x = last(torch.randn(4, 6, 8, 8))
    residual = torch.randn(4, 6, 8, 8).bfloat16().requires_grad_()
    y = run(x, new_running(6), activation=RELU, residual=residual)
    z = F.batch_norm(x, None, None, training=True, eps=EPS) + residual
    torch.testing.assert_close(y, z.relu())
    (found,) = torch.autograd.grad(y.sum(), residual)
    torch.testing.assert_close(found, (z > 0).bfloat16())


@pytest.mark.parametrize(("activation", "bytes_each"), [("identity", 0), ("relu6", 1), ("hardswish", 4)])
def test_what_a_residual_adds_to_what_is_kept(activation, bytes_each):
    x, residual = torch.randn(32, 6, 8, 8, requires_grad=True), torch.randn(32, 6, 8, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(x, new_running(6), activation=Activation(activation), residual=residual)
    assert sum(t.nbytes for t in kept) == x.nbytes + bytes_each * x.numel()


def test_a_residual_that_broadcasts_is_left_to_others():
    layer, x, residual = layers.BatchNorm2d(6), torch.randn(4, 6, 8, 8), torch.randn(4, 6, 1, 1)
    assert run(x, new_running(6), activation=RELU, residual=residual) is None
    with pytest.raises(ValueError, match="residual"):
        layer(x, residual=residual)


@pytest.mark.parametrize("momentum", [1.0, 0.0, None])
@pytest.mark.parametrize("name", ["images", "channels_last"])
def test_momentum(name, momentum):
    compare(SHAPES[name](), momentum=momentum)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    channels=st.integers(1, 300),
    size=st.lists(st.integers(1, 40), max_size=3),
    channels_last=st.booleans(),
    mean=st.sampled_from([0.0, 5.0, -300.0]),
    activation=st.sampled_from(ALL),
    with_residual=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n, channels, size, channels_last, mean, activation, with_residual, seed):
    while n * channels * prod(size) > 300_000:
        n, channels, size = 1 + n // 2, 1 + channels // 2, [1 + s // 2 for s in size]
    if n * prod(size) < 2:
        n = 2
    torch.manual_seed(seed)
    x = torch.randn(n, *size, channels).movedim(-1, 1) if channels_last else torch.randn(n, channels, *size)
    compare(x + mean, activation, with_residual=with_residual)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_threads_change_no_bit(name, with_residual):
    x = SHAPES[name]()
    residual = torch.randn_like(x) if with_residual else None
    gamma, beta, dy = torch.rand(x.shape[1]), torch.rand(x.shape[1]), torch.randn_like(x)
    for activation in (RELU, Activation("silu")):
        form = autograd.form_of(x, activation)
        found = []
        for threads in (1, 2, 3, 5):
            out = call(form, threads, x, gamma, beta, dy, residual)
            found.append([bytes(t.view(torch.uint8).numpy()) for t in out])
        assert all(bits == found[0] for bits in found)


def call(form, threads, x, gamma, beta, dy, residual):
    """Call the kernels with outputs inside larger buffers, and check that they do not write outside the outputs."""
    around, kernels, channels = 64, compiler.kernels(), x.shape[1]
    sizes = [x.numel(), autograd.ROWS_KEPT * channels, x.numel(), channels, channels, x.numel()]
    memory = [torch.full((size + 2 * around,), torch.nan) for size in sizes]
    y, kept, dx, dgamma, dbeta, dz = (m.data_ptr() + 4 * around for m in memory)
    marks = torch.full((x.numel() + 2 * around,), 7, dtype=torch.uint8)
    marked, written = residual is not None and not form.is_smooth, residual is not None or form.is_smooth
    passed = marks.data_ptr() + around if marked else None
    inputs = x.data_ptr(), gamma.data_ptr(), beta.data_ptr(), None if residual is None else residual.data_ptr()
    assert not kernels.forward(form.address, threads, EPS, 0.1, *inputs, None, None, None, y, passed, kept)
    given_ = x.data_ptr(), dy.data_ptr(), inputs[-1], passed, kept
    assert not kernels.backward(form.address, threads, *given_, dx, dz if written else None, dgamma, dbeta)
    if not written:
        assert memory.pop().isnan().all()
    for m in memory:
        assert m[:around].isnan().all()
        assert m[-around:].isnan().all()
        assert not m[around:-around].isnan().any()
    assert (marks[:around] == 7).all()
    assert (marks[-around:] == 7).all()
    assert not marked or (marks[around:-around] < 2).all()
    return [*memory, marks]


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


@pytest.mark.parametrize("wanted", ["x", "gamma", "beta", "residual"])
@pytest.mark.parametrize("activation", [IDENTITY, RELU, Activation("silu")], ids=lambda a: a.name)
def test_only_one_gradient_is_wanted_with_a_residual(activation, wanted):
    x = torch.randn(4, 6, 8, 8)
    tensors = {"x": x, "gamma": torch.rand(6) + 0.5, "beta": torch.randn(6), "residual": torch.randn_like(x)}
    dy = torch.randn_like(x)
    want = expect(x, tensors["gamma"], tensors["beta"], EPS, dy, activation, tensors["residual"])
    tensors[wanted].requires_grad_()
    (found,) = torch.autograd.grad(run(running=new_running(6), activation=activation, **tensors), tensors[wanted], dy)
    assert_near(found, getattr(want, f"d{wanted}"), torch.float32, wanted, top=want.sum_terms)


@pytest.mark.parametrize("name", ["contiguous", "bfloat16", "float64"])
@pytest.mark.parametrize("activation", ["relu6", "silu"])
def test_saved_tensors_of_a_residual_that_come_back_otherwise(name, activation):
    x, residual, dy = (last(torch.randn(4, 6, 8, 8)).bfloat16().float().requires_grad_() for _ in range(3))
    layer = layers.BatchNorm2d(6, activation=activation)
    want = torch.autograd.grad(layer(x, residual), (x, residual, layer.weight), dy)
    with torch.autograd.graph.saved_tensors_hooks(HOOKS[name], lambda t: t):
        y = layer(x, residual)
    for found, expected in zip(torch.autograd.grad(y, (x, residual, layer.weight), dy), want, strict=True):
        torch.testing.assert_close(found, expected)


def test_parameters_with_gaps_between_them():
    x = torch.randn(20, 6)
    wide = torch.rand(2, 12, requires_grad=True)
    gamma, beta = wide[:, ::2]
    want = expect(x, gamma, beta, EPS, torch.ones_like(x)).y
    layer = layers.BatchNorm1d(6, eps=EPS)
    layer.weight.data, layer.bias.data = gamma.data, beta.data
    assert_near(layer(x), want, torch.float32)


def test_the_backward_pass_keeps_x_and_five_numbers_a_channel():
    x = torch.randn(32, 6, 8, 8, requires_grad=True)
    kept = []
    layer = layers.BatchNorm2d(6, activation="relu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert sum(t.numel() for t in kept) == x.numel() + layer.weight.numel()
    assert y.grad_fn.kept.shape == (5, 6)
    with torch.no_grad():
        y.zero_()  # the backward pass does not read y
    y.backward(torch.ones_like(y))


@pytest.mark.parametrize("name", ["images", "channels_last"])
@pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)
def test_second_derivatives_are_torchs(name, activation):
    added = torch.randn_like(SHAPES[name]()) if activation.name in ("relu6", "hardswish") else None

    def ours(x, gamma, beta):
        return run(x, new_running(x.shape[1]), activation=activation, gamma=gamma, beta=beta, residual=added)

    def torchs(x, gamma, beta):
        y = F.batch_norm(x, None, None, gamma, beta, training=True, eps=EPS)
        return activation(y if added is None else y + added)

    leaf, dy = SHAPES[name](), torch.randn_like(SHAPES[name]())
    found = []
    for forward in (ours, torchs):
        torch.manual_seed(0)
        x, d = leaf.clone().requires_grad_(), dy.clone().requires_grad_()
        gamma, beta = (torch.rand(x.shape[1]).add(0.5).requires_grad_() for _ in range(2))
        first = torch.autograd.grad(forward(x, gamma, beta), (x, gamma, beta), d, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, gamma, d))
        found.append((*first, *second))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.detach().abs().max()))


@pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)
def test_a_batch_of_gradients(activation):
    x = last(torch.randn(20, 3, 12, 12)).requires_grad_()
    gamma = torch.rand(3, requires_grad=True)
    y = run(x, new_running(3), activation=activation, gamma=gamma)
    dys = torch.randn(2, *y.shape)
    both = torch.autograd.grad(y, (x, gamma), dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        for found, want in zip(both, torch.autograd.grad(y, (x, gamma), dy, retain_graph=True), strict=True):
            torch.testing.assert_close(found[i], want, rtol=1e-4, atol=1e-4)


def with_value(value):
    return torch.randn(4, 6, 8, 8).index_put(tuple(torch.tensor(i) for i in (1, 2, 3, 4)), torch.tensor(value))


LEFT = {
    "NaN": lambda: with_value(torch.nan),
    "inf": lambda: with_value(torch.inf),
    "-inf": lambda: with_value(-torch.inf),
    "a variance beyond float32, of mean 0": lambda: torch.tensor([1e25, -1e25]).repeat(4, 6, 8, 4),
    "NaN in channels_last": lambda: last(torch.randn(4, 16, 6, 6) / torch.zeros(6)),
    "inf in channels_last": lambda: last(with_value(torch.inf)),
    "NaN in a vector": lambda: torch.randn(8, 3).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(torch.nan)),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_batch_that_is_not_finite_is_skipped_and_counted(name):
    x = LEFT[name]()
    running = new_running(x.shape[1])
    before = copy_of(running)
    assert run(x, running) is None
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))
    assert_skips((layers.BatchNorm2d if x.dim() == 4 else layers.BatchNorm1d)(x.shape[1]), x)


FAR = {
    "vectors": lambda: torch.randn(64, 16),
    "images": lambda: torch.randn(8, 16, 6, 6),
    "large images": lambda: torch.randn(8, 3, 100, 110),
    "channels_last": lambda: last(torch.randn(8, 16, 6, 6)),
    "few channels in channels_last": lambda: last(torch.randn(8, 3, 100, 110)),
}


@pytest.mark.parametrize(("mean", "bound"), [(1e6, 1e-3), (1e4, 1e-4)])
@pytest.mark.parametrize("name", FAR)
def test_accurate_far_from_zero(name, mean, bound):
    x = (FAR[name]() + mean).requires_grad_()
    channels, dy = x.shape[1], torch.randn_like(x)
    gamma, beta = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    want = expect(x, gamma, beta, EPS, dy)
    y = run(x, new_running(channels), gamma=gamma, beta=beta)
    y.backward(dy)
    assert float((y.detach() - want.y).abs().max()) < bound
    assert float((x.grad - want.dx).abs().max()) < bound * float(want.dx.abs().max())
    assert float((gamma.grad - want.dgamma).abs().max()) < bound * float(want.sum_terms)


def test_one_value_far_from_the_others():
    x = torch.randn(64, 6, 8, 8)
    x[0, :, 0, 0] = 1e6
    compare(x)


@pytest.mark.parametrize("name", ["vectors", "images", "channels_last"])
@pytest.mark.parametrize("activation", [IDENTITY, RELU, Activation("silu")], ids=lambda a: a.name)
def test_outputs_are_computed_again(name, activation):
    assert_recomputes(partial(run, activation=activation), SHAPES[name]())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["images", "channels_last"])
def test_computed_again_in_a_checkpoint(name, reentrant):
    x = SHAPES[name]()
    assert_checkpoints(layers.BatchNorm2d(x.shape[1], activation="relu"), x, reentrant)


def test_torchs_kernel_is_taken_where_there_is_nothing_to_win(monkeypatch):
    monkeypatch.undo()
    x = last(torch.randn(40, 64, 14, 14)).requires_grad_()
    names = {}
    for form, batch in (("rows", x), ("planes", x.contiguous())):
        for activation in ("identity", "relu"):
            y = layers.BatchNorm2d(64, activation=activation)(batch)
            names[form, activation] = type(y.grad_fn).__name__
    assert names.pop(("rows", "identity")) == "NativeBatchNormBackward0"
    assert set(names.values()) == {"CompiledFunctionBackward"}
    x = torch.randn(32, 128, 80).movedim(-1, 1)  # channels last; torch's kernel would return another layout
    assert layers.BatchNorm1d(80)(x).stride() == x.stride()


def test_other_batches_are_left_to_others():
    for x in (
        torch.randn(4, 6, 8, 8).double(),
        torch.randn(4, 6, 8, 8).bfloat16(),
        torch.randn(4, 6, 8, 16)[..., ::2],
        torch.randn(1, 6),
        torch.randn(0, 6),
        torch.randn(4, 0),
        torch.randn(6),
    ):
        assert autograd.form_of(x, RELU) is None


def test_fewer_threads_than_were_asked_for(monkeypatch):
    """If OpenMP starts fewer threads than asked for, as with OMP_THREAD_LIMIT, these threads do all the work."""
    work = ctypes.CFUNCTYPE(
        None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    )
    parallel = work(lambda function, data, *_: function(data))
    number, count = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0), ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
    addresses = tuple(ctypes.cast(f, ctypes.c_void_p).value for f in (parallel, number, count))
    kernels = compiler.kernels()._replace(openmp=addresses)
    monkeypatch.setattr(compiler, "_load", lambda: kernels)
    for name in ("images", "many rows", "late images"):
        compare(SHAPES[name]())


HOOKS = {
    "contiguous": lambda t: t.contiguous(memory_format=torch.contiguous_format),
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
}


@pytest.mark.parametrize("name", HOOKS)
def test_saved_tensors_that_come_back_otherwise(name):
    x, dy = last(torch.randn(4, 6, 8, 8)).bfloat16().float().requires_grad_(), torch.randn(4, 6, 8, 8)
    layer = layers.BatchNorm2d(6, activation="relu")
    want = torch.autograd.grad(layer(x), (x, layer.weight), dy)
    with torch.autograd.graph.saved_tensors_hooks(HOOKS[name], lambda t: t):
        y = layer(x)
    for found, expected in zip(torch.autograd.grad(y, (x, layer.weight), dy), want, strict=True):
        torch.testing.assert_close(found, expected)


def test_saved_tensors_that_come_back_otherwise_under_another_default_type():
    x, dy = last(torch.randn(4, 6, 8, 8)).requires_grad_(), torch.randn(4, 6, 8, 8)
    layer = layers.BatchNorm2d(6)
    (want,) = torch.autograd.grad(layer(x), x, dy)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autograd.graph.saved_tensors_hooks(HOOKS["contiguous"], lambda t: t):
            y = layer(x)
        (found,) = torch.autograd.grad(y, x, dy)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, want)


def test_saved_tensors_that_come_back_without_memory():
    x, dy = torch.randn(4, 6, 8, 8, requires_grad=True), torch.randn(4, 6, 8, 8)
    layer = layers.BatchNorm2d(6)
    (want,) = torch.autograd.grad(layer(x), x, dy)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch._neg_view(-t)):
        y = layer(x)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], want)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.to("meta")):
        y = layer(x)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, x, dy)


def test_parameters_whose_memory_holds_other_values():
    x, gamma = torch.randn(8, 3), torch.rand(3) + 0.5
    for lazy, plain in ((torch._neg_view(gamma), -gamma), (torch._efficientzerotensor(3), torch.zeros(3))):
        found, want = (ops.normalize_batch_(x, g, None, new_running(3)) for g in (lazy, plain))
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("which", ["x", "gamma"])
def test_what_cannot_be_saved_moves_nothing(which):
    x, layer = torch.randn(8, 3, requires_grad=True), layers.BatchNorm1d(3)
    with torch.inference_mode():
        if which == "x":
            x = torch.randn(8, 3)
        else:
            layer = layers.BatchNorm1d(3)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        layer(x)
    assert layer.num_batches_tracked == 0
    assert not layer.running_mean.any()


@pytest.mark.parametrize("change", ["gaps", "expanded", "float count", "int32 count"])
def test_averages_that_the_kernel_cannot_move(change):
    layer, x = layers.BatchNorm2d(6), torch.randn(4, 6, 8, 8) + 1
    around = torch.zeros(24)
    if change == "gaps":
        layer.running_mean = around[:12][::2]
    elif change == "expanded":
        layer.running_var = around[:1].add_(1).expand(6)
    else:
        counts = torch.zeros(4, dtype=torch.float32 if "float" in change else torch.int32)
        layer.num_batches_tracked = counts[0]
    layer(x)
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2, 3)))
    assert layer.num_batches_tracked == 1
    assert around[1::2].count_nonzero() == around[12:].count_nonzero() == 0


def test_averages_of_another_shape_at_the_same_place():
    layer, x = layers.BatchNorm1d(6, affine=False), torch.randn(8, 6)
    layer(x)
    layer.running_mean.data = layer.running_mean.data[:3]
    with pytest.raises((ValueError, RuntimeError)):
        layer(x)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_without_memory_are_refused(name):
    layer = layers.BatchNorm2d(6)
    setattr(layer, name, torch.nn.Parameter(torch.ones(6, device="meta")))
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 6, 8, 8))


def test_averages_keep_their_digits_when_they_move_far():
    layer, x = layers.BatchNorm2d(6, momentum=None), torch.randn(4, 6, 8, 8)
    layer(x * 1e-4)
    torch.testing.assert_close(layer.running_var, (x * 1e-4).var((0, 2, 3)), rtol=1e-5, atol=0)
    layer.momentum = 1.0
    layer(x * 1e4 + 1e8)
    layer(x + 1)
    torch.testing.assert_close(layer.running_mean, (x + 1).mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_var, x.var((0, 2, 3)))


def test_a_negative_momentum_is_one():
    x, running = torch.randn(8, 3), new_running(3)
    expected = running.mean - 0.5 * (x.mean(0) - running.mean)
    run(x, running, -0.5)
    torch.testing.assert_close(running.mean, expected)


def test_tangents_in_the_backward_pass():
    x, dy, tangent = torch.randn(8, 3, requires_grad=True), torch.randn(8, 3), torch.randn(8, 3)
    found = []
    for layer in (layers.BatchNorm1d(3), torch.nn.BatchNorm1d(3)):
        y = layer(x)
        with forward_ad.dual_level():
            (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent))
            found.append(forward_ad.unpack_dual(dx).tangent)
    torch.testing.assert_close(*found)


def test_gradients_without_memory():
    x = torch.randn(8, 3, requires_grad=True)
    dy = torch.randn(8, 3)
    for given_, same in ((torch._efficientzerotensor((8, 3)), torch.zeros(8, 3)), (torch._neg_view(dy), -dy)):
        y = run(x, new_running(3))
        (found,) = torch.autograd.grad(y, x, given_, retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(y, x, same)[0])
    torch.testing.assert_close(layers.BatchNorm1d(3)(torch._neg_view(dy)), layers.BatchNorm1d(3)(-dy))


def test_no_gradient_is_none():
    class Forget(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = torch.randn(8, 3, requires_grad=True)
    Forget.apply(run(x, new_running(3))).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize(("std", "eps"), [(1e-20, 1e-42), (3e-15, 1e-60)])
def test_scales_beyond_float32_take_another_way(std, eps):
    x = (torch.randn(64, 16) * std).requires_grad_()
    dy = torch.randn(64, 16)
    ours, theirs = layers.BatchNorm1d(16, eps=eps), torch.nn.BatchNorm1d(16, eps=eps)
    (found,), (want,) = torch.autograd.grad(ours(x), x, dy), torch.autograd.grad(theirs(x), x, dy)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_relu_lets_gradients_of_nan_pass():
    x = torch.randn(8, 3)
    beta = torch.tensor([torch.nan, 0.0, 0.0], requires_grad=True)
    run(x, new_running(3), activation=RELU, beta=beta).backward(torch.ones(8, 3))
    assert beta.grad[0] == 8  # as with torch's ReLU
