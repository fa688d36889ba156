"""Test the sign bits, one per element, that kernels write and read in two orders."""

import pytest
import torch

from batchnorm.ops import Activation
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import launch
from batchnorm.ops.cuda.layout import geometry_of
from batchnorm.ops.cuda.sign_bits import empty_bits, is_woven, rearrange, unpack

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def test_unpack_in_both_layouts(device):
    last = torch.randn(3, 3, 3, 10, device=device).movedim(-1, 1)
    for x in (torch.randn(3, 10, 3, 3, device=device), last):
        residual = torch.randn_like(x)
        y, _, bits = launch.forward(Call(x, activation=Activation("relu"), residual=residual), True)
        assert torch.equal(unpack(bits, x), y > 0)
        assert bits.shape == empty_bits(x, geometry_of(x), False).shape


@pytest.mark.parametrize("shape", [(3, 16, 7, 7), (8, 8, 5), (1, 4, 14, 14)])
def test_orders_are_exchanged_without_loss(shape):
    x = torch.randn(shape)
    words = empty_bits(x, geometry_of(x), True)
    woven = torch.randint(256, words.shape, dtype=torch.uint8)
    by_channel = rearrange(woven, x, False)
    assert by_channel.shape == empty_bits(x, geometry_of(x), False).shape
    assert is_woven(woven)
    assert not is_woven(by_channel)
    assert torch.equal(unpack(by_channel, x), unpack(woven, x))
    assert torch.equal(rearrange(by_channel, x, True), woven)
    # Woven bits have the order of a dense tensor; the lowest bit of a byte belongs to the first of eight elements.
    assert [int(b) for b in unpack(woven, x).flatten()[:8]] == [int(woven[0, 0]) >> k & 1 for k in range(8)]
