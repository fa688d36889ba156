"""The public batch normalization functions, which choose the fastest correct path for a call and run it."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from . import composite, cpu
from .activation import Activation, as_activation
from .call import Call, Features, Path
from .cuda import autograd as cuda
from .moments import Moments
from .running import Running, update_
from .torch_state import is_forward_mode, is_observed, is_transformed

FAST = os.environ.get("BATCHNORM_FAST", "1").lower() not in ("0", "off", "false", "no")
PATHS: dict[str, Path] = {"composite": composite, "cpu": cpu, "cuda": cuda}


def has_kernels(x: Tensor) -> bool:
    """Return whether this library's Triton and CUDA kernels can be used on the device of ``x``.

    ROCm is excluded, because the kernels are untested there.
    """
    return cuda.HAS_TRITON and FAST and x.is_cuda and torch.version.hip is None


class Choice(NamedTuple):
    """Name the path that a call takes and say why.

    Attributes:
        path: "composite", "cpu" or "cuda".
        reason: why the call takes that path, or which kernels the path runs.

    >>> explain(torch.randn(2, 3), mask=torch.tensor([True, False]))
    Choice(path='composite', reason='a mask is given')

    Beyond the paper: shows what the dispatcher decided.
    """

    path: str
    reason: str


def batch_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    *,
    feature_dims: int = 1,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalize a mini-batch by its own statistics; return the output and the statistics.

    y = g(gamma * (x - mu_B) / sqrt(sigma_B^2 + eps) + beta + residual), with mu_B and sigma_B^2 taken over the batch
    and every dimension that is not a feature dimension. Nothing is changed in place. The returned statistics are
    differentiable.

    Args:
        x: the input, of shape (N, C), (N, C, L), (N, C, H, W), ...: batch, features, locations.
        gamma: scale, of the features' shape; None means 1.
        beta: shift, of the features' shape; None means 0.
        eps: added to the variance.
        feature_dims: how many dimensions after the first are feature dimensions; each feature has its own statistics.
            With 1, statistics are taken over batch and locations (the convolutional form); with ``x.dim() - 1``, they
            are taken per activation.
        activation: the nonlinearity g: an :class:`Activation`, or a name in :data:`batchnorm.ops.activation.NAMES`.
        residual: added before the nonlinearity; same shape as x.
        mask: bool, of shape (N, *locations): False leaves a position out of the statistics and makes its output 0.

    Raises:
        TypeError: if ``x`` has a complex, integer or bool dtype, or ``activation`` has a wrong type.
        ValueError: if the shapes do not match, ``feature_dims`` is out of range, the mask is not bool, or the
            activation is unknown.

    >>> y, moments = batch_norm(torch.tensor([[1.0], [3.0]]), eps=0.0)
    >>> y.flatten(), moments.mean, moments.var
    (tensor([-1.,  1.]), tensor([2.]), tensor([1.]))

    Paper: Alg. 1; Sec. 3.2 (convolutional); Sec. 4.2.3 (per activation)
    """
    features = Features(x, feature_dims)
    call = features.call(x, gamma, beta, eps, activation, residual, mask)
    y, moments = PATHS[choose(call).path].run(call)
    return features.restore(y), features.restore_moments(moments)


