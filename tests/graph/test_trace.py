"""Test that a trace finds which call feeds which, for modules and functions, in place or not, in any Python code."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from networks import Branching, Coded, Functional, NormWithActivation, Residual
from torch import nn

from batchnorm.graph import trace
from batchnorm.graph.kinds import is_leaf, keeps_torch_forward


def network(code):
    """Return a network with a convolution, a norm, a ReLU, a dropout and an identity."""
    layers = {"conv": nn.Conv2d(3, 3, 1), "bn": nn.BatchNorm2d(3), "relu": nn.ReLU(inplace=True)}
    return Coded(code, **layers, drop=nn.Dropout(), same=nn.Identity())


def flow(code, training=False):
    """Return the names of the traced calls, each with the names of the calls that produced its inputs."""
    graph = trace(network(code).train(training), torch.randn(2, 3, 4, 4))
    return [(call.name, [v.producer.name if v.producer else None for v in call.inputs]) for call in graph.calls]


FUNCTIONS = {
    "F.relu": (lambda n, x: F.relu(n.conv(x)), "relu"),
    "F.relu in place": (lambda n, x: F.relu(n.conv(x), inplace=True), "relu"),
    "torch.sigmoid": (lambda n, x: torch.sigmoid(n.conv(x)), "sigmoid"),
    "relu_": (lambda n, x: n.conv(x).relu_(), "relu"),
    "method": (lambda n, x: n.conv(x).tanh(), "tanh"),
    "aten": (lambda n, x: torch.ops.aten.relu(n.conv(x)), "relu"),
    "operator": (lambda n, x: n.conv(x) + 1, "add"),
    "reflected operator": (lambda n, x: 1 + n.conv(x), "add"),
    "negation": (lambda n, x: -n.conv(x), "neg"),
    "property": (lambda n, x: n.conv(x).mT, "mT"),
    "index": (lambda n, x: n.conv(x)[:, 0], "__getitem__"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_calls(name):
    code, expected = FUNCTIONS[name]
    assert flow(code) == [("Conv2d", [None]), (expected, ["Conv2d"])]


def test_functional_batch_norm_and_cat():
    def code(n, x):
        y = F.batch_norm(n.conv(x), n.bn.running_mean, n.bn.running_var)
        return torch.cat([x, y], 1)

    calls = flow(code)
    assert calls[1] == ("batch_norm", ["Conv2d", None, None])
    assert calls[2] == ("cat", [None, "batch_norm"])


def test_a_write_in_place_makes_a_new_value():
    def code(n, x):
        y = n.conv(x)
        z = y
        y += x
        return n.relu(z) * y

    assert flow(code) == [
        ("Conv2d", [None]),
        ("add", ["Conv2d", None]),
        ("ReLU", ["add"]),
        ("mul", ["ReLU", "ReLU"]),
    ]


def test_a_write_through_a_view_reaches_the_tensor_behind_it():
    def code(n, x):
        y = n.conv(x)
        y.view(2, -1)[:, 0].zero_()
        y[0] = 1
        return n.bn(y)

    names = [name for name, _ in flow(code)]
    assert names == ["Conv2d", "view", "__getitem__", "zero", "__setitem__", "BatchNorm2d"]
    assert flow(code)[-1] == ("BatchNorm2d", ["__setitem__"])


def test_what_hands_its_input_on_is_no_producer():
    def code(n, x):
        y = n.drop(n.same(n.conv(x)))
        return n.bn(y.contiguous().to(y.dtype))

    assert flow(code)[-1] == ("BatchNorm2d", ["Conv2d"])
    assert flow(code, training=True)[-1] == ("BatchNorm2d", ["Dropout"])


def test_a_replay_is_not_recorded():
    graph = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 2)), torch.randn(2, 3, 4, 4))
    flatten = graph.calls[1]
    consumers = {value: list(value.consumers) for call in graph.calls for value in (*call.inputs, *call.outputs)}
    assert flatten.replay(torch.zeros(2, 4, 4, 4)).shape == (2, 64)
    assert len(graph.calls) == 3
    assert all(value.consumers == before for value, before in consumers.items())


def test_modules_called_twice_have_two_calls():
    graph = trace(network(lambda n, x: n.conv(n.conv(x))), torch.randn(2, 3, 4, 4))
    assert len(graph.calls_of(graph.calls[0].module)) == 2


def test_reading_values_into_python_counts_as_reading():
    net = Branching()
    graph = trace(net.eval(), torch.randn(2, 3, 6, 6))
    assert [call.name for call in graph.functions("mean", "gt", "__bool__")] == ["mean", "gt", "__bool__"]


def test_asking_for_a_shape_does_not():
    names = [name for name, _ in flow(lambda n, x: n.conv(x).view(x.shape[0], x.size(1), len(x) * 8))]
    assert names == ["Conv2d", "view"]


def test_outputs_and_what_hooks_see_escape():
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.ReLU(), nn.Linear(3, 3))
    escapes = [call.outputs[0].escapes for call in trace(net, torch.zeros(1, 3)).calls]
    assert escapes == [False, False, True]
    net[0].register_forward_hook(lambda *_: None)
    escapes = [call.outputs[0].escapes for call in trace(net, torch.zeros(1, 3)).calls]
    assert escapes == [True, False, True]


def test_outputs_in_dicts_and_dataclasses_escape():
    from dataclasses import dataclass

    @dataclass
    class Output:
        logits: torch.Tensor

    for wrap in (Output, lambda y: {"y": [y]}):
        graph = trace(network(lambda n, x, wrap=wrap: wrap(n.conv(x))), torch.randn(1, 3, 2, 2))
        assert graph.calls[-1].outputs[0].escapes


CAPTURED = []


class Holder:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


def cycle(n, y):
    n.outer = SimpleNamespace(y=y)
    n.outer.me = n.outer


KEEPING = {
    "attribute": lambda n, y: setattr(n, "kept", y),
    "list": lambda n, y: n.__dict__.setdefault("kept", []).append(y),
    "object": lambda n, y: setattr(n, "kept", Holder(y)),
    "cycle": cycle,
    "global": lambda n, y: CAPTURED.append(y),
    "closure": lambda n, y: setattr(n, "kept", lambda: y),
}


@pytest.mark.parametrize("name", KEEPING)
def test_tensors_that_outlive_the_run_escape(name):
    def code(n, x):
        y = n.conv(x)
        KEEPING[name](n, y)
        return n.bn(y)

    escapes = [call.outputs[0].escapes for call in trace(network(code), torch.randn(1, 3, 2, 2), training=False).calls]
    CAPTURED.clear()
    assert escapes == [True, True]


def test_what_a_dead_cycle_held_does_not_escape():
    def code(n, x):
        box = SimpleNamespace(y=n.conv(x))
        box.me = box
        return n.bn(box.y)

    graph = trace(network(code), torch.randn(1, 3, 2, 2), training=False)
    assert [call.outputs[0].escapes for call in graph.calls] == [False, True]


def test_an_object_handed_to_a_module_holds_nothing():
    net = network(lambda n, x: n.reader(SimpleNamespace(y=n.conv(x))))
    net.reader = Coded(lambda n, box: box.y * 2)
    graph = trace(net, torch.randn(1, 3, 2, 2))
    assert [call.outputs[0].escapes for call in graph.calls] == [False, True]


def test_training_draws_no_random_numbers_of_the_user():
    net, state = network(lambda n, x: n.drop(x)), torch.get_rng_state()
    trace(net, torch.ones(1, 3, 2, 2), training=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_paths_name_the_module_whose_code_calls():
    graph = trace(Residual().eval(), torch.randn(2, 3, 8, 8))
    assert {call.path for call in graph.functions("add")} == {"blocks.0", "blocks.1"}
    assert str(graph.functions("add")[0]) == "add in 'blocks.0'"
    assert str(graph.calls[0]) == "'stem.0' (Conv2d)"


def test_parameters_read_outside_their_module_are_known():
    net = network(lambda n, x: F.conv2d(n.conv(x), n.conv.weight))
    graph = trace(net, torch.randn(1, 3, 2, 2))
    assert [call.name for call in graph.readers_of(net.conv.weight)] == ["conv2d"]
    assert graph.readers_of(net.conv.bias) == []


def test_scripted_functions_are_seen():
    @torch.jit.script
    def swish(x):
        return x * torch.sigmoid(x)

    names = [name for name, _ in flow(lambda n, x: swish(n.conv(x)))]
    assert names == ["Conv2d", "sigmoid", "mul"]


def test_custom_autograd_functions_are_seen():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    assert flow(lambda n, x: n.bn(Double.apply(n.conv(x))))[-1][1] != ["Conv2d"]


def test_the_example_is_not_written_to():
    x = torch.randn(2, 3, 4, 4)
    before = x.clone()
    trace(network(lambda n, x: n.relu(x)), x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_hooks_are_removed_after_an_exception():
    net = network(lambda n, x: n.conv(x).no_such_method())
    with pytest.raises(AttributeError):
        trace(net, torch.randn(1, 3, 2, 2))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_leaves_are_what_torch_wrote():
    assert is_leaf(nn.Conv2d(1, 1, 1))
    assert is_leaf(NormWithActivation(3))
    assert not is_leaf(Functional())
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert is_leaf(parametrized)
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    assert not keeps_torch_forward(patched)


def test_kwargs_and_forward():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, left, right):
            return self.a(left) + self.b(right)

    batch = {"left": torch.zeros(1, 2), "right": torch.zeros(1, 2)}
    assert len(trace(Two(), batch).calls) == 3
    assert len(trace(Two(), [batch], forward=lambda net, b: net(**b[0])).calls) == 3
