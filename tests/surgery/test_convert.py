"""Test that convert keeps a network's results and the users' hooks and attributes, and that revert is its inverse."""

import copy
from inspect import signature

import pytest
import torch
from networks import ZOO, BasicBlock, Coded, FusedResidual, NormWithActivation, Residual, scramble_
from torch import nn
from torch.nn.utils import parametrizations

import batchnorm as bn
from batchnorm.layers import BatchNorm
from batchnorm.layers.fusion import Fused
from batchnorm.surgery.convert import AMPLIFIED, LARGE_ERROR

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def sequential():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2), nn.SiLU()
    )


@pytest.mark.parametrize(
    "name", sorted(ZOO.keys() - {"fused_residual", "per_activation"})
)  # torch.nn has no equivalent for these
def test_outputs_and_gradients_stay_and_revert_is_the_inverse(name):
    make, example, _ = ZOO[name]
    net, x = scramble_(make()).double(), example().double()
    converted = bn.convert(net, x)
    back = bn.revert(converted, x)
    assert repr(back) == repr(net)
    assert back.state_dict().keys() == net.state_dict().keys()
    for training in (True, False):
        nets = [copy.deepcopy(n).train(training) for n in (net, converted, back)]
        outputs = [n(x) for n in nets]
        for n, out in zip(nets, outputs, strict=True):
            torch.testing.assert_close(out, outputs[0], rtol=1e-9, atol=1e-10)
            out.square().sum().backward()
            for p, q in zip(n.parameters(), nets[0].parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-7, atol=1e-8)
        for key, value in nets[0].state_dict().items():
            torch.testing.assert_close(nets[1].state_dict()[key], value, rtol=1e-9, atol=1e-10)


def test_every_layer_becomes_ours_with_its_activation():
    x = torch.randn(2, 3, 8, 8)
    converted = bn.convert(sequential(), x, rewrite=False)
    assert [type(m) for m in converted] == [nn.Conv2d, bn.BatchNorm2d, Fused, nn.Conv2d, bn.BatchNorm2d, Fused]
    assert [converted[i].activation.name for i in (1, 4)] == ["relu", "silu"]
    assert converted.report.paths("converted") == ["1", "4"]
    assert repr(bn.revert(converted)) == repr(sequential())


EDITS = {
    "another norm": lambda net: net.__setitem__(1, nn.GroupNorm(2, 4)),
    "another activation": lambda net: net.__setitem__(2, nn.GELU()),
    "no activation": lambda net: net.__delitem__(2),
    "a hook": lambda net: net[1].register_forward_hook(lambda m, args, out: out.clamp(-0.1)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_sequential_can_be_edited_after_converting(name):
    net, x = sequential(), torch.randn(2, 3, 8, 8)
    converted = bn.convert(net, x)
    assert converted.report.summary.startswith("convert: 2 of 2 BN layers that feed an activation are fused")
    torch.testing.assert_close(converted[:2](x), net[:2](x))
    for n in (net, converted):
        EDITS[name](n)
    torch.testing.assert_close(converted(x), net(x))


def test_exchanging_alone_fuses_in_sequentials_only_and_lists_the_rest():
    report = bn.convert(Residual(), torch.randn(2, 3, 8, 8), rewrite=False).report
    assert report["stem.1"].action == "converted with ReLU"
    assert "the code of 'blocks.0' (BasicBlock) calls it and its activation" in report["blocks.0.bn1"].reason
    assert "its output goes to the function add" in report["blocks.0.bn2"].reason


def test_an_activation_read_elsewhere_only_in_training_is_not_fused():
    def code(n, x):
        y = n.bn(x)
        return (n.relu(y), y * 2) if n.training else n.relu(y)

    report = bn.convert(Coded(code, bn=nn.BatchNorm1d(3), relu=nn.ReLU()), torch.randn(4, 3)).report
    assert report["bn"].action == "converted with ReLU in evaluation"
    assert "is read by" in report["bn"].reason


def test_one_activation_module_for_several_layers_goes_into_all_of_them():
    relu = nn.ReLU()
    net = nn.Sequential(nn.BatchNorm1d(3), relu, nn.Linear(3, 3), nn.BatchNorm1d(3), relu)
    converted = bn.convert(net, torch.randn(4, 3), rewrite=False)
    assert converted[1] is converted[4]
    assert [converted[i].activation.name for i in (0, 3)] == ["relu", "relu"]
    back = bn.revert(converted)
    assert back[1] is back[4]
    assert isinstance(back[1], nn.ReLU)


def test_a_network_without_batch_normalization():
    with pytest.warns(UserWarning, match=r"no batch normalization, so convert changed nothing; .* bn.insert"):
        bn.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3))


