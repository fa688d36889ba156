"""Each rule finds its fault, and finds nothing in the same network without the fault."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import Coded, scramble_
from torch import nn

import batchnorm as bn
from batchnorm.diagnosis.rules import RULES
from batchnorm.network_copy import SharedWithOriginalError

OPTIMIZED = {"weight_decay", "not_trained"}


def data(count=6, m=64, features=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(m, features, generator=generator) * 2 + 1 for _ in range(count)]


class Net(nn.Module):
    """Two normalized layers with dropout after the second; ``between`` runs before ``fc2``."""

    def __init__(self, *, bias=False, between=None, **options):
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(6, 8, bias=bias), nn.BatchNorm1d(8)
        self.between = nn.Identity() if between is None else between
        self.fc2, self.bn2 = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, **options)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        x = self.between(F.relu(self.bn1(self.fc1(x))))
        return self.head(self.dropout(F.relu(self.bn2(self.fc2(x)))))


def healthy(**options):
    torch.manual_seed(0)
    net = Net(**options)
    bn.estimate_(net, data())
    return net.train()


def rules(net, batches=None, **options):
    return {finding.rule: finding for finding in bn.diagnose(net, data() if batches is None else batches, **options)}


def optimizer(net):
    return torch.optim.SGD(bn.param_groups(net, 1e-4), 0.1)


@pytest.mark.parametrize("change", [lambda net: net, lambda net: bn.convert(net, data()[0]), lambda net: net.eval()])
def test_a_healthy_network(change):
    net = change(healthy())
    found = bn.diagnose(net, data(), optimizer=optimizer(net))
    assert found.findings == ()
    assert str(found) == "diagnose: no problem found in 2 batch normalization layers, on 6 batches"


def never_updated(net):
    net.bn2.reset_running_stats()


def stale_averages(net):
    net.bn2.running_mean += 3 * net.bn2.running_var.sqrt()


def not_finite(net):
    net.bn2.running_var[3] = float("nan")


def thaws(net):
    net.bn2.eval()


def half_frozen(net):
    net.bn2.requires_grad_(False)


def momentum(net):
    net.bn2.momentum = 0.99


def tiny_variance(net):
    with torch.no_grad():
        net.fc2.weight[2], net.bn2.bias[2] = 0, 1  # with a bias of 0, the feature would also be dead
    bn.estimate_(net, data())


def dead_features(net):
    with torch.no_grad():
        net.bn2.bias[5] = -50


def never_called(net):
    net.unused = nn.BatchNorm1d(4)


FAULTS = [
    never_updated,
    stale_averages,
    not_finite,
    thaws,
    half_frozen,
    momentum,
    tiny_variance,
    dead_features,
    never_called,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["torch", "batchnorm"])
def test_a_fault_is_found_at_its_layer(fault, kind):
    net = healthy()
    if kind == "batchnorm":
        net = bn.convert(net, data()[0])
    fault(net)
    found = bn.diagnose(net, data())
    assert [finding.rule for finding in found] == [fault.__name__]
    (finding,) = found
    assert finding.path == ("unused" if fault is never_called else "bn2")
    words = f"{fault.__name__.replace('_', ' ')} {finding.path}: {finding.why} fix: {finding.fix}"
    assert words in " ".join(str(found).split())
    assert max(map(len, str(found).splitlines())) <= 100


def test_the_advice_for_stale_averages_helps():
    net = healthy()
    stale_averages(net)
    assert rules(net)["stale_averages"].why == (
        "its running averages are off for 8 of 8 features: the mean by up to 3 standard deviations, the variance by a"
        " factor of up to 1"
    )
    bn.estimate_(net, data())
    assert not rules(net.train())


def ours(net):
    return bn.convert(net, data()[0])


class Subclass(nn.BatchNorm1d):
    """A layer that convert refuses."""


class LeavesAlone(Net):
    """A network whose train() leaves ``bn2`` in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self.bn2.eval()
        return self


def unfreeze_and_estimate(net):
    for layer in (net.bn1, net.bn2):
        if layer.frozen_statistics:
            bn.unfreeze_(layer)
            bn.estimate_(net, data())
            bn.freeze_(layer)
    return net


def estimated(net):
    bn.estimate_(net, data())
    return net


