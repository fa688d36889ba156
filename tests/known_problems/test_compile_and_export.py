"""momentum=None works with torch.compile and torch.export, and does not synchronize (pytorch 194504, ...)."""

import copy

import pytest
import torch
from torch import nn

import batchnorm as bn


def net(momentum):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), bn.BatchNorm2d(4, momentum=momentum, activation="relu"), nn.Conv2d(4, 2, 1)
    )


@pytest.mark.inductor
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_compile_fullgraph(momentum):
    eager = net(momentum)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 3, 6, 6)
        a, b = eager(x), compiled(x)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        a.square().sum().backward()
        b.square().sum().backward()
    for (name, p), q in zip(eager.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3, msg=name)
    torch.testing.assert_close(dict(eager.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)
    eager.eval(), twin.eval()
    torch.testing.assert_close(eager(x), compiled(x), rtol=1e-4, atol=1e-5)


def test_compile_skips_non_finite_batches_too():
    layer = bn.BatchNorm1d(3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.full((4, 3), float("inf")))
    assert (layer.num_batches_tracked, layer.num_batches_skipped) == (0, 1)
    compiled(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.isfinite().all()


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_export_in_training_mode(momentum):
    eager = net(momentum)
    exported = torch.export.export(copy.deepcopy(eager), (torch.randn(4, 3, 6, 6),)).module()
    for _ in range(3):
        x = torch.randn(4, 3, 6, 6)
        torch.testing.assert_close(exported(x), eager(x), rtol=1e-4, atol=1e-5)
    state = exported.state_dict()
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def test_no_host_synchronization():
    # Run the update on fake tensors, where any .item() or bool() of data raises an error.
    from torch._subclasses import FakeTensorMode

    from batchnorm.ops import running as module

    with FakeTensorMode():
        running = (torch.zeros(3), torch.ones(3), torch.tensor(0), torch.tensor(0))
        module._update(*running, torch.tensor(4.0), torch.zeros(3), torch.ones(3), None)
