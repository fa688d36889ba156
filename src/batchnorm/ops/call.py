"""The arguments of one batch normalization, in the form that every implementation (called a path) takes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .activation import Activation, as_activation
from .moments import Moments
from .running import Kept


class Call(NamedTuple):
    """Hold the arguments of one batch normalization.

    The input x has shape (N, C, ...). Gamma, beta, and the running mean and variance have shape (C,). The mask has
    shape (N, 1, ...).
    """

    x: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    eps: float = 1e-5
    activation: Activation = Activation()
    residual: Tensor | None = None
    mask: Tensor | None = None
    running: Kept | None = None
    momentum: float | None = None

    @property
    def reduced_dims(self) -> list[int]:
        """The dimensions of x over which the statistics are taken."""
        return [0, *range(2, self.x.dim())]


class Path(Protocol):
    """One implementation of batch normalization; the modules ``composite``, ``cpu`` and ``cuda.autograd`` are paths."""

    def refusal(self, call: Call, /) -> str | None:
        """Return why the path does not support a call, or None if the path supports it."""

    def describe(self, call: Call, /) -> str | None:
        """Return how the path computes a call, or None if the dispatcher's reason for choosing the path is enough."""

    def run(self, call: Call, /) -> tuple[Tensor, Moments]:
        """Return the output and the batch's statistics; update the running averages if the call has any."""

    def normalize(self, call: Call, mean: Tensor, var: Tensor, /) -> Tensor:
        """Normalize by given statistics."""


class Features:
    """Flatten the feature dimensions of a call's tensors to one dimension C, and restore them in the results."""

    def __init__(self, x: Tensor, feature_dims: int) -> None:
        if not x.is_floating_point():
            raise TypeError(f"batch normalization needs real floating-point input, not {x.dtype}; convert it first")
        if not 1 <= feature_dims < x.dim():
            raise ValueError(
                f"an input of shape {tuple(x.shape)} cannot have {feature_dims} feature dimension(s) after its batch"
                " dimension; the input needs at least 2 dimensions, and feature_dims must be at least 1 and less than"
                " the number of dimensions"
            )
        self.shape, self.dims = x.shape, feature_dims
        self.features = x.shape[1 : 1 + feature_dims]
        # If all dimensions but the first are features, flatten a channels_last input in memory order (h, w, c), because
        # the order (c, h, w) would need a copy.
        self.nhwc = 1 < feature_dims == x.dim() - 1 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()

    def call(
        self,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        eps: float,
        activation: str | Activation | None = None,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Call:
        """Check the arguments and return a :class:`Call` whose tensors have one feature dimension.

        Raises:
            TypeError: if the activation has the wrong type.
            ValueError: if the shapes do not match, the mask is not bool, or the activation is unknown.
        """
        self.check("gamma", gamma)
        self.check("beta", beta)
        if residual is not None and residual.shape != x.shape:
            raise ValueError(
                f"the residual has shape {tuple(residual.shape)}, but the input has shape {tuple(x.shape)}; the shapes"
                " must be equal"
            )
        if mask is not None:
            positions = (x.shape[0], *x.shape[1 + self.dims :])
            if mask.dtype != torch.bool or mask.shape != positions:
                raise ValueError(
                    f"the mask must be bool of shape {positions} for an input of shape {tuple(x.shape)},"
                    f" not {mask.dtype} of shape {tuple(mask.shape)}"
                )
            mask = mask.unsqueeze(1)
        if self.dims > 1:
            x, residual = self.flat(x), None if residual is None else self.flat(residual)
            gamma, beta = (None if p is None else self.flat_vector(p) for p in (gamma, beta))
        return Call(x, gamma, beta, eps, as_activation(activation), residual, mask)

    def check(self, name: str, p: Tensor | None) -> None:
        """Raise ValueError if a parameter or statistic does not have the features' shape."""
        if p is not None and p.shape != self.features:
            raise ValueError(
                f"{name} has shape {tuple(p.shape)}; expected {tuple(self.features)} for an input of shape"
                f" {tuple(self.shape)}"
            )

    def flat(self, x: Tensor) -> Tensor:
        """Flatten the feature dimensions of a tensor that has the input's shape."""
        if self.dims == 1:
            return x
        return (x.movedim(1, self.dims) if self.nhwc else x).flatten(1, self.dims)

    def flat_vector(self, p: Tensor) -> Tensor:
        """Flatten a tensor that has the features' shape, in the same order as :meth:`flat`."""
        if self.dims == 1:
            return p
        return (p.movedim(0, -1) if self.nhwc else p).flatten()

    def restore(self, y: Tensor) -> Tensor:
        """Undo :meth:`flat`."""
        if self.dims == 1:
            return y
        if self.nhwc:
            return y.reshape(self.shape[0], *self.features[1:], self.features[0]).movedim(-1, 1)
        return y.reshape(self.shape)

    def restore_moments(self, moments: Moments) -> Moments:
        """Reshape the mean and the variance to the features' shape."""
        if self.dims == 1:
            return moments
        return Moments(moments.count, self._restore_vector(moments.mean), self._restore_vector(moments.var))

    def _restore_vector(self, v: Tensor) -> Tensor:
        if self.nhwc:
            return v.reshape(*self.features[1:], self.features[0]).movedim(-1, 0)
        return v.reshape(self.features)
