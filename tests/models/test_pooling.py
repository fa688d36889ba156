"""Compare the pooling kernels with torch's, in Triton's interpreter or on a GPU."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchnorm.models.bn_inception import pooling
from batchnorm.models.bn_inception.channels_last import takes

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]
SHAPES = [
    (2, 8, 7, 7),  # at stride 2, the last windows extend beyond the image
    (1, 5, 6, 9),  # five channels do not fill a slice of eight
    (3, 64, 4, 5),
    (2, 96, 1, 3),  # one row; in bfloat16, the second of two slices of channels is not full
]
CASES = [
    *((shape, False, torch.float32) for shape in SHAPES),
    ((2, 8, 7, 7), True, torch.bfloat16),
    *(
        pytest.param(*c, marks=pytest.mark.slow)
        for c in product(SHAPES, (False, True), (torch.float32, torch.bfloat16))
    ),
]


def values(shape, dtype, device, sliced):
    """Return a channels-last tensor, or a slice of one, of small integers, so that windows contain equal values."""
    n, c, h, w = shape
    x = torch.randint(-3, 4, (n, c + 16 * sliced, h, w)).to(device, dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    return x[:, 8 : 8 + c] if sliced else x


def check(ours, theirs, x, sliced):
    """Compare a pool and its gradient with torch's on contiguous float64 values."""
    a, b = x.detach().requires_grad_(), x.cpu().double().contiguous().requires_grad_()
    y, expected = ours(a), theirs(b)
    torch.testing.assert_close(y.cpu(), expected.to(x.dtype))
    assert y.is_contiguous(memory_format=torch.channels_last)
    dy = values(y.shape, x.dtype, x.device, sliced)
    (got,) = torch.autograd.grad(y, a, dy)
    (wanted,) = torch.autograd.grad(expected, b, dy.cpu().double())
    torch.testing.assert_close(got.cpu(), wanted.to(x.dtype))


@pytest.mark.parametrize(("shape", "sliced", "dtype"), CASES)
def test_the_largest_of_each_window(shape, sliced, dtype, device):
    x = values(shape, dtype, device, sliced)
    for stride in (1, 2):
        check(lambda v, s=stride: pooling.max_pool(v, s), lambda v, s=stride: F.max_pool2d(v, 3, s, 1), x, sliced)


@pytest.mark.parametrize("stride", [1, 2])
def test_hooks_that_lose_the_layout_of_what_is_saved(stride, device):
    x = values((2, 16, 6, 7), torch.float32, device, False).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = pooling.max_pool(x, stride)
    (expected,) = torch.autograd.grad(F.max_pool2d(x, 3, stride, 1).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)


def second_derivative(pooled, x):
    (dx,) = torch.autograd.grad(pooled(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), x)[0].cpu().float()


@pytest.mark.parametrize("shape", [SHAPES[1], *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES)])
def test_second_derivatives(shape, device):
    x = values(shape, torch.float32, device, sliced=False)
    for ours, theirs in (
        (lambda v: pooling.max_pool(v, 1), lambda v: F.max_pool2d(v, 3, 1, 1)),
        (lambda v: pooling.max_pool(v, 2), lambda v: F.max_pool2d(v, 3, 2, 1)),
        (pooling.average_pool, lambda v: F.avg_pool2d(v, 3, 1, 1, count_include_pad=False)),
    ):
        expected = second_derivative(theirs, x.cpu().double().contiguous().requires_grad_())
        torch.testing.assert_close(second_derivative(ours, x.detach().requires_grad_()), expected)


