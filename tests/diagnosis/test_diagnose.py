"""Each rule finds its fault, and finds nothing in the same network without the fault."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import scramble_
from torch import nn

import batchnorm as bn
from batchnorm.diagnosis.rules import RULES
from batchnorm.network_copy import SharedWithOriginalError

OPTIMIZED = {"weight_decay", "not_trained"}


def data(count=6, m=64, features=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(m, features, generator=generator) * 2 + 1 for _ in range(count)]


class Net(nn.Module):
    """Two normalized layers with dropout after the second; ``between`` runs before the second layer's affine map."""

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
        net.fc2.weight[2], net.bn2.bias[2] = 0, 1  # with a bias of 0, the ReLU would also be 0
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
    assert f"{fault.__name__.replace('_', ' ')}\n  {finding.path}: {finding.why}\n  fix: {finding.fix}" in str(found)


def test_the_advice_for_stale_averages_helps():
    net = healthy()
    stale_averages(net)
    assert "its running mean is off by 3 standard deviations" in rules(net)["stale_averages"].why
    bn.estimate_(net, data())
    assert not rules(net.train())


def test_a_nan_in_a_batch_is_found_at_the_first_layer():
    batches = data()
    batches[2][0, 0] = float("inf")
    found = rules(healthy(), batches)
    assert found["not_finite"].path == "bn1"
    assert found["not_finite"].why == "1 of its inputs has an inf or NaN"
    assert "a batch gave no usable statistics" in found["no_statistics"].why


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
    assert "small_batches" not in rules(healthy(), data(m=16))
    found = rules(healthy(), data(count=100, m=4))
    assert found["small_batches"].why == "its statistics are over 4 values per feature, so they are noisy"


@pytest.mark.parametrize(("shifts", "found"), [((2, 2, 2, 2, 2), True), ((4, 0, 2, 3, 1), False)])
def test_a_gap_within_three_standard_errors_is_not_reported(shifts, found):
    net = nn.Sequential(nn.BatchNorm1d(6))
    bn.estimate_(net, data(5))
    assert ("stale_averages" in rules(net, [x + shift for x, shift in zip(data(5), shifts, strict=True)])) is found


def test_a_layer_with_different_inputs():
    class Shared(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.bn, self.shift = nn.BatchNorm1d(6), shift

        def forward(self, x):
            return self.bn(x) + self.bn(x + self.shift)

    net = Shared(0.0)
    bn.estimate_(net, data())
    assert not rules(net.train())
    net.shift = 4.0
    bn.estimate_(net, data())
    found = rules(net.train())
    assert set(found) == {"different_inputs"}
    assert "called 2 times in a forward pass, on inputs whose means differ by 2" in found["different_inputs"].why


def test_half_precision():
    net, batches = healthy().bfloat16(), [x.bfloat16() for x in data()]
    assert rules(net, batches)["half_precision"].why.startswith("its running averages are torch.bfloat16")
    assert "half_precision" not in rules(bn.convert(healthy(), data()[0]).bfloat16(), batches)


def test_functional_batch_normalization():
    class Functional(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, None, None, training=True)

    net = nn.Sequential(nn.Linear(6, 6), Functional())
    assert rules(net)["functional"].path == "1"


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


def test_frozen_statistics_do_not_cancel_a_bias():
    net = bn.convert(healthy(bias=True), data()[0])
    bn.freeze_(net)
    assert not rules(net)


def test_weight_decay():
    net = healthy()
    found = bn.diagnose(net, data(), optimizer=torch.optim.SGD(net.parameters(), 0.1, weight_decay=1e-4))
    assert [(finding.rule, finding.path) for finding in found] == [("weight_decay", "bn1"), ("weight_decay", "bn2")]


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
        "whether running averages are stale (pass at least 5 batches)",
    )

    class OnlyEvaluates(nn.Module):
        def forward(self, x):
            if self.training:
                raise NotImplementedError
            return x

    net = nn.Sequential(nn.BatchNorm1d(6), OnlyEvaluates())
    assert any("training mode" in what for what in bn.diagnose(net, data()).unchecked)


def test_many_layers_are_summarized():
    net = nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(5)))
    assert str(bn.diagnose(net, data())).split("\n")[1:6] == [
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


def test_batches_are_left_alone():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    for net in (nn.Sequential(InPlace(), bn.BatchNorm1d(6)), nn.Sequential(InPlace(), bn.BatchNorm1d(6)).eval()):
        bn.freeze_(net)
        batches = data()
        bn.diagnose(net, batches)
        torch.testing.assert_close(batches, data(), rtol=0, atol=0)


def test_errors():
    with pytest.raises(ValueError, match=r"no batch normalization: add it with bn\.insert"):
        bn.diagnose(nn.Linear(6, 2), data())
    with pytest.raises(ValueError, match="must be an iterable of batches, not a tensor"):
        bn.diagnose(healthy(), data()[0])
    with pytest.raises(ValueError, match="batches is empty"):
        bn.diagnose(healthy(), [])
    with pytest.raises(TypeError, match="cannot be called as"):
        bn.diagnose(nn.Bilinear(6, 6, 2), data())
    net = healthy()
    with pytest.raises(SharedWithOriginalError):
        bn.diagnose(net, data(), forward=lambda _, batch: net(batch))


def test_every_rule_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [rule.__name__ for rule in RULES]


def test_every_rule_is_tested():
    source = Path(__file__).read_text()
    missing = [
        rule.__name__ for rule in RULES if f'"{rule.__name__}"' not in source and f"def {rule.__name__}(" not in source
    ]
    assert not missing
