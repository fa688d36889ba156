"""Test how networks are called on batches, and how tensors in batches are found and moved."""

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm import network_call


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x, 0), lambda x: [x, 0], lambda x: {"input": x}, lambda x: Pair(x, x)]
)
def test_a_tensor_the_first_of_a_tuple_or_list_a_dict_by_name(wrap):
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    torch.testing.assert_close(network_call.call(net, wrap(x)), net(x))


def test_a_shape_is_not_a_batch():
    with pytest.raises(
        TypeError, match=r"the batch \(8, 3\) looks like a shape: pass a tensor, such as torch.randn\(8, 3\)"
    ):
        network_call.call(nn.Linear(3, 2), (8, 3))


def test_forward_overrides():
    assert network_call.call(nn.Linear(3, 2), "anything", lambda net, batch: batch * 2) == "anythinganything"


@pytest.mark.parametrize("batch", ["text", 3, (), []])
def test_other_batches_are_refused(batch):
    with pytest.raises(TypeError, match="forward=lambda net, batch"):
        network_call.call(nn.Linear(3, 2), batch)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (
            (torch.zeros(2, 3), torch.zeros(2, 3)),
            r"net\(batch\[0\]\) on a batch of type tuple: missing .* 'input2'.*batch: net\(\*batch\)",
        ),
        (
            {"input1": torch.zeros(2, 3), "labels": 0},
            r"net\(\*\*batch\) on a batch of type dict: missing.*batch: net\(batch\[\"x\"\]\)",
        ),
        (torch.zeros(2, 3), r"net\(batch\) on a batch of type Tensor: missing.*batch: net\(batch, \.\.\.\)"),
    ],
)
def test_a_network_that_cannot_take_the_batch_names_forward(batch, found):
    with pytest.raises(TypeError, match=found):
        network_call.call(nn.Bilinear(3, 3, 1), batch)


def test_a_data_loader_is_no_batch():
    with pytest.raises(TypeError, match=r"a DataLoader is not a batch: pass one batch, such as next\(iter\(loader\)\)"):
        network_call.call(nn.Linear(3, 2), torch.utils.data.DataLoader([torch.zeros(3)]))


def test_an_iterator_is_no_batch():
    with pytest.raises(TypeError, match=r"a generator is not a batch: pass one batch, such as next\(iter\(loader\)\)"):
        network_call.call(nn.Linear(3, 2), (torch.zeros(1, 3) for _ in range(2)))


@pytest.mark.parametrize("batch", [[(torch.zeros(2, 3), 0)] * 2, [{"input": torch.zeros(2, 3)}]])
def test_a_list_of_batches_gets_a_hint(batch):
    kind = type(batch[0]).__name__
    hint = (
        rf"^the network got the first item of the batch, a {kind} \(if this is a list of batches, pass one of them\): "
    )
    with pytest.raises(TypeError, match=hint):
        network_call.call(nn.Linear(3, 2), batch)


VERBS = {
    "estimate_": bn.estimate_,
    "estimate_ layer by layer": partial(bn.estimate_, upstream="population"),
    "adapt": bn.adapt,
    "diagnose": bn.diagnose,
    "insert": lambda net, batches: bn.insert(net, torch.zeros(2, 3), init="identity", batches=batches),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize(
    ("batch", "kind", "hint", "why"),
    [
        ("text", TypeError, "", "cannot call a network on a batch of type str"),
        (torch.zeros(2, 5), RuntimeError, "", ".*shapes cannot be multiplied"),
        (torch.zeros(2).long(), RuntimeError, r" \(if batches is one batch, pass \[batch\]\)", ".*dtype"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_bad_batch_is_named_by_its_index(verb, batch, kind, hint, why, index):
    batches = [batch, torch.randn(2, 3)] if index == 0 else (torch.randn(2, 3), batch)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.ReLU())
    with pytest.raises(kind, match=f"^batch at index {index}{hint if index else ''}: {why if index else ''}"):
        verb(net, batches)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ({"input": torch.zeros(2, 3)}, r"not one dict: pass \[batch\] for one batch"),
        ("text", "such as a list or a DataLoader, not str"),
        (nn.Sequential(nn.ReLU()), "such as a list or a DataLoader, not Sequential"),
        (torch.utils.data.TensorDataset(torch.zeros(2, 3)), "such as a list or a DataLoader, not TensorDataset"),
    ],
)
def test_what_is_no_iterable_of_batches(verb, batches, says):
    with pytest.raises((TypeError, ValueError), match=f"^batches must be an iterable of batches, {says}"):
        verb(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.ReLU()), batches)


def test_a_type_error_inside_the_network_is_its_own():
    class Broken(nn.Module):
        def forward(self, x):
            return x + "text"

    with pytest.raises(TypeError, match=r"must be Tensor, not str|unsupported operand"):
        network_call.call(Broken(), torch.zeros(2))


def test_a_copied_batch_keeps_its_form():
    x = torch.randn(2, 3, requires_grad=True)
    batch = {"pair": Pair(x, x), "list": [x, "text"]}
    moved = network_call.copy_for(nn.Identity(), batch)
    assert isinstance(moved["pair"], Pair)
    assert moved["list"][1] == "text"
    assert moved["list"][0].data_ptr() != x.data_ptr()
    assert not moved["list"][0].requires_grad


class Slotted:
    __slots__ = ("a", "unset")

    def __init__(self, a):
        self.a = a


class Mirrored(dict):
    """A dict whose items are also attributes, like the outputs of Hugging Face transformers."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


def test_tensors_are_found_in_any_object_and_cycles_end():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    loop = SimpleNamespace(a=a)
    loop.me = [loop, deque([b])]
    trees = [
        (loop, [a, b]),
        (Slotted(SimpleNamespace(c=c)), [c]),
        (Mirrored(b=b, c=c), [b, c]),
        (torch.distributions.Normal(a, b, validate_args=False), [a, b]),
        ({a}, [a]),
        ((a, a), [a, a]),
        (nn.Linear(1, 1), []),
    ]
    for tree, expected in trees:
        assert [id(t) for t in network_call.tensors_in(tree)] == [id(t) for t in expected], tree


def test_tensors_in_objects_are_moved_in_a_copy():
    batch = SimpleNamespace(x=torch.zeros(2), n=torch.tensor([3]))
    moved = network_call.copy_for(nn.Identity(), [batch], torch.float64)[0]
    assert isinstance(moved, SimpleNamespace)
    assert moved.x.dtype == torch.float64
    assert moved.n.dtype == torch.int64
    moved.x.add_(1)
    assert (batch.x == 0).all()


def test_a_network_without_tensors_is_on_the_cpu():
    assert network_call.device_of(nn.ReLU()) == torch.device("cpu")


def test_compiled_code_runs_as_written_for_a_while():
    seen = []
    net = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    x = torch.zeros(1, 2)
    net(x)
    with network_call.eagerly():
        net._orig_mod[0].register_forward_hook(lambda *_: seen.append(1))
        net(x)
    assert seen
    torch._dynamo.reset()