def convert_and_freeze(net):
    net = net if isinstance(net.bn2, bn.BatchNorm1d) else ours(net)
    bn.freeze_(net.bn2)
    return net


def frozen(fault):
    def make():
        fault(net := ours(healthy()))
        bn.freeze_(net.bn2)
        return net

    return make


def frozen_first():
    net = ours(healthy())
    net.bn1.running_var[0] = float("nan")
    bn.freeze_(net.bn1)
    return net


def faulty(*faults, change=lambda net: net, **options):
    def make():
        net = change(healthy(**options))
        for fault in faults:
            fault(net)
        return net

    return make


def subclass(net):
    net.bn2.__class__ = Subclass


def overridden(net):
    net.__class__ = LeavesAlone
    return net.train()


def broken_gamma(net):
    net.bn2.weight.data[0] = float("nan")


def broken_weight(net):
    net.fc2.weight.data[0, 0] = float("inf")


def without_bias(net):
    net.bn1.running_mean -= net.fc1.bias.detach()
    net.fc1.bias = None
    return net


def bad_first(net):
    net.bn1.running_var[0] = float("nan")
    net.bn1.eval()


UNFREEZE = "unfreeze it with bn.unfreeze_, call bn.estimate_(net, batches), and freeze it again"
FREEZE = "freeze it with bn.freeze_, which train() does not undo"
# For each fault: a function that makes a network with this fault, the rule, the path, the end of the advice, and a
# function that follows the advice.
REMEDIES = {
    "frozen, stale": (frozen(stale_averages), "stale_averages", "bn2", UNFREEZE, unfreeze_and_estimate),
    "frozen, never updated": (
        *(frozen(never_updated), "never_updated", "bn2"),
        *(f"load its weights, or {UNFREEZE}", unfreeze_and_estimate),
    ),
    "frozen, NaN": (frozen(not_finite), "not_finite", "bn2", UNFREEZE, unfreeze_and_estimate),
    "frozen, NaN, before a layer": (
        *(frozen_first, "not_finite", "bn2"),
        *("repair the running averages of 'bn1'", unfreeze_and_estimate),
    ),
    "alone in evaluation mode, NaN, before a layer": (
        *(faulty(bad_first), "not_finite", "bn2", "repair the running averages of 'bn1'"),
        lambda net: estimated(net.eval()),
    ),
    "NaN": (faulty(not_finite), "not_finite", "bn2", "batch with inf or NaN", estimated),
    "ours, NaN": (faulty(not_finite, change=ours), "not_finite", "bn2", "call bn.estimate_(net, batches)", estimated),
    "alone in evaluation mode, stale": (
        *(
            faulty(thaws, stale_averages),
            "stale_averages",
            "bn2",
            "call net.eval() and then bn.estimate_(net, batches)",
        ),
        lambda net: estimated(net.eval()),
    ),
    "alone in evaluation mode": (
        *(faulty(thaws), "thaws", "bn2", f"call bn.convert, and then {FREEZE}", convert_and_freeze),
    ),
    "ours, alone in evaluation mode": (faulty(thaws, change=ours), "thaws", "bn2", FREEZE, convert_and_freeze),
    "a class that convert refuses": (
        *(faulty(subclass, thaws), "thaws", "bn2"),
        *("override the network's train() to keep the layer in evaluation mode, because bn.convert refuses it",),
        overridden,
    ),
    "half frozen": (faulty(half_frozen), "half_frozen", "bn2", FREEZE, convert_and_freeze),
    "NaN in gamma": (
        *(faulty(broken_gamma), "not_finite", "", "a lower learning rate or with clipped gradients"),
        lambda net: healthy(),
    ),
    "inf in a weight": (
        *(faulty(broken_weight), "not_finite", "bn2", "a lower learning rate or with clipped gradients"),
        lambda net: healthy(),
    ),
    "a bias in a trained network": (
        *(faulty(bias=True), "bias_without_effect", "fc1"),
        *(
            "keep the bias in this trained network, or subtract it from the running mean, which includes it, and set"
            " the layer's bias to None; in a new network, create the layer with bias=False",
            without_bias,
        ),
    ),
}


