"""Test which tensors compiled code recomputes in the backward pass instead of saving them."""

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from oracle import assert_near

from batchnorm.ops import Activation
from batchnorm.ops.activation import NAMES
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import autograd, inductor

pytestmark = [
    pytest.mark.triton,
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (2, 8, 6, 6)


@pytest.fixture(autouse=True)
def _fresh():
    """Compile everything again, even if an earlier run has left compiled code in a cache."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def normalize(x, gamma, beta, activation="relu", residual=None, running=None):
    return autograd.run(Call(x, gamma, beta, 1e-5, Activation(activation), residual, None, running, 0.1))[0]


def excite(input, weight, *rest, **options):
    """Run a block with squeeze-and-excitation.

    The backward pass needs the block's input, the normalization's input x and output y, and y * gate.
    """
    y = normalize(F.conv2d(input, weight), *rest, **options)
    return F.conv2d(y * torch.sigmoid(y.mean((2, 3), keepdim=True)), weight)


def kept(function, *given):
    """Return the output and the gradients, and how many tensors of shape SHAPE are kept for the backward pass."""
    leaves = [t.clone().requires_grad_() for t in given]
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(t.shape), t)[1], lambda t: t):
        y = function(*leaves)
    y.float().square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)], shapes.count(SHAPE)


def draw(dtype=torch.float32):
    x, weight = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in (SHAPE, (8, 8, 1, 1)))
    return x, weight, torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)


@pytest.mark.parametrize("activation", NAMES)
def test_recomputes_the_output_that_a_gate_scales(activation):
    def call(*given):
        return excite(*given, activation=activation)

    given = draw()
    expected, _ = kept(call, *given)
    got, count = kept(torch.compile(call, fullgraph=True), *given)
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b, torch.float32)
    assert count == 3  # the block's input, the normalization's input x, and y * gate; y itself would be the fourth


@pytest.mark.parametrize("dynamic", [False, True])
def test_with_running_averages_in_half_precision(dynamic):
    running = [torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE)]
    running += [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2)]

    def call(*given):
        return excite(*given, running=running)

    given = draw(torch.bfloat16)
    expected, _ = kept(call, *given)
    got, count = kept(torch.compile(call, fullgraph=True, dynamic=dynamic), *given)
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b, torch.bfloat16)
    assert count == 3
    assert int(running[2]) == 2


def test_does_not_recompute_what_a_convolution_reads(monkeypatch):
    def call(x, weight, gamma, beta):
        y = normalize(F.conv2d(x, weight), gamma, beta)
        return F.conv2d(y, weight) * y  # the gradients of the product and of the convolution both need y

    answers = []
    recompute = inductor._recompute
    monkeypatch.setattr(inductor, "_recompute", lambda *args: answers.append(recompute(*args)) or answers[-1])
    kept(torch.compile(call, fullgraph=True), *draw())
    assert answers == [False]


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_residual_is_not_read_again(activation):
    def call(residual, *given):
        return excite(*given, activation=activation, residual=residual)

    given = (torch.randn(SHAPE, device=DEVICE), *draw())
    expected, _ = kept(call, *given)
    got, _ = kept(torch.compile(call, fullgraph=True), *given)
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b, torch.float32)


@pytest.mark.parametrize("shape", [(6, 5), (3, 5, 7), (2, 5, 2, 3, 2)])
def test_renormalizes_any_number_of_dimensions(shape):
    x = torch.randn(shape, device=DEVICE) * 3 + 1000
    gamma, beta = torch.rand(5, device=DEVICE), torch.rand(5, device=DEVICE)
    call = Call(x, gamma, beta, 1e-5, Activation("silu"))
    y, stats = autograd._normalize(call)
    assert_near(inductor.renormalize(x, stats, call.activation), y, x.dtype)
