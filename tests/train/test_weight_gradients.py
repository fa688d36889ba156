"""Test gradients on separate streams and updates during the backward pass, with simulated streams on the CPU."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchnorm.models import inception
from batchnorm.models.bn_inception.blocks import SeparableConv2d
from batchnorm.models.bn_inception.network import CUT
from batchnorm.models.bn_inception.weight_gradients import WeightGradients
from batchnorm.train.fused_update import FusedUpdate
from batchnorm.train.loss import cross_entropy
from batchnorm.train.step import Shadows

IMAGES, LABELS = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5


class Streams:
    """Simulated streams: gradients are NaN until something waits for their stream; updates happen at once."""

    def __init__(self, monkeypatch):
        self.hidden, self.deferred, self.parts = [], 0, 0
        for name in ("Stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, **__: SimpleNamespace())
        monkeypatch.setattr(WeightGradients, "compute", lambda _, *given: self.compute(*given))
        monkeypatch.setattr(WeightGradients, "wait", lambda _: self.reveal())
        monkeypatch.setattr(WeightGradients, "updating", lambda _: self.updating())
        monkeypatch.setattr(Shadows, "_can_fuse", lambda *_: True)
        monkeypatch.setattr(FusedUpdate, "__call__", lambda _, rows: self.update(rows))

    def compute(self, function, *inputs):
        self.deferred += 1
        found = function(*inputs)
        for t in found if isinstance(found, tuple) else (found,):
            self.hidden.append((t, t.clone()))
            t.fill_(torch.nan)
        return found

    def reveal(self):
        for t, value in self.hidden:
            t.copy_(value)
        self.hidden.clear()

    @contextmanager
    def updating(self):
        self.reveal()
        yield

    @torch.no_grad()
    def update(self, rows):
        self.parts += 1
        for weight, gradient, copy in rows:
            weight -= 0.01 * gradient
            if copy is not None:
                copy.copy_(weight)


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def stepped(net, aside, hooks=nullcontext):
    shadows = Shadows(net, aside)
    with torch.autocast("cpu", torch.bfloat16), hooks():
        y = shadows.run(IMAGES)
    shadows.step(y, cross_entropy(y.detach(), LABELS)[1], torch.optim.SGD(net.parameters(), 0.01))
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def paper_network(**options):
    net = inception(classes=5, size=32, width=0.1, seed=0, **options)
    for module in net.modules():
        if isinstance(module, SeparableConv2d):
            module.rearrange = True  # as on a GPU
    return net


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = paper_network()
        torch.manual_seed(0)


class Before(Wrapped):
    def __init__(self):
        super().__init__()
        self.colors = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.body(self.colors(x))


class FrozenBefore(Before):
    def __init__(self):
        super().__init__()
        for name, module in self.body.named_children():
            if name == CUT:
                break
            module.requires_grad_(False)


class Around(Wrapped):
    """A network with a second head, which reads a layer before the point where the backward pass is divided."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.body.inception_3a.register_forward_hook(lambda _, __, y: self.kept.append(y))
        self.body(IMAGES)
        self.head = nn.Linear(self.kept.pop().shape[1], 5)

    def forward(self, x):
        y = self.body(x)
        return y + self.head(self.kept.pop().mean((2, 3)))


class Twice(Wrapped):
    def forward(self, x):
        return self.body(x) + self.body(x.flip(3))