@pytest.mark.parametrize(("make", "rule", "path", "fix", "follow"), REMEDIES.values(), ids=REMEDIES)
def test_the_advice_is_possible_and_helps(make, rule, path, fix, follow):
    net = make()
    (found,) = (finding for finding in bn.diagnose(net, data()).of(rule) if finding.path == path)
    assert found.fix.endswith(fix)
    assert not bn.diagnose(follow(net), data()).findings


def test_removing_a_bias_changes_nothing():
    net = healthy(bias=True).eval()
    expected = net(data()[0])
    torch.testing.assert_close(without_bias(net)(data()[0]), expected)


def test_a_bias_of_a_new_network():
    (found,) = bn.diagnose(Net(bias=True), data()).of("bias_without_effect")
    assert found.fix == "create the layer with bias=False"


def test_averages_cannot_be_estimated_on_bad_batches():
    batches = data()
    batches[2][0, 0] = float("inf")
    net = ours(healthy())
    not_finite(net)
    inputs, averages = bn.diagnose(net, batches).of("not_finite")
    assert inputs.fix == "look for the inf or NaN in the batches, and for values that overflow before this layer"
    assert averages.fix == "first repair the inputs that have an inf or NaN, then call bn.estimate_(net, batches)"


@pytest.mark.parametrize(
    ("keeps", "small", "single"),
    [
        (
            True,
            "use larger batches or statistics=bn.Sync() with several GPUs or statistics=bn.Renorm(); to fine-tune, call"
            " bn.convert, and then use bn.freeze_",
            "use drop_last=True in the data loader or larger batches, or call bn.convert, and then set the layer's"
            " on_single to 'running'; to fine-tune, call bn.convert, and then use bn.freeze_",
        ),
        (
            False,
            "use larger batches or statistics=bn.Sync() with several GPUs",
            "use drop_last=True in the data loader or larger batches",
        ),
    ],
)
def test_small_batches_without_running_statistics(keeps, small, single):
    net = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=keeps))
    assert rules(net, data(m=4))["small_batches"].fix == small
    assert rules(net, [*data(), *data(1, m=1)])["single_value"].fix == single
    if keeps:
        net = bn.convert(net, data()[0], statistics=bn.Renorm())
        assert "small_batches" not in rules(net, data(m=4))
        net[0].statistics, net[0].on_single = None, "running"
        assert "single_value" not in rules(net, [*data(), *data(1, m=1)])


@pytest.mark.parametrize("keep", [lambda layer: bn.freeze_(layer), lambda layer: layer.eval()])
def test_stale_averages_can_make_features_look_dead(keep):
    net = ours(healthy())
    stale_averages(net)
    keep(net.bn2)
    assert rules(net)["dead_features"].fix.startswith("check that its running averages are not stale")


def test_parameters_of_eight_bits():
    net = healthy()
    net.scale = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    assert not bn.diagnose(net, data()).findings
    net.scale.data = torch.full((3,), float("nan")).to(torch.float8_e4m3fn)
    assert rules(net)["not_finite"].why == f"1 of {len(list(net.parameters()))} parameters has an inf or NaN: scale"


def test_weight_decay_on_layers_inside_a_layer():
    class Conditional(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(6)
            self.gamma = nn.Linear(2, 6)

    net = nn.Sequential(Conditional())
    found = rules(net, optimizer=torch.optim.SGD(net.parameters(), 0.1, weight_decay=1e-4))
    assert "weight_decay" in found
    assert "weight_decay" not in rules(net, optimizer=optimizer(net))


def test_a_nan_in_a_batch_is_found_at_the_first_layer():
    batches = data()
    batches[2][0, 0] = float("inf")
    found = rules(healthy(), batches)
    assert found.keys() == {"not_finite"}
    assert found["not_finite"].path == "bn1"
    assert found["not_finite"].why == "1 of its inputs has an inf or NaN"


def test_values_behind_a_mask_may_be_nan():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = bn.BatchNorm1d(6)

        def forward(self, x, mask):
            return self.bn(x, mask=mask)

    batches = []
    for x in data():
        mask = torch.ones(len(x), 1, dtype=torch.bool)
        mask[::2], x[::2] = False, float("nan")
        batches.append({"x": x[..., None], "mask": mask})
    net = Masked()
    bn.estimate_(net, batches)
    assert not rules(net, batches)


def test_small_batches():
    assert "small_batches" not in rules(healthy(), [*data(m=16), *data(1, m=3)])  # a small last batch
    found = rules(healthy(), data(count=100, m=4))
    assert found["small_batches"].why == "its statistics are over 4 values per feature, so they are noisy"


@pytest.mark.parametrize(("statistics", "m", "found"), [(bn.Renorm(), 8, False), (bn.Ghost(4), 64, True)])
def test_where_statistics_come_from_counts(statistics, m, found):
    net = nn.Sequential(bn.BatchNorm1d(6, statistics=statistics))
    bn.estimate_(net, data(m=m))
    assert ("small_batches" in rules(net.train(), data(m=m))) is found


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, bn.BatchNorm1d])
def test_batches_of_one_value(kind):
    net = nn.Sequential(kind(6))
    bn.estimate_(net, data())
    found = rules(net.train(), [*data(), *data(2, m=1)])
    assert set(found) == {"single_value"}  # the other batches are still judged
    assert found["single_value"].why.startswith("2 of 8 batches have only one value per feature")
    assert not rules(bn.BatchNorm1d(6, on_single="running"), data(1, m=1)).keys() & {"single_value"}
    net.eval()[0].eval()
    bn.freeze_(frozen := bn.convert(net, data()[0]).train())
    assert not rules(frozen, data(m=1))


