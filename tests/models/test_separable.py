import pytest
import torch

from batchnorm.models.bn_inception import separable
from batchnorm.models.bn_inception.blocks import SeparableConv2d

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]


def parts(device, inputs, outputs, size, multiplier):
    conv = SeparableConv2d(inputs, outputs, size, multiplier=multiplier, bias=False).to(device)
    return conv.pointwise.weight, conv.depthwise.weight


@pytest.mark.parametrize("sizes", [(3, 64, 7, 8), (1, 5, 1, 1), (2, 20, 3, 3)])
def test_the_kernels_compose(device, sizes):
    p, d = parts(device, *sizes)
    weight = separable._composed(p.double(), d.double(), sizes[0])
    torch.testing.assert_close(separable.run_compose(p, d, sizes[0]).double(), weight, rtol=1e-5, atol=1e-6)
    dweight = torch.randn_like(weight)
    expected = torch.autograd.grad(weight, (p, d), dweight)
    found = separable.run_compose_backward(dweight.float(), p.detach(), d.detach(), sizes[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def usable(device, monkeypatch):
    """Allow interpreted kernels on CPU tensors."""
    if device == "cpu":
        monkeypatch.setattr(separable, "_takes", lambda p, d: True)
    return device


def test_gradients(usable):
    p, d = parts(usable, 3, 16, 5, 4)
    weight = separable.compose(p, d, 3)
    assert type(weight.grad_fn).__name__ == "_CompositionBackward"
    many = torch.randn(2, *weight.shape, device=usable)
    expected = [torch.autograd.grad(separable._composed(p, d, 3), (p, d), one) for one in many]
    for one, wanted in zip(many, expected, strict=True):
        found = torch.autograd.grad(weight, (p, d), one, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    batched = torch.autograd.grad(weight, (p, d), many, is_grads_batched=True)
    torch.testing.assert_close(batched, tuple(map(torch.stack, zip(*expected, strict=True))), rtol=1e-4, atol=1e-5)


def test_the_gradient_can_be_differentiated(usable):
    p, d = parts(usable, 2, 8, 3, 2)
    found, expected = [], []
    for into, compose in ((found, separable.compose), (expected, separable._composed)):
        first = torch.autograd.grad(compose(p, d, 2).square().sum(), (p, d), create_graph=True)
        into += torch.autograd.grad(first[0].sum() + first[1].square().sum(), (p, d))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
