"""Test that a rewritten module and its copies differ from the original class only in their forward."""

import copy
import io
import pickle
import re

import pytest
import torch
from blocks import Bottleneck, ConvNorm, RegNetLike, fusions_in
from networks import Coded, scramble_
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.graph.generated import _text_of, is_rewritten, original_kind
from batchnorm.graph.rewrite import restore_


@pytest.fixture
def net():
    return scramble_(Bottleneck(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))))


@pytest.fixture
def x():
    return torch.randn(3, 4, 6, 6)


def saved_and_loaded(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, saved_and_loaded, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_copies_are_rewritten_too(net, x, duplicate):
    converted = bn.convert(net, x)
    other = duplicate(converted)
    assert type(other) is type(converted)
    assert other is not converted
    for m in other.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.constant_(m.bias, 0.3)  # copy.copy shares the layers, so this also changes the original
    expected = bn.revert(other)
    torch.testing.assert_close(other(x), expected(x))


def test_it_is_what_it_was(net, x):
    net.register_forward_hook(lambda m, args, out: out * 2)
    converted = bn.convert(net, x)
    assert isinstance(converted, Bottleneck)
    assert is_rewritten(converted)
    assert original_kind(converted) is Bottleneck
    assert repr(converted).splitlines()[0] == "Bottleneck("
    assert converted.state_dict().keys() == net.state_dict().keys()
    assert vars(converted).keys() - {"report"} == vars(net).keys()
    torch.testing.assert_close(converted(x), net(x))
    converted.load_state_dict(net.state_dict())


def test_printing_a_network_shows_what_is_fused(x):
    net = scramble_(Bottleneck())
    converted = bn.convert(net, x)
    assert "fused: bn1 + relu, bn2 + relu, bn3 + residual + relu\n" in str(converted)
    assert "fused" not in str(bn.revert(converted))


def test_equal_modules_have_one_class(x):
    pair = bn.convert(
        nn.ModuleList([ConvNorm(torch.relu), ConvNorm(torch.relu)]), x, forward=lambda n, x: n[1](n[0](x))
    )
    assert type(pair[0]) is type(pair[1])
    assert is_rewritten(pair[0])


def test_a_module_whose_code_has_changed_since_unpickles_as_its_own_class(net, x, monkeypatch):
    dumped = pickle.dumps(bn.convert(net, x))
    monkeypatch.setattr(Bottleneck, "forward", lambda self, x: self.conv1(x))
    loaded = pickle.loads(dumped)
    assert type(loaded) is Bottleneck


def test_the_digest_of_code_ignores_the_order_of_a_set():
    code = (lambda x: x in {"a", "b"}).__code__
    texts = {_text_of(code.replace(co_consts=(None, frozenset(items)))) for items in ((0, 8), (8, 0))}
    # 0 and 8 collide in a small set, so the set keeps their order of insertion. In a set of strings, the order differs
    # between processes.
    assert repr(frozenset((0, 8))) != repr(frozenset((8, 0)))
    assert len(texts) == 1
    assert _text_of(code) != _text_of(code.replace(co_consts=(None, frozenset((0, 8)))))


def test_a_forward_that_its_class_gets_later_is_respected(net, x, monkeypatch):
    converted = bn.convert(net, x)
    monkeypatch.setattr(Bottleneck, "forward", lambda self, x: self.conv1(x))
    torch.testing.assert_close(converted(x), converted.conv1(x))


def test_code_that_uses_what_cannot_be_imported_pickles_as_its_own_class(x):
    class Local(nn.Module):  # cannot be pickled; the test only looks at __reduce_ex__
        def __init__(self):
            super().__init__()
            self.bn, self.g = nn.BatchNorm2d(4), torch.relu

        def forward(self, x):
            return self.g(self.bn(x))

    converted = bn.convert(Local(), x)
    assert is_rewritten(converted)
    assert type(copy.deepcopy(converted)) is type(converted)
    reduced = converted.__reduce_ex__(2)
    assert reduced[1][0] is Local


def test_parameters_may_have_any_name(x):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, type, len=(1, 2), /, original=None, *rest, children, **isinstance):
            return torch.relu(self.bn(type)) * children

    net = Odd()
    converted = bn.convert(net, x, forward=lambda net, x: net(x, children=2.0))
    assert is_rewritten(converted)
    for args, kwargs in (((x,), {}), ((x, (3,), 1, 2), {"children": 1.0}), ((x,), {"children": 3.0, "more": 4})):
        given = {"children": 2.0, **kwargs}
        torch.testing.assert_close(converted(*args, **given), net(*args, **given))


