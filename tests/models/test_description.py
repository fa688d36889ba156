import torch
from torch import nn

from batchnorm.models import describe, inception
from batchnorm.models.description import claims, googlenet


def test_convolution_and_linear_by_hand():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.Flatten(), nn.Linear(4 * 4 * 4, 5))
    found = describe(net, size=8)
    assert [layer.multiply_adds for layer in found.layers] == [4 * 4 * 4 * 3 * 9, 5 * 64]
    assert (found.parameters, found.depth) == (4 * 3 * 9 + 64 * 5 + 5, 2)


def test_a_layer_that_returns_a_tuple():
    layers = describe(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, return_indices=True)), size=8).layers
    assert [layer.output for layer in layers] == [(4, 6, 6), (4, 3, 3)]


def test_the_network_is_left_alone():
    net = inception(size=32, classes=3)
    net.stem.eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    describe(net, 32)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    assert not net.stem.bn.training
    assert not any(m._forward_hooks for m in net.modules())


def test_ratios_to_googlenet():
    depth, parameters, work = googlenet()
    separable, plain = describe(inception()), describe(inception(stem="plain"))
    assert (depth, separable.depth, plain.depth) == (22, 35, 34)
    assert [round(d.multiply_adds / work, 2) for d in (plain, separable)] == [1.28, 1.22]
    assert round(plain.parameters / parameters, 1) == 1.6
    assert claims(separable)[1].computed == "13: 1 in each of nine modules, 3 in the tenth, 1 in the separable stem"


def test_printed_table():
    lines = str(describe(inception())).splitlines()
    assert lines[1].split() == ["stem.conv.depthwise", "Conv2d", "112x112x24", "1,176", "14,751,744"]
    assert lines[-1].split() == ["total", "11,188,288", "1,934,857,216"]
