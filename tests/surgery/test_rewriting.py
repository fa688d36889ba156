"""Test that convert fuses whatever the data flow permits, in any coding style, and never changes the results."""

import copy
import functools
import random
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Event
from time import sleep

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from blocks import Block, Bottleneck, ConvNorm, DenseBlock, MobileOneLike, RegNetLike, UNet, fusions_in
from networks import Coded, scramble_
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.graph.generated import is_rewritten
from batchnorm.ops.activation import NAMES, Activation, to_module

CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def image(channels=4):
    return torch.randn(3, channels, 6, 6, dtype=torch.double)


def conv_bn_relu(n, x):
    return n.relu(n.bn1(n.conv1(x)))


def rewritten_runs(net, x):
    """Return how many rewritten forwards run in one call of the network."""
    runs = []

    def watch(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_name == "run" and code.co_filename.startswith("<batchnorm: "):
            runs.append(code)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        net(x)
    finally:
        sys.setprofile(before)
    return len(runs)


def assert_same(net, converted, x):
    """Compare outputs, gradients and running statistics in both modes."""
    for training in (True, False):
        pair = [copy.deepcopy(n).train(training) for n in (net, converted)]
        inputs = [x.clone().requires_grad_() for _ in pair]
        outs = [n(i * 1) for n, i in zip(pair, inputs, strict=True)]
        torch.testing.assert_close(outs[1], outs[0], **CLOSE)
        for out in outs:
            (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **CLOSE)
        for (name, p), q in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(pair[1].state_dict(), pair[0].state_dict(), **CLOSE)


def converted_and_checked(net, x=None):
    net, x = scramble_(net).double(), image() if x is None else x
    converted = bn.convert(net, x)
    assert not any("was not rewritten" in note for note in converted.report.notes)
    assert_same(net, converted, x)
    return converted


def fused(net):
    """Return what each BN fuses (the activation, and "sum" for a residual), as text."""
    found = {path: {(f.activation.name, f.residual) for f in fs} for path, fs in fusions_in(net).items()}
    return {path: " ".join([kind] + ["sum"] * residual) for path, ((kind, residual),) in found.items()}


def after_a_mask(n, x):
    mask = x > 0
    same = mask
    mask &= x < 1
    mask |= x < -1
    return conv_bn_relu(n, x) * same.double().mean()


ACTIVATIONS = {
    "after a mask that is changed in place": (after_a_mask, "relu"),
    "F.relu": (lambda n, x: F.relu(n.bn1(n.conv1(x))), "relu"),
    "F.relu in place": (lambda n, x: F.relu(n.bn1(n.conv1(x)), True), "relu"),
    "F.relu_": (lambda n, x: F.relu_(n.bn1(n.conv1(x))), "relu"),
    "torch.relu": (lambda n, x: torch.relu(n.bn1(n.conv1(x))), "relu"),
    "relu_": (lambda n, x: n.bn1(n.conv1(x)).relu_(), "relu"),
    "module": (conv_bn_relu, "relu"),
    "through identities": (lambda n, x: n.relu(n.same(n.same(n.bn1(n.conv1(x))))), "relu"),
    "leaky": (lambda n, x: F.leaky_relu(n.bn1(n.conv1(x)), 0.3, inplace=True), "leaky_relu"),
    "sigmoid": (lambda n, x: torch.sigmoid(n.bn1(n.conv1(x))), "sigmoid"),
    "tanh": (lambda n, x: n.bn1(n.conv1(x)).tanh(), "tanh"),
    "silu": (lambda n, x: F.silu(n.bn1(n.conv1(x))), "silu"),
    "a shape as an argument": (lambda n, x: F.avg_pool2d(y := F.relu(n.bn1(n.conv1(x))), y.size()[2:]), "relu"),
    "a buffer": (lambda n, x: F.relu(n.bn1(n.conv1(x))) * n.bn2.running_var.view(1, -1, 1, 1), "relu"),
    "a slice of children": (lambda n, x: F.relu(n.bn1(next(child(x) for child in n.shortcut[:1]))), "relu"),
}


def relu6_in_steps(x):
    return F.relu6(x + 3, inplace=True) / 6


IN_STEPS = {
    "x * sigmoid": (lambda m, x: x * torch.sigmoid(x), "silu"),
    "sigmoid * x": (lambda m, x: m.sigmoid(x) * x, "silu"),
    "mul_": (lambda m, x: x.mul_(x.sigmoid()), "silu"),
    "x * relu6 / 6": (lambda m, x: x * F.relu6(x + 3.0) / 6, "hardswish"),
    "x * (relu6 / 6)": (lambda m, x: torch.mul(x, relu6_in_steps(x)), "hardswish"),
    "in modules": (lambda m, x: x * m.steps(x), "hardswish"),
    "a function": (lambda m, x: F.relu(x), "relu"),
    "a module": (lambda m, x: m.steps(x), "hardswish"),
}


@pytest.mark.parametrize("name", IN_STEPS)
def test_activations_in_steps_and_in_children(name):
    code, kind = IN_STEPS[name]
    inside = nn.Hardswish() if name == "a module" else Coded(lambda m, x: relu6_in_steps(x))
    act = Coded(code, steps=nn.Sequential(inside), sigmoid=nn.Sigmoid())
    for write in (conv_bn_relu, lambda n, x: act.code(n.relu, n.bn1(n.conv1(x)))):
        both = lambda n, x, write=write: n.relu(write(n, x) + n.bn2(n.conv2(x)))  # noqa: E731
        converted = converted_and_checked(Block(both, act))
        assert fused(converted) == {"bn1": kind, "bn2": f"{kind} sum"}
        assert converted.report.summary.startswith("convert: 2 of 2")


def test_one_activation_with_its_own_code_in_many_modules():
    act = Coded(lambda m, x: x * torch.sigmoid(x))
    converted = converted_and_checked(nn.Sequential(ConvNorm(act), nn.Sequential(ConvNorm(act), ConvNorm(act))))
    assert fused(converted) == dict.fromkeys(("0.bn", "1.0.bn", "1.1.bn"), "silu")


NOT_IN_STEPS = {
    "another factor": lambda n, x: (y := n.bn1(n.conv1(x))) * torch.sigmoid(y + 1),
    "another number": lambda n, x: (y := n.bn1(n.conv1(x))) * F.relu6(y + 2) / 6,
    "another quotient": lambda n, x: 6 / (1 + (y := n.bn1(n.conv1(x))) * F.relu6(y + 3)),
    "the gate is read": lambda n, x: (y := n.bn1(n.conv1(x))) * (s := torch.sigmoid(y)) + s,
    "the input is read": lambda n, x: (y := n.bn1(n.conv1(x))) * torch.sigmoid(y) + y,
    "the gate of another": lambda n, x: n.bn1(n.conv1(x)) * torch.sigmoid(x),
}


@pytest.mark.parametrize("name", NOT_IN_STEPS)
def test_products_that_are_not_activations(name):
    converted = converted_and_checked(Block(NOT_IN_STEPS[name]))
    assert "sum" in fused(converted).get("bn1", "sum")


def test_a_changed_limit_of_relu6_is_noticed():
    net, x = scramble_(Block(conv_bn_relu, nn.ReLU6())).double(), image()
    converted = bn.convert(net, x)
    assert fused(converted) == {"bn1": "relu6"}
    net.relu.max_val = converted.relu.max_val = 0.5
    torch.testing.assert_close(converted(x), net(x), **CLOSE)


@pytest.mark.parametrize(
    "change",
    [
        lambda act: setattr(act, "slope", 0.5),
        lambda act: setattr(act, "inner", nn.Tanh()),
        lambda act: act.register_forward_hook(lambda m, args, out: out * 2),
        lambda act: act.inner.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        lambda act: setattr(act, "forward", torch.sin),
    ],
)
def test_a_change_inside_an_activation_is_noticed(change):
    def code(n, x):
        return F.leaky_relu(x, n.slope) if n.slope else n.inner(x)

    for slope in (0.1, 0):
        act = Coded(code, slope=slope, inner=nn.LeakyReLU(0.2))
        net, x = scramble_(Block(conv_bn_relu, act)).double(), image()
        converted = bn.convert(net, x)
        assert fused(converted) == {"bn1": "leaky_relu"}
        for n in (net, converted):
            change(n.relu)
        torch.testing.assert_close(converted(x), net(x), **CLOSE)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"identity"}))
