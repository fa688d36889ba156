"""On the CPU, torch's backward kernel for matrices ignores the strides of gamma and the statistics; ours does not."""

import pytest
import torch
import torch.nn.functional as F

from batchnorm import ops

C = 20


def every_other(v):
    """Return the same values with stride 2, and NaN between them."""
    return torch.stack([v, torch.full_like(v, torch.nan)], 1)[:, 0]


def by_batch(x, gamma, mean, var):
    return ops.batch_norm(x, gamma)[0]


def by_batch_far_from_zero(x, gamma, mean, var):
    return ops.batch_norm(x + 1e4, gamma)[0]


def as_in_a_layer(x, gamma, mean, var):
    running = ops.Running(mean.clone(), var.clone(), torch.tensor(0), torch.tensor(0))
    return ops.normalize_batch_(x, gamma, None, running)


def by_statistics(x, gamma, mean, var):
    return ops.normalize(x, mean, var, gamma)


def in_torch(x, gamma, mean, var):
    return F.batch_norm(x, mean, var, gamma)


IN_TORCH = pytest.param(in_torch, marks=pytest.mark.xfail(reason="torch ignores the strides", strict=False))
WAYS = [by_batch, by_batch_far_from_zero, as_in_a_layer, by_statistics, IN_TORCH]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("run", WAYS)
def test_gradients_do_not_depend_on_strides(run, dtype):
    x, dy = torch.randn(2, 16, C).to(dtype)
    given = [torch.rand(C, dtype=torch.float64 if dtype is torch.float64 else torch.float32) + 0.5 for _ in range(3)]
    found = []
    for gamma, mean, var in (given, map(every_other, given)):
        of = x.clone().requires_grad_(), gamma.requires_grad_()
        found.append(torch.autograd.grad(run(*of, mean, var), of, dy))
    torch.testing.assert_close(*found)
