"""``torch.nn`` counts padded positions in the statistics (pytorch 70529); a mask leaves them out."""

from itertools import product

import pytest
import torch

import batchnorm as bn
from batchnorm.ops.activation import NAMES


@pytest.mark.parametrize("padding", [0.0, 1e30, float("nan"), float("inf")])
def test_padding_changes_nothing(padding):
    lengths, longest = [7, 2, 5], 7
    sequences = [torch.randn(4, n) for n in lengths]
    x = torch.full((3, 4, longest), padding)
    for row, sequence in zip(x, sequences, strict=True):
        row[:, : sequence.shape[1]] = sequence
    x.requires_grad_()
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ours, packed = (bn.BatchNorm1d(4, activation="relu") for _ in range(2))
    y = ours(x, mask=mask)
    want = packed(torch.cat(sequences, 1).T)
    torch.testing.assert_close(y.movedim(1, 2)[mask], want)
    torch.testing.assert_close(dict(ours.state_dict()), dict(packed.state_dict()))
    y.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, packed.weight.grad)
    assert x.grad.isfinite().all()
    assert y.eq(0).movedim(1, 2)[~mask].all()


@pytest.mark.parametrize("training", [True, False])
def test_padding_reaches_no_gradient(training):
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 5])[:, None]
    x, residual, dy = (torch.randn(4, 3, 6) for _ in range(3))

    def gradients(activation, statistics, padding):
        layer = bn.BatchNorm1d(3, activation=activation, statistics=statistics).train(training)
        given = [torch.where(mask[:, None], v, padding).requires_grad_() for v in (x, residual)]
        return torch.autograd.grad(layer(*given, mask), [*given, *layer.parameters()], dy)

    for activation, statistics in product(NAMES, (None, bn.Ghost(2), bn.Renorm())):
        found = gradients(activation, statistics, float("nan"))
        torch.testing.assert_close(found, gradients(activation, statistics, 0.0))
        for padded in found[:2]:
            assert padded.movedim(1, 2)[~mask].eq(0).all()


def test_evaluation_masks_too():
    layer = bn.BatchNorm2d(2).eval()
    x, mask = torch.randn(3, 2, 4, 4), torch.rand(3, 4, 4) < 0.5
    y = layer(x, mask=mask)
    torch.testing.assert_close(y.movedim(1, 3)[mask], layer(x).movedim(1, 3)[mask])
    assert y.movedim(1, 3)[~mask].eq(0).all()


def test_all_true_is_no_mask():
    x = torch.randn(3, 2, 4)
    a, b = bn.BatchNorm1d(2), bn.BatchNorm1d(2)
    torch.testing.assert_close(a(x, mask=torch.ones(3, 4, dtype=torch.bool)), b(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.running_var, b.running_var)
