"""Test replacing modules in a copy: all references point to the new modules, and what was shared stays shared."""

import copy
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from networks import Coded
from torch import nn

import batchnorm as bn
from batchnorm.network_copy import copy_with, outputs, private_copy, relative_error, restored


def test_references_in_lists_closures_and_methods_follow():
    relu = nn.ReLU()
    net = Coded(lambda n, x: n.plain[0](x), relu=relu, plain=[relu], method=relu.forward, table={"again": (relu,)})
    new = copy_with(net, {net.relu: lambda memo: nn.Tanh()})
    assert isinstance(new.relu, nn.Tanh)
    assert new.plain[0] is new.relu is new.table["again"][0] is new.method.__self__
    assert isinstance(net.relu, nn.ReLU)


def test_parts_copied_with_the_memo_share_tensors_with_the_rest():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    new = copy_with(net, {net[0]: lambda memo: nn.Sequential(copy.deepcopy(net[0], memo))})
    assert new[0][0].weight is new[1].weight
    assert new[1].weight is not net[1].weight


class KeepsOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.features, self.history = {}, []
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        y = self.norm(self.linear(x)).relu()
        self.features["y"] = self.last = y
        self.history.append((y,))
        self.mean = y.mean(0)
        return y


@pytest.mark.parametrize("verb", ["convert", "fold", "insert", "revert"])
def test_kept_outputs_of_a_training_step_are_copied(verb):
    net, x = KeepsOutputs(), torch.randn(4, 2)
    kept = net(x)
    kept.sum().backward(retain_graph=True)
    new = getattr(bn, verb)(net, x)
    assert new.features["y"] is new.last is new.history[0][0]
    assert new.last is not kept
    torch.testing.assert_close([new.last, new.mean], [kept.detach(), kept.detach().mean(0)], rtol=0, atol=0)
    assert net.features["y"] is net.last is kept


class Shares(nn.Module):
    """A scripted module whose two layers, and one layer outside, share their weights."""

    def __init__(self):
        super().__init__()
        self.outside = nn.Linear(2, 2)
        inside = nn.Sequential(self.outside, nn.Linear(2, 2), nn.BatchNorm1d(2))
        inside[1].weight = self.outside.weight
        inside[1].bias.requires_grad_(False)
        self.inside = torch.jit.script(inside)
        self.again = [self.inside]

    def forward(self, x):
        return self.inside(self.outside(x))


def by_deepcopy(net):
    return copy.deepcopy(nn.Sequential(net))[0]  # the copy's scripted parameters are not leaves of the autograd graph


@pytest.mark.parametrize("source", [lambda net: net, by_deepcopy], ids=["scripted", "deepcopy of scripted"])
def test_scripted_modules_are_copied_with_their_own_parameters(source):
    net = source(Shares())
    new, x = private_copy(net), torch.randn(4, 2)
    torch.testing.assert_close(new(x), net(x), rtol=0, atol=0)
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in net.named_parameters()}
    assert all(p.is_leaf and p.requires_grad == before[name][0] for name, p in new.named_parameters())
    assert new.again[0] is new.inside
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    new(x).square().sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in net.parameters() if p.is_leaf)
    assert all(torch.equal(p, before[name][1]) for name, p in net.named_parameters())
    assert not torch.equal(new(x), net(x))


def test_what_scripted_modules_share_stays_shared():
    new = private_copy(Shares())
    weights = {id(new.outside.weight), *(id(p) for name, p in new.inside.named_parameters() if p.dim() == 2)}
    assert len(weights) == 1


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(4, 2))])
def test_a_converted_network_trains_its_own_scripted_modules(make):
    inside = make(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    net = nn.Sequential(inside, nn.BatchNorm1d(2), nn.ReLU())
    new = bn.convert(net, torch.randn(4, 2))
    new(torch.randn(4, 2)).square().sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in new.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_the_root_itself_can_be_replaced():
    net = nn.ReLU()
    assert isinstance(copy_with(net, {net: lambda memo: nn.Tanh()}), nn.Tanh)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 0.5),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, 0.0),
        (torch.ones(2), torch.ones(3), float("inf")),
        ([torch.ones(1)], [], float("inf")),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), 0.0),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 2.0]), 0.5),
        ([torch.tensor([float("nan")]), torch.ones(1)], [torch.ones(1), torch.ones(1)], float("inf")),
        (torch.ones(1), torch.tensor([float("inf")]), float("inf")),
        (torch.zeros(2), torch.zeros(2), 0.0),
        ([torch.zeros(0), torch.ones(1)], [torch.zeros(0), torch.ones(1)], 0.0),
        (torch.tensor([3]), torch.tensor([3]), 0.0),
    ],
)
def test_relative_error(new, old, expected):
    assert relative_error(new, old) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("old", [[], torch.zeros(0), torch.full((2,), float("nan"))], ids=["none", "empty", "nan"])
