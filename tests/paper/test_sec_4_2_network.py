"""Section 4.2 and the appendix: the architecture of the paper's Inception network, compared with GoogLeNet's."""

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.models import describe, inception
from batchnorm.models.bn_inception.blocks import SeparableConv2d, Unit
from batchnorm.models.bn_inception.network import rows
from batchnorm.models.bn_inception.pooling import AvgPool2d, MaxPool2d
from batchnorm.models.description import GOOGLENET


@pytest.fixture(scope="module")
def net():
    return inception()


def test_the_classifier_is_the_only_fully_connected_layer(net):
    assert [name for name, m in net.named_modules() if isinstance(m, nn.Linear)] == ["classifier"]
    assert net.classifier.out_features == 1000


def test_every_convolution_has_bn_and_the_nonlinearity_behind_it(net):
    units = [m for m in net.modules() if isinstance(m, Unit)]
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    # The separable first layer is two convolutions, and is normalized once.
    assert len(units) == len(convolutions) - 1
    for unit in units:
        assert type(unit[1]) is bn.BatchNorm2d
        assert unit[1].activation.name == "relu"
        assert isinstance(unit[1].num_features, int)  # one gamma and one beta per feature map


def test_two_3x3_convolutions_replace_each_5x5(net):
    kernels = {m.kernel_size for m in net.modules() if isinstance(m, nn.Conv2d)}
    assert kernels == {(1, 1), (3, 3), (7, 7)}
    for row in rows():
        double = getattr(net, f"inception_{row.name}").double33
        assert [unit.conv.kernel_size for unit in (double.conv1, double.conv2)] == [(3, 3)] * 2


def test_three_modules_of_28_by_28_instead_of_two():
    sizes = {"3": 28, "4": 14, "5": 7}  # of the modules' inputs
    assert sum(sizes[row.name[0]] == 28 for row in rows()) == 3
    assert sum(size == 28 for *_, size in GOOGLENET) == 2


def test_the_kind_of_pooling_in_each_module(net):
    kinds = {row.name: type(getattr(net, f"inception_{row.name}").pool.pool) for row in rows()}
    assert {name for name, kind in kinds.items() if kind is MaxPool2d} == {"3c", "4e", "5b"}
    assert {*kinds.values()} == {MaxPool2d, AvgPool2d}


def test_strides_of_2_are_inside_3c_and_4e(net):
    names = [name for name, _ in net.named_children()]
    first, last = names.index("inception_3a"), names.index("inception_5b")
    assert all(name.startswith("inception_") for name in names[first : last + 1])  # no pools between the modules
    strided = {
        row.name
        for row in rows()
        for m in getattr(net, f"inception_{row.name}").modules()
        if getattr(m, "stride", 1) in (2, (2, 2))
    }
    assert strided == {"3c", "4e"}


def test_depth_multiplier_8_costs_less_computation_and_more_memory(net):
    conv = net.stem.conv
    assert isinstance(conv, SeparableConv2d)
    assert conv.depthwise.out_channels == 8 * conv.depthwise.in_channels == 24
    stems = [
        [layer for layer in describe(one).layers if layer.name.startswith("stem.conv")]
        for one in (net, inception(stem="plain"))
    ]
    separable, plain = (sum(layer.multiply_adds for layer in stem) for stem in stems)
    assert separable < plain
    # Training keeps the outputs of both parts of the separable convolution.
    separable, plain = (sum(torch.Size(layer.output).numel() for layer in stem) for stem in stems)
    assert separable - plain == 24 * 112 * 112
