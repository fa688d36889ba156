"""Section 3: gamma = sqrt(Var[x]) and beta = E[x] recover the original activations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batchnorm as bn


@given(st.floats(-50, 50), st.floats(0.1, 20), st.integers(0, 2**31))
def test_identity_transform(mean, std, seed):
    x = torch.randn(16, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * std + mean
    _, moments = bn.ops.batch_norm(x)
    for eps in (0.0, 1e-5, 1e-2):
        # BN divides by sqrt(Var + eps), so this value of gamma restores x exactly.
        y, _ = bn.ops.batch_norm(x, (moments.var + eps).sqrt(), moments.mean, eps)
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("m", [2, 60, 1000])
def test_normalized_values_have_mean_0_and_variance_1(m):
    x_hat, _ = bn.ops.batch_norm(torch.randn(m, 3, dtype=torch.float64) * 4 + 9, eps=0.0)
    torch.testing.assert_close(x_hat.sum(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(x_hat.square().mean(0), torch.ones(3, dtype=torch.float64))


def test_eps_lowers_the_variance_by_var_over_var_plus_eps():
    x = torch.randn(50, 3, dtype=torch.float64) * 0.1
    x_hat, moments = bn.ops.batch_norm(x, eps=1e-2)
    torch.testing.assert_close(x_hat.square().mean(0), moments.var / (moments.var + 1e-2))


def test_two_parameters_per_activation():
    assert sum(p.numel() for p in bn.BatchNorm2d(7).parameters()) == 2 * 7
    assert sum(p.numel() for p in bn.BatchNorm2d((7, 3, 3)).parameters()) == 2 * 7 * 9