@pytest.mark.parametrize("name", ["class", "__hidden", "\ufb01", "two words"])
def test_attributes_may_have_any_name(x, name):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)
            setattr(self, name, 2)

        def forward(self, x):
            return torch.relu(self.bn(x)) * getattr(self, name)

    net = Odd()
    converted = bn.convert(net, x)
    assert is_rewritten(converted)
    for value in (2, 3):
        setattr(net, name, value)
        setattr(converted, name, value)
        torch.testing.assert_close(converted(x), net(x))


def test_replicas_of_data_parallel(net, x):
    converted = bn.convert(net, x)
    replica = converted._replicate_for_data_parallel()
    assert type(replica) is type(converted)
    replica.conv1 = nn.Identity()
    assert isinstance(converted.conv1, nn.Conv2d)


def test_parametrizations(net, x):
    converted = bn.convert(net, x)
    for n in (net, converted):
        nn.utils.parametrizations.weight_norm(n.conv1)
    assert len(fusions_in(converted)) == 3
    torch.testing.assert_close(converted(x), net(x))


def test_checkpointing(net, x):
    converted = bn.convert(net.double(), x.double())
    pair = [copy.deepcopy(converted), copy.deepcopy(converted)]
    inputs = [x.double().requires_grad_() for _ in pair]
    pair[0](inputs[0]).sum().backward()
    checkpoint(pair[1], inputs[1], use_reentrant=False).sum().backward()
    for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(pair[1].state_dict(), pair[0].state_dict())


def test_torch_compile_sees_one_graph(x):
    net = scramble_(RegNetLike())
    converted = bn.convert(net, x)
    for training in (True, False):
        pair = [copy.deepcopy(n).train(training) for n in (net, converted)]
        compiled = torch.compile(pair[1], backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), pair[0](x), rtol=1e-4, atol=1e-5)


def test_torch_compile_accepts_another_number(x):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x, scale=1.0):
            return torch.relu(self.bn(x)) * scale

    net = Scaled()
    compiled = torch.compile(bn.convert(net, x), backend="eager", fullgraph=True)
    for scale in (1.0, 2.0, 3.0):
        torch.testing.assert_close(compiled(x, scale), net(x, scale))


def test_torch_compile_with_dynamic_shapes_compiles_code_that_asks_for_shapes_once():
    def code(n, x):
        b, c, h, w = x.shape
        assert c == n.bn.num_features
        return torch.relu(n.bn(x)).view(b, c, h * w)

    net, compiles = Coded(code, bn=nn.BatchNorm2d(4)), []
    converted = bn.convert(net, torch.randn(3, 4, 6, 6))

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(converted, backend=backend, fullgraph=True, dynamic=True)
    for shape in [(3, 4, 6, 8), (5, 4, 6, 8), (2, 4, 9, 7)]:
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), net(x))
    assert len(compiles) == 1


def test_guards_of_torch_compile_do_not_check_properties(x):
    """A guard on a property would make Dynamo check every layer in each call, instead of the whole module at once."""
    downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    converted = bn.convert(scramble_(Bottleneck(downsample)), x)
    for mode in (True, False):
        torch._dynamo.reset()  # other tests may have compiled the same class
        torch.compile(converted.train(mode), backend="eager", fullgraph=True)(x)
        (entry,) = _debug_get_cache_entry_list(type(converted).forward.__code__)
        guards = str(entry.guard_manager)
        assert "source=L['self']._modules['bn3']," in guards
        guarded = [line for line in guards.splitlines() if "source=type(L['self']._modules" in line]
        assert not [line for line in guarded if re.search(r"<class 'property'>|\)\.(forward|__call__),", line)]


def test_restore(net, x):
    converted = bn.convert(net, x)
    assert restore_(converted) == [""]
    assert type(converted) is Bottleneck
    assert restore_(converted) == []
    torch.testing.assert_close(converted(x), net(x))