def test_sharing_survives():
    net = nn.ModuleDict({"a": BasicBlock(3, 3), "b": BasicBlock(3, 3)})
    net["b"].bn1 = net["a"].bn1
    net["b"].bn2.weight = net["a"].bn2.weight
    converted = bn.convert(net, torch.randn(2, 3, 5, 5), forward=lambda net, x: net["b"](net["a"](x)))
    assert converted["a"].bn1 is converted["b"].bn1
    assert converted["a"].bn2.weight is converted["b"].bn2.weight


def test_modules_in_plain_lists_are_exchanged_too():
    net = Coded(lambda n, x: n.steps[0](x), bn=nn.BatchNorm1d(3))
    net.steps = [net.bn, net.bn.forward]
    converted = bn.convert(net, torch.randn(4, 3))
    assert converted.steps[0] is converted.bn
    assert isinstance(converted.steps[0], BatchNorm)
    assert converted.steps[1].__self__ is converted.bn


def test_hooks_survive_and_keep_the_activation_out():
    net, seen = sequential(), []
    net[1].register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
    net[4].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    x = torch.randn(4, 3, 8, 8)
    converted = bn.convert(net, x)
    assert [m.activation.name for m in converted if isinstance(m, BatchNorm)] == ["identity", "identity"]
    assert "hooks" in converted.report["1"].reason
    seen.clear()
    torch.testing.assert_close(converted(x), net(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-5)


def test_state_survives():
    net = sequential().double()
    net[1].weight.requires_grad_(False)
    net[1].momentum = None
    net[1].eps = 1e-3
    net[1].note = {"mine": 1}
    net[4].eval()
    scramble_(net)
    converted = bn.convert(net, torch.randn(2, 3, 8, 8).double())
    layer = converted[1]
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert (layer.momentum, layer.eps, layer.note, layer.running_mean.dtype) == (None, 1e-3, {"mine": 1}, torch.float64)
    assert converted[0].training
    assert not converted[4].training
    assert converted.state_dict().keys() == net.state_dict().keys()
    torch.testing.assert_close(converted.state_dict(), net.state_dict(), rtol=0, atol=0)


WITHOUT_BIAS = pytest.mark.skipif("bias" not in signature(nn.BatchNorm1d).parameters, reason="needs a newer torch")


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        pytest.param({"bias": False}, marks=WITHOUT_BIAS),
        {"track_running_stats": False},
        {"momentum": None},
    ],
    ids=str,
)
def test_every_form_of_torchs_layer(options):
    net = scramble_(nn.Sequential(nn.BatchNorm1d(3, **options), nn.Tanh()))
    x = torch.randn(5, 3)
    converted = bn.convert(net, x)
    assert converted.state_dict().keys() == net.state_dict().keys()
    back = bn.revert(converted, x)
    for n in (converted, back):
        torch.testing.assert_close(n(x), net(x))


def test_half_precision_is_the_same_after_there_and_back():
    net = sequential().bfloat16()
    back = bn.revert(bn.convert(net, torch.randn(2, 3, 8, 8).bfloat16()))
    assert [t.dtype for t in back.state_dict().values()] == [t.dtype for t in net.state_dict().values()]


def test_synchronized_layers():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 5, 5)
    converted = bn.convert(net, x)
    assert type(converted[1]) is bn.BatchNorm2d
    assert converted[1].statistics == bn.Sync()
    converted.train()(x)
    assert repr(bn.revert(converted)) == repr(net)


def test_a_synchronized_layer_of_too_many_dimensions_is_refused():
    net = nn.Sequential(nn.SyncBatchNorm(3), nn.ReLU()).eval()
    site = bn.convert(net, torch.randn(2, 3, 2, 2, 2, 2)).report["0"]
    assert site.action == "refused"
    assert site.reason == "its input has 6 dimensions, but BatchNorm1d, 2d and 3d take at most 5"


def test_lazy_layers_become_what_they_are():
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    net(torch.randn(2, 3, 5, 5))
    assert bn.convert(net, torch.randn(2, 3, 5, 5)).report.paths("converted") == ["1"]


