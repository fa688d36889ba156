"""Test that verification compares everything that a network computes, and distinguishes rounding from errors."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from networks import Coded, scramble_
from torch import nn

import batchnorm as bn
from batchnorm.network_copy import outputs, relative_error
from batchnorm.verify import roundings, verify


class Slots:
    __slots__ = ("features", "out")

    def __init__(self, features, out):
        self.features, self.out = features, out


@dataclass
class Fields:
    features: torch.Tensor
    out: torch.Tensor


class Named(NamedTuple):
    features: torch.Tensor
    out: torch.Tensor


FORMS = {
    "namespace": lambda f, out: SimpleNamespace(features=f, out=out),
    "slots": Slots,
    "dataclass": Fields,
    "namedtuple": Named,
    "dict": lambda f, out: {"features": f, "out": [out]},
    "set": lambda f, out: {f, out},
    "object in object": lambda f, out: Slots(SimpleNamespace(f=f), out),
}


class Both(nn.Module):
    """Return a batch normalization's output, and return or store the output of the convolution before it."""

    def __init__(self, form):
        super().__init__()
        self.conv, self.bn, self.form = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), form

    def forward(self, x):
        f = self.conv(x)
        out = self.bn(f)
        return self.form(self, f, out)


def returning(name):
    return scramble_(Both(lambda self, f, out: FORMS[name](f, out)))


def keeping():
    def keep(self, f, out):
        self.kept = f
        return out

    return scramble_(Both(keep))


IMAGE = (4, 3, 6, 6)


@pytest.mark.parametrize("name", FORMS)
def test_fold_leaves_all_that_is_returned_as_it_was(name):
    net, x = returning(name), torch.randn(IMAGE)
    folded = bn.fold(net, x)
    assert folded.report["bn"].action == "fixed affine map"
    assert 0 < folded.report.relative_error < 1e-5


def test_fold_leaves_what_is_kept_on_modules_as_it_was():
    net, x = keeping(), torch.randn(IMAGE)
    folded = bn.fold(net, x)
    folded(x), net.eval()(x)
    torch.testing.assert_close(folded.kept, net.kept)


def wrong_convolution(net):
    """Return a copy whose convolution differs, but whose batch normalization compensates, so the output agrees."""
    new = copy.deepcopy(net)
    with torch.no_grad():
        new.conv.weight.mul_(2)
        new.conv.bias.mul_(2)
        new.bn.running_mean.mul_(2)
        new.bn.running_var.add_(new.bn.eps).mul_(4).sub_(new.bn.eps)
    return new


@pytest.mark.parametrize("name", FORMS)
def test_a_difference_in_any_returned_object_is_an_error(name):
    net = returning(name)
    with pytest.raises(ValueError, match=r"the new network computes different results: the output.* differs from the"):
        verify(net, wrong_convolution(net), torch.randn(IMAGE), what="the new network")


def test_a_difference_in_a_kept_tensor_is_an_error():
    net = keeping()
    with pytest.raises(ValueError, match="kept differs from the original's by 1"):
        verify(net, wrong_convolution(net), torch.randn(IMAGE), what="the new network")
    forgets = copy.deepcopy(net)
    forgets.form = lambda self, f, out: out
    with pytest.raises(ValueError, match="no longer stores a tensor in the attribute 'kept'"):
        verify(net, forgets, torch.randn(IMAGE), what="the new network")


def test_a_difference_in_statistics_is_an_error():
    net = nn.Sequential(nn.BatchNorm1d(3))
    new = copy.deepcopy(net)
    new[0].momentum = 0.2
    with pytest.raises(ValueError, match=r"0\.running_\w+ differs"):
        verify(net, new, torch.randn(4, 3), what="the new network", training=True)
    assert verify(net, new, torch.randn(4, 3), what="the new network") == 0


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda self, f, out: [out, f], r"the output is list, but was tuple"),
        (lambda self, f, out: (out,), r"the output has length 1, but had length 2"),
        (lambda self, f, out: (out, None), r"the output\[1\] is NoneType"),
        (lambda self, f, out: (out, f[:2]), r"of shape \(2, 4, 4, 4\), but was"),
        (lambda self, f, out: (out.double(), f), r"float64 of shape"),
    ],
)
def test_another_structure_is_an_error(form, message):
    net = Both(lambda self, f, out: (out, f))
    new = copy.deepcopy(net)
    new.form = form
    with pytest.raises(ValueError, match=message):
        verify(net, new, torch.randn(IMAGE), what="the new network")


def test_other_names_in_a_dict_are_an_error():
    net = Both(lambda self, f, out: {"a": out})
    new = copy.deepcopy(net)
    new.form = lambda self, f, out: {"b": out}
    with pytest.raises(ValueError, match="the items of the output have different names"):
        verify(net, new, torch.randn(IMAGE), what="the new network")


@pytest.mark.parametrize("read", [float, lambda t: t.numpy(), lambda t: np.float32(t)], ids=["float", "array", "numpy"])
def test_numbers_outside_tensors_are_compared(read):
    net = scramble_(Both(lambda self, f, out: (out, read(f.sum()))))
    with pytest.raises(ValueError, match=r"the output\[1\] differs"):
        verify(net, wrong_convolution(net), torch.randn(IMAGE), what="the new network")


NOTHING = {
    "no tensors": lambda self, f, out: {"count": 3},
    "are empty": lambda self, f, out: out[:0],
    "NaN everywhere": lambda self, f, out: out * float("nan"),
}