def test_every_activation_as_a_module_and_as_a_function(name):
    function = getattr(F, name)
    for code in (conv_bn_relu, lambda n, x: function(n.bn1(n.conv1(x)))):
        assert fused(converted_and_checked(Block(code, to_module(Activation(name))))) == {"bn1": name}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_every_spelling(name):
    code, kind = ACTIVATIONS[name]
    converted = converted_and_checked(Block(code))
    assert fused(converted) == {"bn1": kind}
    assert converted.report["bn1"].action.startswith("converted with ")


def in_place(n, x):
    y = n.bn1(n.conv1(x))
    y += x
    return n.relu(y)


def into_the_other(n, x):
    y = n.conv2(x)
    y += n.bn1(n.conv1(x))
    return n.relu(y)


def past_others(n, x):
    y = n.bn1(x)
    z = n.f(x) + n.g(x)
    z += y
    return n.relu(z)


def one_after_the_other(n, x):
    y = n.conv1(x) + x
    y += n.bn1(x)
    y += n.bn2(x)
    return n.relu(y)


SUMS = {
    "one after the other": (one_after_the_other, {"bn1": "identity sum", "bn2": "relu sum"}),
    "bn + x": (lambda n, x: n.relu(n.bn1(n.conv1(x)) + x), {"bn1": "relu sum"}),
    "x + bn": (lambda n, x: F.relu(x + n.same(n.bn1(n.conv1(x)))), {"bn1": "relu sum"}),
    "torch.add": (lambda n, x: torch.add(x, n.bn1(n.conv1(x))).relu(), {"bn1": "relu sum"}),
    "add_": (lambda n, x: n.bn1(n.conv1(x)).add_(x).relu_(), {"bn1": "relu sum"}),
    "in place": (in_place, {"bn1": "relu sum"}),
    "into the other": (into_the_other, {"bn1": "relu sum"}),
    "no activation": (lambda n, x: n.bn1(n.conv1(x)) + x, {"bn1": "identity sum"}),
    "other activation": (lambda n, x: F.gelu(n.bn1(n.conv1(x)) + x), {"bn1": "identity sum"}),
    "two norms": (lambda n, x: n.relu(n.bn1(n.conv1(x)) + n.bn2(n.conv2(x))), {"bn2": "relu sum"}),
    "in a child": (lambda n, x: n.relu(n.bn1(n.conv1(x)) + n.shortcut(x)), {"bn1": "relu sum"}),
    "past other children": (past_others, {"bn1": "relu sum", "g.bn": "identity sum"}),
    "in a child alone": (lambda n, x: n.relu(x + n.shortcut(x)), {"shortcut.1": "relu sum"}),
    "the built-in sum": (lambda n, x: n.relu(sum([n.bn1(n.conv1(x)), x])), {"bn1": "relu sum"}),
    "three": (
        lambda n, x: n.relu(n.bn1(n.conv1(x)) + n.bn2(n.conv2(x)) + n.shortcut(x)),
        {"bn2": "identity sum", "shortcut.1": "relu sum"},
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_in_every_spelling(name):
    code, expected = SUMS[name]
    converted = converted_and_checked(Block(code))
    assert fused(converted) == expected
    assert rewritten_runs(converted, image()) == rewritten_runs(converted.eval(), image()) == 1


def read_later(n, x):
    y = n.conv2(x)
    identity = y.view_as(y)
    y += n.bn1(n.conv1(x))
    return torch.sigmoid(y) * identity


def under_another_name(n, x):
    identity = y = n.conv2(x)
    y += n.bn1(n.conv1(x))
    return torch.tanh(y) * identity


def sum_read_twice(n, x):
    y = n.bn1(n.conv1(x)) + x
    return torch.relu(y) + y.mean()


def written_in_between(n, x):
    y = n.conv1(x)
    z = n.bn1(y)
    y.mul_(2)
    return torch.sigmoid(z + y)


def added_to_in_between(n, x):
    y = n.conv1(x)
    z = n.bn1(y)
    y += n.conv2(x)
    return torch.sigmoid(z + y)


def into_another_tensor(n, x):
    other = torch.empty(0, dtype=x.dtype)
    y = torch.add(x.detach(), 1, out=other)
    y += n.bn1(n.conv1(x)).detach()
    return torch.relu(y) + other


def into_its_input(n, x):
    x += n.bn1(n.conv1(x))
    return torch.relu(x)


def written_after_the_activation(n, x, activation):
    r = x * 1
    y = activation(n.bn1(n.conv1(x)) + r)
    r.mul_(0)
    return y


def written_through_a_view(n, x, activation):
    r = x * 1
    flat = r.view(-1)
    y = activation(n.bn1(n.conv1(x)) + r)
    flat.mul_(0)
    return y


@pytest.mark.parametrize("code", [written_after_the_activation, written_through_a_view])
@pytest.mark.parametrize(("activation", "kind"), [(F.silu, "identity sum"), (torch.relu, "relu sum")])
def test_a_residual_that_is_overwritten_later_is_not_saved(code, activation, kind):
    net = scramble_(Block(functools.partial(code, activation=activation))).double()
    converted = bn.convert(net, image())
    assert fused(converted) == {"bn1": kind}
    x = image()
    grads = []
    for n in (net, converted):  # torch does not notice changes of saved tensors under this kind of checkpointing
        given = x.clone().requires_grad_()
        checkpoint(n, given, use_reentrant=False).sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(grads[1], grads[0], **CLOSE)


ALONE = {
    "read twice": lambda n, x: (y := n.bn1(n.conv1(x))) * torch.tanh(y),
    "the sum is read twice": sum_read_twice,
    "the sum is read under another name": under_another_name,
    "written later": read_later,
    "written in between": written_in_between,
    "added to in between": added_to_in_between,
    "into its input": into_its_input,
    "into another tensor": into_another_tensor,
    "doubled": lambda n, x: (y := n.bn1(n.conv1(x))) + y,
    "scaled sum": lambda n, x: torch.relu(torch.add(n.bn1(n.conv1(x)), x, alpha=2)),
    "another activation": lambda n, x: F.elu(n.bn1(n.conv1(x))),
    "dropout in between": lambda n, x: F.relu(n.drop(n.bn1(n.conv1(x))) if n.training else n.bn1(n.conv1(x)).exp()),
    "a branch on the data": lambda n, x: F.relu(n.bn1(n.conv1(x))) if x.sum() > 1e9 else n.bn1(n.conv1(x)).exp(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_would_change_is_left_alone(name):
    net, x = scramble_(Block(ALONE[name])).double(), image()
    converted = bn.convert(net, x)
    assert fused(converted) == ({"bn1": "identity sum"} if name.startswith("the sum is read") else {})
    net.drop.p = converted.drop.p = 0.0
    for training in (True, False):
        for n in (net, converted):
            n.train(training)
        given = [x.clone(), x.clone()]
        torch.testing.assert_close(converted(given[1]), net(given[0]), **CLOSE)
        torch.testing.assert_close(given[1], given[0], **CLOSE)


def test_a_residual_that_broadcasts_is_added_as_torch_adds():
    converted = converted_and_checked(Block(lambda n, x: n.relu(n.bn1(n.conv1(x)) + x.mean((2, 3), keepdim=True))))
    assert fused(converted) == {"bn1": "relu sum"}
    converted = converted_and_checked(Block(lambda n, x: n.relu(n.bn1(n.conv1(x[:1])).add(x)) if not n.training else x))
    assert fused(converted) == {"bn1": "relu sum"}


def test_types_are_promoted_as_torch_promotes():
    net = scramble_(Block(lambda n, x: n.relu(n.bn1(n.conv1(x)) + x.float()))).bfloat16()
    x = torch.randn(3, 4, 6, 6, dtype=torch.bfloat16)
    converted = bn.convert(net, x)
    assert fused(converted) == {"bn1": "relu sum"}
    assert converted(x).dtype is net(x).dtype is torch.float32
    inplace = scramble_(Block(lambda n, x: n.relu(n.bn1(n.conv1(x)).add_(x.float())))).bfloat16()
    assert bn.convert(inplace, x)(x).dtype is inplace(x).dtype is torch.bfloat16


@pytest.mark.parametrize("downsample", [False, True])
def test_a_bottleneck(downsample):
    shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)) if downsample else None
    converted = converted_and_checked(Bottleneck(shortcut))
    assert fused(converted) == {"bn1": "relu", "bn2": "relu", "bn3": "relu sum"}
    more = "; 1 feeds a sum" if downsample else ""
    assert f"3 of 3 BN layers that feed an activation are fused, 1 with a residual{more}" in str(converted.report)
    assert converted.report["bn3"].action == "converted with a residual and ReLU"
    assert rewritten_runs(converted, image()) == rewritten_runs(converted.eval(), image()) == 1


def gate():
    """Return a squeeze-and-excitation gate written by the user, which convert has no special rule for."""
    return Coded(lambda n, x: x * torch.sigmoid(n.fc(x.mean((2, 3), keepdim=True))), fc=nn.Conv2d(4, 4, 1))


def gate_after_the_shortcut(n, x):
    y = n.bn1(n.conv1(x))
    shortcut = n.shortcut(x)
    return n.relu(n.same(y) + shortcut)


def sum_into_a_gate(n, x):
    y = n.same(n.bn1(n.conv1(x)))
    y += n.shortcut(x)
    return n.relu(y)


@pytest.mark.parametrize("code", [gate_after_the_shortcut, sum_into_a_gate])
def test_squeeze_and_excitation_before_a_sum(code):
    net = Block(code)
    net.same = gate()
    converted = converted_and_checked(net)
    assert fused(converted) == {"shortcut.1": "relu sum"}
    converted.shortcut[0] = net.shortcut[0] = nn.Identity()  # now the shortcut's BN reads the block's input
    x = image()
    torch.testing.assert_close(converted.eval()(x), net.double().eval()(x), **CLOSE)


def reads_the_counter(n, x):
    y = n.bn1(n.conv1(x))
    return F.relu(y + torch.where(n.bn1.num_batches_tracked > 3, x, 2 * x))


def clamps_gamma(n, x):
    y = n.bn1(n.conv1(x))
    n.bn1.weight.data.clamp_(-1, 1)
    return F.relu(y + x)


@pytest.mark.parametrize("code", [reads_the_counter, clamps_gamma])
def test_a_norm_does_not_move_past_code_that_uses_its_tensors(code):
    net, x = scramble_(Block(code)).double(), image()
    converted = bn.convert(net, x)
    for n in (net, converted):
        nn.init.constant_(n.bn1.weight, 3.0)
    for _ in range(6):
        torch.testing.assert_close(converted(x), net(x), **CLOSE)


def test_a_norm_does_not_move_past_a_module_that_holds_it():
    net = scramble_(Block(gate_after_the_shortcut)).double()
    net.same = Coded(lambda n, x: x * n.norms[0].num_batches_tracked, norms=[net.shortcut[1]])
    converted = bn.convert(net, image())
    for _ in range(3):
        torch.testing.assert_close(converted(image() * 0 + 1), net(image() * 0 + 1), **CLOSE)


def test_a_hook_on_the_layer_before_a_norm_that_moved():
    net, x = Block(adds_after_unknown_code).double(), image()
    net.same = Coded(lambda n, x: x.mul_(0.5))
    converted = bn.convert(net, x)
    for n in (net, converted):
        n.conv1.register_forward_hook(lambda module, args, output: args[0])
    with torch.no_grad():
        torch.testing.assert_close(converted(x.clone()), net(x.clone()), **CLOSE)


def adds_after_unknown_code(n, x):
    y = n.bn1(n.conv1(x))
    z = n.same(x)
    return F.relu(y + z)


def test_unusual_modules_do_not_make_convert_fail():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x, times=1):
            y = F.relu(self.bn(x))
            return self(y, times - 1) if times else y

    odd = type("Odd[Conv]", (nn.Conv2d,), {})
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1)))
    for first in (Again(), odd(4, 4, 1), scripted):
        net, x = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU()), image().float()
        converted = bn.convert(net, x)
        assert fused(converted) == {"1": "relu"}
        torch.testing.assert_close(converted(x), net(x), rtol=1e-4, atol=1e-5)


