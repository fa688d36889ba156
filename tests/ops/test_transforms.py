"""Check batch_norm numerically under torch.func's transforms: a wrong derivative is often zero, without an error."""

import pytest
import torch
from torch import func
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from batchnorm import ops

EPS = 1e-3


def f(x, gamma, beta):
    y, moments = ops.batch_norm(x, gamma, beta, EPS, activation="tanh")
    return y, moments.mean, moments.var


@pytest.fixture
def args():
    def make(*shape):
        return torch.randn(shape, dtype=torch.float64)

    return make(5, 3, 4), make(3), make(3)


def differences(g, primals, tangents, h=1e-6):
    up = g(*(p + h * t for p, t in zip(primals, tangents, strict=True)))
    down = g(*(p - h * t for p, t in zip(primals, tangents, strict=True)))
    return tuple((a - b) / (2 * h) for a, b in zip(up, down, strict=True))


def test_jvp(args):
    tangents = tuple(torch.randn_like(a) for a in args)
    _, got = func.jvp(f, args, tangents)
    torch.testing.assert_close(got, differences(f, args, tangents), rtol=1e-6, atol=1e-7)
    assert all(t.abs().max() > 0 for t in got)


def test_forward_mode_dual_numbers(args):
    tangents = tuple(torch.randn_like(a) for a in args)
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(a, t) for a, t in zip(args, tangents, strict=True)))
        got = tuple(forward_ad.unpack_dual(o).tangent for o in out)
    torch.testing.assert_close(got, differences(f, args, tangents), rtol=1e-6, atol=1e-7)


def test_grad(args):
    def loss(*a):
        y, mean, var = f(*a)
        return y.square().sum() + (mean * var).sum()

    got = func.grad(loss, argnums=(0, 1, 2))(*args)
    leaves = [a.clone().requires_grad_() for a in args]
    torch.testing.assert_close(got, torch.autograd.grad(loss(*leaves), leaves))


def test_vmap_is_a_loop(args):
    x = torch.randn(6, *args[0].shape, dtype=torch.float64)
    got = func.vmap(f, in_dims=(0, None, None))(x, *args[1:])
    for i in range(6):
        torch.testing.assert_close(tuple(g[i] for g in got), f(x[i], *args[1:]))


def test_vmap_of_grad_gives_a_gradient_per_group(args):
    x = torch.randn(6, *args[0].shape, dtype=torch.float64)

    def loss(x, gamma, beta):
        return f(x, gamma, beta)[0].square().sum()

    got = func.vmap(func.grad(loss, argnums=1), in_dims=(0, None, None))(x, *args[1:])
    for i in range(6):
        torch.testing.assert_close(got[i], func.grad(loss, argnums=1)(x[i], *args[1:]))


def test_jacobians_agree(args):
    x, gamma, beta = args
    reverse = func.jacrev(lambda x: f(x, gamma, beta)[0])(x)
    forward = func.jacfwd(lambda x: f(x, gamma, beta)[0])(x)
    torch.testing.assert_close(reverse, forward)


def test_explain_names_the_reason(args):
    paths = []

    def look(x):
        paths.append(ops.explain(x))
        return x.sum()

    func.grad(look)(args[0])
    assert paths[0].path == "composite"
    assert "torch.func" in paths[0].reason
    assert ops.explain(args[0]).path == "cpu"
    assert "mask" in ops.explain(args[0], mask=torch.ones(5, 4, dtype=torch.bool)).reason
    with forward_ad.dual_level():
        assert "forward-mode" in ops.explain(args[0]).reason


def test_those_who_watch_operations_see_them():
    x, other = torch.randn(8, 4, 20, 20), torch.randn(8, 4, 20, 20)
    traced = make_fx(lambda x: ops.batch_norm(x)[0])(x)
    torch.testing.assert_close(traced(other), ops.batch_norm(other)[0], rtol=1e-5, atol=1e-5)
    scripted = torch.jit.trace(lambda x: ops.batch_norm(x)[0], x)
    torch.testing.assert_close(scripted(other), ops.batch_norm(other)[0], rtol=1e-5, atol=1e-5)
    with FakeTensorMode():
        assert ops.batch_norm(torch.empty(8, 4, 20, 20))[0].shape == x.shape
    with FlopCounterMode(display=False):
        assert ops.explain(x).path == "composite"


def test_normalize_far_from_zero_and_near():
    x = torch.randn(8, 4, 5, 5) + torch.tensor([0.0, 10.0, 1e4, 1e6]).reshape(4, 1, 1)
    mean, var = x.double().mean((0, 2, 3)).float(), torch.ones(4)
    for c in (slice(0, 2), slice(0, 4)):
        want = (x[:, c].double() - mean[c].double().view(-1, 1, 1)) / (1 + 1e-5) ** 0.5
        got = ops.normalize(x[:, c], mean[c], var[c])
        assert float((got - want).abs().max()) < 1e-5