class Checkpointed(Wrapped):
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Stems(nn.Module):
    """A network that applies one separable convolution twice, to the image and to its own output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = SeparableConv2d(3, 3, 7, stride=2, multiplier=2), nn.Linear(3, 5)
        self.stem.rearrange = True

    def forward(self, x):
        return self.head(self.stem(self.stem(x)).mean((2, 3)))


def ending(change):
    def made():
        net = paper_network()
        torch.manual_seed(0)
        change(net)
        return net

    return made


def with_a_shared_bias(net):
    net.last = nn.Linear(5, 5)
    net.last.bias = net.classifier.bias


def with_a_shared_weight(net):
    net.second, net.third = nn.Linear(5, 5), nn.Linear(5, 5)
    net.third.weight = net.second.weight


def with_a_shared_layer(net):
    net.second = nn.Linear(5, 5)
    net.third = net.second


def with_a_frozen_bias(net):
    net.classifier.bias.requires_grad_(False)


# Networks, each with the number of parts of its backward pass, and whether weight gradients are deferred.
NETWORKS = {
    "the paper's": (paper_network, 3, True),
    "without BN": (lambda: paper_network(norm=None), 3, True),
    "a frozen bias": (ending(with_a_frozen_bias), 3, True),
    "a shared bias": (ending(with_a_shared_bias), 3, False),
    "a shared weight": (ending(with_a_shared_weight), 3, False),
    "a shared layer": (ending(with_a_shared_layer), 3, False),
    "a layer before": (Before, 2, True),
    "a layer before frozen ones": (FrozenBefore, 2, True),
    "a path around the cut": (Around, 1, True),
    "called twice": (Twice, 1, False),
    "checkpointed": (Checkpointed, 3, True),
    "a stem twice": (Stems, 1, False),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_weights_as_without_streams(streams, name):
    make, parts, deferred = NETWORKS[name]
    expected, streams.parts = stepped(make(), aside=False), 0
    found = stepped(make(), aside=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert streams.parts == parts
    assert bool(streams.deferred) == deferred


def test_saved_tensors_that_hooks_copy(streams):
    def copies():
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)

    make, *_ = NETWORKS["a shared weight"]
    expected = stepped(make(), aside=False)
    torch.testing.assert_close(stepped(make(), aside=True, hooks=copies), expected, rtol=1e-4, atol=1e-6)


def test_other_backward_passes_defer_nothing(streams):
    net, gradients = paper_network().to(torch.bfloat16), WeightGradients()
    with gradients:
        y = net(IMAGES.bfloat16())
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.float().sum(), list(net.parameters())))
    assert not streams.deferred


class Stream:
    """A simulated stream; ``done`` has the work that is complete before the stream's next work starts."""

    def __init__(self):
        self.done = set()

    def wait_stream(self, other):
        self.done |= other.done

    def wait_event(self, event):
        self.done |= event.done


@pytest.fixture
def main(monkeypatch):
    """Simulate torch.cuda's streams and events, and return the current stream."""
    running = [Stream()]

    @contextmanager
    def switched(stream):
        running.append(stream)
        yield
        running.pop()

    class Event:
        def record(self):
            self.done = set(running[-1].done)

    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", switched)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: running[-1])
    return running[0]


def test_updates_wait_for_the_gradients_of_all_streams(main):
    gradients = WeightGradients()

    def start(name):
        gradients.compute(lambda _: torch.cuda.current_stream().done.add(name), torch.ones(1))

    main.done.add("forward")
    for name in "abc":
        start(name)
    used = [stream.done for stream in gradients.streams]
    assert sorted(map(sorted, used)) == [["a", "c", "forward"], ["b", "forward"]]
    with gradients.updating():
        assert torch.cuda.current_stream().done == {*"abc", "forward"}
    start("d")
    assert main.done == {"forward"}
    gradients.wait()
    assert main.done == {*"abcd", "forward"}


def test_the_backward_pass_waits_for_the_oldest_gradient_if_memory_is_short(main, monkeypatch):
    gradients = WeightGradients()
    monkeypatch.setattr(WeightGradients, "BYTES", 10)
    for k in range(4):
        gradients.compute(lambda _, k=k: torch.cuda.current_stream().done.add(k), torch.ones(1))
    assert main.done == {0, 1}
    assert len(gradients.pending) == gradients.AHEAD


def test_the_weights_of_a_module_with_two_names_stay_its_own():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.append(net[0])
    weight = net[0].weight
    Shadows(net).run(torch.randn(2, 4).bfloat16())
    assert net[0].weight is weight


def test_a_bias_is_cast_with_its_weight():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight.requires_grad_(False)
    assert set(Shadows(net).copies) == {"0.weight", "0.bias"}