@pytest.mark.parametrize(("shape", "sliced", "dtype"), CASES)
def test_the_mean_of_each_window(shape, sliced, dtype, device):
    x = values(shape, dtype, device, sliced)
    check(pooling.average_pool, lambda v: F.avg_pool2d(v, 3, 1, 1, count_include_pad=False), x, sliced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_not_finite(stride, dtype, device):
    x = torch.zeros(1, 8, 5, 5, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    x[0, 0, 2, 2], x[0, 1], x[0, 2, 4, 4], x[0, 3, 0, 0] = (float(v) for v in ("nan", "-inf", "inf", "-inf"))
    x.requires_grad_()
    # If all values of a window are -inf, torch's kernels for the CPU and CUDA give its gradient to different pixels.
    on_cpu = x.detach().cpu().requires_grad_()
    y, expected = pooling.max_pool(x, stride), F.max_pool2d(on_cpu, 3, stride, 1)
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    got, wanted = torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.autograd.grad(expected.sum(), on_cpu)[0]
    torch.testing.assert_close(got[:, 1:].cpu(), wanted[:, 1:], rtol=0, atol=0)
    # The gradient of a window with a NaN may go to any of the window's pixels.
    assert got[:, 0].sum() == wanted[:, 0].sum()
    (within,) = torch.autograd.grad(y, x, y.isnan().to(dtype))
    assert within[0, 0].sum() == y.isnan().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_places_are_inside_the_image_and_of_the_largest_value(dtype, device):
    """The second derivative reads x at the saved positions, so they must be inside the image, even if x has inf."""
    for shape in ((2, 6, 5, 7), (1, 3, 2, 2), (1, 4, 1, 1)):
        x = values(shape, dtype, device, False)
        x.movedim(1, -1).view(-1)[::5] = float("inf")
        x.movedim(1, -1).view(-1)[::7] = float("-inf")
        for stride in (1, 2):
            y, where = torch.ops.batchnorm.max_pool(x, stride)
            assert where.shape == (shape[0], (shape[1] + 1) // 2, *y.shape[2:])
            # The transpose of the backward pass reads each window's value at the saved position.
            dy = torch.zeros_like(y).requires_grad_()
            dx = torch.ops.batchnorm.max_pool_backward(dy, where, stride, *shape[2:])
            (found,) = torch.autograd.grad(dx, dy, x)
            torch.testing.assert_close(found, y, rtol=0, atol=0)


def test_a_gradient_in_another_order_is_copied(device):
    x = values((2, 8, 4, 4), torch.float32, device, False).requires_grad_()
    for pooled in (pooling.max_pool(x, 1), pooling.average_pool(x)):
        dy = torch.randn(2, 8, 4, 4, device=device)
        got, wanted = (
            torch.autograd.grad(pooled, x, g, retain_graph=True)[0]
            for g in (dy, dy.contiguous(memory_format=torch.channels_last))
        )
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.triton
def test_contiguous_tensors_are_refused():
    with pytest.raises(ValueError, match="channels-last"):
        torch.ops.batchnorm.max_pool(torch.zeros(2, 3, 4, 4), 1)


@pytest.mark.parametrize("module", [pooling.MaxPool2d(1), pooling.MaxPool2d(2), pooling.AvgPool2d()])
def test_modules_are_torchs_off_the_device(module):
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    assert isinstance(module, nn.MaxPool2d | nn.AvgPool2d)
    assert not takes(x)
    expected = type(module).__base__.forward(module, x)
    for run in (module, torch.fx.symbolic_trace(module)):
        torch.testing.assert_close(run(x), expected)
    assert torch.func.vmap(module)(x[None]).shape[0] == 1


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (pooling.MaxPool2d(2), {"ceil_mode": True}),
        (pooling.MaxPool2d(2), {"return_indices": True}),
        (pooling.MaxPool2d(1), {"kernel_size": 5, "padding": 2}),
        (pooling.MaxPool2d(1), {"padding": 0}),
        (pooling.MaxPool2d(1), {"dilation": 2}),
        (pooling.AvgPool2d(), {"count_include_pad": True}),
        (pooling.AvgPool2d(), {"ceil_mode": True, "stride": 2}),
        (pooling.AvgPool2d(), {"kernel_size": 5, "padding": 2}),
        (pooling.AvgPool2d(), {"divisor_override": 5}),
    ],
)
def test_modules_whose_windows_were_changed_are_torchs(module, change, device, monkeypatch):
    monkeypatch.setattr(pooling, "takes", lambda x: True)
    module, x = copy.copy(module), values((2, 8, 6, 6), torch.float32, device, False)
    for name, value in change.items():
        setattr(module, name, value)
    torch.testing.assert_close(module(x), type(module).__base__.forward(module, x))


@pytest.mark.gpu
@pytest.mark.parametrize("module", [pooling.MaxPool2d(1), pooling.MaxPool2d(2), pooling.AvgPool2d()])
def test_modules_on_the_device(module):
    x = torch.randn(2, 24, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    assert takes(x)
    # On CUDA, torch 2.11's gradient of a padded avg_pool2d is wrong in channels last (pytorch issue 188344).
    on_cpu = x.detach().cpu().requires_grad_()
    for run in (module, torch.compile(module, fullgraph=True)):
        y, expected = run(x), type(module).__base__.forward(module, on_cpu)
        torch.testing.assert_close(y.cpu(), expected)
        dy = torch.randn_like(y)
        (got,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, on_cpu, dy.cpu())
        torch.testing.assert_close(got.cpu(), wanted)
    assert torch.func.vmap(module)(x[None]).shape[0] == 1


@pytest.mark.parametrize(("shape", "sliced", "dtype"), [*CASES, ((2, 130, 9, 8), False, torch.float32)])
def test_the_average_of_each_channel(shape, sliced, dtype, device):
    x = values(shape, dtype, device, sliced).requires_grad_()
    y = pooling._GlobalAverage.apply(x)
    expected = x.detach().double().mean((2, 3))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)
    dy = torch.randint(-3, 4, y.shape).to(device, dtype)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert dx.is_contiguous(memory_format=torch.channels_last)
    wanted = (dy.double() / (shape[2] * shape[3]))[:, :, None, None].expand(shape)
    torch.testing.assert_close(dx.double(), wanted, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)
    (again,) = torch.autograd.grad(y, x, dy, create_graph=True)
    torch.testing.assert_close(again, dx)


@pytest.mark.gpu
def test_the_average_of_a_single_image():
    x = torch.randn(8, 5, 6, device="cuda")
    torch.testing.assert_close(pooling.GlobalAvgPool2d()(x), x.mean((1, 2), keepdim=True))
