"""Test woven sign bits (see sign_bits.py), used for small channels-first images, and the kernels that read them.

Outputs start as NaN, so that tests fail if a value is not written.
"""

import pytest
import torch
from kernels import EPS, Way, arranged, compare, planned, run
from oracle import expect
from torch._dynamo.testing import CompileCounterWithBackend

from batchnorm.bench.kernel_rows import all_layers
from batchnorm.ops import Activation, Running
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import autograd, cached_pass, driver, launch, resident, schedule
from batchnorm.ops.cuda.layout import geometry_of
from batchnorm.ops.cuda.sign_bits import is_woven, unpack

pytestmark = [
    pytest.mark.usefixtures("unwritten_is_nan"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
RELU = Activation("relu")
SHAPE = (9, 16, 7, 7)
STREAM = Way("stream", 256)  # two tiles per channel; smaller tiles take the interpreter longer


@pytest.fixture
def device(resident_device):
    return resident_device


def drawn(device, shape=SHAPE, dtype=torch.bfloat16):
    return arranged(shape, "first", dtype, device), arranged(shape, "first", dtype, device, 0.0)


def misaligned(t):
    """Return a dense copy at an address that is not a multiple of 16 bytes."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def forward(x, residual, p, activation=RELU):
    return launch.forward(Call(x, None, None, EPS, activation, residual), True, p)


def check_backward(x, residual, bits, stats, p, dy=None, wanted=torch.bfloat16):
    dy = torch.randn_like(x) if dy is None else dy
    ones = torch.ones(x.shape[1], device=x.device)
    e = expect(x, ones, ones * 0, EPS, dy, RELU, residual)
    dx, dgamma, dbeta, dr = launch.backward(dy, x, None, bits, stats, *RELU, wanted, p)
    e.check_gradients(dx, dgamma, dbeta, x.dtype)
    assert dr is None if wanted is None else torch.equal(dr == 0, (dy == 0) | ~unpack(bits, x))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_is_woven_is_known_from_the_tensor_alone(itemsize):
    found = 0
    for layer in all_layers():
        g = geometry_of(torch.empty(layer.shape, device="meta"))
        for residual in (False, True):
            for backward in (False, True):
                expected = resident.weaves(g, itemsize, backward, residual)
                r = resident.choose(g, itemsize, backward, residual, 132)
                assert (r is not None and r.plane > 0) == expected
        both = {resident.weaves(g, itemsize, backward, True) for backward in (False, True)}
        assert len(both) == 1  # a backward pass reads the bits that the forward pass wrote
        found += both == {True}
    assert found


def test_bits_lie_as_y_does(device):
    x, residual = drawn(device)
    y, _, bits = forward(x, residual, planned(x, 2))
    assert is_woven(bits)
    assert torch.equal(unpack(bits, x), y > 0)
    assert bits.numel() * 8 == x.numel()


@pytest.mark.parametrize(
    "view", ["sliced", "misaligned x", "misaligned residual", "transposed residual", "float32 residual"]
)
def test_tensors_of_all_kinds(device, view):
    x, residual = drawn(device)
    if view == "sliced":
        x = torch.cat([x + 1, x, x - 1], 1)[:, 16:32]
    elif view == "misaligned x":
        x = misaligned(x)
    elif view == "misaligned residual":
        residual = misaligned(residual)
    elif view == "transposed residual":
        residual = residual.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        residual = residual.float()
    got, e = run(x, planned(x, 2), ("relu",), residual)
    compare(x, got, e, residual)


@pytest.mark.parametrize(
    "activation", [("silu",), *(pytest.param((name,), marks=pytest.mark.slow) for name in ("sigmoid", "tanh"))]
)
def test_activations_whose_gradient_needs_the_residual(device, activation):
    x, residual = drawn(device)
    got, e = run(x, planned(x, 2), activation, residual)
    compare(x, got, e, residual)


@pytest.mark.parametrize("kind", ["float32", "misaligned", "transposed", "not asked for"])
def test_gradients_of_all_kinds(device, kind):
    x, residual = drawn(device)
    dy = torch.randn_like(x)
    if kind == "float32":
        dy = dy.float()
    elif kind == "misaligned":
        dy = misaligned(dy)
    elif kind == "transposed":
        dy = dy.transpose(2, 3).contiguous().transpose(2, 3)
    p = planned(x, 2)
    _, stats, bits = forward(x, residual, p)
    check_backward(x, residual, bits, stats, p, dy, None if kind == "not asked for" else torch.bfloat16)


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        ("resident", torch.bfloat16),
        ("other", None),
        pytest.param("resident", None, marks=pytest.mark.slow),
        pytest.param("other", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_one_pass_by_other_kernels(device, first, wanted):
    x, residual = drawn(device)
    ways = [planned(x, 2), schedule.make(geometry_of(x), 2, *STREAM, 4)]
    ways = ways if first == "resident" else ways[::-1]
    _, stats, bits = forward(x, residual, ways[0])
    assert is_woven(bits) == (first == "resident")
    check_backward(x, residual, bits, stats, ways[1], wanted=wanted)


def test_launches_that_the_device_refuses(device, monkeypatch):
    class Refusing:
        def __call__(self, programs, arguments, stream):
            raise driver.Refused("CUDA: too many blocks in cooperative launch")

    x, residual = drawn(device)
    p = planned(x, 2)
    monkeypatch.setattr(resident, "_kernel", lambda *_: Refusing())
    resident.prepared.cache_clear()
    y, stats, bits = forward(x, residual, p)
    assert is_woven(bits)  # under torch.compile, the fake kernel promises woven bits
    assert torch.equal(unpack(bits, x), y > 0)
    check_backward(x, residual, bits, stats, p)


@pytest.fixture
def chosen(device, monkeypatch):
    """Make the dispatcher choose the resident kernel for small tensors, too, and on the CPU."""
    monkeypatch.setattr(resident, "megabytes_of", lambda *_: 100.0)
    monkeypatch.setattr(resident, "runs_on", lambda _: True)
    caches = (cached_pass._pass, resident.choose)
    for one in caches:
        one.cache_clear()
    yield device
    for one in caches:
        one.cache_clear()


def leaves(device, dtype=torch.bfloat16):
    x, residual = (t.requires_grad_() for t in drawn(device, dtype=dtype))
    gamma, beta = (torch.randn(SHAPE[1], device=device, requires_grad=True) for _ in range(2))
    return x, gamma, beta, residual


def test_what_the_compiler_is_told(chosen):
    x, gamma, beta, residual = leaves(chosen)
    for given in ((gamma, beta, residual), (gamma.bfloat16(), beta, residual), (None, None, residual.float())):
        args = (x.detach(), *(None if t is None else t.detach() for t in given), EPS, "relu", 0.0, True)
        bits = torch.ops.batchnorm.fused(*args)[2]
        assert is_woven(bits) == (given[0] is gamma)
        torch.library.opcheck(torch.ops.batchnorm.fused.default, args, test_utils=("test_faketensor",))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(chosen, dynamic):
    def call(x, gamma, beta, residual):
        running = Running(*(torch.zeros(SHAPE[1], device=chosen) for _ in range(2)), *counts)
        return autograd.run(Call(x, gamma, beta, EPS, RELU, residual, None, running, 0.1))[0] * 2

    given = leaves(chosen)
    counts = [torch.zeros((), dtype=torch.long, device=chosen) for _ in range(2)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for a, b in zip(*(torch.autograd.grad(f(*given).sum(), given) for f in (call, compiled)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.triton
def test_of_small_tensors_the_compiler_knows_no_more_than_that(monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(resident, "runs_on", lambda _: True)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def call(x, residual):
        return autograd.run(Call(x, None, None, EPS, RELU, residual))[0] * 2

    counts = []
    for size in (5, 7, 9):
        x, residual = (torch.randn(2, 8, size, size, device=device, requires_grad=True) for _ in range(2))
        call(x, residual).sum().backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    torch._dynamo.mark_dynamic(x := torch.randn(2, 8, 7, 7, device=device), 2)
    call(x, torch.randn_like(x))


def recorded(ran, run):
    def call(name, *args):
        launched = run(name, *args)
        ran[name] = launched is not None
        return launched

    return call


KINDS = [
    *("plain", "bfloat16 gamma", "float32 residual", "misaligned x", "misaligned residual", "misaligned and sliced"),
    "no residual",
]


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        *((kind, "relu") for kind in KINDS),
        *(("plain", activation) for activation in ("identity", "silu")),
        *(pytest.param(kind, a, marks=pytest.mark.slow) for kind in KINDS[1:] for a in ("identity", "silu")),
    ],
)
def test_explain_says_what_runs(chosen, monkeypatch, kind, activation):
    x, gamma, beta, residual = (t.detach() for t in leaves(chosen))
    gamma = gamma.bfloat16() if kind == "bfloat16 gamma" else gamma
    x = misaligned(x) if kind == "misaligned x" else x
    residual = misaligned(residual) if kind == "misaligned residual" else residual
    if kind == "misaligned and sliced":  # the library copies a residual that is not dense, and the copy is aligned
        residual = misaligned(torch.cat([residual, residual], 1))[:, :16]
    residual = residual.float() if kind == "float32 residual" else residual
    given = (x, gamma, beta, None if kind == "no residual" else residual)
    names = ("forward", "backward")
    call = Call(*given[:3], EPS, Activation(activation), given[3])
    paths = launch.paths(call)
    ran = {}
    monkeypatch.setattr(launch, "_launch_resident", recorded(ran, launch._launch_resident))
    for t in given:
        if t is not None:
            t.requires_grad_()
    y, _ = autograd.run(Call(*given[:3], EPS, Activation(activation), given[3]))
    y.backward(torch.randn_like(y))
    assert ran == {name: True for name, path in zip(names, paths, strict=True) if path == "resident"}


def test_double_backward(chosen):
    x, gamma, beta, residual = leaves(chosen, torch.float32)
    y, _ = autograd.run(Call(x, gamma, beta, EPS, RELU, residual))
    dy = torch.randn_like(y)
    plain = torch.autograd.grad(y, (x, residual), dy, retain_graph=True)
    twice = torch.autograd.grad(y, (x, residual), dy, create_graph=True)
    torch.testing.assert_close(plain, twice, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(torch.autograd.grad(twice[0].square().sum(), x)[0]).all()


def test_a_relu_lets_through_what_is_no_number(device):
    x, residual = drawn(device)
    residual[1, 2, 3, 4] = float("nan")
    dy = torch.randn_like(x)
    for p in (planned(x, 2), schedule.make(geometry_of(x), 2, *STREAM, 4)):
        y, stats, bits = forward(x, residual, p)
        assert torch.equal(unpack(bits, x), (y > 0) | y.isnan())
        dr = launch.backward(dy, x, None, bits, stats, *RELU, torch.bfloat16, p)[3]
        assert dr[1, 2, 3, 4] == dy[1, 2, 3, 4]


def test_hooks_that_lose_the_layout_of_what_is_saved(chosen):
    def as_rows(t):
        return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t

    given, results = leaves(chosen), []
    dy = torch.randn(SHAPE, device=chosen, dtype=torch.bfloat16)
    for pack in (lambda t: t, as_rows):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y, _ = autograd.run(Call(*given[:3], EPS, RELU, given[3]))
        results.append(torch.autograd.grad(y, given, dy))
    torch.testing.assert_close(*results, rtol=0, atol=0)
