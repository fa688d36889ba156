"""The batch normalizing transform for callers: builds one Call, chooses the fastest path that is right, runs it."""

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

# One switch turns every fast path off: plain torch operations compute everything.
FAST = os.environ.get("BATCHNORM_FAST", "1") != "0"
PATHS: dict[str, Path] = {"composite": composite, "cpu": cpu, "cuda": cuda}


class Choice(NamedTuple):
    """Name the path that a call takes and say why.

    Attributes:
        path: "composite", "cpu" or "cuda".
        reason: why that path is taken, and what it runs.

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
    """Normalize a mini-batch by its own statistics and return it with them; nothing is changed in place.

    y = g(gamma * (x - mu_B) / sqrt(sigma_B^2 + eps) + beta + residual), with mu_B and sigma_B^2 over the batch and
    every dimension that is not a feature. The moments are differentiable too.

    Args:
        x: values of shape (N, C), (N, C, L), (N, C, H, W), ...: a batch, features, locations.
        gamma: scale, of the features' shape; None is 1.
        beta: shift, of the features' shape; None is 0.
        eps: added to the variance.
        feature_dims: how many dimensions after the first are features, each with its own statistics. 1 is the
            convolutional form (statistics over batch and locations); ``x.dim() - 1`` is per activation.
        activation: the nonlinearity g, by name: see :data:`batchnorm.ops.activation.NAMES`.
        residual: added before the nonlinearity; of x's shape.
        mask: bool, of shape (N, *locations): False leaves a position out of the statistics and makes its output 0.

    Raises:
        TypeError: if ``x`` is complex or an integer.
        ValueError: if shapes do not fit.

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
    """Do what :func:`batch_norm` does and move the running averages in place, as the layers do in training.

    The moments returned are constants: no gradient flows through them. Other arguments as for :func:`batch_norm`.

    Args:
        running: the averages to move, in place.
        momentum: the weight of the new batch; None averages all batches alike.

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
                f"a running {name} of shape {tuple(average.shape)} for features of shape {tuple(features.features)}"
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
    """Do what :func:`batch_norm_` does and return the output alone, as ``torch.nn.functional.batch_norm`` does.

    That is faster if batches are small. Other arguments as for :func:`batch_norm`.

    Args:
        running: the averages to move, in place.
        momentum: the weight of the new batch; None averages all batches alike.

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
    """Run an ordinary training call by its device's shortest way; None, and nothing moved, if anything is unusual.

    The call need not have been checked.
    """
    if not FAST:
        return None
    return cuda.train_(call) if call.x.is_cuda else cpu.train_(call)


def infer(call: Call, mean: Tensor, var: Tensor) -> Tensor | None:
    """Normalize an ordinary call by given statistics, in the shortest way; None if anything is unusual."""
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
    """Normalize by given statistics, as at inference: each example's output depends on that example alone.

    y = g(gamma * (x - mean) / sqrt(var + eps) + beta + residual)

    Other arguments as for :func:`batch_norm`.

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
        path = "composite"  # one pass over memory, which the compiler fuses with its neighbours
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
    """Say which path :func:`batch_norm` takes for these arguments, and why. Arguments as for :func:`batch_norm`.

    >>> explain(torch.randn(8, 3)).path
    'cpu'

    Beyond the paper: shows what the dispatcher decided.
    """
    call = Features(x, feature_dims).call(x, gamma, beta, 0.0, activation, residual, mask)
    path, reason = choose(call)
    return Choice(path, PATHS[path].describe(call) or reason)


def choose(call: Call) -> Choice:
    """Choose the fastest path that is right for a call."""
    x = call.x
    if not FAST:
        return Choice("composite", "BATCHNORM_FAST=0 turns every fast path off")
    if torch.compiler.is_compiling():
        # The compiler sees through plain operations; what it makes of them on CUDA is slower than the fused kernels.
        if x.device.type != "cuda":
            return Choice("composite", "torch.compile fuses plain operations itself")
    elif is_transformed():
        return Choice("composite", "a torch.func transform differentiates plain operations itself")
    elif is_observed(x):
        return Choice("composite", "a tensor subclass, a tracer or a dispatch mode wants to see plain operations")
    if is_forward_mode():
        return Choice("composite", "forward-mode differentiation needs plain operations")
    if call.mask is not None:
        return Choice("composite", "a mask is given")
    if x.numel() == 0:
        return Choice("composite", "the batch is empty")
    if x.device.type not in ("cpu", "cuda"):
        return Choice("composite", f"no faster path for {x.device.type} tensors")
    refused = PATHS[x.device.type].refusal(call)
    return Choice(x.device.type, "a tensor it takes") if refused is None else Choice("composite", refused)