def test_abstract_classes_are_type_checks_too():
    net = Block(lambda n, x: n.relu(n.bn1(y)) if not isinstance(y := n.same(x), Mapping) else n.relu(n.bn1(y["y"])))
    net.same = gate()
    converted = bn.convert(net, image().float())
    for n in (net, converted):
        n.same = Wraps()
    torch.testing.assert_close(converted(image().float() * 0 + 1), net(image().float() * 0 + 1))


class Wraps(nn.Module):
    def forward(self, x):
        return {"y": x}


def test_the_report_counts_only_activations_that_are_fused():
    net = Block(lambda n, x: F.gelu(n.bn1(n.conv1(x)) + x)).double()
    assert bn.convert(net, image()).report.summary.startswith("convert: 0 of 1 BN layers that feed an activation")


def test_the_report_counts_what_the_built_in_sum_adds():
    for rewrite, fused_layers in [(True, 1), (False, 0)]:
        net = Block(lambda n, x: n.relu(sum([n.bn1(n.conv1(x)), x]))).double()
        summary = bn.convert(net, image(), rewrite=rewrite).report.summary
        assert summary.startswith(f"convert: {fused_layers} of 1 BN layers that feed an activation are fused")


def test_a_layer_with_two_names_is_counted():
    norm = nn.BatchNorm2d(4)
    net = Coded(lambda n, x: n.net(x), norm=norm, net=nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.ReLU()))
    assert bn.convert(net, image().float()).report.summary.startswith("convert: 1 of 1 BN layers")


