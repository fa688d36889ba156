"""Test that param_groups exempts gamma and beta from weight decay."""

import numpy as np
import pytest
import torch
from torch import nn

import batchnorm as bn


def named(net, group):
    names = {id(p): name for name, p in net.named_parameters()}
    return {names[id(p)] for p in group["params"]}


def test_gamma_and_beta_of_every_normalization_are_spared():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), bn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)
    )
    decayed, spared = bn.param_groups(net, 0.1)
    assert named(net, decayed) == {"0.weight", "0.bias", "5.weight", "5.bias"}
    assert named(net, spared) == {f"{i}.{p}" for i in (1, 2, 3) for p in ("weight", "bias")}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_shared_parameters_appear_once_and_frozen_ones_not_at_all():
    norm = bn.BatchNorm1d(3)
    net = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm)
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    decayed, spared = bn.param_groups(net, 0.1)
    assert named(net, decayed) == {"0.weight", "2.bias"}
    assert named(net, spared) == {"1.weight", "1.bias"}
    torch.optim.SGD([decayed, spared], lr=0.1)


def test_decay_leaves_gamma_alone():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), bn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(bn.param_groups(net, 0.5), lr=0.1)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    before = net[0].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(net[1].weight, torch.ones(3), check_stride=False)
    torch.testing.assert_close(net[0].weight, before * 0.95)


class Conditional(bn.BatchNorm1d):
    """A normalization with layers inside, such as those that compute gamma from a condition."""

    def __init__(self, features):
        super().__init__(features)
        self.gamma = nn.Sequential(nn.Linear(2, features), nn.LayerNorm(features))


def test_other_layers_inside_a_normalization_are_decayed():
    net = nn.Sequential(Conditional(3))
    decayed, spared = bn.param_groups(net, 0.1)
    assert named(net, decayed) == {"0.gamma.0.weight", "0.gamma.0.bias"}
    assert named(net, spared) == {"0.weight", "0.bias", "0.gamma.1.weight", "0.gamma.1.bias"}


@pytest.mark.parametrize("net", ["net", None, [nn.Linear(3, 3)], torch.optim.SGD(nn.Linear(3, 3).parameters()), 1e-4])
@pytest.mark.parametrize("verb", [bn.param_groups, bn.freeze_, bn.unfreeze_, bn.revert, bn.estimate_, bn.export])
def test_what_is_no_network(verb, net):
    others = {bn.param_groups: (nn.ReLU(),), bn.estimate_: ([],), bn.export: (torch.zeros(1), "net.pt2")}
    found = f"not {type(net).__name__}: pass the network as the first argument"
    with pytest.raises(TypeError, match=rf"^the network must be a torch\.nn\.Module, {found}$"):
        verb(net, *others.get(verb, ()))


@pytest.mark.parametrize("decay", ["1e-4", None, [1e-4], nn.Linear(3, 3)])
def test_a_decay_that_is_no_number(decay):
    with pytest.raises(TypeError, match=f"weight_decay must be a number, such as 1e-4, not {type(decay).__name__}"):
        bn.param_groups(nn.Linear(3, 3), decay)


@pytest.mark.parametrize("decay", [-0.1, float("nan"), float("inf")])
def test_a_decay_out_of_range(decay):
    with pytest.raises(ValueError, match=f"weight_decay={decay}: must be"):
        bn.param_groups(nn.Linear(3, 3), decay)


@pytest.mark.parametrize("decay", [0, np.float32(0.5), np.float64(0.5)])
def test_a_decay_of_another_type(decay):
    assert bn.param_groups(nn.Linear(3, 3), decay)[0]["weight_decay"] == decay


def test_a_parametrized_norm_is_spared_too():
    net = nn.Sequential(bn.BatchNorm1d(3))
    nn.utils.parametrize.register_parametrization(net[0], "weight", nn.Softplus())
    assert len(bn.param_groups(net, 0.1)[1]["params"]) == 2
