"""A mean of a million standard deviations makes torch inaccurate (flax 1491, tensorflow 118701, pytorch 57796)."""

import pytest
import torch
import torch.nn.functional as F
from oracle import expect

import batchnorm as bn


def data(layout):
    return (torch.randn(16, 8, 28, 28) + 1e6).contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
def test_layer_is_accurate(layout, compiled):
    x, layer = data(layout), bn.BatchNorm2d(8, momentum=None)
    y = (torch.compile(layer, fullgraph=True) if compiled else layer)(x)
    want = expect(x, torch.ones(8), torch.zeros(8), 1e-5, torch.zeros_like(x))
    assert float((y.detach() - want.y).abs().max()) < 1e-3
    m = x.numel() / 8
    torch.testing.assert_close(layer.running_var.double(), want.var * m / (m - 1), rtol=1e-4, atol=0)


def test_torch_is_not():
    # If this fails, torch has become accurate and the comparison in the docs must change.
    x = data(torch.channels_last)
    want = expect(x, torch.ones(8), torch.zeros(8), 1e-5, torch.zeros_like(x))
    assert float((F.batch_norm(x, None, None, training=True) - want.y).abs().max()) > 1e-2


@pytest.mark.parametrize("mean", [1e2, 1e3, 1e4, 1e5])
def test_variance_is_never_negative_nor_far_off(mean):
    x = torch.randn(64, 4, 16) * 1e-2 + mean
    _, moments = bn.ops.batch_norm(x)
    assert (moments.var >= 0).all()
    torch.testing.assert_close(moments.var.double(), x.double().var((0, 2), correction=0), rtol=1e-3, atol=1e-12)
