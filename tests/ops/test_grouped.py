"""Compare launches for several layers with the float64 oracle, layer by layer, for every kind of launch."""

import pytest
import torch
from kernels import EPS, Way, kept
from oracle import assert_near, expect

from batchnorm.ops import Activation
from batchnorm.ops.cuda import grouped, resident, schedule
from batchnorm.ops.cuda.launch import STATS
from batchnorm.ops.cuda.layout import Geometry

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]
H, W = 4, 4


class Layers:
    """Layers whose outputs are slices of one tensor; all inputs but the last are slices of another tensor."""

    def __init__(self, channels, dtype, device, activation="relu", examples=3):
        self.channels, self.activation, self.examples = channels, Activation(activation), examples
        self.rows = examples * H * W
        *shared, alone = channels
        joined = self.last(sum(shared) + 8, dtype, device)
        starts = [sum(shared[:k]) for k in range(len(shared))]
        self.xs = [joined[:, a : a + c] for a, c in zip(starts, shared, strict=True)]
        self.xs.append(self.last(alone, dtype, device))
        self.out, self.dy, self.dx = (self.last(sum(channels) + 16, dtype, device) for _ in range(3))
        self.gammas, self.betas = ([torch.randn(c, device=device) for c in channels] for _ in range(2))
        self.running = [kept(c, device) for c in channels]

    def last(self, channels, dtype, device):
        x = torch.randn(self.examples, channels, H, W, device=device) * 2 + 3
        return x.to(dtype).contiguous(memory_format=torch.channels_last)

    def slices(self, t):
        starts = [8 + sum(self.channels[:k]) for k in range(len(self.channels))]
        return [t[:, a : a + c] for a, c in zip(starts, self.channels, strict=True)]

    def run(self, way, momentum=0.1):
        options = (EPS, momentum, self.activation, way)
        stats = grouped.forward(self.xs, self.gammas, self.betas, self.running, self.slices(self.out), *options)
        dys, dxs = self.slices(self.dy), self.slices(self.dx)
        return stats, *grouped.backward(dys, self.xs, stats, dxs, self.activation, way)

    def check(self, way):
        edges = [self.out[:, :8].clone(), self.dx[:, -8:].clone()]
        stats, dgammas, dbetas = self.run(way)
        dtype = self.out.dtype
        found = zip(stats.split([STATS * c for c in self.channels]), dgammas, dbetas, strict=True)
        for k, (s, dgamma, dbeta) in enumerate(found):
            y, dy, dx = (self.slices(t)[k] for t in (self.out, self.dy, self.dx))
            e = expect(self.xs[k], self.gammas[k], self.betas[k], EPS, dy, self.activation)
            assert_near(y, e.y, dtype, "y")
            e.check_gradients(dx, dgamma, dbeta, dtype)
            assert_near(s.view(STATS, -1)[0], e.mean, torch.float32, "mean")
            mean, var, batches, skipped = self.running[k]
            assert_near(mean, 0.5 + 0.1 * (e.mean - 0.5), torch.float32, "running mean")
            assert_near(var, 2 + 0.1 * (e.var * self.rows / (self.rows - 1) - 2), torch.float32, "running var")
            assert (int(batches), int(skipped)) == (1, 0)
        # The kernels write nothing outside the slices.
        assert torch.equal(self.out[:, :8], edges[0])
        assert torch.equal(self.dx[:, -8:], edges[1])

    def tiling(self, way):
        g = Geometry(True, sum(self.channels), self.rows, self.rows, sum(self.channels), 1, False)
        return schedule.make(g, self.out.element_size(), *way, 4)

    def residence(self, parts, groups, lanes=4, kept=2):
        g = Geometry(True, sum(self.channels), self.rows, self.rows, sum(self.channels), 1, False)
        size = self.out.element_size()
        r = resident.make(g, size, 2, 132, 128, 1, lanes, parts)
        slices = sum(-(-c * size // (16 * lanes)) for c in self.channels)
        return r._replace(kept=kept, slices=slices, groups=min(groups, slices))


ALONE, MET = Way("once", 1024, 16, 1, 16), Way("once", 64, 2, 1, 16)
STREAM, TREE = Way("stream", 64, 0, 3, 16), Way("stream", 64, 0, 40, 8)


@pytest.mark.parametrize(
    ("way", "channels", "dtype"),
    [
        (ALONE, (32, 16, 24, 8), torch.float32),
        (MET, (24, 40), torch.bfloat16),
        (STREAM, (16, 24, 8), torch.float32),
        pytest.param(TREE, (8, 8), torch.float32, marks=pytest.mark.slow),
        (ALONE, (16,), torch.float32),
    ],
)
def test_tritons_kernels(device, way, channels, dtype):
    layers = Layers(channels, dtype, device, examples=20 if way is TREE else 3)
    layers.check(layers.tiling(way))


def test_the_launch_that_is_chosen(device):
    Layers((32, 16, 24, 8), torch.float32, device, "sigmoid").check(None)


@pytest.mark.parametrize(
    ("channels", "dtype", "parts", "groups"),
    [
        ((32, 64, 40, 8), torch.bfloat16, 3, 2),  # some slices are not full; a program processes several layers
        ((32, 64, 40, 8), torch.bfloat16, 1, 8),
        ((24, 16), torch.float32, 2, 1),
        ((64,), torch.bfloat16, 2, 1),
    ],
)
def test_resident_kernels(resident_device, channels, dtype, parts, groups):
    layers = Layers(channels, dtype, resident_device)
    layers.check(layers.residence(parts, groups))


@pytest.mark.parametrize("kind", ["triton", "resident"])
def test_words_that_earlier_launches_used_as_barriers(monkeypatch, resident_device, kind):
    def used(x, floats, words):
        left = torch.full((words,), -(2**31), dtype=torch.int32, device=x.device)
        left[:2] = 0  # these two words are counters, not barriers; each launch resets them to 0
        return x.new_empty(floats, dtype=torch.float32), left

    monkeypatch.setattr(grouped, "workspace", used)
    layers = Layers((32, 64, 40), torch.bfloat16, resident_device)
    layers.check(layers.residence(2, 2) if kind == "resident" else layers.tiling(MET))


@pytest.mark.parametrize("kind", ["triton", "resident"])
def test_a_bad_channel_holds_up_the_averages_of_its_own_layer_alone(resident_device, kind):
    layers = Layers((32, 16, 24), torch.float32, resident_device)
    layers.xs[1][0, 3, 0, 0] = float("nan")
    layers.run(layers.residence(2, 2) if kind == "resident" else layers.tiling(STREAM))
    assert [int(batches) for _, _, batches, _ in layers.running] == [1, 0, 1]
    assert [int(skipped) for *_, skipped in layers.running] == [0, 1, 0]
    assert [bool((mean == 0.5).all()) for mean, *_ in layers.running] == [False, True, False]


def test_cumulative_averages(device):
    layers = Layers((16, 8), torch.float32, device)
    for _ in range(2):
        stats, *_ = layers.run(layers.tiling(MET), momentum=None)
    mean, _, batches, _ = layers.running[0]
    assert int(batches) == 2
    torch.testing.assert_close(mean, stats[:16])


def test_gradients_that_are_not_channels_last_are_copied(device):
    layers = Layers((16, 8), torch.float32, device)
    layers.slices = lambda t, slices=layers.slices: [s.contiguous() if t is layers.dy else s for s in slices(t)]
    layers.check(None)