@pytest.mark.parametrize("problem", NOTHING)
def test_every_verb_refuses_an_example_that_shows_nothing(problem, tmp_path):
    x = torch.randn(IMAGE)
    for verb in (
        bn.fold,
        bn.convert,
        lambda net, x: bn.revert(net, x),
        lambda net, x: bn.insert(net, x, init="identity", batches=[x], where=["conv"]),
        lambda net, x: bn.export(net.eval(), x, tmp_path / "net.pt2"),
    ):
        with pytest.raises(ValueError, match=f"cannot be checked on this example.*{problem}"):
            verb(Both(NOTHING[problem]), x)


def chaotic(depth=40):
    """Return a deep network that amplifies rounding errors by a factor of more than a thousand."""
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()]
        nn.init.normal_(layers[-3].weight, 0, 2.5 / 4)
    return scramble_(nn.Sequential(*layers, nn.Linear(16, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_alone_is_no_reason_to_refuse(dtype):
    torch.manual_seed(0)
    net, x = chaotic().to(dtype), torch.randn(8, 16).to(dtype)
    assert bn.fold(net, x).report.relative_error > 1e-4, "the error must be one that a fixed tolerance would refuse"
    assert bn.convert(net, x).report.relative_error > 1e-4


def test_errors_are_found_in_a_network_that_amplifies_rounding():
    torch.manual_seed(0)
    net, x = chaotic(), torch.randn(8, 16)
    folded = bn.fold(net, x)
    with torch.no_grad():
        folded[0].weight.mul_(1 + 1e-2 * torch.randn(16, 16))
    with pytest.raises(ValueError, match="more than rounding explains"):
        verify(net, folded, x, what="the new network")


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-2])
def test_small_errors_are_found_in_a_network_that_does_not(factor):
    net, x = chaotic(3), torch.randn(8, 16)
    folded = bn.fold(net, x)
    with torch.no_grad():
        folded[-1].weight.mul_(factor)
    with pytest.raises(ValueError, match="more than rounding explains"):
        verify(net, folded, x, what="the new network")


def test_a_wrong_rule_is_found_even_where_rounding_hides_its_effect():
    net, x = chaotic(2).bfloat16(), torch.randn(8, 16).bfloat16()

    def almost(net, example):
        new = copy.deepcopy(net).eval()
        with torch.no_grad():
            new[-1].weight.mul_(1.01)
        return new

    assert verify(net, almost(net, x), x, what="the new network") < 0.1
    with pytest.raises(ValueError, match="more than rounding explains"):
        verify(net, almost(net, x), x, what="the new network", make=almost)


def test_a_network_that_does_not_run_in_float64_is_compared_in_its_own_precision():
    def code(n, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return n.body(x)

    torch.manual_seed(0)
    net, x = Coded(code, body=chaotic()), torch.randn(8, 16)
    assert bn.fold(net, x).report.relative_error > 1e-4
    assert bn.convert(net, x).report.relative_error > 1e-4
    wrong = copy.deepcopy(net)
    with torch.no_grad():
        wrong.body[0].weight.mul_(1.01)
    with pytest.raises(ValueError, match="more than rounding explains"):
        verify(net, wrong, x, what="the new network")


def test_a_network_that_makes_tensors_of_the_default_type_is_compared_in_float64():
    net = scramble_(nn.Sequential(chaotic()))
    net[0].register_forward_hook(lambda m, args, out: out @ torch.eye(4))
    torch.manual_seed(0)
    bn.convert(net, torch.randn(8, 16))
    assert torch.get_default_dtype() == torch.float32


def test_a_mean_that_is_zero_up_to_rounding_is_no_difference():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU6(), nn.BatchNorm1d(3), nn.Identity(), nn.BatchNorm1d(3))
    bn.convert(net, torch.randn(64, 3))  # the last layer's batch means are rounding errors


def test_what_changes_from_run_to_run_is_blamed_on_the_original():
    calls = []
    net = Both(lambda self, f, out: calls.append(1) or out * len(calls))
    with pytest.raises(ValueError, match=r"The original network's own results differ by .* from one run to the next"):
        bn.fold(net, torch.randn(IMAGE))


def test_a_given_tolerance_is_kept_to():
    net, x = chaotic(), torch.randn(8, 16)
    with pytest.raises(ValueError, match="more than the tolerance of 1e-12"):
        bn.fold(net, x, tolerance=1e-12)


def test_rounding_is_what_the_network_makes_of_it():
    torch.manual_seed(0)
    deep, x = chaotic().eval(), torch.randn(8, 16)
    nudged = copy.deepcopy(deep)
    with torch.no_grad():
        nudged[0].weight.mul_(1 + 1e-7)
    assert 1e-4 < relative_error(outputs(nudged, x), outputs(deep, x)) < max(roundings(deep, x))
    assert max(roundings(chaotic(2).eval(), x)) < 1e-4


def test_networks_that_agree_in_float64_are_run_once_each_in_float64():
    torch.manual_seed(0)
    net, x, seen = chaotic(), torch.randn(8, 16), []
    net.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    new = copy.deepcopy(net)
    new.register_forward_hook(lambda m, args, out: out * (1 + 1e-4) if out.dtype == torch.float32 else None)
    verify(net, new, x, what="the new network", same_weights=True)
    assert seen.count(torch.float64) == 2