class Loud(nn.BatchNorm1d):
    """A subclass without its own forward. convert still refuses it, because a subclass may behave differently."""


def parametrized():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    nn.utils.parametrize.register_parametrization(net[1], "weight", nn.Softplus())
    return net


def patched():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].forward = lambda x: x + 1
    return net


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), Loud(3)), "Loud is a subclass"),
        (parametrized, "it is parametrized"),
        (patched, "its forward was replaced on the instance"),
    ],
)
def test_what_behaves_in_its_own_way_is_refused_and_stays(make, reason):
    net = scramble_(make())
    x = torch.randn(4, 3)
    converted = bn.convert(net, x)
    assert reason in converted.report["1"].reason
    assert converted.report["1"].action == "refused"
    assert type(converted[1]) is type(net[1]) or reason == "it is parametrized"
    torch.testing.assert_close(converted.eval()(x), net.eval()(x))


def test_a_subclass_keeps_its_activation():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), NormWithActivation(4))
    converted = bn.convert(net, torch.randn(2, 3, 5, 5))
    assert type(converted[1]) is NormWithActivation


def test_weight_norm_on_other_layers_is_no_obstacle():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3), nn.ReLU())
    x = torch.randn(4, 3)
    torch.testing.assert_close(bn.convert(net, x)(x), net(x))


def test_layers_of_this_library_take_in_their_activation():
    net = nn.Sequential(bn.BatchNorm1d(3), nn.Sigmoid(), bn.BatchNorm1d(3, activation="relu"), nn.Tanh())
    converted = bn.convert(net, torch.randn(4, 3), rewrite=False)
    assert [converted[i].activation.name for i in (0, 2)] == ["sigmoid", "relu"]
    assert isinstance(converted[3], nn.Tanh)


def test_revert_of_a_layer_made_with_an_activation():
    net = nn.Sequential(nn.Linear(3, 3), bn.BatchNorm1d(3, activation=nn.LeakyReLU(0.2)))
    x = torch.randn(4, 3)
    back = bn.revert(net, x)
    assert [type(m) for m in back[1]] == [nn.BatchNorm1d, nn.LeakyReLU]
    torch.testing.assert_close(back(x), net(x))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (bn.BatchNorm1d(3, statistics=bn.Ghost(2)), r"Ghost\(size=2\)"),
        (bn.BatchNorm1d(3, statistics=bn.Renorm()), "Renorm"),
        (bn.BatchNorm1d((3, 4)), "per activation"),
        (bn.BatchNorm1d(3, on_single="running"), "on_single='running'"),
    ],
)
def test_revert_refuses_what_torch_has_no_equal_for(layer, reason):
    with pytest.raises(ValueError, match=f"'0'.*{reason}"):
        bn.revert(nn.Sequential(layer))


def test_revert_refuses_frozen_statistics_and_residuals():
    net = nn.Sequential(bn.BatchNorm1d(3))
    bn.freeze_(net)
    with pytest.raises(ValueError, match=r"call batchnorm\.unfreeze_ first"):
        bn.revert(net)
    with pytest.raises(ValueError, match="'bn2': it is called with a residual or a mask"):
        bn.revert(FusedResidual(), torch.randn(2, 3, 5, 5))


@pytest.mark.parametrize("verb", [bn.convert, bn.insert, bn.fold])
def test_an_exception_leaves_the_network_as_it_was(verb):
    def code(n, x):
        n.calls += 1
        x = torch.relu(n.bn(n.linear(x)))
        raise RuntimeError("in the middle")

    net = scramble_(Coded(code, linear=nn.Linear(3, 3), bn=nn.BatchNorm1d(3), calls=0))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match="in the middle"):
        verb(net, torch.randn(4, 3))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net.calls == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("verb", [bn.convert, bn.insert, bn.fold])
def test_an_example_that_the_network_cannot_take(verb):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.raises(
        RuntimeError, match=r"raised an error on the example of shape \(2, 5, 8, 8\): Given groups=1, .*$"
    ):
        verb(net, torch.randn(2, 5, 8, 8))
    with pytest.raises(ValueError, match=r"raised an error on the example of shape \(3, 8, 8\): expected 4D input"):
        verb(net, torch.randn(3, 8, 8))


@pytest.mark.parametrize("verb", [bn.convert, bn.insert, bn.fold])
def test_wrappers_are_named(verb):
    with pytest.raises(TypeError, match=r"pass the network inside it, net\.module"):
        verb(nn.DataParallel(nn.Linear(3, 3)), torch.zeros(2, 3))


