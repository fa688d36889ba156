"""Checks that both fast paths on the CPU must pass: kernel.c, and torch's kernel."""

import copy
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from batchnorm import ops
from batchnorm.ops import Running


def new_running(channels):
    return Running(torch.randn(channels), torch.rand(channels) + 0.5, torch.tensor(3), torch.tensor(0))


def copy_of(running):
    return Running(*(v.clone() for v in running))


def assert_skips(layer, x):
    """Check that a new layer, after one good batch, skips and counts ``x``, which is not finite."""
    layer(torch.randn_like(x))
    before = layer.running_mean.clone(), layer.running_var.clone()
    layer(x)
    assert torch.equal(layer.running_mean, before[0])
    assert torch.equal(layer.running_var, before[1])
    assert (layer.num_batches_tracked, layer.num_batches_skipped) == (1, 1)


def assert_checkpoints(layer, x, reentrant):
    """Check that a checkpoint changes no gradient, and that the running averages move only once."""
    x.requires_grad_()
    twin, dy = copy.deepcopy(layer), torch.randn_like(x)
    expected = torch.autograd.grad(layer(x), [x, layer.weight], dy)
    checkpoint(twin, x, use_reentrant=reentrant).backward(dy)
    torch.testing.assert_close([x.grad, twin.weight.grad], list(expected), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(list(twin.buffers()), list(layer.buffers()), rtol=0, atol=0)


def assert_recomputes(run, x):
    """Check that recompute() changes neither the gradients nor the averages; ``run`` takes x and running averages."""
    weight, running = torch.randn(1, x.shape[1], *[1] * (x.dim() - 2)).to(x.dtype), new_running(x.shape[1])
    results = []
    for context in (nullcontext, ops.recompute):
        leaf, w, kept = x.clone().requires_grad_(), weight.clone().requires_grad_(), copy_of(running)
        with context():
            loss = (run(leaf, kept) * w).sum()
        loss.backward()
        results.append((leaf.grad, w.grad, *kept))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)
