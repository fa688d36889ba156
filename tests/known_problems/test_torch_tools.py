"""torch's own tools would lose fused activations and frozen statistics; this library's layers keep them or raise."""

import copy

import pytest
import torch
from networks import BasicBlock
from torch import nn
from torch.nn.utils import fusion
from torch.optim.swa_utils import update_bn

import batchnorm as bn

synchronized = nn.SyncBatchNorm.convert_sync_batchnorm
EXTRAS = [
    ({"activation": "leaky_relu"}, r"activation=leaky_relu\(0.01\)"),
    ({"statistics": bn.Ghost(4)}, r"statistics=Ghost\(size=4\)"),
    ({"on_single": "running"}, "on_single=running"),
]


def network(**options):
    net = nn.Sequential(nn.Conv2d(2, 3, 1), bn.BatchNorm2d(3, **options), nn.Flatten())
    net(torch.randn(4, 2, 5, 5) * 2 + 1)
    return net


def test_update_bn_keeps_frozen_statistics():
    net = network()
    bn.freeze_(net)
    before = copy.deepcopy(net.state_dict())
    update_bn([torch.randn(4, 2, 5, 5)], net)
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)
    bn.unfreeze_(net)
    update_bn([torch.randn(4, 2, 5, 5)], net)
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])


@pytest.mark.parametrize(("options", "lost"), EXTRAS)
def test_convert_sync_batchnorm_raises(options, lost):
    net = network(**options)
    with pytest.raises(RuntimeError, match=rf"convert_sync_batchnorm would drop {lost}; use layers with statistics="):
        synchronized(net)
    assert type(net[1]) is bn.BatchNorm2d


def test_convert_sync_batchnorm_of_frozen_and_of_plain_layers():
    net = network()
    bn.freeze_(net)
    with pytest.raises(RuntimeError, match=r"would drop frozen=statistics\+weight\+bias"):
        synchronized(net)
    bn.unfreeze_(net)
    mean = net[1].running_mean
    assert type(synchronized(net)[1]) is nn.SyncBatchNorm
    assert net[1].running_mean is mean


def test_convert_sync_batchnorm_of_rewritten_code():
    net, x = BasicBlock(3, 4), torch.randn(4, 3, 6, 6)
    converted = bn.convert(net, x).eval()
    torch.testing.assert_close(synchronized(converted)(x), net.eval()(x))


def test_folding_raises_for_an_activation():
    net = network(activation="relu").eval()
    for fuse in (fusion.fuse_conv_bn_eval, nn.utils.fuse_conv_bn_eval):
        with pytest.raises(RuntimeError, match=r"fuse_conv_bn_eval would drop activation=relu; use batchnorm\.fold"):
            fuse(net[0], net[1])
    linear, norm = nn.Linear(2, 3).eval(), bn.BatchNorm1d(3, activation="relu").eval()
    with pytest.raises(RuntimeError, match="fuse_linear_bn_eval would drop activation=relu"):
        fusion.fuse_linear_bn_eval(linear, norm)


def test_mkldnn_raises_for_an_activation():
    from torch.utils import mkldnn

    with pytest.raises(RuntimeError, match="to_mkldnn would drop activation=relu"):
        mkldnn.to_mkldnn(network(activation="relu").eval()[1])


def test_folding_is_right_where_nothing_is_lost():
    net, x = network(on_single="running").eval(), torch.randn(2, 2, 5, 5)
    bn.freeze_(net)
    torch.testing.assert_close(fusion.fuse_conv_bn_eval(net[0], net[1])(x), net[:2](x))


def test_quantization_does_not_take_the_layers_for_its_own():
    net = network(activation="relu").eval()
    with pytest.raises((NotImplementedError, AssertionError), match="fuser method"):
        torch.ao.quantization.fuse_modules(net, [["0", "1"]])


def test_fx_folding_leaves_the_layers_alone():
    from torch.fx.experimental.optimization import fuse

    net, x = network(activation="relu").eval(), torch.randn(2, 2, 5, 5)
    torch.testing.assert_close(fuse(net)(x), net(x))
