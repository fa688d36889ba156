"""Test tensors of more than 2^31 elements, whose offsets need 64 bits; a small tensor tests the test itself."""

import pytest
import torch

from batchnorm import ops

EPS, CHUNK = 1e-5, 4096
SHAPES = [
    pytest.param("cpu", (40, 64, 16, 16), id="small"),
    pytest.param("cuda", (2**17 + 8, 64, 16, 16), id="huge", marks=pytest.mark.gpu),
]


def per_channel(*tensors):
    """Add up products of tensors over examples and locations in float64, some examples at a time."""
    total = torch.zeros(tensors[0].shape[1], dtype=torch.float64, device=tensors[0].device)
    for parts in zip(*(t.split(CHUNK) for t in tensors), strict=True):
        product = parts[0].double()
        for part in parts[1:]:
            product = product * part.double()
        total += product.sum((0, 2, 3))
    return total


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize(("device", "shape"), SHAPES)
def test_offsets_beyond_32_bits(device, shape, channels_last):
    form = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (torch.empty(shape, dtype=torch.bfloat16, device=device, memory_format=form).normal_() for _ in range(2))
    assert device == "cpu" or x.numel() > 2**31
    x[-1] += 3  # so that the test fails if a kernel misses the last example
    channels = shape[1]
    gamma, beta = (torch.rand(channels, device=device).requires_grad_() for _ in range(2))
    leaf = x.requires_grad_()
    y, moments = ops.batch_norm(leaf, gamma, beta, EPS, activation="relu")
    y.backward(dy)
    x = x.detach()

    m = x.numel() // channels
    mean = per_channel(x) / m
    var = per_channel(x, x) / m - mean.square()
    torch.testing.assert_close(moments.mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments.var.double(), var, rtol=1e-4, atol=1e-5)
    mask = y.detach() > 0
    dy.mul_(mask)
    del mask
    shaped = (1, -1, 1, 1)
    invstd = (var + EPS).rsqrt()
    dbeta = per_channel(dy)
    dgamma = (per_channel(dy, x) - mean * dbeta) * invstd
    torch.testing.assert_close(beta.grad.double(), dbeta, rtol=1e-3, atol=1e-5 * m)
    torch.testing.assert_close(gamma.grad.double(), dgamma, rtol=1e-3, atol=1e-5 * m)
    for part in (slice(0, 2), slice(shape[0] // 2, shape[0] // 2 + 2), slice(-2, None)):
        x_hat = (x[part].double() - mean.view(shaped)) * invstd.view(shaped)
        want = (x_hat * gamma.detach().view(shaped) + beta.detach().view(shaped)).relu()
        torch.testing.assert_close(y.detach()[part].double(), want, rtol=1e-2, atol=1e-2)
        inner = dy[part].double() - dbeta.view(shaped) / m - x_hat * dgamma.view(shaped) / m
        want = inner * (gamma.detach() * invstd).view(shaped)
        torch.testing.assert_close(leaf.grad[part].double(), want, rtol=1e-2, atol=1e-2)
