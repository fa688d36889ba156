"""Compare the kernel for a bias and a nonlinearity with torch's operations in float64."""

from itertools import product

import pytest
import torch

from batchnorm.models.bn_inception.bias import bias_act

pytestmark = [
    pytest.mark.usefixtures("unwritten_is_nan"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
SHAPES = [(1, 1, 1, 1), (2, 8, 4, 4), (3, 5, 7, 3), (2, 96, 5, 5), (20, 64, 9, 9), (1, 200, 2, 1)]
ACTIVATIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid}
OTHERS = ((False, True), (torch.float32, torch.bfloat16), ACTIVATIONS)


def draw(shape, dtype, device, sliced):
    """Return a channels-last tensor or, if ``sliced``, some of the channels of a larger one."""
    n, c, h, w = shape
    whole = torch.randn(n, h, w, c + 16 * sliced, device=device).to(dtype)
    return whole.permute(0, 3, 1, 2)[:, 8 * sliced : 8 * sliced + c]


@pytest.mark.parametrize(
    ("shape", "sliced", "dtype", "activation"),
    [
        *((shape, False, torch.float32, "relu") for shape in SHAPES),
        *(((2, 96, 5, 5), sliced, torch.bfloat16, "sigmoid") for sliced in (False, True)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(SHAPES, *OTHERS)),
    ],
)
def test_values_and_gradients(shape, sliced, dtype, activation, device):
    x, dy = (draw(shape, dtype, device, sliced) for _ in range(2))
    x, bias = x.requires_grad_(), torch.randn(shape[1], device=device, requires_grad=True)
    y = bias_act(x, bias, activation)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    wide = [t.detach().cpu().double().requires_grad_() for t in (x, bias)]
    expected = ACTIVATIONS[activation](wide[0] + wide[1][None, :, None, None])
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 3e-2}
    torch.testing.assert_close(y.detach().cpu().double(), expected.detach(), **rounding)
    got = torch.autograd.grad(y, (x, bias), dy)
    wanted = torch.autograd.grad(expected, wide, dy.cpu().double())
    assert [t.dtype for t in got] == [dtype, torch.float32]
    torch.testing.assert_close(got[0].cpu().double(), wanted[0], **rounding)
    error = (got[1].cpu().double() - wanted[1]).norm()
    assert error <= (1e-5 if dtype == torch.float32 else 2e-2) * wanted[1].norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives(activation, device):
    x = draw((2, 8, 3, 3), torch.float32, device, False).requires_grad_()
    bias = torch.randn(8, device=device, requires_grad=True)

    def second(y, x, bias):
        dx, db = torch.autograd.grad(y.square().sum(), (x, bias), create_graph=True)
        return torch.autograd.grad(dx.square().sum() + db.sin().sum(), (x, bias))

    got = second(bias_act(x, bias, activation), x, bias)
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    wanted = second(ACTIVATIONS[activation](wide[0] + wide[1][None, :, None, None]), *wide)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_hooks_that_lose_the_layout_of_what_is_saved(device):
    x, dy = (draw((2, 16, 5, 6), torch.float32, device, False) for _ in range(2))
    x, bias = x.requires_grad_(), torch.randn(16, device=device, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = bias_act(x, bias, "relu")
    expected = torch.autograd.grad((x + bias[:, None, None]).relu(), (x, bias), dy)
    torch.testing.assert_close(torch.autograd.grad(y, (x, bias), dy), expected)


def test_what_is_not_a_number_stays_it(device):
    x = torch.zeros(1, 8, 2, 2, device=device).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0], x[0, 1, 0, 0] = float("nan"), float("inf")
    y = bias_act(x, torch.zeros(8, device=device), "relu")
    torch.testing.assert_close(y, x.relu(), equal_nan=True)


def test_the_same_bits_every_time(device):
    x, dy = (draw((4, 24, 9, 9), torch.float32, device, False) for _ in range(2))
    x, bias = x.requires_grad_(), torch.randn(24, device=device, requires_grad=True)
    first, second = (torch.autograd.grad(bias_act(x, bias, "relu"), (x, bias), dy) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
