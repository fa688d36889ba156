"""Test the launch cache: launches share an entry unless Triton would compile them separately."""

import ctypes
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

from batchnorm.ops import Activation, Running
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import autograd, driver, launch
from batchnorm.ops.cuda.triton_launch import TritonLaunch
from batchnorm.ops.cuda.workspace import workspace
from batchnorm.ops.torch_state import is_unseen


class Kernel:
    """A stand-in for a Triton kernel, compiled or not; it counts compilations and records its arguments."""

    def __init__(self):
        self.compiled, self.given = 0, None

    def __getitem__(self, grid):
        if len(grid) == 3:  # the grid of a compiled kernel
            return lambda *args: setattr(self, "given", args)

        def compile_and_run(*args, num_warps):
            self.compiled += 1
            self.given = args
            return self

        return compile_and_run


def launch_of(kernel):
    return TritonLaunch(kernel, 4, (7, 8), ("constant",), {"num_warps": 4}, torch.device("cpu"))


def test_a_launch_is_compiled_once_and_given_addresses():
    kernel = Kernel()
    run = launch_of(kernel)
    a, b = torch.zeros(4), torch.zeros(4)
    run((a, None), (0.5,), (1,))
    assert kernel.given == (a, None, 7, 8, 0.5, 1, "constant")
    run((b, None), (0.25,), (1,))  # a new address and a new scalar need no compilation
    assert kernel.given == (b.data_ptr(), None, 7, 8, 0.25, 1, "constant")
    assert kernel.compiled == 1


def test_what_triton_compiles_again_for():
    kernel = Kernel()
    run = launch_of(kernel)
    a = torch.zeros(4)
    kinds = [((a, None), (1,)), ((a, a), (1,)), ((a.half(), None), (1,)), ((a[1:], None), (1,)), ((a, None), (2,))]
    for _ in range(2):
        for tensors, choices in kinds:
            run(tensors, (0.5,), choices)
    assert kernel.compiled == len(kinds)


def test_arguments_lie_where_the_kernel_reads_them():
    arguments = driver.Arguments("P", ctypes.c_int(7), "PPfi", "f")
    seen = []

    def kernel(programs, pointers, stream):
        kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p * 2, ctypes.c_float)
        values = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        pair = (ctypes.c_float.from_address(pointers[2] + 16).value, ctypes.c_int.from_address(pointers[2] + 20).value)
        seen.append((programs, stream, values[0].value, values[1].value, list(values[2]), pair, values[3].value))

    for k in (1, 2):
        arguments.launch(kernel, k, (100 * k, 200, 300 * k, 0.5, True, 0.25), 9)
    assert seen == [(k, 9, 100 * k, 7, [200, 300 * k], (0.5, 1), 0.25) for k in (1, 2)]


@pytest.mark.gpu
def test_compiled_kernels_are_launched_by_the_driver():
    """Launches by Triton would give the same results, only slower, so no other test would notice them."""
    x = torch.randn(4, 8, 6, 6, device="cuda")
    for shape in ((x, False), (x, True)):
        for one in launch.pass_of(*shape, False).launches:
            one.compiled.clear()
    y, stats, _ = launch.forward(Call(x))
    launch.backward(y, x, None, None, stats, "identity", 0.0, None)
    runs = [
        r for back in (False, True) for one in launch.pass_of(x, back, False).launches for r in one.compiled.values()
    ]
    assert len(runs) >= 2
    assert all("_past_triton" in run.__qualname__ for run in runs)


@pytest.mark.gpu
def test_a_thread_that_has_not_used_cuda_yet():
    # If a backward pass starts with one of these kernels, autograd's thread may not have used CUDA before.
    x, activation, found = torch.randn(4, 8, 6, 6, device="cuda"), Activation("relu"), []
    y, stats, _ = launch.forward(Call(x, activation=activation))

    def recompute():
        found.append(launch.recompute(x, None, stats, activation))

    recompute()  # Triton compiles the kernel
    thread = threading.Thread(target=recompute)
    thread.start()
    thread.join()
    torch.testing.assert_close(found, [y, y], rtol=0, atol=0)


@pytest.mark.gpu
def test_kept_memory_comes_from_no_pool_of_the_user():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        here = torch.zeros(4, device="cuda")
        kept = workspace.grown(here.device, 1 << 20, 1 << 14, None)
    segments = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
    inside = [any(start <= t.data_ptr() < end for start, end in segments) for t in (here, *kept)]
    assert inside == [True, False, False]
    assert not kept[1].any()


def running(c):
    return Running(torch.zeros(c), torch.ones(c), torch.tensor(0), torch.tensor(0))


class Watch(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Special(torch.nn.Parameter):
    pass


@pytest.mark.interpreted
def test_who_watches_sees_one_operator():
    x = torch.randn(4, 3, requires_grad=True)
    with Watch() as watch:
        y, _ = autograd.run(Call(x, None, None, 1e-5, Activation("relu"), None, None, running(3), 0.1))
    assert any("batchnorm" in name for name in watch.seen)
    torch.testing.assert_close(
        y, autograd.run(Call(x, None, None, 1e-5, Activation("relu"), None, None, running(3), 0.1))[0]
    )


def test_is_unseen():
    x = torch.randn(4, 3)
    assert is_unseen(x, None, torch.nn.Parameter(x))
    assert not is_unseen(x, Special(x))
    with Watch():
        assert not is_unseen(x)
    seen = []
    torch.func.vmap(lambda v: seen.append(is_unseen(v)) or v)(x)
    assert seen == [False]


@pytest.mark.interpreted
def test_a_layers_way_gives_what_the_general_one_gives():
    x, r = (torch.randn(6, 5, 4, 4, requires_grad=True) for _ in range(2))
    gamma, beta = (torch.randn(5, requires_grad=True) for _ in range(2))
    results = []
    for run in (autograd.train_, lambda call: autograd.run(call)[0]):
        kept = running(5)
        y = run(Call(x, gamma, beta, 1e-5, Activation("relu"), r, None, kept, 0.1))
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, gamma, beta, r)), *kept))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert int(kept.num_batches) == 1


def test_a_layers_way_leaves_what_is_special_to_others():
    x, gamma, act = torch.randn(4, 3), torch.ones(3), Activation("relu")
    kept = running(3)

    def call(x=x, gamma=gamma, kept=kept, residual=None):
        return autograd.train_(Call(x, gamma, None, 1e-5, act, residual, None, kept, 0.1))

    assert call(x.double()) is None
    assert call(x[:1]) is None  # one value per channel
    assert call(x[0]) is None
    assert call(gamma=torch.ones(1)) is None
    assert call(residual=torch.ones(1, 3)) is None
    assert call(kept=kept._replace(mean=kept.mean.double())) is None
    with Watch():
        assert call() is None
    with torch.autograd.forward_ad.dual_level():
        assert call() is None
    assert int(kept.num_batches) == 0