@pytest.mark.parametrize("p", [0.05, 0.01])
def test_rare_values_are_not_stale(p):
    net = nn.Sequential(bn.BatchNorm1d(512))
    net[0].running_mean.fill_(p), net[0].running_var.fill_(p * (1 - p))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        batches = [(torch.rand(64, 512, generator=generator) < p).float() for _ in range(10)]
        assert "stale_averages" not in rules(net, batches)


def test_the_variance_of_features_that_are_constant_on_the_batches_is_unknown():
    net = healthy()
    bn.estimate_(net, batches := [torch.cat([x[:, :4], torch.zeros(64, 2)], 1) for x in data()])
    first = nn.Sequential(nn.BatchNorm1d(6), net)
    bn.estimate_(first, batches)
    first[0].running_var[4:] = 0.01  # these features vary in the training data
    assert "stale_averages" not in rules(first.train(), batches)


def test_only_features_with_a_tiny_variance_are_counted_as_constant():
    spread = torch.tensor([1.0, 1e-5, 0.0])  # the first is small relative to its mean, but not tiny
    batches = [torch.randn(64, 3) * spread + torch.tensor([1e7, 0.0, 0.0]) for _ in range(6)]
    why = rules(nn.Sequential(nn.BatchNorm1d(3)), batches)["tiny_variance"].why
    assert why.startswith("2 of 3 features (1 of them constant) have a variance below")


def test_a_variance_that_is_off():
    net = healthy()
    net.bn2.running_var *= 9
    assert rules(net)["stale_averages"].why.endswith("the variance by a factor of up to 9")


@pytest.mark.parametrize(("shifts", "found"), [((2, 2, 2, 2, 2), True), ((4, 0, 2, 3, 1), False)])
def test_a_gap_within_three_standard_errors_is_not_reported(shifts, found):
    net = nn.Sequential(nn.BatchNorm1d(6))
    bn.estimate_(net, data(5))
    assert ("stale_averages" in rules(net, [x + shift for x, shift in zip(data(5), shifts, strict=True)])) is found


def test_a_layer_with_different_inputs():
    net = Coded(lambda n, x: n.bn(x) + n.bn(x + n.shift), bn=nn.BatchNorm1d(6), shift=0.0)
    bn.estimate_(net, data())
    assert not rules(net.train())
    net.shift = torch.randn(6) / 40  # no more than sampling noise
    assert not rules(net)
    net.shift = 4.0
    bn.estimate_(net, data())
    found = rules(net.train())
    assert set(found) == {"different_inputs"}
    assert "called 2 times in a forward pass, on inputs whose means differ by 2" in found["different_inputs"].why


def test_half_precision():
    net, batches = healthy().bfloat16(), [x.bfloat16() for x in data()]
    assert rules(net, batches)["half_precision"].why.startswith("its running averages are torch.bfloat16")
    assert "half_precision" not in rules(bn.convert(healthy(), data()[0]).bfloat16(), batches)


class Standardized(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.batch_norm(self.weight, None, None, training=True), self.bias)


