"""Compare the fused kernels with the float64 oracle, on a GPU or interpreted on the CPU.

Outputs start as NaN (by the fixture unwritten_is_nan), so that tests fail if a value is not written.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import EPS, Way, arranged, compare, kept, run
from oracle import assert_near

from batchnorm.ops import Activation
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import cached_pass, launch, schedule
from batchnorm.ops.cuda.layout import geometry_of

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]
ON_DEVICE = torch.cuda.is_available()


ALONE = Way("once", 256, 16)  # one program per slice of channels
MET = Way("once", 64, 2)  # several programs share a slice
STREAM = Way("stream", 64, 0, 3)
TREE = Way("stream", 64, 0, 40)  # so many parts that they are merged in two steps


CASES = [
    # way, shape, layout, dtype, activation, residual: each row is one path through the kernels
    (ALONE, (4, 5, 6, 6), "first", torch.float32, ("relu",), False),
    (ALONE, (4, 24, 3, 5), "last", torch.bfloat16, ("relu",), True),
    (ALONE, (3, 7, 5), "first", torch.float16, ("sigmoid",), False),  # odd length: one value per access
    (ALONE, (37, 9), "last", torch.float32, None, True),  # 2-D, odd channels, identity
    (MET, (4, 5, 6, 6), "first", torch.bfloat16, ("leaky_relu", 0.1), True),
    (MET, (4, 5, 7, 7), "first", torch.float32, ("relu",), True),  # a byte with bits of two examples
    (MET, (6, 16, 4, 4), "last", torch.float32, ("silu",), True),
    (MET, (3, 11, 4, 3, 3), "last", torch.float32, ("relu",), False),  # 3-D, odd channels
    (STREAM, (4, 5, 6, 6), "first", torch.float32, ("tanh",), False),
    (STREAM, (6, 9, 5, 5), "last", torch.float32, ("leaky_relu", 0.1), False),
    (STREAM, (4, 5, 6, 6), "first", torch.float32, ("relu",), True),
    (STREAM, (6, 16, 4, 4), "last", torch.bfloat16, ("relu",), False),
    (STREAM, (6, 8, 5, 5), "last", torch.float32, ("tanh",), True),
    (TREE, (20, 3, 4, 4), "last", torch.float32, ("relu",), False),
    (TREE, (66, 2, 4, 4), "first", torch.float32, ("relu",), False),
    (STREAM, (2, 3, 2, 4, 4), "first", torch.float16, ("silu",), False),
    (ALONE, (4, 24, 3, 5), "last", torch.bfloat16, ("relu6",), True),
    (MET, (4, 5, 7, 7), "first", torch.float32, ("relu6",), False),
    (MET, (6, 16, 4, 4), "last", torch.float32, ("hardswish",), True),
    (STREAM, (4, 5, 6, 6), "first", torch.float16, ("hardswish",), False),
]


@pytest.mark.parametrize(("way", "shape", "layout", "dtype", "activation", "has_residual"), CASES)
def test_every_path_matches_the_oracle(device, way, shape, layout, dtype, activation, has_residual):
    x = arranged(shape, layout, dtype, device)
    residual = arranged(shape, layout, dtype, device, 0.0) if has_residual else None
    got, e = run(x, way, activation, residual)
    compare(x, got, e, residual)


@pytest.mark.triton
@settings(max_examples=8)
@given(
    n=st.integers(1, 5),
    c=st.integers(1, 19),
    size=st.lists(st.integers(1, 5), max_size=3),
    layout=st.sampled_from(["first", "last"]),
    way=st.sampled_from([ALONE, MET, STREAM]),
    activation=st.sampled_from([None, ("relu",), ("leaky_relu", 0.2)]),
    has_residual=st.booleans(),
)
def test_any_shape(n, c, size, layout, way, activation, has_residual):
    device = "cuda" if ON_DEVICE else "cpu"
    shape = (n + 1, c, *size)
    x = arranged(shape, layout, torch.float32, device)
    residual = arranged(shape, layout, torch.float32, device, 0.0) if has_residual else None
    got, e = run(x, way, activation, residual)
    # A channel may have only two values, which may be almost equal. Then 1/std is large and amplifies rounding errors.
    compare(x, got, e, residual, scale=max(1.0, float((e.var + EPS).rsqrt().max()) / 10))


@pytest.mark.parametrize("way", [ALONE, MET, STREAM])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_mean_a_million_standard_deviations(device, layout, way):
    # near 1e6, float32 values are multiples of 1/16; x itself is rounded, but the kernels may lose nothing more
    x = arranged((4, 3, 5, 8), layout, torch.float32, device, 0.0) / 2 + 1e6
    got, e = run(x, way, ("relu",))
    compare(x, got, e)


@pytest.mark.parametrize("way", [ALONE, MET, STREAM])
def test_one_value_far_from_the_others(device, way):
    # a shift by the channel's first value would lose all digits of the variance
    x = torch.randn(8, 2, 4, 4, device=device)
    x[0, :, 0, 0] = 1e5
    got, e = run(x, way)
    compare(x, got, e)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(8, 1, 3, 3), id="one channel"),
        pytest.param(torch.randn(2, 5), id="m = 2"),
        pytest.param(torch.ones(4, 3, 2, 2) * torch.tensor([1.0, -2.0, 1e3]).view(1, 3, 1, 1), id="zero variance"),
        pytest.param(torch.randn(4, 9, 4, 4)[:, 2:7], id="some channels of a contiguous tensor"),
        pytest.param(torch.randn(4, 4, 4, 12)[..., 2:9].movedim(-1, 1), id="some channels of a channels_last tensor"),
        pytest.param(torch.randn(8, 3, 4, 4)[::2], id="every second example"),
        pytest.param(torch.randn(6, 8, 1, 1), id="one location"),
    ],
)
@pytest.mark.parametrize("way", [MET, STREAM])
def test_hard_inputs(device, x, way):
    x = x.to(device) if device == "cpu" else torch.empty_strided(x.shape, x.stride(), device=device).copy_(x)
    got, e = run(x, way, ("leaky_relu", 0.1), affine=False)
    compare(x, got, e)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_64_bit_offsets(device, layout, monkeypatch):
    find = cached_pass.find_geometry
    monkeypatch.setattr(cached_pass, "find_geometry", lambda *lies: find(*lies)._replace(wide=True))
    x = arranged((3, 10, 4, 4), layout, torch.float32, device)
    residual = torch.randn_like(x)
    got, e = run(x, MET, ("relu",), residual)
    compare(x, got, e, residual)


def test_residual_and_gradient_in_another_layout_and_type(device):
    x = arranged((3, 10, 4, 4), "last", torch.float32, device)
    residual = torch.randn(3, 10, 4, 4, device=device).to(torch.float16)
    got, e = run(x, MET, ("relu",), residual)
    compare(x, got, e, residual)


@pytest.mark.parametrize("way", [ALONE, MET, STREAM])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_same_bits_every_time(device, layout, way):
    x = arranged((3, 3, 4, 4), layout, torch.float32, device)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(run(x, way, ("relu",))[0])
    for a, b in zip(*results, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("way", [ALONE, MET, STREAM])
@pytest.mark.parametrize("layout", ["first", "last"])
def test_running_averages(device, layout, way):
    c = 3 if layout == "first" else 9  # 9 channels are two slices
    x = arranged((8, c, 3, 3), layout, torch.float32, device)
    running = kept(c, device)
    _, e = run(x, way, running=running)
    m = x.numel() / c
    assert_near(running[0], 0.5 + 0.1 * (e.mean - 0.5), torch.float32, "mean")
    assert_near(running[1], 2.0 + 0.1 * (e.var * m / (m - 1) - 2.0), torch.float32, "var")
    assert [int(v) for v in running[2:]] == [1, 0]
    run(x, way, running=running, momentum=None)  # the second batch of the cumulative average
    assert int(running[2]) == 2
    first = 0.5 + 0.1 * (e.mean - 0.5)
    assert_near(running[0], (first + e.mean) / 2, torch.float32, "cumulative mean")


@pytest.mark.parametrize("way", [ALONE, MET, STREAM])
@pytest.mark.parametrize("momentum", [1.0, None])
def test_the_first_batch_replaces_the_initial_averages_exactly(device, way, momentum):
    x = arranged((8, 9, 3, 3), "last", torch.float32, device, 0.0) * 1e-6  # 2 + (var - 2) would be 0
    running = kept(9, device)
    _, e = run(x, way, running=running, momentum=momentum)
    m = x.numel() / 9
    torch.testing.assert_close(running[1], (e.var * m / (m - 1)).float(), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, for inf - inf
@pytest.mark.parametrize("way", [ALONE, MET, STREAM])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_batches_are_counted_and_change_nothing(device, way, value):
    x = torch.randn(8, 5, 3, 3, device=device)
    x[1, 3, 2, 2] = value
    running = kept(5, device)
    (y, *_), _ = run(x, way, running=running)
    assert y[:, 3].isnan().all()
    assert y[:, 4].isfinite().all()
    assert (running[0] == 0.5).all()
    assert (running[1] == 2.0).all()
    assert [int(v) for v in running[2:]] == [0, 1]


def test_a_single_value_is_no_information(device):
    running = kept(3, device)
    run(torch.randn(1, 3, device=device), ALONE, running=running)
    assert (running[0] == 0.5).all()
    assert [int(v) for v in running[2:]] == [0, 0]


@pytest.mark.parametrize("at_once", [0, 1, 2, 16])
def test_launches_that_overlap_leave_each_other_room(at_once, monkeypatch):
    monkeypatch.setattr(schedule, "AT_ONCE", at_once)
    capacity = 132 * 16  # warps that fit, with 128 registers per thread
    for channels, rows in ((64, 32 * 32 * 32), (192, 32 * 16 * 16), (96, 32 * 8 * 8), (320, 32 * 4 * 4), (64, 10**6)):
        g = geometry_of(torch.empty(1, rows, 1, channels, device="meta").permute(0, 3, 1, 2))
        for backward in (False, True):
            p = schedule.choose.__wrapped__(g, 2, backward, False, 132)
            waiting = p.parts * (p.beside if p.ticket else p.slices)
            fits = at_once > 0 and waiting * p.warps * at_once <= capacity
            assert p.path == "stream" or p.alone or fits


def test_bits_tell_of_a_residual_whose_gradient_is_not_wanted(device, monkeypatch):
    asked = []

    def pass_of(x, backward, residual, way=None):
        asked.append(residual)
        return found(x, backward, residual, way)

    found = launch.pass_of
    monkeypatch.setattr(launch, "pass_of", pass_of)
    x, residual = (torch.randn(4, 8, 5, 5, device=device) for _ in range(2))
    y, stats, bits = launch.forward(Call(x, activation=Activation("relu"), residual=residual), True)
    launch.backward(torch.randn_like(y), x, None, bits, stats, "relu", 0.0, None)
    assert asked == [True, True]
