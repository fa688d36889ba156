"""torch's CPU kernels are inaccurate in channels_last; this library's layers are accurate (pytorch 51776, 19911).

Speed is measured by ``batchnorm bench cpu`` (results/cpu.json), not asserted here.
"""

import pytest
import torch
from oracle import assert_near, expect

import batchnorm as bn


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 8, 64])
def test_channels_last_is_as_accurate_as_contiguous(channels):
    x = torch.randn(8, channels, 19, 23) * 2 + 30
    dy, gamma, beta = torch.randn_like(x), torch.rand(channels), torch.randn(channels)
    want = expect(x, gamma, beta, 1e-5, dy, "relu")
    for layout in (torch.contiguous_format, torch.channels_last):
        a = x.contiguous(memory_format=layout).requires_grad_()
        y, moments = bn.ops.batch_norm(a, gamma, beta, activation="relu")
        (dx,) = torch.autograd.grad(y, a, dy.contiguous(memory_format=layout))
        assert_near(y, want.y, torch.float32, "y")
        assert_near(moments.var, want.var, torch.float32, "var")
        assert_near(dx, want.dx, torch.float32, "dx", top=want.dx_terms)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    # 4.3 GB of bfloat16. The last 2**14 examples have another value; indices near the end do not fit in int32.
    x = torch.ones(2**15 + 8, 1, 2**8, 2**8, dtype=torch.bfloat16)
    x[-(2**14) :] = 3
    assert x.numel() > 2**31
    with torch.no_grad():
        y, moments = bn.ops.batch_norm(x)
    share = 2**14 / len(x)
    torch.testing.assert_close(moments.mean.item(), 1 + 2 * share, rtol=1e-5, atol=0)
    torch.testing.assert_close(moments.var.item(), 4 * share * (1 - share), rtol=1e-5, atol=0)
    assert y[-1, 0, -1, -1] > 0 > y[0, 0, 0, 0]
