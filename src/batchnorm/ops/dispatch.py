"""The batch normalizing transform for callers: shapes in, the right path chosen, shapes out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import composite, cpu
from .activation import Activation, as_activation
from .cuda import autograd, inference
from .moments import Moments
from .running import Kept, Running, update_
from .torch_state import is_forward_mode, is_observed, is_transformed


class Choice(NamedTuple):
    """Name the path that a call takes and say why.

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
        activation: the nonlinearity g: relu, leaky_relu, sigmoid, tanh, silu or identity.
        residual: added before the nonlinearity; of x's shape.
        mask: bool, of shape (N, *locations): False leaves a position out of the statistics and makes its output 0.

    Raises:
        TypeError: where ``x`` is complex or an integer.
        ValueError: where shapes do not fit.

    >>> y, moments = batch_norm(torch.tensor([[1.0], [3.0]]), eps=0.0)
    >>> y.flatten(), moments.mean, moments.var
    (tensor([-1.,  1.]), tensor([2.]), tensor([1.]))

    Paper: Alg. 1; Sec. 3.2 (convolutional); Sec. 4.2.3 (per activation)
    """
    call = Call(x, gamma, beta, feature_dims, activation, residual, mask)
    return _batch_norm(call, eps, choose(call).path)


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

    The moments returned are constants: no gradient flows through them.

    >>> running = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> _ = batch_norm_(torch.tensor([[1.0], [3.0]]), None, None, running, momentum=None)
    >>> running.mean, running.var  # the variance is the unbiased one
    (tensor([2.]), tensor([2.]))

    Paper: Alg. 1; Sec. 3.1, moving averages
    """
    call = Call(x, gamma, beta, feature_dims, activation, residual, mask)
    features = x.shape[1 : 1 + feature_dims]
    for name, average in (("mean", running.mean), ("variance", running.var)):
        if average.shape != features:
            raise ValueError(
                f"a running {name} of shape {tuple(average.shape)} for features of shape {tuple(features)}"
            )
    path = choose(call).path
    if path == "cuda" and feature_dims == 1 and autograd.moves(running, x):
        return autograd.batch_norm_(x, gamma, beta, running, momentum, eps, call.activation, residual)
    y, moments = _batch_norm(call, eps, path, constant_moments=True)
    moments = Moments(*(v.detach() for v in moments))
    update_(running, moments, momentum, plain=path == "cpu")
    return y, moments


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

    That is faster where batches are small.

    >>> running = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> normalize_batch_(torch.tensor([[1.0], [3.0]]), None, None, running, eps=0.0)
    tensor([[-1.],
            [ 1.]])

    Paper: Alg. 1; Sec. 3.1, moving averages
    """
    activation = as_activation(activation)
    y = quick_(x, gamma, beta, running, momentum, eps, activation, None)
    if y is None:
        y, _ = batch_norm_(x, gamma, beta, running, momentum, eps, activation=activation)
    return y


def quick_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: Kept,
    momentum: float | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor | None:
    """Return y by the shortest way and move the running averages; None, and nothing moved, where another way is due."""
    if x.is_cuda:
        return autograd.normalize_batch_(x, gamma, beta, running, momentum, eps, activation, residual)
    return cpu.normalize_batch_(x, gamma, beta, running, momentum, eps, activation) if residual is None else None


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

    >>> normalize(torch.tensor([[3.0]]), torch.tensor([1.0]), torch.tensor([4.0]), eps=0.0)
    tensor([[1.]])

    Paper: Alg. 2, l. 11
    """
    call = Call(x, gamma, beta, feature_dims, activation, residual, mask)
    call.check("mean", mean)
    call.check("var", var)
    arguments = (call.gamma, call.beta, eps, call.activation, call.residual)
    mean, var = call.features_flat(mean), call.features_flat(var)
    path = choose(call).path
    if path == "cpu":
        y = cpu.normalize(call.x, mean, var, *arguments)
    elif path == "cuda" and not torch.compiler.is_compiling():
        y = inference.normalize(call.x, mean, var, *arguments)
    else:
        y = composite.normalize(call.x, mean, var, *arguments, call.mask)
    return call.restore(y)


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
    """Say which path :func:`batch_norm` takes for these arguments, and why.

    >>> explain(torch.randn(8, 3)).path
    'cpu'

    Beyond the paper: shows what the dispatcher decided.
    """
    call = Call(x, gamma, beta, feature_dims, activation, residual, mask)
    path, reason = choose(call)
    if path == "cuda":
        reason = autograd.describe(call.x, call.gamma, call.beta, call.residual, call.activation)
    elif path == "cpu":
        reason = cpu.describe(call.x, call.residual)
    return Choice(path, reason)