def batch_norm_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: Running,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    feature_dims: int = 1,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Normalize like :func:`batch_norm` and update the running averages in place, as the layers do in training.

    No gradient flows through the returned moments. The other arguments are those of :func:`batch_norm`.

    Args:
        running: the averages, updated in place.
        momentum: the weight of the new batch; None weights all batches equally.

    >>> running = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> _ = batch_norm_(torch.tensor([[1.0], [3.0]]), None, None, running, momentum=None)
    >>> running.mean, running.var  # the variance is the unbiased one
    (tensor([2.]), tensor([2.]))

    Paper: Alg. 1; Sec. 3.1, moving averages
    """
    features = Features(x, feature_dims)
    call = features.call(x, gamma, beta, eps, activation, residual, mask)
    for name, average in (("mean", running.mean), ("variance", running.var)):
        if average.shape != features.features:
            raise ValueError(
                f"the running {name} has shape {tuple(average.shape)}, but the features have shape"
                f" {tuple(features.features)}"
            )
    path = PATHS[choose(call).path]
    if feature_dims == 1:
        return path.run(call._replace(running=running, momentum=momentum))
    y, moments = path.run(call)
    moments = Moments(*(v.detach() for v in features.restore_moments(moments)))
    update_(running, moments, momentum)
    return features.restore(y), moments


def normalize_batch_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: Running,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
) -> Tensor:
    """Normalize like :func:`batch_norm_` but return only the output, as ``torch.nn.functional.batch_norm`` does.

    This function is faster than :func:`batch_norm_` for small batches. It has no ``feature_dims``, ``residual`` or
    ``mask``. Except for ``running`` and ``momentum``, its arguments are those of :func:`batch_norm`.

    Args:
        running: the averages, updated in place.
        momentum: the weight of the new batch; None weights all batches equally.

    >>> running = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> normalize_batch_(torch.tensor([[1.0], [3.0]]), None, None, running, eps=0.0)
    tensor([[-1.],
            [ 1.]])

    Paper: Alg. 1; Sec. 3.1, moving averages
    """
    activation = as_activation(activation)
    y = train_(Call(x, gamma, beta, eps, activation, None, None, running, momentum))
    if y is None:
        y, _ = batch_norm_(x, gamma, beta, running, momentum, eps, activation=activation)
    return y


def train_(call: Call) -> Tensor | None:
    """Run a training call on its device's fast path, and return the output.

    Returns None, without updating anything, if the fast path does not apply. The arguments need not be checked before
    this call.
    """
    if not FAST:
        return None
    return cuda.train_(call) if call.x.is_cuda else cpu.train_(call)


def infer(call: Call, mean: Tensor, var: Tensor) -> Tensor | None:
    """Normalize by given statistics on the fast path; return None if the fast path does not apply."""
    return cuda.infer(call, mean, var) if FAST and call.x.is_cuda else None


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    *,
    feature_dims: int = 1,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize by given statistics, as at inference: each output depends only on its own example.

    y = g(gamma * (x - mean) / sqrt(var + eps) + beta + residual)

    The other arguments are those of :func:`batch_norm`.

    Args:
        mean: E[x], of the features' shape.
        var: Var[x], of the features' shape.

    >>> normalize(torch.tensor([[3.0]]), torch.tensor([1.0]), torch.tensor([4.0]), eps=0.0)
    tensor([[1.]])

    Paper: Alg. 2, l. 11
    """
    features = Features(x, feature_dims)
    call = features.call(x, gamma, beta, eps, activation, residual, mask)
    features.check("mean", mean)
    features.check("var", var)
    path = choose(call).path
    if path == "cuda" and torch.compiler.is_compiling():
        # torch.compile can fuse plain operations with their neighbors, but it cannot fuse this library's kernel.
        path = "composite"
    return features.restore(PATHS[path].normalize(call, features.flat_vector(mean), features.flat_vector(var)))


def explain(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    feature_dims: int = 1,
    activation: str | Activation | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Choice:
    """Return which path :func:`batch_norm` takes for these arguments, and why.

    The arguments are those of :func:`batch_norm`, without ``eps``.

    >>> explain(torch.randn(8, 3)).path
    'cpu'

    Beyond the paper: shows what the dispatcher decided.
    """
    call = Features(x, feature_dims).call(x, gamma, beta, 0.0, activation, residual, mask)
    path, reason = choose(call)
    return Choice(path, PATHS[path].describe(call) or reason)


def choose(call: Call) -> Choice:
    """Choose the fastest correct path for a call."""
    x = call.x
    if not FAST:
        return Choice("composite", "BATCHNORM_FAST=0 disables every fast path")
    if torch.compiler.is_compiling():
        # On CUDA, torch.compile could fuse plain operations too, but we found no tensor size at which the fused
        # operations are clearly faster than this library's kernels (docs/compile.md).
        if x.device.type != "cuda":
            return Choice("composite", "torch.compile fuses plain operations itself")
    elif is_transformed():
        return Choice("composite", "torch.func transforms need plain operations")
    elif is_observed(x):
        return Choice("composite", "a tensor subclass, a tracer or a dispatch mode needs to see plain operations")
    if is_forward_mode():
        return Choice("composite", "forward-mode differentiation needs plain operations")
    if call.mask is not None:
        return Choice("composite", "a mask is given")
    if x.numel() == 0:
        return Choice("composite", "the batch is empty")
    if x.device.type not in ("cpu", "cuda"):
        return Choice("composite", f"there is no faster path for {x.device.type} tensors")
    refused = PATHS[x.device.type].refusal(call)
    return Choice(x.device.type, "this path supports the tensor") if refused is None else Choice("composite", refused)
