import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from networks import Coded
from torch import nn

import batchnorm as bn
from batchnorm.models import perceptron
from batchnorm.monitor import Memory, Monitor, Record
from batchnorm.monitor.records import percentiles_of


@pytest.mark.parametrize("n", [1, 2, 59, 60])
def test_percentiles_equal_torch_quantile(n):
    x = torch.randn(n, 7)
    expected = torch.quantile(x, torch.tensor([0.0, 0.15, 0.5, 0.85, 1.0]), dim=0)
    torch.testing.assert_close(percentiles_of(x, (0, 15, 50, 85, 100)), expected)


def test_the_text_of_a_monitor_is_short():
    net = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Tanh())
    with Monitor(net, every=2) as monitor:
        net(torch.randn(8, 4))
    assert repr(monitor) == "Monitor(2 layers, every=2, 1 record)"


def test_percentiles_run_over_locations_too():
    x = torch.randn(4, 3, 5, 6)
    expected = torch.quantile(x.movedim(1, 0).flatten(1), 0.5, dim=1)
    torch.testing.assert_close(percentiles_of(x, (50,))[0], expected)
    torch.testing.assert_close(percentiles_of(x.movedim(1, -1), (50,), unit_dim=-1)[0], expected)


def test_odd_inputs_do_not_stop_a_training():
    assert percentiles_of(torch.randn(9), (15, 50, 85)).shape == (3, 1)
    assert percentiles_of(torch.tensor(2.0), (15, 85)).tolist() == [[2.0], [2.0]]
    assert percentiles_of(torch.randn(0, 4), (15, 85)).isnan().all()
    assert percentiles_of(torch.randn(8, 4).bfloat16(), (15, 85)).dtype == torch.float32


def test_large_tensors_are_sampled_evenly():
    q = percentiles_of(torch.randn(20_000, 600), (15, 50, 85), samples=1000, units=100)
    assert q.shape == (3, 100)
    assert q[1].abs().max() < 0.3


@pytest.mark.parametrize(("examples", "side"), [(64, 32), (32, 64), (128, 16), (32, 28)])
def test_all_columns_of_images_are_sampled(examples, side):
    # The padding makes the border's values smaller than the others.
    conv = nn.Conv2d(3, 16, 7, padding=3)
    z = conv(torch.rand(examples, 3, side, side)).detach()
    exact = torch.from_numpy(np.percentile(z.movedim(1, 0).flatten(1).numpy(), (15, 50, 85), axis=1))
    assert ((percentiles_of(z, (15, 50, 85)) - exact).abs() < 0.15 * z.std((0, 2, 3))).all()


def test_percentiles_of_a_unit_with_nan_are_nan():
    x = torch.randn(10, 2)
    x[3, 1] = torch.nan
    found = percentiles_of(x, (15, 50))
    assert found[:, 0].isfinite().all()
    assert found[:, 1].isnan().all()


def test_an_output_that_was_changed_in_place_is_not_the_normalized_one():
    def forward(n, x):
        y = n.norm(x)
        y += x
        return n.relu(y)

    net, x = Coded(forward, norm=nn.BatchNorm1d(3), relu=nn.ReLU()), torch.randn(8, 3)
    z, before = Monitor(net).record(0, x).percentiles["relu"]
    assert z is before