def test_dropout_between_a_layer_and_its_activation_keeps_them_apart():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Sigmoid())
    for batch in (4, 1):  # a single example runs only in evaluation mode, without dropout
        converted = bn.convert(net, torch.randn(batch, 3))
        assert converted[0].activation.name == "identity", batch
    (note,) = converted.report.notes
    assert note.startswith("only evaluation mode was traced, because training mode fails on this example: ")
    assert "Expected more than 1 value per channel" in note


@pytest.mark.parametrize("verb", [bn.convert, bn.insert, bn.fold])
def test_what_a_network_remembers_between_calls_is_not_moved(verb):
    def code(n, x):
        y = torch.relu(n.bn(n.linear(x)) + n.memory)
        n.memory = y.detach().mean(0)
        return y

    net = scramble_(Coded(code, linear=nn.Linear(3, 3), bn=nn.BatchNorm1d(3), memory=torch.zeros(3)))
    result = verb(net, torch.randn(4, 3))
    assert (result.memory == 0).all()


class Shortcut(nn.Module):
    """Apply a BN and an activation together or, at random in training, only one of them."""

    def __init__(self, alone, *, chance=0.3):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.alone, self.chance = alone, chance

    def forward(self, x):
        if self.training and torch.rand(()) < self.chance:
            return getattr(self, self.alone)(x)
        return self.relu(self.bn(self.conv(x)))


@pytest.mark.parametrize("alone", ["relu", "bn"])
def test_a_path_that_the_example_does_not_take_stays_right(alone):
    net, x = scramble_(Shortcut(alone, chance=0.0)), torch.randn(4, 3, 5, 5)
    converted = bn.convert(net, x)
    net.chance = converted.chance = 1.0
    torch.testing.assert_close(converted(x), net(x))


def test_an_activation_referred_to_elsewhere_is_not_fused():
    for keep in (
        lambda net: setattr(net, "favorites", [net[2]]),
        lambda net: setattr(net, "pick", lambda relu=net[2]: relu),
        lambda net: net.append(nn.Sequential(nn.Identity(), net[2])),
        lambda net: net.append(net[1]),
    ):
        net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        keep(net)
        converted = bn.convert(net, torch.randn(4, 3, 5, 5))
        assert converted[1].activation.name == "identity"
        assert isinstance(converted[2], nn.ReLU)


def test_a_sequential_with_code_of_its_own_keeps_its_activation():
    class Block(nn.Sequential):
        def normalized(self, x):
            return self[1](self[0](x))

    net = Block(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    x = torch.randn(4, 3, 5, 5)
    converted = bn.convert(net, x)
    torch.testing.assert_close(converted.normalized(x), net.normalized(x))


def test_functional_batch_norm_is_listed():
    make, example, _ = ZOO["functional"]
    report = bn.convert(make(), example()).report
    assert report[""].action == "not converted"
    assert "batch_norm is called as a function" in report[""].reason


class ReluAfterDropout(nn.Sequential):
    def forward(self, x):
        return torch.relu(super().forward(x))


@pytest.mark.parametrize("last", [nn.Linear(4, 4), nn.ReLU(), None])
def test_dropout_after_a_layer_is_what_its_output_goes_to(last):
    layers = [bn.BatchNorm1d(4), nn.Dropout()]
    net = ReluAfterDropout(*layers) if last is None else nn.Sequential(*layers, last)
    reason = bn.convert(net, torch.randn(8, 4)).report["0"].reason
    assert reason == "activation: its output goes to '1' (Dropout), which cannot be fused"


def test_a_layer_that_only_feeds_a_sum_has_no_activation_to_fuse():
    net = Coded(lambda n, x: torch.relu(n.a(x) + n.b(x)), a=nn.BatchNorm2d(3), b=nn.BatchNorm2d(3))
    report = bn.convert(net, torch.randn(4, 3, 5, 5)).report
    reasons = [site.reason for site in report.sites if site.reason]
    assert reasons == ["activation: none, its output goes to a sum"]


def test_a_note_says_that_the_example_amplifies_rounding():
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(60) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))
    deep, shallow = (bn.convert(part, torch.randn(3, 16)).report for part in (net, net[:6]))
    assert deep.relative_error > LARGE_ERROR > shallow.relative_error
    assert AMPLIFIED in deep.notes
    assert AMPLIFIED not in shallow.notes
