"""Other tools compute wrong population statistics (fvcore 152, detectron2 5398, swa_utils.update_bn)."""

import io
from contextlib import redirect_stderr

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.optim.swa_utils import update_bn

import batchnorm as bn

UNEVEN = [torch.zeros(8, 1), torch.full((2, 1), 10.0)]


def test_batches_of_eight_and_two():
    net = nn.Sequential(nn.BatchNorm1d(1))
    update_bn(UNEVEN, net)
    assert (net[0].running_mean.item(), net[0].running_var.item()) == (5.0, 0.0), "torch has fixed it"
    bn.estimate_(net, UNEVEN, rule="pooled")
    assert net[0].running_mean.item() == pytest.approx(2.0)
    assert net[0].running_var.item() == pytest.approx(16.0)
    bn.estimate_(net, UNEVEN, rule="paper")
    assert net[0].running_mean.item() == pytest.approx(2.0), "weighted by the number of examples"
    assert net[0].running_var.item() == 0.0, "Alg. 2, lines 8 to 10 average the batches' variances, which are 0"


def test_frozen_layers_are_kept_and_dropout_is_off():
    net = nn.Sequential(nn.Dropout(0.9), bn.BatchNorm1d(3), bn.BatchNorm1d(3))
    bn.freeze_(net[2])
    net[2].running_mean.fill_(7.0)
    x = torch.randn(50, 3) + 4
    bn.estimate_(net.train(), [x], rule="pooled")
    torch.testing.assert_close(net[1].running_mean, x.mean(0), rtol=1e-5, atol=1e-5)
    assert (net[2].running_mean == 7.0).all()


def one_rank(rank, world_size, sizes, upstream):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), bn.BatchNorm1d(5), nn.Sigmoid(), nn.BatchNorm1d(5)).double()
    x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(3)).double()
    mine = x.split(sizes)[rank]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as shown:
        patch.setattr("batchnorm.progress.PATIENCE", -1.0)
        report = bn.estimate_(net, mine.split(4), rule="pooled", upstream=upstream)
    return dict(net.state_dict()), report.layers[0].count, shown.getvalue()


@pytest.mark.dist
@pytest.mark.parametrize("upstream", ["batch", "population"])
def test_ranks_with_different_numbers_of_batches_agree(upstream):
    sizes = [12, 6]
    (a, count, shown), (b, _, nothing) = on_ranks(2, one_rank, sizes, upstream)
    assert count == 18
    assert "estimating population statistics, pass 1 of " in shown
    assert ": batch 2 of 3" in shown
    assert nothing == ""  # only one rank prints, or lines would mix
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    alone, *_ = one_rank(0, 1, [18], upstream)
    layers = ("1", "3") if upstream == "population" else ("1",)
    for key in (f"{layer}.running_{what}" for layer in layers for what in ("mean", "var")):
        torch.testing.assert_close(a[key], alone[key], rtol=1e-10, atol=1e-12)
