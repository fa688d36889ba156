"""Test the kernel that keeps its input on chip; it runs on a GPU, or is emulated on the CPU.

Outputs start as NaN, so that tests fail if a value is not written.
"""

from itertools import product

import pytest
import torch
from kernels import EPS, arranged, compare, kept, planned, run
from oracle import KINKS, assert_near

from batchnorm.bench.kernel_rows import all_layers
from batchnorm.ops import Activation, batch_norm, explain
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import driver, launch, resident
from batchnorm.ops.cuda.layout import geometry_of, magic_of

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


@pytest.mark.parametrize("processors", [132, 144])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_all_programs_of_a_plan_run_at_the_same_time(itemsize, processors):
    found = 0
    for layer in all_layers():
        for form in (torch.channels_last, torch.contiguous_format):
            g = geometry_of(torch.empty(layer.shape, device="meta", memory_format=form))
            for backward in (False, True):
                for residual in (False, True):
                    r = resident.choose(g, itemsize, backward, residual, processors)
                    if r is None:
                        continue
                    found += 1
                    assert 1 <= r.groups * r.parts <= processors * r.each
                    assert r.groups <= r.slices
                    kept_bytes = r.kept * r.threads * resident.WIDTH * (1 + (backward or r.added))
                    assert 0 < kept_bytes * r.each < resident.SHARED
                    assert r.kept <= 4 * resident.BATCHES
    assert found > 200


@pytest.mark.parametrize("shape", [(64, 192, 512, 512), (512, 64, 56, 56), (3, 2048, 7, 7), (4096, 1000, 14, 14)])
@pytest.mark.parametrize("processors", [4, 16, 132])  # 16, as in a MIG partition of a GPU
def test_there_are_programs_however_large_a_channel_is(shape, processors):
    for form in (torch.channels_last, torch.contiguous_format):
        g = geometry_of(torch.empty(shape, device="meta", memory_format=form))
        for backward, residual in product((False, True), repeat=2):
            r = resident.choose(g, 2, backward, residual, processors)
            assert r is None or 1 <= r.groups * r.parts <= processors * r.each


def test_tensors_that_vectors_do_not_fit_are_left_to_the_others():
    for shape, form in [((256, 100, 28, 28), torch.channels_last), ((256, 100, 7, 7), torch.contiguous_format)]:
        g = geometry_of(torch.empty(shape, device="meta", memory_format=form))
        assert resident.choose(g, 2, False, False, 132) is None


@pytest.mark.parametrize("divisor", [2, 3, 7, 49, 392, 1568, 6272])
def test_division_by_multiplication(divisor):
    m, s = magic_of(divisor)
    for n in (0, 1, divisor - 1, divisor, 10 * divisor - 1, 2**31 - 1):
        assert (n * m >> 32) >> s == n // divisor


@pytest.fixture
def device(resident_device):
    return resident_device


CASES = [
    # shape, layout, dtype, activation, residual, parts, groups (number of slices processed at the same time)
    ((8, 64, 12, 12), "last", torch.bfloat16, ("relu",), False, 5, None),
    ((8, 64, 12, 12), "last", torch.bfloat16, ("relu",), True, 5, 1),
    ((8, 64, 12, 12), "last", torch.float16, ("leaky_relu", 0.1), True, 1, 1),
    ((8, 40, 12, 12), "last", torch.float32, ("relu",), True, 3, 2),  # the last slice is not full
    ((500, 64), "last", torch.bfloat16, ("tanh",), False, 7, None),
    ((8, 6, 16, 16), "first", torch.bfloat16, ("relu",), False, 3, 2),
    ((8, 5, 16, 8), "first", torch.float16, ("silu",), False, 2, 1),
    ((6, 3, 14, 14), "first", torch.float32, ("relu",), True, 2, 1),  # a byte with bits of two examples
    ((9, 16, 7, 7), "first", torch.bfloat16, ("relu",), False, 1, 1),  # vectors with values of two channels
    ((9, 16, 7, 7), "first", torch.bfloat16, ("relu",), True, 1, 1),
    ((9, 16, 7, 3), "first", torch.float32, ("relu",), True, 2, 1),  # two vectors share a byte
    ((8, 64, 6, 6), "last", torch.bfloat16, ("relu6",), True, 5, 1),
    ((8, 6, 16, 16), "first", torch.float32, ("hardswish",), False, 3, 2),
]
MORE = [
    ((8, 24, 5, 5), "last", torch.float32, ("sigmoid",), False, 4, None),
    ((8, 6, 16, 16), "first", torch.bfloat16, ("relu",), True, 1, None),
    ((8, 5, 4, 8, 8), "first", torch.float32, ("leaky_relu", 0.1), True, 2, 1),
    ((8, 5, 64), "first", torch.float32, None, True, 1, 1),
    ((9, 16, 3, 3), "first", torch.float16, ("relu",), False, 3, None),
    ((9, 8, 3, 5), "first", torch.float32, ("silu",), False, 2, 1),
    ((20, 6, 14, 2), "first", torch.bfloat16, None, False, 2, 2),
    ((41, 4, 14, 14), "first", torch.float16, ("leaky_relu", 0.1), True, 3, 1),
    ((9, 16, 3, 3), "first", torch.bfloat16, None, True, 2, None),
    ((9, 16, 7, 7), "first", torch.float16, ("relu6",), True, 2, None),
    ((500, 64), "last", torch.bfloat16, ("hardswish",), False, 7, None),
]


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "activation", "has_residual", "parts", "groups"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_matches_the_oracle(device, shape, layout, dtype, activation, has_residual, parts, groups):
    x = arranged(shape, layout, dtype, device)
    residual = arranged(shape, layout, dtype, device, 0.0) if has_residual else None
    r = planned(x, parts)
    got, e = run(x, r._replace(groups=groups or r.groups), activation, residual)
    compare(x, got, e, residual)