def test_nothing_to_compare_is_an_error(old):
    with pytest.raises(ValueError, match="cannot be checked on this example"):
        relative_error(old, old)


class Closures(nn.Module):
    """A module that calls its layer in one of several ways; in a copy, some of them still call the original's layer."""

    def __init__(self, name):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.step = {
            "lambda": lambda x: self.bn(x),
            "list": [lambda x: self.bn(x)],
            "forward": lambda x: self.bn.forward(x),
            "functional": lambda x: F.batch_norm(x, self.bn.running_mean, self.bn.running_var),
            "caught": lambda x: self.caught(x),
            "wrapped": lambda x: self.wrapped(x),
            "method": self.norm,
            "partial": partial(self.norm),
        }[name]

    def norm(self, x):
        return self.bn(x)

    def caught(self, x):
        with suppress(Exception):
            x = self.bn(x)
        return x

    def wrapped(self, x):
        try:
            return self.bn.running_mean + x
        except Exception as error:
            raise RuntimeError("wrapped") from error

    def forward(self, x):
        return (self.step[0] if isinstance(self.step, list) else self.step)(x)


@pytest.mark.parametrize("verb", [bn.fold, bn.convert, bn.insert])
@pytest.mark.parametrize("name", ["lambda", "list", "forward", "functional", "caught", "wrapped"])
def test_a_copy_that_uses_the_original_is_refused(name, verb):
    net = Closures(name)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"still uses 'bn.* of the original.* with methods or modules"):
        verb(net, torch.randn(4, 3, generator=torch.Generator()))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["method", "partial"])
def test_methods_and_partials_follow_the_copy(name):
    assert bn.convert(Closures(name), torch.randn(4, 3)).report["bn"].action == "converted"


def test_a_forward_that_ignores_the_network_it_is_given_is_refused():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"make sure that it calls the network"):
        bn.fold(net, torch.randn(4, 3), forward=lambda _, x: net(x))


def test_a_closure_used_in_training_only_is_refused():
    class Training(Closures):
        def forward(self, x):
            return self.step(x) if self.training else self.bn(x)

    with pytest.raises(ValueError, match="still uses 'bn'"):
        bn.convert(Training("lambda"), torch.randn(4, 3))


def test_outputs_leave_nothing_behind():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).train()
    x, state = torch.randn(4, 3), torch.get_rng_state()
    before = copy.deepcopy(net.state_dict())
    first, second = outputs(net, x), outputs(net, x)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_restored_brings_replaced_buffers_back():
    net = nn.BatchNorm1d(2)
    mean = net.running_mean

    def run():
        net.running_mean = torch.ones(2)
        mean.add_(1)
        net.eval()
        net.momentum = 0.5
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), restored(net):
        run()
    assert net.running_mean is mean
    assert (mean == 0).all()
    assert net.training
    assert net.momentum == 0.1


def test_only_networks_are_accepted():
    with pytest.raises(TypeError, match="not the class ReLU: pass an instance"):
        bn.convert(nn.ReLU, torch.zeros(1))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not dict"):
        bn.fold({}, torch.zeros(1))


def test_wrappers_are_refused():
    with pytest.raises(TypeError, match=r"net\.module"):
        private_copy(nn.DataParallel(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=r"net\._orig_mod"):
        private_copy(torch.compile(nn.Linear(1, 1), backend="eager"))