def test_a_batch_norm_at_the_end_of_children():
    converted = converted_and_checked(RegNetLike())
    expected = {"f.0.1": "relu", "f.1.bn": "relu", "f.2.1": "relu sum"}
    assert fused(converted) == expected
    assert "3 of 3" in str(converted.report)
    assert fused(converted_and_checked(RegNetLike(project=False))) == expected


def test_branches_that_are_added_one_by_one():
    sums = {"branches.0.bn": "identity sum", "branches.1.bn": "identity sum"}
    converted = converted_and_checked(MobileOneLike())
    assert fused(converted) == {**sums, "identity": "relu sum"}
    assert "; 3 feed a sum (2 fused); " in converted.report.summary
    last = {"branches.1.bn": "relu sum"}
    assert fused(converted_and_checked(MobileOneLike(identity=False))) == {**sums, **last}
    assert fused(converted_and_checked(MobileOneLike(identity=False, scale=False))) == last


def test_lists_of_tensors_as_arguments():
    converted = converted_and_checked(DenseBlock())
    assert len(fused(converted)) == 4
    layer, plain = converted["layer0"], bn.revert(converted)["layer0"]
    x = image()
    torch.testing.assert_close(layer(x), plain(x))  # the trace saw a list, so this tensor takes another path


def test_a_u_net():
    converted = converted_and_checked(UNet())
    assert len(fused(converted)) == 6


def test_shared_blocks():
    assert len(fused(converted_and_checked(Coded(lambda n, x: n.block(n.block(x)), block=Bottleneck())))) == 3


def returns_what_the_activation_reads(n, x):
    y = n.bn1(n.conv1(x))
    return n.relu(y) + 2 * y


def sums_into_a_child(n, x):
    x = x * 1
    y = n.conv2(x)
    y += n.bn1(n.conv1(x))
    return n.relu(y) + x


def loops_over_children(n, x):
    y = x
    for child in n.shortcut.children():
        y = child(y)
    return n.relu(y)


def reads_before_an_identity(n, x):
    same = n.same(x)
    return conv_bn_relu(n, x) + same


def adds_a_branch(n, x):
    y = n.bn1(x)
    return F.relu(y + n.shortcut(x))


class Same(nn.Identity):
    """A subclass that behaves like its base."""