@pytest.mark.parametrize(
    ("activation", "has_residual", "layout", "dtype"),
    [("relu6", True, "last", torch.bfloat16), ("hardswish", False, "first", torch.float32)],
)
def test_gradients_where_the_derivative_jumps_are_torchs(device, activation, has_residual, layout, dtype):
    x = arranged((8, 64, 6, 6) if layout == "last" else (8, 6, 16, 16), layout, dtype, device)
    at = torch.tensor([v for k in KINKS[activation] for v in (k, k - 1 / 8, k + 1 / 8)], device=device)
    act, zeros, p = Activation(activation), torch.zeros(x.shape[1], device=device), planned(x, 3)
    if has_residual:
        z = at.repeat(x.numel() // 6 + 1)[: x.numel()].view_as(x.movedim(1, -1)).movedim(-1, 1).to(dtype)
    else:
        z = at.view(1, 6, 1, 1).expand_as(x).clone()
    z.requires_grad_()
    dy, want = torch.randn_like(x), act(z)
    (dz,) = torch.autograd.grad(want, z, dy)
    # With gamma 0, z is exactly the residual, or beta.
    beta, residual = (zeros, z.detach()) if has_residual else (at, None)
    y, stats, bits = launch.forward(Call(x, zeros, beta, EPS, act, residual), has_residual, p)
    _, _, dbeta, dr = launch.backward(dy, x, None, bits, stats, *act, dtype if has_residual else None, p)
    torch.testing.assert_close(y, want.detach())
    torch.testing.assert_close(dbeta, dz.float().sum((0, 2, 3)), rtol=1e-4, atol=1e-4)
    assert dr is None or torch.equal(dr, dz)


KEPT = [((8, 64, 6, 6), "last"), ((8, 6, 16, 16), "first"), ((33, 16, 7, 7), "first")]


@pytest.mark.parametrize("groups", [None, 1])  # with 1, one slice after the other
@pytest.mark.parametrize(("shape", "layout"), KEPT)
def test_the_residual_may_be_kept_too(device, shape, layout, groups):
    x = arranged(shape, layout, torch.bfloat16, device)
    residual = arranged(shape, layout, torch.bfloat16, device, 0.0)
    r = planned(x, 3, kept=7)
    assert r.fits(geometry_of(x), 2)
    r = r._replace(added=True, groups=groups or r.groups)
    got, e = run(x, r, ("relu",), residual)
    compare(x, got, e, residual)


MANY = [((40, 32, 16, 16), "last"), ((40, 3, 32, 16), "first"), ((500, 16, 7, 7), "first")]


@pytest.mark.parametrize(
    ("residual", "kept", "parts"),
    [
        (True, 27, 4),  # vectors are loaded in several batches
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 14, 3), (False, 27, 4), (True, 14, 3))),
    ],
)
@pytest.mark.parametrize(("shape", "layout"), MANY)
def test_many_vectors_of_a_thread(device, shape, layout, residual, kept, parts):
    x = arranged(shape, layout, torch.bfloat16, device)
    added = arranged(shape, layout, torch.bfloat16, device, 0.0) if residual else None
    r = planned(x, parts, threads=96, kept=kept)
    got, e = run(x, r._replace(groups=min(r.groups, 2)), ("relu",), added)
    compare(x, got, e, added)


