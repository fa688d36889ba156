"""Under AMP, one inf ruins ``torch.nn``'s statistics for good, and ``half()`` rounds them (pytorch 90342, 70901)."""

import pytest
import torch
from torch import nn

import batchnorm as bn

CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.float16),
    "to device and type": lambda m: m.to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_statistics_stay_float32(cast):
    net = nn.Sequential(nn.Conv2d(2, 3, 1), bn.BatchNorm2d(3))
    net[1].running_mean.fill_(1 + 2**-20)  # half precision would round this to 1
    net = CASTS[cast](net)
    layer = net[1]
    assert layer.running_mean.dtype == layer.running_var.dtype == torch.float32
    assert layer.running_mean[0] == 1 + 2**-20
    assert layer.weight.dtype == net[0].weight.dtype
    y = net(torch.randn(4, 2, 5, 5).to(layer.weight.dtype))
    assert y.dtype == layer.weight.dtype
    y.float().sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert net.eval()(torch.randn(4, 2, 5, 5).to(layer.weight.dtype)).isfinite().all()


def test_double_widens():
    assert bn.BatchNorm1d(3).double().running_var.dtype == torch.float64


def test_made_or_loaded_in_half():
    layer = bn.BatchNorm1d(3, dtype=torch.float16)
    assert layer.running_var.dtype == torch.float32
    state = {k: v.half() if v.is_floating_point() else v for k, v in nn.BatchNorm1d(3).state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.running_var.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_bad_batch_is_skipped_and_counted(bad, momentum):
    layer = bn.BatchNorm2d(3, momentum=momentum)
    layer(torch.randn(4, 3, 5, 5))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(4, 3, 5, 5)
    x[1, 2, 3, 4] = bad
    layer(x)
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert layer.num_batches_skipped == 1
    assert "num_batches_skipped" not in layer.state_dict()
    layer(torch.randn(4, 3, 5, 5))
    assert layer.num_batches_tracked == 2


def test_float16_overflow_of_the_sum_is_no_overflow_of_the_mean():
    x = torch.full((64, 2), 6e4, dtype=torch.float16) * torch.linspace(0.5, 1, 64)[:, None].half()
    layer = bn.BatchNorm1d(2)
    assert layer(x).isfinite().all()
    assert layer.num_batches_skipped == 0
    assert layer.running_mean.isfinite().all()
