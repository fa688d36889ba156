"""Run the fused kernels with a given plan, and compare their results with the float64 oracle."""

from typing import NamedTuple

import torch
from oracle import assert_near, expect, off_the_kinks, spread

from batchnorm.ops import Activation
from batchnorm.ops.activation import TWO_SLOPES
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import launch, resident, schedule
from batchnorm.ops.cuda.layout import geometry_of

EPS = 1e-5


class Way(NamedTuple):
    """Arguments of schedule.make, which choose a kernel and its launch."""

    path: str
    tile: int = 64
    tiles: int = 0
    parts: int = 1
    lanes: int = 8


def arranged(shape, layout, dtype, device, mean=3.0):
    x = (torch.randn(shape, device=device) * 2 + mean).to(dtype)
    if layout == "last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x


def planned(x, parts, each=1, lanes=4, threads=128, kept=2):
    """Return a plan of the resident kernel; by default, it keeps so little on chip that small inputs are read twice."""
    g = geometry_of(x)
    if not g.nhwc:
        lanes = resident.woven_lanes(g, x.element_size(), True) or 1
    r = resident.make(g, x.element_size(), 2, 132, threads, each, lanes, parts)
    return r._replace(kept=kept)


def run(x, way, activation=None, residual=None, affine=True, running=None, momentum=0.1):
    """Return the results of a forward and a backward pass, and the expected ones; ``way`` may also be a plan."""
    act = Activation(*activation) if activation else Activation()
    c = x.shape[1]
    gamma, beta = (torch.randn(c, device=x.device) for _ in range(2)) if affine else (None, None)
    ones, zeros = torch.ones(c, device=x.device), torch.zeros(c, device=x.device)
    if affine:
        gamma *= spread(act)
    given = (x, ones if gamma is None else gamma, zeros if beta is None else beta, EPS)
    dy = off_the_kinks(torch.randn_like(x), *given, act, residual)
    p = schedule.make(geometry_of(x), x.element_size(), *way, 4) if isinstance(way, Way) else way
    signed = residual is not None and act.name in TWO_SLOPES
    call = Call(x, gamma, beta, EPS, act, residual, None, running, momentum)
    y, stats, bits = launch.forward(call, signed, p)
    hidden = residual if residual is not None and act.name != "identity" and not signed else None
    wanted = None if residual is None else residual.dtype
    dx, dgamma, dbeta, dr = launch.backward(dy, x, hidden, bits if signed else None, stats, *act, wanted, p)
    return (y, stats, dx, dgamma, dbeta, dr), expect(*given, dy, act, residual)


def compare(x, got, e, residual=None, scale=1.0):
    y, stats, dx, dgamma, dbeta, dr = got
    assert_near(y, e.y, x.dtype, "y", scale)
    assert_near(stats[0], e.mean, torch.float32, "mean")
    assert_near(stats[1], e.var, torch.float32, "var", scale)
    assert (stats[2] == x.numel() // x.shape[1]).all()
    e.check_gradients(dx, dgamma, dbeta, x.dtype, scale=scale)
    if residual is not None:
        assert_near(dr, e.dresidual, residual.dtype, "dresidual", scale)


def kept(c, device):
    count = torch.zeros((), dtype=torch.long, device=device)
    return torch.full((c,), 0.5, device=device), torch.full((c,), 2.0, device=device), count, count.clone()