GUARDED = {
    "mode": (lambda n, x: conv_bn_relu(n, x) if n.training else n.bn1(n.conv1(x)).exp(), lambda n: n.eval()),
    "attribute": (
        lambda n, x: conv_bn_relu(n, x) if not n.flag else n.relu(x) + n.bn1(n.conv1(x)),
        lambda n: setattr(n, "flag", True),
    ),
    "number": (lambda n, x: conv_bn_relu(n, x) * n.scale, lambda n: setattr(n, "scale", 3)),
    "code": (conv_bn_relu, lambda n: setattr(n, "code", lambda n, x: n.relu(x))),
    "child": (
        lambda n, x: conv_bn_relu(n, x) if n.drop is not None else n.bn1(n.conv1(x)),
        lambda n: setattr(n, "drop", None),
    ),
    "attribute of a child": (
        lambda n, x: conv_bn_relu(n, x) if n.drop.p < 1 else n.relu(x),
        lambda n: setattr(n.drop, "p", 1.0),
    ),
    "a new attribute": (
        lambda n, x: conv_bn_relu(n, x) if not hasattr(n, "other") else n.relu(x),
        lambda n: setattr(n, "other", 1),
    ),
    "another activation": (conv_bn_relu, lambda n: setattr(n, "relu", nn.Tanh())),
    "another forward": (conv_bn_relu, lambda n: setattr(n.relu, "forward", torch.sin)),
    "another norm": (conv_bn_relu, lambda n: setattr(n, "bn1", nn.Identity())),
    "an activation of its own": (conv_bn_relu, lambda n: setattr(n, "bn1", nn.Sequential(n.bn1, nn.Tanh()))),
    "more children": (lambda n, x: n.relu(x + n.shortcut(x)), lambda n: n.shortcut.append(nn.Tanh())),
    "a hook on the activation": (conv_bn_relu, lambda n: n.relu.register_forward_hook(lambda m, args, out: out * 2)),
    "a hook on the norm": (conv_bn_relu, lambda n: n.bn1.register_forward_hook(lambda m, args, out: -out)),
    "a hook on a child in between": (
        lambda n, x: n.relu(x + n.shortcut(x)),
        lambda n: n.shortcut.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    ),
    "a hook on an identity": (
        lambda n, x: n.relu(n.same(n.bn1(n.conv1(x)))),
        lambda n: n.same.register_forward_hook(lambda m, args, out: -out),
    ),
    "an activation in place": (returns_what_the_activation_reads, lambda n: setattr(n.relu, "inplace", False)),
    "a child that returns its input": (sums_into_a_child, lambda n: setattr(n, "conv2", nn.Identity())),
    "children that code loops over": (loops_over_children, lambda n: n.shortcut.append(nn.Tanh())),
    "an identity that is replaced": (reads_before_an_identity, lambda n: setattr(n, "same", nn.MaxPool2d(3, 1, 1))),
    "a hook on an identity beside it": (
        reads_before_an_identity,
        lambda n: n.same.register_forward_hook(lambda m, args, out: out * 2),
    ),
    "a child's class": (
        lambda n, x: conv_bn_relu(n, x) + (x if isinstance(n.same, nn.Identity) else n.same(x)),
        lambda n: setattr(n, "same", nn.MaxPool2d(3, 1, 1)),
    ),
    "a child's class, to a subclass": (
        lambda n, x: conv_bn_relu(n, x) * (2 if isinstance(n.same, Same) else 1),
        lambda n: setattr(n, "same", Same()),
    ),
    "the name of a child's class": (
        lambda n, x: conv_bn_relu(n, x) * len(n.same.__class__.__name__),
        lambda n: setattr(n, "same", Same()),
    ),
    "a child that code gets by its name": (
        lambda n, x: conv_bn_relu(n, x) * (2 if isinstance(n.get_submodule("drop"), nn.Dropout) else 1),
        lambda n: setattr(n, "drop", nn.Identity()),
    ),
    "a grandchild in place": (
        adds_a_branch,
        lambda n: n.shortcut.__setitem__(0, nn.Sequential(nn.ReLU(inplace=True), n.shortcut[0])),
    ),
    "one of a child's two names": (
        lambda n, x: n.relu(n.bn1(n.conv1(n.alias(n.drop2(x))))),
        lambda n: setattr(n, "alias", nn.Conv2d(4, 4, 1).double()),
    ),
    "a weight that was shared": (
        lambda n, x: n.relu(n.bn1(F.conv2d(n.conv1(x), n.conv2.weight))),
        lambda n: setattr(n.conv2, "weight", nn.Parameter(n.conv2.weight + 1)),
    ),
    "a tensor that is gone": (
        lambda n, x: n.relu(n.bn1(n.conv1(x)) if n.extra is None else n.bn1(n.conv1(x)) + n.extra),
        lambda n: setattr(n, "extra", None),
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_the_original_forward_runs_if_anything_differs(name):
    code, change = GUARDED[name]
    net, x = scramble_(Block(code)).double(), image()
    net.drop2 = net.alias = nn.Conv2d(4, 4, 1).double()
    net.conv2.weight = net.conv1.weight
    converted = bn.convert(net, x)
    assert rewritten_runs(copy.deepcopy(converted), x) == 1
    for n in (net, converted):
        torch.manual_seed(0)
        change(n)
    with torch.no_grad():
        torch.testing.assert_close(converted(x * 1), net(x * 1), **CLOSE)
        assert rewritten_runs(converted, x) == 0


def test_hooks_on_all_modules_see_every_call():
    converted, seen = converted_and_checked(Bottleneck()), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        converted(image())
    finally:
        handle.remove()
    assert seen.count("ReLU") == 3


def test_absent_arguments():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x, skip=None, *, double=False):
            y = self.bn(x)
            y = F.relu(y) if skip is None else y * skip
            return y * 2 if double else y

    net, x = scramble_(Optional()).double(), image()
    converted = bn.convert(net, x)
    assert fused(converted) == {"bn": "relu"}
    for args, kwargs in (((x,), {}), ((x, x), {}), ((x,), {"skip": x, "double": True}), ((), {"x": x, "double": 1})):
        torch.testing.assert_close(converted(*args, **kwargs), net(*args, **kwargs), **CLOSE)


def counts_calls(n, x):
    n.scale += 1
    return conv_bn_relu(n, x)


def ticks(n, x):
    n.drop.counts["calls"] += 1
    return conv_bn_relu(n, x)


def without_gradients(n, x):
    with torch.no_grad():
        y = n.bn1(n.conv1(x))
    return n.relu(y)


def in_a_context(n, x):
    with nullcontext():
        return conv_bn_relu(n, x)


ONE = np.ones(1)


def catches(n, x):
    try:
        return conv_bn_relu(n, x) if x.sum() < 1e9 else x
    except Exception:
        return x


def is_half(x):
    return x.dtype is torch.half


def doubles_the_data(n, x):
    y = n.bn1(n.conv1(x))
    y.data = y.data * 2
    return n.relu(y)


REFUSED = {
    "the data of a tensor": (doubles_the_data, "assigns to the attribute 'data'"),
    "random": (lambda n, x: conv_bn_relu(n, x) if random.random() < 2 else x, "draws random numbers"),
    "torch.rand": (lambda n, x: conv_bn_relu(n, x) if torch.rand(1) < 2 else x, "control flow may depend on"),
    "an attribute is set": (counts_calls, "assigns to the attribute 'scale'"),
    "gradients": (without_gradients, "in another gradient mode"),
    "the gradient mode": (
        lambda n, x: conv_bn_relu(n, x) if torch.is_grad_enabled() else n.bn1(n.conv1(x)).relu(),
        "depends on the gradient mode",
    ),
    "the data": (lambda n, x: conv_bn_relu(n, x) if x.sum() < 1e9 else x, "control flow may depend on more"),
    "a with statement": (in_a_context, "has a with statement"),
    "an exception": (catches, "has a try statement"),
    "a type": (lambda n, x: conv_bn_relu(n, x) if isinstance(x.shape, tuple) else x, "checks the type"),
    "a dict of a child": (ticks, "changes a list, dict or set"),
    "vars": (lambda n, x: conv_bn_relu(n, x) if not vars(n)["flag"] else x, "through __dict__ or vars()"),
    "parameters": (
        lambda n, x: conv_bn_relu(n, x) if all(p.requires_grad for p in n.conv1.parameters()) else x,
        "loops over, adds or deletes parameters",
    ),
    "the size of a buffer": (
        lambda n, x: conv_bn_relu(n, x) if n.bn1.running_mean.numel() else x,
        "control flow may depend on more than its arguments' shapes, dtypes and devices",
    ),
    "the shape of a computed tensor": (
        lambda n, x: n.relu(n.bn1(y)) if (y := n.conv1(x)).shape == x.shape else y,
        "control flow may depend on more than its arguments' shapes, dtypes and devices",
    ),
    "the size of a selection": (lambda n, x: conv_bn_relu(n, x) if len(x[x > 0]) else x, "calls len() on a value"),
    "a shape that changes": (
        lambda n, x: conv_bn_relu(n, x) if x.squeeze_(0).dim() == 4 else x,
        "control flow may depend on more than its arguments' shapes, dtypes and devices",
    ),
    "a number of the data": (lambda n, x: conv_bn_relu(n, x) * float(x[0, 0, 0, 0]), "calls float() on a value"),
    "the batch size": (lambda n, x: conv_bn_relu(n, x).view(len(x), -1), "the batch size as a number"),
    "rows": (lambda n, x: torch.stack([n.relu(n.bn1(n.conv1(r[None]))) for r in x]), "loops over a tensor"),
    "autocast on another device": (
        lambda n, x: conv_bn_relu(n, x) if not torch.is_autocast_enabled("cuda") else n.bn1(x),
        "depends on the gradient mode or on autocast",
    ),
    "a key": (lambda n, x: conv_bn_relu(n, x) * {3: 1.0}.get(x.shape[0], 2.0), "as a key"),
    "text": (lambda n, x: conv_bn_relu(n, x) if str(x.dtype) != "torch.half" else x, "into text"),
    "identity": (lambda n, x: conv_bn_relu(n, x) if x.dtype is not torch.half else x, "compares objects"),
    "identity in a function": (lambda n, x: x if is_half(x) else conv_bn_relu(n, x), "compares objects"),
    "a constant": (lambda n, x: conv_bn_relu(n, x) * torch.exp(n.extra), "calls exp"),
    "a constant from numpy": (lambda n, x: conv_bn_relu(n, x) * torch.from_numpy(ONE), "uses a tensor"),
}


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_code_that_unpacks_another_number_of_tensors_fails_like_the_original(channels):
    def unpacks(n, x):
        first, second = n.conv1(x).split(channels, dim=1)
        return n.relu(n.bn1(torch.cat([second, first], 1)))

    def run(net):
        net.conv1 = nn.Conv2d(4, 4, 1).double()
        return net(image())

    net = Block(unpacks)
    net.conv1, net.bn1 = nn.Conv2d(4, 2 * channels, 1), nn.BatchNorm2d(2 * channels)
    converted = converted_and_checked(net)
    assert fused(converted) == {"bn1": "relu"}
    if channels != 2:
        with pytest.raises(ValueError, match="values to unpack") as expected:
            run(net)
        with pytest.raises(ValueError, match="values to unpack") as got:
            run(converted)
        assert str(got.value) == str(expected.value)


def test_a_question_about_the_process_is_asked_again_in_each_call(monkeypatch):
    def synchronizes(n, x):
        y = conv_bn_relu(n, x)
        return y * 2 if torch.distributed.is_initialized() or torch.jit.is_tracing() else y

    x = image()
    converted = converted_and_checked(Block(synchronizes))
    assert fused(converted) == {"bn1": "relu"}
    net = bn.revert(converted)
    for owner, name in ((torch.distributed, "is_initialized"), (torch.jit, "is_tracing")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda: True)
            torch.testing.assert_close(converted.eval()(x), net.eval()(x), **CLOSE)


def test_other_threads_can_convert_and_run_networks():
    waiting = Event()

    def waits(n, x):
        waiting.set()
        sleep(0.01)
        return conv_bn_relu(n, x) + torch.zeros(1)

    x, other = image(), scramble_(Block(conv_bn_relu)).double().eval()
    factory, expected = torch.zeros, other(x)
    nets = [scramble_(Block(waits)).double() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(bn.convert, net, x) for net in nets]
        waiting.wait()
        while not all(job.done() for job in jobs):
            torch.testing.assert_close(other(x), expected, **CLOSE)
    assert torch.zeros is factory
    for net, job in zip(nets, jobs, strict=True):
        assert fused(job.result()) == {"bn1": "relu"}
        assert_same(net, job.result(), x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_would_lose_is_refused_and_said(name):
    code, reason = REFUSED[name]
    net, x = scramble_(Block(code)).double(), image()
    converted = bn.convert(net, x)
    assert not is_rewritten(converted)
    assert reason in converted.report["bn1"].reason
    torch.testing.assert_close(converted(x), net(x), **CLOSE)


def test_code_whose_conditions_never_hold_is_not_reported_as_fused():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.model, name)

        def forward(self, x):
            return F.relu(self.bn1(x))

    converted = bn.convert(Wrapper(Block(None)), image().float())
    assert converted.report.summary.startswith("convert: 0 of 1 BN layers")
    assert "do not hold on the example" in converted.report["model.bn1"].reason


ANSWERED = {
    "isinstance": lambda n, x: conv_bn_relu(n, x) if isinstance(x, torch.Tensor) else x,
    "is_tensor": lambda n, x: conv_bn_relu(n, x) if torch.is_tensor(x) else x,
    "hasattr": lambda n, x: conv_bn_relu(n, x) if not hasattr(x, "tensors") else x,
    "of a layer": lambda n, x: n.relu(y) if isinstance(y := n.bn1(n.conv1(x)), torch.Tensor) else y,
}


@pytest.mark.parametrize("name", ANSWERED)
def test_questions_about_types_are_answered(name):
    assert fused(converted_and_checked(Block(ANSWERED[name]))) == {"bn1": "relu"}


def test_code_that_is_called_with_nan_is_not_rewritten():
    class Inner(Block):
        def forward(self, x, floor=0.0):
            return super().forward(x)

    net = Coded(lambda n, x: n.inner(x, float("nan")), inner=Inner(conv_bn_relu))
    converted = bn.convert(net.double(), image())
    assert "it is called with NaN" in converted.report["inner.bn1"].reason


def checks(n, x):
    assert x.size(dim=1) == 4, f"4 channels, not {x.size(1)}"
    if not x.is_floating_point() or x.dtype == torch.long:
        x = x.double()
    return conv_bn_relu(n, x)


def adds_a_dimension(n, x):
    if x.dim() == 3:
        x = x.unsqueeze(0)
    return conv_bn_relu(n, x)


def unpacks(n, x):
    b, c, h, w = x.shape
    half = h
    half //= 2  # h stays the same
    if h % 2 or h != w or min(h, w) > 6:
        return n.bn1(x).exp()
    return conv_bn_relu(n, x).reshape(b, c, half, h // half, w)


def loops_over_channels(n, x):
    if len(x.shape) != 4 or x.shape[2:] not in [(6, 6), (8, 8)]:
        return n.bn1(x).exp()
    scale = float(x.ndim) ** -0.5
    for i in range(x.size(1)):
        x = x + i
    return conv_bn_relu(n, x) * scale


def looks_at_a_view(n, x):
    z = x.transpose(1, 3)[..., :2]
    _, *sizes = z.shape
    if z.size(-1) == len(z[0, 0, 0]) and sizes[0] > 5 and x.unsqueeze(0).dim() == 5:
        return conv_bn_relu(n, x)
    return n.bn1(x).exp()


QUESTIONS = [looks_at_a_view, checks, adds_a_dimension, unpacks, loops_over_channels]


@pytest.mark.parametrize("code", QUESTIONS)
def test_questions_about_shapes_are_asked_again_in_each_call(code):
    converted = converted_and_checked(Block(code))
    assert fused(converted) == {"bn1": "relu"}
    assert rewritten_runs(converted, image()) == rewritten_runs(converted, image()[:2]) == 1
    net = bn.revert(converted)
    for other in [(2, 4, 7, 7), (2, 4, 6, 7), (2, 4, 8, 8), (4, 6, 6), (2, 3, 6, 6), (2, 4, 6), (5,), ()]:
        pair = [copy.deepcopy(n) for n in (net, converted)]
        x = torch.randn(other, dtype=torch.double)
        try:
            expected = pair[0](x)
        except Exception as error:
            with pytest.raises(type(error)):
                pair[1](x)
        else:
            torch.testing.assert_close(pair[1](x), expected, **CLOSE)


def test_classes_that_count_their_subclasses_or_have_their_own_call_are_left_alone():
    known = []

    class Registered(nn.Module):
        def __init_subclass__(cls):
            known.append(cls)

        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(self.bn(x))

    class Calls(nn.Identity):
        def __call__(self, x):
            return super().__call__(x) * 2

    net = nn.Sequential(Registered(), Block(lambda n, x: n.relu(n.bn1(n.same(x)))))
    net[1].same = Calls()
    converted = bn.convert(net, image().float())
    assert known == []
    assert not fused(converted)
    assert "has its own __call__" in converted.report["1.bn1"].reason


def drops_examples(n, x):
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    kept = torch.rand(shape, dtype=x.dtype, device=x.device).add_(0.5).floor_()
    return n.relu(n.bn1(n.conv1(x)) * torch.ones(4, 1, 1, dtype=x.dtype) + x) * kept


def adds_coordinates(n, x):
    b, _, h, w = x.shape
    y = n.relu(n.bn1(n.conv1(x)) + torch.zeros(b, 4, h, w, dtype=x.dtype))
    return y * torch.arange(w, dtype=x.dtype).repeat(h, 1) * torch.tensor(0.5)


@pytest.mark.parametrize("code", [drops_examples, adds_coordinates])
def test_tensors_that_the_code_creates_are_created_in_each_call(code):
    code = lambda n, x, code=code: n.relu(n.bn2(code(n, x)))  # noqa: E731
    net, before = scramble_(Block(code)).double(), torch.rand
    converted = bn.convert(net, image())
    assert torch.rand is before
    assert fused(converted)["bn2"] == "relu"
    for shape in [(3, 4, 6, 6), (3, 4, 6, 6), (5, 4, 7, 8)]:
        x, seed = torch.randn(shape, dtype=torch.double), random.randrange(1000)
        outs = [(torch.manual_seed(seed), n(x))[1] for n in (net, converted)]
        torch.testing.assert_close(outs[1], outs[0], **CLOSE)
        assert rewritten_runs(converted, x) == 1


class Collects(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, *xs, x_0=None, **more):
        y = F.relu(self.bn(sum(xs)))
        for name, value in more.items():
            y = y * (value[name] if isinstance(value, dict) else value)
        return {"y": y, "first": [xs[0]]}


@pytest.mark.parametrize("forward", [lambda net, x: net(x, x), lambda net, x: net(x, a={"a": x, "b c": 2.0}, b=x)])
def test_any_number_of_tensors_and_dicts_of_tensors(forward):
    net, x = scramble_(Collects()).double(), image()
    converted = bn.convert(net, x, forward=forward)
    assert fused(converted) == {"bn": "relu"}
    others = [
        ((x,), {}),
        ((x,), {"a": {"b c": 2.0, "a": x}, "b": x}),
        ((x, x, x), {"b": x, "a": 2}),
        ((x, x), {"b": x}),
    ]
    for args, kwargs in [*others, ((x, x), {}), ((x,), {"a": {"a": 2 * x, "b c": 2.0}, "b": x})]:
        torch.testing.assert_close(converted(*args, **kwargs), net(*args, **kwargs), **CLOSE)
    assert rewritten_runs(lambda x: forward(converted, x), x) == 1


def test_a_dict_that_the_code_changes_or_returns_is_not_lost():
    def changes(self, d):
        d["y"] = F.relu(self.bn(d["x"]))
        return d["y"]

    def returns(self, d):
        return d, F.relu(self.bn(d["x"]))

    for code in (changes, returns):
        kind = type("Net", (Collects,), {"forward": code})
        converted = bn.convert(kind(), image().float(), forward=lambda net, x: net({"x": x}))
        assert not is_rewritten(converted)
        assert "list or dict that is passed to it" in converted.report["bn"].reason


def test_a_list_that_the_code_keeps_or_is_given_is_not_lost():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.kept = nn.BatchNorm2d(4), []

        def forward(self, xs):
            self.kept.append(1)
            xs.append(F.relu(self.bn(xs[0])))
            return xs[-1]

    converted = bn.convert(Keeps(), [image().float()], forward=lambda net, batch: net(list(batch)))
    assert not is_rewritten(converted)


def test_modules_that_code_calls_by_themselves_stay_right():
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    net = Coded(lambda n, x: n.block(x) if n.which is None else n.block[n.which](x), block=block, which=None)
    net, x = scramble_(net).double(), image()
    converted = bn.convert(net, x)
    assert "1 of 1" in str(converted.report)
    for which in (1, 2, slice(0, 2)):
        net.which = converted.which = which
        torch.testing.assert_close(converted(x), net(x), **CLOSE)


def test_converting_twice_changes_nothing_and_says_so():
    once = converted_and_checked(RegNetLike())
    twice = bn.convert(once, image())
    assert [type(m) for m in twice.modules()] == [type(m) for m in once.modules()]
    assert fused(twice) == fused(once)
    assert "nothing changed: there is nothing that can be converted or fused" in twice.report.notes
    assert not any("nothing changed" in note for note in once.report.notes)


def test_revert_restores_classes():
    net = RegNetLike()
    back = bn.revert(bn.convert(net, image().float()), image().float())
    assert [type(m) for m in back.modules()] == [type(m) for m in net.modules()]
    assert repr(back) == repr(net)


def test_rewrite_false_exchanges_modules_only():
    converted = bn.convert(Bottleneck(), image().float(), rewrite=False)
    assert not any(is_rewritten(m) for m in converted.modules())
    assert isinstance(converted.bn1, bn.BatchNorm2d)


def test_statistics_of_every_layer():
    converted = bn.convert(RegNetLike(), image().float(), statistics=bn.Ghost(2))
    assert {m.statistics for m in converted.modules() if isinstance(m, bn.BatchNorm2d)} == {bn.Ghost(2)}
    with pytest.raises(TypeError, match="statistics must be a value"):
        bn.convert(Bottleneck(), image().float(), statistics=bn.Sync)


def test_fold_of_a_rewritten_network():
    net, x = scramble_(RegNetLike()).double().eval(), image()
    folded = bn.fold(bn.convert(net, x), x)
    torch.testing.assert_close(folded(x), net(x), **CLOSE)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    assert not any(is_rewritten(m) for m in folded.modules())


def test_normalized_layers_of_insert_are_fused():
    net = bn.insert(Coded(lambda n, x: F.relu(n.conv(x)), conv=nn.Conv2d(4, 4, 3)).double(), image())
    assert fused(bn.convert(net, image())) == {"conv.norm": "relu"}


def test_a_child_that_does_not_trace_leaves_the_others_fused():
    good, bad = ConvNorm(F.relu), Block(REFUSED["torch.rand"][0])
    converted = converted_and_checked(Coded(lambda n, x: n.bad(n.good(x)), good=good, bad=bad))
    assert fused(converted) == {"good.bn": "relu"}
    assert "1 of 2 BN layers that feed an activation are fused" in str(converted.report)


class Asks(ConvNorm):
    def forward(self, x):
        return super().forward(x) if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def test_a_child_that_traces_only_by_itself_is_called_as_it_is():
    net = Block(lambda n, x: n.relu(n.f(x * 2) + n.g(conv_bn_relu(n, x))))
    net.f = Asks()
    assert fused(converted_and_checked(net)) == {"bn1": "relu", "g.bn": "relu sum"}
    net.g = Asks()
    assert fused(converted_and_checked(net)) == {"bn1": "relu"}


def test_a_module_that_fails_the_check_leaves_the_others_fused():
    scale = {"now": 1.0}

    class Sets(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            if type(x) is torch.Tensor:  # not while tracing
                scale["now"] = self.value
            return x

    def unseen(n, x):  # a trace keeps the present value of scale["now"] as a constant
        return torch.relu(n.bn1(x)) * scale["now"]

    blocks = [ConvNorm(F.relu), Sets(3.0), Block(unseen), Sets(1.0), ConvNorm(F.relu), ConvNorm(F.relu)]
    net, x = scramble_(nn.Sequential(*blocks)).double(), image()
    converted = bn.convert(net, x)
    assert fused(converted) == dict.fromkeys(("0.bn", "4.bn", "5.bn"), "relu")
    (note,) = converted.report.notes
    assert note.startswith("the code of '2' was not rewritten: with rewritten code, ")
    assert note.endswith("; the original was not changed")
    assert "was not rewritten: with rewritten code" in converted.report["2.bn1"].reason
    assert_same(net, converted, x)


def is_same(a, b):
    return a is b


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x, y):
        z = torch.relu(self.bn(x))
        return z if is_same(x, y) else z + y


def test_the_same_tensor_in_two_places_is_not_two_tensors():
    net, (x, y) = Attending(), torch.randn(2, 4, 3, 5, 5)
    converted = bn.convert(net, {"x": x, "y": y})
    assert "1 of 1" in str(converted.report)
    for given in ((x, y), (x, x)):
        torch.testing.assert_close(converted(*given), copy.deepcopy(net).train()(*given))


def matches_a_shape(n, x):
    y = conv_bn_relu(n, x)
    match x.shape:
        case (_, _, height, _) if height > 8:
            return y * 2
        case _:
            return y


class Mine(torch.Tensor):
    pass


def looks_for_a_subclass(n, x):
    return conv_bn_relu(n, x) * (2 if isinstance(x, Mine) else 1)


def looks_for_parameters(n, x):
    return conv_bn_relu(n, x) * (2 if isinstance(x, nn.Parameter) else 1)


def reads_a_scale(n, x):
    y, scale = conv_bn_relu(n, x), getattr(x, "scale", None)
    return y if scale is None else y * scale


def reads_a_mark(n, x):
    return conv_bn_relu(n, x) * (2 if hasattr(n.conv1.weight, "mark") else 1)


def with_scale(x):
    x.scale = 3.0
    return x


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (matches_a_shape, lambda n, x: F.pad(x, (2, 2, 2, 2))),
        (looks_for_parameters, lambda n, x: nn.Parameter(x)),
        (looks_for_a_subclass, lambda n, x: x.as_subclass(Mine)),
        (reads_a_scale, lambda n, x: with_scale(x)),
        (reads_a_mark, lambda n, x: setattr(n.conv1.weight, "mark", 1) or x),
    ],
)
def test_what_the_code_asks_about_tensors_may_change_later(code, change):
    net = scramble_(Block(code)).double()
    converted = bn.convert(net, image())
    x = image()
    found, expected = (n(change(n, x)).as_subclass(torch.Tensor) for n in (converted, net))
    torch.testing.assert_close(found, expected, **CLOSE)


