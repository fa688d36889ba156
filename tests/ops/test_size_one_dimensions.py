"""Test tensors with dimensions of size 1: their strides do not tell contiguous from channels_last."""

from contextlib import nullcontext

import pytest
import torch
from oracle import assert_near, expect

import batchnorm as bn
from batchnorm import ops
from batchnorm.ops import composite
from batchnorm.ops.call import Call
from batchnorm.ops.cpu import autograd

EPS = 1e-3
SHAPES = [(3, 4, 5, 1), (3, 4, 1, 5), (1, 17, 3, 5), (6, 4, 1, 1), (3, 1, 5, 1), (2, 3, 4, 1, 1), (1, 3, 2, 4, 3)]


def contiguous(t):
    return t.contiguous()


def last(t):
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def odd(t, memory=contiguous):
    """Return the tensor with a stride of 1 in each dimension of size 1, as ``unsqueeze(-1)`` and some kernels do."""
    t = memory(t)
    return t.as_strided(t.shape, [1 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


def odd_last(t):
    return odd(t, last)


def turned(t):
    """Return a dense tensor whose dimensions are neither in contiguous nor in channels_last order."""
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(t):
    """Return the first slice along dimension 2, repeated with stride 0 to the shape of ``t``."""
    return t[:, :, :1].expand(t.shape)


INPUTS = (contiguous, last, odd_last, turned)
GRADIENTS = (contiguous, last, odd, odd_last, turned, expanded)


def layer(frozen=False, recompute=False, **options):
    """Return a function that makes a layer in training mode from the given parameters and statistics, and calls it."""

    def run(x, residual, gamma, beta, stats):
        kinds = {3: bn.BatchNorm1d, 4: bn.BatchNorm2d, 5: bn.BatchNorm3d}
        norm = kinds[x.dim()](x.shape[1], eps=EPS, device=x.device, **options)
        norm.weight, norm.bias = gamma, beta
        if stats is not None:
            norm.running_mean, norm.running_var = stats
        if frozen:
            bn.freeze_(norm, affine=False)
        with bn.recompute() if recompute else nullcontext():
            return norm(x, residual) if residual is not None else norm(x)

    return run


def functional(x, residual, gamma, beta, stats):
    if stats is not None:
        return ops.normalize(x, *stats, gamma, beta, EPS, residual=residual)
    return ops.batch_norm(x, gamma, beta, EPS, residual=residual)[0]


def plain(x, residual, gamma, beta, stats):
    mask = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
    return ops.batch_norm(x, gamma, beta, EPS, residual=residual, mask=mask)[0]


class Path:
    def __init__(self, run, dtype=torch.float32, activation=None, residual=False, given=False, compiled=True):
        self.run, self.dtype, self.activation = run, dtype, activation
        self.residual, self.given, self.compiled = residual, given, compiled


PATHS = {
    "compiled kernel": Path(layer()),
    "compiled kernel, relu": Path(layer(activation="relu"), activation="relu"),
    "torch's kernel": Path(layer(), compiled=False),
    "torch's kernel, silu": Path(layer(activation="silu"), activation="silu", compiled=False),
    "recomputed": Path(layer(recompute=True), compiled=False),
    "residual": Path(layer(activation="relu"), activation="relu", residual=True),
    "float64": Path(layer(), torch.float64),
    "bfloat16": Path(layer(), torch.bfloat16),
    "float16, residual": Path(layer(), torch.float16, residual=True),
    "frozen": Path(layer(frozen=True), given=True),
    "frozen, relu, residual": Path(layer(frozen=True, activation="relu"), activation="relu", residual=True, given=True),
    "frozen, bfloat16": Path(layer(frozen=True), torch.bfloat16, given=True),
    "ops": Path(functional),
    "ops, float64": Path(functional, torch.float64, residual=True),
    "ops, given statistics": Path(functional, torch.float64, given=True),
    "plain operations": Path(plain),
    "ghost": Path(layer(statistics=bn.Ghost(64))),
}
ON_CUDA = ("compiled kernel", "residual", "bfloat16", "frozen", "frozen, relu, residual", "ops", "ops, float64")


def with_given_statistics(x, gamma, beta, mean, var, dy, activation, residual):
    """Return the output and the gradients, computed by plain operations in float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, gamma, beta, residual)]
    x64, gamma64, beta64, residual64 = leaves
    function = ops.Activation(activation or "identity")
    y = composite.normalize(Call(x64, gamma64, beta64, EPS, function, residual64), mean.double(), var.double())
    wanted = [t for t in leaves if t is not None]
    return y.detach(), *torch.autograd.grad(y, wanted, dy.double())


def check(path, shape, device):
    channels = shape[1]
    gamma, beta = (torch.rand(channels, device=device) + 0.5 for _ in range(2))
    mean, var = torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.5
    values, residuals, gradients = (torch.randn(shape, device=device).to(path.dtype) for _ in range(3))
    for arrange in INPUTS:
        for arrange_gradient in GRADIENTS:
            x, dy = arrange(values).detach().requires_grad_(), arrange_gradient(gradients)
            residual = arrange_gradient(residuals).detach().requires_grad_() if path.residual else None
            parameters = [torch.nn.Parameter(v.clone()) for v in (gamma, beta)]
            y = path.run(x, residual, *parameters, (mean.clone(), var.clone()) if path.given else None)
            leaves = [x, *parameters, *([residual] if path.residual else [])]
            found = y.detach(), *torch.autograd.grad(y, leaves, dy)
            if path.given:
                want = with_given_statistics(x, gamma, beta, mean, var, dy, path.activation, residual)
                tops = [float(w.abs().max()) for w in want]
                tops[2:4] = [float(dy.double().abs().sum()) / channels * 3] * 2
            else:
                e = expect(x, gamma, beta, EPS, dy, path.activation, residual)
                want = e.y, e.dx, e.dgamma, e.dbeta, e.dresidual
                tops = [float(e.y.abs().max()), e.dx_terms, e.sum_terms, e.sum_terms, float(dy.abs().max())]
            stats = torch.float32 if path.dtype == torch.float64 else path.dtype  # gamma and beta are float32
            for what, a, b, top in zip(("y", "dx", "dgamma", "dbeta", "dresidual"), found, want, tops, strict=False):
                dtype = path.dtype if what in ("y", "dx", "dresidual") else stats
                name = f"{what} of {shape}, x {x.stride()}, dy {dy.stride()}"
                assert_near(a, b, dtype, name, top=top)


@pytest.mark.parametrize("name", PATHS)
def test_against_the_reference(name, monkeypatch):
    if not PATHS[name].compiled:
        monkeypatch.setattr(autograd, "form_of", lambda *_: None)
    for shape in SHAPES:
        check(PATHS[name], shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CUDA)
def test_against_the_reference_on_cuda(name):
    for shape in SHAPES:
        check(PATHS[name], shape, "cuda")