def train(net, data, steps=12):
    """Train as a user would, with dropout and augmentation, which draw random numbers."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data), (16,), generator=generator)
        loss = net(data[rows] + 0.1 * torch.randn(16, *data.shape[1:])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def small_net(kind):
    torch.manual_seed(1)
    if kind == "fused":
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), bn.BatchNorm2d(4, activation="relu"), nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(3)
        )
    if kind == "torch.nn":
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.LazyLinear(3),
        )
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(3))


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("probe", [False, True], ids=["batch", "probe"])
@pytest.mark.parametrize("kind", ["fused", "torch.nn", "plain"])
def test_training_is_the_same_bit_for_bit(kind, probe):
    data = torch.randn(64, 2, 6, 6)
    ends = []
    for watched in (False, True):
        net = small_net(kind)
        net(data[:2])
        torch.manual_seed(2)
        if watched:
            with Monitor(net, every=3, probe=data[:8] if probe else None) as monitor:
                train(net, data)
                monitor.record_gradient_change(12, lambda y, _: y.square().mean(), data[:8], rate=0.1)
            assert [r.step for r in monitor.records] == [0, 3, 6, 9]
        else:
            train(net, data)
        ends.append({**net.state_dict(), "random numbers": torch.get_rng_state()})
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name


@pytest.mark.parametrize("rebinds", [False, True])
def test_a_probe_changes_no_buffer(rebinds):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()
            self.register_buffer("average", torch.zeros(()))
            self.register_buffer("none", None)

        def forward(self, x):
            if rebinds:
                self.average = self.average.lerp(x.mean(), 0.1)
            else:
                self.average.lerp_(x.mean(), 0.1)
            return self.act(x)

    net, x = Average(), torch.randn(8, 3)
    with Monitor(net, every=1, probe=x + 100) as monitor:
        net(x)
    assert len(monitor.records) == 1
    torch.testing.assert_close(net.average, 0.1 * x.mean())


def test_a_probe_keeps_shared_buffers_shared():
    class Counter(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x):
            self.count += 1
            return x * self.count

    count = torch.zeros(())
    net = nn.Sequential(Counter(count), Counter(count), nn.ReLU())
    z = Monitor(net).record(0, torch.ones(1, 1)).percentiles["2"].z
    assert z[1] == 2
    assert count == 0


def test_layers_called_by_keyword():
    def code(n, x):
        return n.fused(residual=x, input=n.act(input=n.norm(input=x)))

    net = Coded(code, norm=nn.BatchNorm1d(3), act=nn.ReLU(), fused=bn.BatchNorm1d(3, activation="relu"))
    x = torch.randn(8, 3)
    with Monitor(net, every=1) as monitor:
        net(x)
    percentiles = monitor.records[0].percentiles
    torch.testing.assert_close(percentiles["act"].x, percentiles_of(x, (15, 50, 85)))
    y = torch.relu(net.norm(x))
    torch.testing.assert_close(percentiles["fused"].x, percentiles_of(y, (15, 50, 85)))


def test_nothing_stays_attached_even_after_an_exception():
    net = perceptron()
    with pytest.raises(RuntimeError), Monitor(net, every=1):
        net(torch.rand(4, 783))
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_fused_layer_shows_what_the_separate_ones_show():
    separate = nn.Sequential(nn.Linear(5, 4), bn.BatchNorm1d(4), nn.Sigmoid())
    fused = nn.Sequential(separate[0], bn.BatchNorm1d(4, activation="sigmoid"))
    batch = torch.randn(32, 5)
    one, other = (Monitor(net).record(0, batch).percentiles for net in (separate, fused))
    for a, b in zip(one["2"], other["1"], strict=True):
        torch.testing.assert_close(a, b)
    x = separate[0](batch)
    torch.testing.assert_close(one["2"].x, percentiles_of(x, (15, 50, 85)))
    torch.testing.assert_close(one["2"].z, percentiles_of(separate[1](x), (15, 50, 85)))


def test_the_residual_counts_in_a_fused_layer():
    net, x = Coded(lambda n, x: n.bn(x, residual=x), bn=bn.BatchNorm1d(3, activation="relu")), torch.randn(16, 3)
    expected = bn.ops.batch_norm(x, residual=x)[0]
    z = Monitor(net).record(0, x).percentiles["bn"].z
    torch.testing.assert_close(z, percentiles_of(expected, (15, 50, 85)))


def test_functional_nonlinearities_are_seen_at_the_normalization_before_them():
    net = Coded(lambda n, x: F.relu(n.norm(n.fc(x))), fc=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))
    assert list(Monitor(net).record(0, torch.randn(8, 3)).percentiles) == ["norm"]


def test_a_second_call_has_its_own_name():
    act = nn.ReLU()
    net = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)
    assert list(Monitor(net, ["1"]).record(0, torch.randn(8, 3)).percentiles) == ["1", "1#2"]


def test_evaluation_passes_are_not_steps():
    net = perceptron()
    monitor = Monitor(net, every=1).__enter__()
    with torch.no_grad():
        net(torch.rand(4, 784))
    net.eval()(torch.rand(4, 784))
    with pytest.warns(UserWarning, match="the monitor recorded nothing"):
        monitor.__exit__()
    assert monitor.records == []


def test_layers_that_the_network_does_not_call():
    net, x = Coded(lambda n, x: F.relu(n.fc(x)), fc=nn.Linear(3, 3), act=nn.ReLU()), torch.randn(8, 3)
    monitor = Monitor(net)
    with pytest.raises(
        ValueError, match=r"nothing to record: the network did not call .* watches \(act\); use layers="
    ):
        monitor.record(0, x)
    for watching in (monitor, Monitor(net, probe=x)):
        with (
            pytest.warns(UserWarning, match=r"recorded nothing: the network did not call .* watches \(act\)"),
            watching,
        ):
            net(x)
        assert watching.records == watching.gradient_changes == []


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


def normalized():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_compiled_network_is_recorded(ran_before, probe):
    net, x = compiled(normalized()), torch.randn(8, 3)
    if ran_before:
        net(x)
    with Monitor(net, every=2, probe=x if probe else None) as monitor:
        for _ in range(4):
            net(x).sum().backward()
    assert [(r.step, *r.percentiles) for r in monitor.records] == [(0, "_orig_mod.2"), (2, "_orig_mod.2")]


def test_a_compiled_part_is_recorded():
    x = torch.randn(8, 3)
    net = nn.Sequential(compiled(normalized()), nn.Linear(4, 2))
    net(x)
    with Monitor(net, every=1) as monitor:
        net(x)
    assert [list(r.percentiles) for r in monitor.records] == [["0._orig_mod.2"]]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_network_inside_compiled_code_is_refused(fullgraph):
    net, x = normalized(), torch.randn(8, 3)
    torch._dynamo.reset()
    fast = torch.compile(net, backend="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"with the network that torch\.compile returned"), Monitor(net, every=1):
        fast(x)


def test_a_monitor_says_that_compiled_code_hides_the_network():
    net, x = normalized(), torch.randn(8, 3)
    fast = compiled(net)
    fast(x)
    with pytest.warns(UserWarning, match="pass that network to Monitor"), Monitor(net, every=1):
        fast(x)


def test_memory_is_bounded_and_the_interval_doubles():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    with Monitor(net, every=1, points=8) as monitor:
        for _ in range(100):
            net(torch.randn(4, 2))
    assert len(monitor.records) <= 8
    assert monitor.every == 16
    steps = [r.step for r in monitor.records]
    assert steps == list(range(0, 16 * len(steps), 16))


def test_memory_keeps_the_first_and_the_last():
    memory = Memory(points=10)
    for step in range(1000):
        memory.write(Record(step))
        assert len(memory.records) <= 10
    assert memory.records[0].step == 0
    assert memory.records[-1].step == 999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["sigmoid9"]}, "the network has no layer 'sigmoid9'; its layers are linear1"),
        ({"every": 0}, "every=0: must be 1 or more"),
        ({"percentiles": (85, 15)}, "ascending"),
        ({"percentiles": (-10, 50)}, "from 0 to 100"),
        ({"percentiles": (15, 150)}, "from 0 to 100"),
        ({"points": 1}, "points must be at least 2"),
    ],
)
def test_errors_say_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        Monitor(perceptron(), **arguments)


def test_a_network_without_nonlinearities_is_refused():
    with pytest.raises(ValueError, match="no nonlinearity modules and no batch or instance normalization; use layers="):
        Monitor(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="pass a batch to record\\(\\)"):
        Monitor(perceptron()).record(0)