def deterministic(n, x):
    return conv_bn_relu(n, x) * (2 if torch.are_deterministic_algorithms_enabled() else 1)


def default_dtype(n, x):
    return conv_bn_relu(n, x) * (2 if torch.get_default_dtype() == torch.float64 else 1)


def autocast_with_gradients(n, x):
    return conv_bn_relu(n, x) * (2 if torch.is_grad_enabled() and torch.is_autocast_enabled("cpu") else 1)


def autocast_dtype(n, x):
    return conv_bn_relu(n, x).to(torch.get_autocast_dtype("cpu"))


@contextmanager
def set_by(function, value, before):
    function(value)
    try:
        yield
    finally:
        function(before)


@pytest.mark.parametrize(
    ("code", "context"),
    [
        (deterministic, lambda: set_by(torch.use_deterministic_algorithms, True, False)),
        (default_dtype, lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32)),
        (autocast_with_gradients, lambda: torch.autocast("cpu", torch.bfloat16)),
        (autocast_dtype, lambda: torch.autocast("cpu", torch.float16)),
    ],
)
def test_torch_states_may_change_later(code, context):
    net, x = scramble_(Block(code)).eval(), image().float()
    converted = bn.convert(net, x)
    with context():
        found, expected = converted(x), net(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def scaled(forward):
    @functools.wraps(forward)
    def wrapper(self, x, scale=None, *, double=False):
        if scale is None:
            scale = self.scale if x.shape[0] > 8 else 1.0
        return forward(self, x, scale) * (2 if double else 1)

    return wrapper


class Decorated(Block):
    scale = 5.0

    def __init__(self):
        super().__init__(conv_bn_relu)

    @scaled
    def forward(self, x, scale=1.0):
        return conv_bn_relu(self, x) * scale


@pytest.mark.parametrize("given", [{}, {"scale": 2.0}, {"double": True}])
@pytest.mark.parametrize("verb", [bn.convert, bn.fold])
def test_decorators_with_other_arguments(verb, given):
    net = scramble_(Decorated()).double().eval()
    changed, x = verb(net, image()), torch.cat([image()] * 4)
    torch.testing.assert_close(changed(x, **given), net(x, **given), **CLOSE)


class Wrapped(Block):
    def __init__(self):
        super().__init__(conv_bn_relu)

    @torch.compiler.disable
    def forward(self, x):
        return conv_bn_relu(self, x)


def test_decorators_that_pass_all_arguments_on():
    converted = converted_and_checked(Wrapped())
    assert fused(converted) == {"bn1": "relu"}


@pytest.mark.parametrize("verb", [bn.convert, bn.insert, bn.fold])
def test_networks_made_in_inference_mode_can_be_trained(verb):
    net, x = (
        scramble_(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Tanh())).eval(),
        image().float(),
    )
    with torch.inference_mode():
        changed = verb(net, x)
    changed(x.requires_grad_()).sum().backward()
    assert x.grad.isfinite().all()


def test_parametrizations_of_a_converted_block_can_be_removed():
    net = scramble_(Block(conv_bn_relu)).double()
    net.gain = nn.Parameter(torch.ones(1, dtype=torch.double))
    parametrize.register_parametrization(net, "gain", nn.Identity())
    converted = bn.convert(net, image())
    parametrize.remove_parametrizations(converted, "gain")
    torch.testing.assert_close(converted(image()[:1] * 0 + 1), net(image()[:1] * 0 + 1), **CLOSE)


class Settings(dict):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


def test_attributes_whose_attributes_raise_key_errors():
    net = Block(conv_bn_relu).double()
    net.settings = Settings(a=1)
    assert bn.convert(net, image()).settings.a == 1
