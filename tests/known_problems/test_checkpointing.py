"""Activation checkpointing runs a forward pass twice; the layers update the statistics only once (pytorch 96136)."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn


def block():
    return nn.Sequential(nn.Linear(4, 5), bn.BatchNorm1d(5, activation="relu", momentum=None), nn.Linear(5, 2))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_statistics_and_gradients_as_without(reentrant, steps):
    plain = block()
    saved = copy.deepcopy(plain)
    for _ in range(steps):
        x = torch.randn(8, 4)
        plain(x.clone().requires_grad_()).square().sum().backward()
        checkpoint(saved, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
    assert saved[1].num_batches_tracked == steps
    torch.testing.assert_close(dict(saved.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    for p, q in zip(plain.parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_around_a_compiled_block(reentrant):
    plain = block()
    saved = copy.deepcopy(plain)
    compiled = torch.compile(saved, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(8, 4)
        plain(x)
        checkpoint(compiled, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert saved[1].num_batches_tracked == 2
    torch.testing.assert_close(saved[1].running_var, plain[1].running_var)


def test_inside_a_compiled_function():
    net = block()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return checkpoint(net, x, use_reentrant=False).sum()

    for n in (1, 2):
        compiled(torch.randn(8, 4, requires_grad=True)).backward()
        assert net[1].num_batches_tracked == n


def test_nested():
    net = block()

    def inner(x):
        return checkpoint(net, x, use_reentrant=False)

    checkpoint(inner, torch.randn(8, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert net[1].num_batches_tracked == 1
