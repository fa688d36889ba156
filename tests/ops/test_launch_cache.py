"""What launches have in common is found once, and told apart where Triton would compile again."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from batchnorm.ops import Activation, Running
from batchnorm.ops.cuda import autograd, launch_cache
from batchnorm.ops.torch_state import is_unseen


class Kernel:
    """Stands for a compiled Triton kernel, which no CPU can run: counts what is compiled, keeps what it is given."""

    def __init__(self):
        self.compiled, self.given = 0, None

    def __getitem__(self, grid):
        if len(grid) == 3:  # a compiled kernel's
            return lambda *args: setattr(self, "given", args)

        def compile_and_run(*args, num_warps):
            self.compiled += 1
            self.given = args
            return self

        return compile_and_run


def launch_of(kernel):
    return launch_cache.Launch(kernel, 4, (7, 8), ("constant",), {"num_warps": 4}, torch.device("cpu"))


def test_a_launch_is_compiled_once_and_given_addresses():
    kernel = Kernel()
    launch = launch_of(kernel)
    a, b = torch.zeros(4), torch.zeros(4)
    launch((a, None), (0.5,), (1,))
    assert kernel.given == (a, None, 7, 8, 0.5, 1, "constant")
    launch((b, None), (0.25,), (1,))  # other numbers are no other code
    assert kernel.given == (b.data_ptr(), None, 7, 8, 0.25, 1, "constant")
    assert kernel.compiled == 1


def test_what_triton_compiles_again_for():
    kernel = Kernel()
    launch = launch_of(kernel)
    a = torch.zeros(4)
    kinds = [((a, None), (1,)), ((a, a), (1,)), ((a.half(), None), (1,)), ((a[1:], None), (1,)), ((a, None), (2,))]
    for _ in range(2):
        for tensors, choices in kinds:
            launch(tensors, (0.5,), choices)
    assert kernel.compiled == len(kinds)


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


@pytest.mark.triton
def test_who_watches_sees_one_operator():
    x = torch.randn(4, 3, requires_grad=True)
    with Watch() as watch:
        y, _ = autograd.batch_norm_(x, None, None, running(3), 0.1, 1e-5, Activation("relu"), None)
    assert any("batchnorm" in name for name in watch.seen)
    torch.testing.assert_close(
        y, autograd.batch_norm_(x, None, None, running(3), 0.1, 1e-5, Activation("relu"), None)[0]
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


@pytest.mark.triton
def test_a_layers_way_gives_what_the_general_one_gives():
    x, r = (torch.randn(6, 5, 4, 4, requires_grad=True) for _ in range(2))
    gamma, beta = (torch.randn(5, requires_grad=True) for _ in range(2))
    results = []
    for call in (autograd.normalize_batch_, lambda *args: autograd.batch_norm_(*args)[0]):
        kept = running(5)
        y = call(x, gamma, beta, kept, 0.1, 1e-5, Activation("relu"), r)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, gamma, beta, r)), *kept))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert int(kept.num_batches) == 1


def test_a_layers_way_leaves_what_is_special_to_others():
    x, gamma, act = torch.randn(4, 3), torch.ones(3), Activation("relu")
    kept = running(3)

    def call(x=x, gamma=gamma, kept=kept, residual=None):
        return autograd.normalize_batch_(x, gamma, None, kept, 0.1, 1e-5, act, residual)

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