def test_functional_batch_normalization():
    net = nn.Sequential(nn.Linear(6, 6), Coded(lambda n, x: F.batch_norm(x, None, None, training=True)))
    assert rules(net)["functional"].path == "1"
    assert not rules(nn.Sequential(Standardized(6, 6), bn.BatchNorm1d(6), nn.ReLU())).keys() & {"functional"}
    with pytest.raises(ValueError, match="no batch normalization"):
        bn.diagnose(Standardized(6, 6), data())


def test_a_layer_whose_forward_is_called():
    found = rules(Coded(lambda n, x: n.bn.forward(x), bn=nn.BatchNorm1d(6)))
    assert set(found) == {"functional"}
    assert found["functional"].path == "bn"
    assert found["functional"].fix == "call it as layer(x)"


@pytest.mark.parametrize(("p", "found"), [(0.5, True), (0.0, False)])
def test_dropout_between_two_layers(p, found):
    net = healthy(between=nn.Dropout(p))
    assert ("dropout_before" in rules(net)) is found  # the dropout before the head is no problem


def test_a_bias_without_effect():
    found = bn.diagnose(healthy(bias=True), data())
    assert [(finding.rule, finding.path) for finding in found] == [("bias_without_effect", "fc1")]


def test_a_bias_on_other_features_has_an_effect():
    # The bias is added along the last dimension, but the layer averages over it.
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5), nn.ReLU())
    batches = [torch.randn(16, 5, 6) for _ in range(4)]
    bn.estimate_(net, batches)
    assert "bias_without_effect" not in rules(net, batches)


def test_a_bias_with_another_use_has_an_effect():
    class Uses(Net):
        def __init__(self, use):
            super().__init__(bias=True)
            self.use = use

        def forward(self, x):
            return super().forward(x) + self.use(self, x).mean()

    uses = {
        "another call": lambda net, x: net.fc1(x + 1),
        "the bias itself": lambda net, x: net.fc1.bias,
        "no other": lambda net, x: x,
    }
    found = {name: "bias_without_effect" in rules(Uses(use)) for name, use in uses.items()}
    assert found == {"another call": False, "the bias itself": False, "no other": True}
    net = healthy(bias=True)
    net.fc2.bias = net.fc1.bias
    assert "bias_without_effect" not in rules(net)


def test_frozen_statistics_do_not_cancel_a_bias():
    net = bn.convert(healthy(bias=True), data()[0])
    bn.freeze_(net)
    assert not rules(net)


def test_frozen_statistics_are_compared_too():
    net = bn.convert(healthy(), data()[0])
    stale_averages(net)
    bn.freeze_(net)
    assert rules(net)["stale_averages"].why.endswith("by a factor of up to 1 (it is frozen)")


def test_a_layer_that_train_leaves_in_evaluation_mode():
    class Evaluating(Net):
        def train(self, mode=True):
            super().train(mode)
            self.bn2.eval()
            return self

    net = Evaluating()
    bn.estimate_(net.eval(), data())
    net.bn2.requires_grad_(False)
    assert not rules(net)
    assert not rules(net.train())


def test_weight_decay():
    net = healthy()
    found = bn.diagnose(net, data(), optimizer=torch.optim.SGD(net.parameters(), 0.1, weight_decay=1e-4))
    assert [(finding.rule, finding.path) for finding in found] == [("weight_decay", "bn1"), ("weight_decay", "bn2")]
    net.bn1.requires_grad_(False)
    found = bn.diagnose(net, data(), optimizer=torch.optim.SGD(net.parameters(), 0.1, weight_decay=1e-4))
    assert [finding.path for finding in found.of("weight_decay")] == ["bn2"]  # torch skips parameters without gradient


def test_an_optimizer_of_the_network_before_conversion():
    net = healthy()
    old = optimizer(net)
    found = rules(bn.convert(net, data()[0]), optimizer=old)
    assert found["not_trained"].why == (
        "the optimizer does not have 8 of 8 parameters: fc1.weight, bn1.weight, bn1.bias, ..."
    )


def test_what_is_not_checked_is_listed():
    assert bn.diagnose(healthy(), data()[:1]).unchecked == (
        "which parameters are trained and decayed (pass optimizer=)",
        "whether running averages are stale or mix different inputs (5 or more batches are needed; got 1)",
    )

    def only_evaluates(n, x):
        if n.training:
            raise NotImplementedError
        return x

    net = nn.Sequential(nn.BatchNorm1d(6), Coded(only_evaluates))
    assert any("training mode" in what for what in bn.diagnose(net, data()).unchecked)


