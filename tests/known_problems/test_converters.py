"""Other converters lose hooks, shared modules and the activations of subclasses (pytorch 187298, timm 1254)."""

import torch
from networks import NormWithActivation, scramble_
from torch import nn

import batchnorm as bn


def network():
    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3, padding=1),
            "own": NormWithActivation(4),
            "shared": nn.BatchNorm2d(4),
            "mix": nn.Conv2d(4, 4, 1),
        }
    )
    net["shared"].weight.requires_grad_(False)
    return scramble_(net)


def run(net, x):
    y = net["own"](net["conv"](x))
    return net["shared"](net["mix"](net["shared"](y)))


def test_torchs_converter_moves_the_output():
    net, x = network().eval(), torch.randn(2, 3, 5, 5)
    before = run(net, x)
    after = run(nn.SyncBatchNorm.convert_sync_batchnorm(net).eval(), x)
    assert (before - after).abs().max() > 0.1, "torch has fixed it"


def test_ours_keeps_the_output_and_everything_on_the_layers():
    net, x, seen = network(), torch.randn(2, 3, 5, 5), []
    net["shared"].register_forward_hook(lambda m, args, out: seen.append(type(m)))
    net["own"].eval()
    converted = bn.convert(net, x, forward=run)
    assert type(converted["own"]) is NormWithActivation
    assert "subclass" in converted.report["own"].reason
    assert type(converted["shared"]) is bn.BatchNorm2d
    assert not converted["shared"].weight.requires_grad
    assert (converted["shared"].training, converted["own"].training) == (True, False)
    seen.clear()
    torch.testing.assert_close(run(converted.eval(), x), run(net.eval(), x), rtol=1e-4, atol=1e-5)
    assert seen == [bn.BatchNorm2d] * 2 + [nn.BatchNorm2d] * 2