def test_averages_move_while_others_still_write_bits(device):
    x = arranged((90, 8, 14, 14), "first", torch.float32, device)
    residual = arranged(x.shape, "first", torch.float32, device, 0.0)
    mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
    batches = torch.zeros((), dtype=torch.long, device=device)
    got, e = run(x, planned(x, 2, kept=1), ("relu",), residual, running=(mean, var, batches, batches.clone()))
    compare(x, got, e, residual)
    assert batches == 1
    torch.testing.assert_close(mean, 0.1 * x.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_mean_a_million_standard_deviations(device, layout):
    x = arranged((16, 16, 8, 8), layout, torch.float32, device, 0.0) / 2 + 1e6
    got, e = run(x, planned(x, 3), ("relu",))
    compare(x, got, e)


def test_one_value_far_from_the_others(device):
    x = torch.randn(64, 8, 8, 8, device=device)
    x[0, :, 0, 0] = 1e5
    got, e = run(x, planned(x, 2))
    compare(x, got, e)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_same_bits_every_time(device, layout):
    x = arranged((8, 32, 8, 8), layout, torch.bfloat16, device)
    results = []
    for _ in range(3):
        torch.manual_seed(1)
        results.append(run(x, planned(x, 3), ("relu",), torch.randn_like(x))[0])
    for several in zip(*results, strict=True):
        assert all(torch.equal(several[0], v) for v in several)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_running_averages(device, layout):
    x = arranged((8, 40, 8, 8), layout, torch.float32, device)
    running = kept(40, device)
    _, e = run(x, planned(x, 3), running=running)
    m = x.numel() / 40
    assert_near(running[0], 0.5 + 0.1 * (e.mean - 0.5), torch.float32, "mean")
    assert_near(running[1], 2.0 + 0.1 * (e.var * m / (m - 1) - 2.0), torch.float32, "var")
    assert [int(v) for v in running[2:]] == [1, 0]
    run(x, planned(x, 3), running=running, momentum=None)
    assert int(running[2]) == 2
    x[3, 30] = float("inf")
    before = [v.clone() for v in running]
    run(x, planned(x, 3), running=running)
    assert all(torch.equal(a, b) for a, b in zip(before[:3], running[:3], strict=True))
    assert int(running[3]) == 1


@pytest.mark.parametrize("momentum", [1.0, None])
def test_the_first_batch_replaces_the_initial_averages_exactly(device, momentum):
    x = arranged((8, 40, 8, 8), "last", torch.float32, device, 0.0) * 1e-6  # 2 + (var - 2) would be 0
    running = kept(40, device)
    _, e = run(x, planned(x, 3), running=running, momentum=momentum)
    m = x.numel() / 40
    torch.testing.assert_close(running[1], (e.var * m / (m - 1)).float(), rtol=1e-5, atol=0)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_a_launch_that_the_device_refuses_is_left_to_the_others(monkeypatch):
    class Refusing:
        def __call__(self, programs, arguments, stream):
            raise driver.Refused("CUDA: too many blocks in cooperative launch")

    monkeypatch.setattr(resident, "_kernel", lambda *_: Refusing())
    resident.prepared.cache_clear()
    x = arranged((8, 16, 4, 4), "last", torch.float32, "cpu")
    got, e = run(x, planned(x, 1), ("relu",))  # falls back to Triton's kernel, which is interpreted
    compare(x, got, e)


@pytest.mark.gpu
def test_large_tensors_take_it_and_a_gradient_that_is_a_slice_is_read_as_it_is():
    x = arranged((64, 64, 56, 56), "last", torch.bfloat16, "cuda").requires_grad_()
    assert "resident" in explain(x).reason
    gamma, beta = torch.rand(64, device="cuda"), torch.rand(64, device="cuda")
    y, _ = batch_norm(x, gamma, beta, activation="relu")
    other = torch.randn_like(y)
    dy = torch.randn(64, 128, 56, 56, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    (from_slice,) = torch.autograd.grad(torch.cat([y, other], 1), x, dy, retain_graph=True)
    (from_copy,) = torch.autograd.grad(y, x, dy[:, :64].contiguous(memory_format=torch.channels_last))
    assert torch.equal(from_slice, from_copy)


@pytest.mark.gpu
def test_what_does_not_compile_says_so():
    with pytest.raises(RuntimeError, match=r"resident\.cu does not compile"):
        driver.load(resident.SOURCE, "forward", (("FORWARD", 1),), 128, 0, torch.device("cuda"))