class Call:
    """Bring a call into canonical form: x as (N, C, ...), parameters as (C,), mask as (N, 1, ...); and back."""

    def __init__(
        self,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        feature_dims: int = 1,
        activation: str | Activation | None = None,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        if not x.is_floating_point():
            raise TypeError(f"batch normalization needs real floating-point input, not {x.dtype}; convert it first")
        if not 1 <= feature_dims < x.dim():
            raise ValueError(
                f"an input of shape {tuple(x.shape)} has no batch dimension and {feature_dims} feature dimension(s)"
            )
        self.features = x.shape[1 : 1 + feature_dims]
        self.shape = x.shape
        self.check("gamma", gamma)
        self.check("beta", beta)
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"the residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}")
        # Per activation on a channels_last input: the features flattened in memory order need no copy.
        self.nhwc = feature_dims > 1 and _features_last(x, feature_dims)
        self.activation = as_activation(activation)
        self.x = self.flat(x)
        self.residual = None if residual is None else self.flat(residual)
        self.gamma = None if gamma is None else self.features_flat(gamma)
        self.beta = None if beta is None else self.features_flat(beta)
        self.mask = None
        if mask is not None:
            where = (x.shape[0], *x.shape[1 + feature_dims :])
            if mask.dtype != torch.bool or mask.shape != where:
                raise ValueError(
                    f"the mask must be bool of shape {where} for an input {tuple(x.shape)},"
                    f" not {mask.dtype} of shape {tuple(mask.shape)}"
                )
            self.mask = mask.unsqueeze(1)

    def check(self, name: str, p: Tensor | None) -> None:
        """Refuse what has not the features' shape."""
        if p is not None and p.shape != self.features:
            raise ValueError(
                f"{name} has shape {tuple(p.shape)}, the features of an input {tuple(self.shape)} are"
                f" {tuple(self.features)}"
            )

    @property
    def reduced_dims(self) -> list[int]:
        """The dimensions of the canonical x that statistics run over."""
        return [0, *range(2, self.x.dim())]

    def flat(self, x: Tensor) -> Tensor:
        """Flatten the features of a tensor of the input's shape."""
        if len(self.features) == 1:
            return x
        if self.nhwc:
            x = x.movedim(1, len(self.features))
        return x.flatten(1, len(self.features))

    def features_flat(self, p: Tensor) -> Tensor:
        """Flatten a tensor of the features' shape, in the same order."""
        if len(self.features) == 1:
            return p
        return (p.movedim(0, -1) if self.nhwc else p).flatten()

    def restore(self, y: Tensor) -> Tensor:
        """Undo :meth:`flat`."""
        if len(self.features) == 1:
            return y
        if self.nhwc:
            return y.reshape(self.shape[0], *self.features[1:], self.features[0]).movedim(-1, 1)
        return y.reshape(self.shape)

    def restore_moments(self, moments: Moments) -> Moments:
        """Give moments of the canonical form the features' shape."""
        if len(self.features) == 1:
            return moments
        return Moments(moments.count, self._features_shaped(moments.mean), self._features_shaped(moments.var))

    def _features_shaped(self, v: Tensor) -> Tensor:
        if self.nhwc:
            return v.reshape(*self.features[1:], self.features[0]).movedim(-1, 0)
        return v.reshape(self.features)


def _features_last(x: Tensor, feature_dims: int) -> bool:
    return feature_dims == x.dim() - 1 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _batch_norm(call: Call, eps: float, path: str, *, constant_moments: bool = False) -> tuple[Tensor, Moments]:
    arguments = (call.x, call.gamma, call.beta, eps, call.activation, call.residual)
    if path == "cpu":
        y, moments = cpu.batch_norm(*arguments, constant_moments=constant_moments)
    elif path == "cuda":
        y, moments = autograd.batch_norm(*arguments)
    else:
        y, moments = composite.batch_norm(*arguments, call.mask)
    return call.restore(y), call.restore_moments(moments)


def choose(call: Call) -> Choice:
    """Choose the fastest path that is right for a call."""
    x = call.x
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
    if x.device.type == "cpu":
        return Choice("cpu", "a CPU tensor")
    if x.device.type == "cuda":
        refused = autograd.refusal(x)
        return Choice("cuda", "a CUDA tensor") if refused is None else Choice("composite", refused)
    return Choice("composite", f"no faster path for {x.device.type} tensors")
