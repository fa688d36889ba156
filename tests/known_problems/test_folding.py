"""torch's folding is missing or silently wrong (pytorch 197539, 180995, 122070); compare it with fold()."""

import pytest
import torch
from networks import ZOO, Coded, scramble_
from torch import nn
from torch.fx.experimental.optimization import fuse

import batchnorm as bn


def two_paths():
    """Return a network whose convolution is called twice, with a BN after the first call only."""

    def code(n, x):
        y = n.bn(n.conv(x))
        return y + n.conv(y)

    return Coded(code, conv=nn.Conv2d(3, 3, 3, padding=1), bn=nn.BatchNorm2d(3))


def over_positions():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))


CASES = {
    "one conv called twice": (two_paths, lambda: torch.randn(2, 3, 6, 6), "fixed"),
    "Linear on 3-D input, BN over dim 1": (over_positions, lambda: torch.randn(4, 6, 5), "fixed"),
    "Linear and BN without affine": (*ZOO["without_affine"][:2], "folded"),
    "grouped transposed convolution": (*ZOO["transposed_grouped"][:2], "folded"),
    "transposed convolution": (*ZOO["transposed"][:2], "folded"),
    "BN before a convolution": (*ZOO["before_unpadded_conv"][:2], "folded"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_folded_or_left_as_a_map_exactly(name):
    make, example, action = CASES[name]
    net, x = scramble_(make()).eval(), example()
    folded = bn.fold(net, x)
    assert [site.action.split()[0] for site in folded.report] == [action]
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["one conv called twice", "Linear on 3-D input, BN over dim 1"])
def test_what_torch_gets_wrong(name):
    make, example, _ = CASES[name]
    net, x = scramble_(make()).eval(), example()
    assert (fuse(net)(x) - net(x)).abs().max() > 0.1, "torch has fixed it"


def test_functional_batch_norm_is_folded_or_counted():
    make, example, _ = ZOO["functional"]
    net, x = scramble_(make()).eval(), example()
    for traced in (None, True):
        folded = bn.fold(net, x, traced=traced)
        assert [site.action for site in folded.report] == ["folded into 'functional_conv2d'", "folded into 'conv'"]
        torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match=r"1 left: batch_norm is called as a function"):
        folded = bn.fold(net, x, traced=False)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-4)


def test_subclasses_with_their_own_forward_are_folded_or_counted():
    make, example, _ = ZOO["own_forward"]
    net, x = scramble_(make()).eval(), example()
    for traced in (None, True):
        folded = bn.fold(net, x, traced=traced)
        assert all(site.action.startswith("folded") for site in folded.report)
        torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match=r"0 of 1 batch norm folded.*1 left: NormWithActivation has its own forward"):
        folded = bn.fold(net, x, traced=False)
    torch.testing.assert_close(folded(x), net(x), rtol=0, atol=0)


def test_pre_activation_networks_have_no_batch_normalization_left():
    make, example, _ = ZOO["dense"]
    net, x = scramble_(make()).eval(), example()
    folded = bn.fold(net, x)
    assert not any("BatchNorm" in type(m).__name__ for m in folded.modules())
    assert [site.action for site in folded.report] == ["fixed affine map"] * 4
    traced = bn.fold(net, x, traced=True)  # a torch.fx graph instead of the network's own code
    assert [site.action for site in traced.report] == ["fixed affine map with ReLU"] * 3 + ["fixed affine map"]
    torch.testing.assert_close(traced(x), net(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)


def test_an_activation_that_another_path_uses_alone_stays():
    def code(n, x):
        return n.relu(n.bn(x)) if n.normalized else n.relu(x)

    net = scramble_(Coded(code, bn=nn.BatchNorm1d(3), relu=nn.ReLU(), normalized=True)).eval()
    x = torch.randn(4, 3)
    folded = bn.fold(net, x)
    net.normalized = folded.normalized = False
    torch.testing.assert_close(folded(x), net(x))
