"""Compare the kernel that normalizes by given statistics, and its gradients, with plain operations in float64."""

from itertools import product

import pytest
import torch

from batchnorm.ops import Activation, composite
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import autograd

EPS = 1e-3
SHAPES = [(1, 1), (5, 3), (4, 7, 6), (2, 8, 4, 4), (3, 5, 7, 3), (2, 70, 9, 9), (2, 3, 2, 5, 4)]
ROUNDING = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def drawn(shape, layout, dtype, device):
    x = (torch.randn(shape, device=device) * 2 + 3).to(dtype)
    if layout == "sliced":
        return torch.cat([x, x, x], 1)[:, shape[1] : 2 * shape[1]]
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "last" else x


def on_path(path, x, mean, var, gamma, beta, activation, residual):
    return path.normalize(Call(x, gamma, beta, EPS, activation, residual), mean, var)


def normalize(*given_):
    return on_path(autograd, *given_)


def plain(*given_):
    return on_path(composite, *given_)


def statistics(channels, device):
    mean, gamma, beta = (torch.randn(channels, device=device) for _ in range(3))
    return mean, torch.rand(channels, device=device) + 0.1, gamma, beta


def check(y, x, given_, activation, residual, dtype):
    mean, var, gamma, beta, r = (None if t is None else t.detach().double() for t in (*given_, residual))
    expected = plain(x.detach().double(), mean, var, gamma, beta, activation, r)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    rtol, atol = ROUNDING[dtype]
    torch.testing.assert_close(y.detach().double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("shape", "layout", "dtype"),
    [
        *((shape, "first", torch.float32) for shape in SHAPES),
        *(((3, 5, 7, 3), layout, dtype) for layout in ("last", "sliced") for dtype in ROUNDING),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(SHAPES, ("first", "last", "sliced"), ROUNDING)
        ),
    ],
)
def test_one_pass(shape, layout, dtype, device):
    x, residual = (drawn(shape, layout, dtype, device) for _ in range(2))
    given_ = statistics(shape[1], device)
    for activation, added in (
        (Activation(), None),
        (Activation("relu"), residual),
        (Activation("leaky_relu", 0.2), None),
    ):
        check(normalize(x, *given_, activation, added), x, given_, activation, added, dtype)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "silu"])
def test_smooth_nonlinearities_and_no_parameters(name, device):
    x, (mean, var, *_) = drawn((3, 6, 5), "first", torch.float32, device), statistics(6, device)
    given_, activation = (mean, var, None, None), Activation(name)
    check(normalize(x, *given_, activation, None), x, given_, activation, None, torch.float32)


def test_means_far_from_zero(device):
    x = torch.randn(64, 4, 3, device=device) + 1e6
    given_ = (x.double().mean((0, 2)).float(), torch.ones(4, device=device), None, None)
    check(normalize(x, *given_, Activation(), None), x, given_, Activation(), None, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_gradients(added, dtype, device):
    x, residual = (drawn((4, 6, 5, 5), "last", dtype, device).requires_grad_() for _ in range(2))
    mean, var, gamma, beta = statistics(6, device)
    leaves = [x, gamma.requires_grad_(), beta.requires_grad_(), *([residual] if added else [])]
    y = normalize(x, mean, var, gamma, beta, Activation("relu"), residual if added else None)
    check(y, x, (mean, var, gamma, beta), Activation("relu"), residual if added else None, dtype)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, dy)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = plain(wide[0], mean.double(), var.double(), *wide[1:3], Activation("relu"), wide[3] if added else None)
    for a, b in zip(got, torch.autograd.grad(expected, wide, dy.double()), strict=True):
        assert (a.double() - b).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * b.norm()


def test_a_wider_residual_leaves_the_type_alone(device):
    x, residual = (torch.randn(4, 3, 5, device=device, requires_grad=True) for _ in range(2))
    given_ = statistics(3, device)
    y = normalize(x, *given_, Activation("relu"), residual.double())
    check(y, x, given_, Activation("relu"), residual, torch.float32)
    y.sum().backward()
    assert residual.grad.dtype == torch.float32


@pytest.mark.gpu
def test_layers_in_evaluation_take_it():
    import batchnorm as bn

    layer, x = bn.BatchNorm2d(6, activation="relu").cuda().eval(), torch.randn(4, 6, 5, 5, device="cuda")
    layer.running_mean.normal_()
    expected = torch.nn.functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps).relu()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), expected)