class Doubled(nn.BatchNorm1d):
    def forward(self, x, scale=2.0):
        return super().forward(x * scale)


def test_a_layer_with_its_own_forward():
    net = Coded(lambda n, x: n.bn(x=x), bn=Doubled(6))
    net.bn.running_mean += 9
    found = bn.diagnose(net, data())
    assert not found.findings
    assert "the inputs of layers whose class has its own forward: bn" in found.unchecked


def test_many_layers_are_summarized():
    net = nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(5)))
    assert str(bn.diagnose(net, data())).split("\n")[2:7] == [
        "never updated (5 layers)",
        "  0: its running averages have never been updated, so it does not normalize in evaluation mode",
        "  1: its running averages have never been updated, so it does not normalize in evaluation mode",
        "  2: its running averages have never been updated, so it does not normalize in evaluation mode",
        "  and 2 more",
    ]


def test_the_network_does_not_change():
    net = scramble_(healthy(between=nn.Dropout(0.5)))
    net.bn2.eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    random = torch.get_rng_state()
    bn.diagnose(net, data())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert [m.training for m in net.modules()] == modes
    assert not any(m._forward_hooks for m in net.modules())
    assert torch.equal(torch.get_rng_state(), random)


def noise(n, x):
    return x + torch.randn_like(x)


def test_batches_and_random_numbers_are_left_alone():
    for change in (lambda net: net, lambda net: net.eval(), bn.freeze_):
        net = nn.Sequential(Coded(lambda n, x: x.mul_(2)), Coded(noise), bn.BatchNorm1d(6))
        change(net)
        batches, random = data(), torch.get_rng_state()
        bn.diagnose(net, batches)
        torch.testing.assert_close(batches, data(), rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), random)


def test_random_batches_stay_random():
    drawn = []
    bn.diagnose(
        nn.Sequential(Coded(noise), nn.BatchNorm1d(6)), (drawn.append(torch.randn(9, 6)) or drawn[-1] for _ in range(3))
    )
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_an_exception_on_a_later_batch():
    def code(n, x):
        if x[0, 0] == 7:
            raise ValueError("a batch that starts with 7")
        return x

    net, batches, random = nn.Sequential(Coded(code), nn.BatchNorm1d(6)), data(), torch.get_rng_state()
    batches[3][0, 0] = 7
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="a batch that starts with 7"):
        bn.diagnose(net, batches)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_errors():
    with pytest.raises(ValueError, match=r"no batch normalization: add it with bn\.insert"):
        bn.diagnose(nn.Linear(6, 2), data())
    with pytest.raises(ValueError, match="must be an iterable of batches, not a tensor"):
        bn.diagnose(healthy(), data()[0])
    with pytest.raises(ValueError, match="batches is empty"):
        bn.diagnose(healthy(), [])
    with pytest.raises(TypeError, match="must be an iterable of batches, such as a list or a DataLoader, not NoneType"):
        bn.diagnose(healthy(), None)
    with pytest.raises(TypeError, match="cannot be called as"):
        bn.diagnose(nn.Bilinear(6, 6, 2), data())
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not the class BatchNorm1d"):
        bn.diagnose(nn.BatchNorm1d, data())
    with pytest.raises(TypeError, match=r"must be an optimizer of torch\.optim, not list"):
        bn.diagnose(healthy(), data(), optimizer=[optimizer(healthy())])
    with pytest.raises(TypeError, match="the network is scripted or traced"):
        bn.diagnose(torch.jit.trace(healthy().eval(), data()[0]), data())
    net = healthy()
    with pytest.raises(SharedWithOriginalError):
        bn.diagnose(net, data(), forward=lambda _, batch: net(batch))


def test_the_guide_shows_what_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert f"It prints:\n\n```\n{capsys.readouterr().out}```" in page


def test_every_rule_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [rule.__name__ for rule in RULES]


def test_every_rule_is_tested():
    source = Path(__file__).read_text()
    missing = [
        rule.__name__ for rule in RULES if f'"{rule.__name__}"' not in source and f"def {rule.__name__}(" not in source
    ]
    assert not missing
