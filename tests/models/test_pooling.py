"""The pool that keeps a byte per output against torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchnorm.models.pooling import MaxPool2d

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WINDOWS = [(3, 2, 1), (3, 1, 1), (2, 2, 0), (5, 3, 2), (16, 5, 8)]


def lean(*window):
    pool = MaxPool2d(*window)
    pool.lean = True
    return pool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_same_values_and_gradients(window, dtype, layout, device):
    x = torch.randn(2, 3, 17, 20, device=device).to(dtype).contiguous(memory_format=layout)
    x[0, 0, 4, 5] = float("nan")
    x[1, 1] = 2.0  # ties
    a, b = (x.clone().requires_grad_() for _ in range(2))
    y, z = lean(*window)(a), F.max_pool2d(b, *window)
    torch.testing.assert_close(y, z, rtol=0, atol=0, equal_nan=True)
    assert y.stride() == z.stride()
    dy = torch.randn_like(z)
    y.backward(dy)
    z.backward(dy)
    # On a GPU torch adds up what overlapping windows send back in no fixed order.
    close = {"rtol": 0, "atol": 0} if device == "cpu" else {}
    torch.testing.assert_close(a.grad, b.grad, **close)
    assert a.grad.stride() == b.grad.stride()


def test_gradients_of_gradients():
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lean(3, 2, 1), x)
    assert torch.autograd.gradgradcheck(lean(3, 2, 1), x)


@pytest.mark.parametrize("device", DEVICES)
def test_keeps_a_byte_per_output(device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = lean(3, 2, 1)(torch.randn(2, 4, 16, 16, device=device, requires_grad=True))
    assert [t.nbytes for t in saved] == [y.numel()]


def test_torchs_own_everywhere_else():
    pool, x = MaxPool2d(3, 2, 1), torch.randn(2, 4, 16, 16, requires_grad=True)
    assert isinstance(pool, nn.MaxPool2d)
    assert "MaxPool2D" in type(pool(x).grad_fn).__name__, "on a CPU"
    assert "MaxPool2D" in type(lean(17, 5, 8)(torch.randn(1, 1, 40, 40, requires_grad=True)).grad_fn).__name__
    assert lean(3, 2, 1)(x.detach()).grad_fn is None
    compiled = torch.compile(lean(3, 2, 1), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), F.max_pool2d(x, 3, 2, 1), rtol=0, atol=0)
