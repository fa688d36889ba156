"""The arithmetic of folding, in float64: a fixed scale and shift moves into the weights before or after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph.kinds import Affine, Transposed


class Map(NamedTuple):
    """Hold a fixed affine map of features, y = scale * x + shift, in float64 on the CPU.

    Paper: Alg. 2, l. 11
    """

    scale: Tensor
    shift: Tensor

    def then(self, other: Map) -> Map:
        """Return the map that applies this one and then the other."""
        return Map(other.scale * self.scale, other.scale * self.shift + other.shift)

    def select(self, index: Tensor) -> Map:
        """Return the map with its features repeated or reordered."""
        return Map(self.scale.flatten()[index], self.shift.flatten()[index])

    @property
    def is_finite(self) -> bool:
        """Whether every entry is a number."""
        return bool((self.scale.isfinite() & self.shift.isfinite()).all())


class Weights(NamedTuple):
    """Hold W and b of an affine layer in float64.

    Paper: Sec. 3.2
    """

    weight: Tensor
    bias: Tensor


def map_of(layer: TorchBatchNorm) -> Map:
    """Return what a layer does at inference.

    y = gamma / sqrt(Var[x] + eps) * x + (beta - gamma * E[x] / sqrt(Var[x] + eps))

    >>> layer = nn.BatchNorm1d(1, eps=0.0); _ = layer.running_var.fill_(4.0); _ = layer.running_mean.fill_(6.0)
    >>> map_of(layer)
    Map(scale=tensor([0.5000], dtype=torch.float64), shift=tensor([-3.], dtype=torch.float64))

    Paper: Alg. 2, l. 11
    """
    assert layer.running_mean is not None and layer.running_var is not None  # noqa: PT018
    mean, var = wide(layer.running_mean), wide(layer.running_var)
    gamma = wide(layer.weight) if layer.weight is not None else torch.ones_like(mean)
    beta = wide(layer.bias) if layer.bias is not None else torch.zeros_like(mean)
    scale = gamma / torch.sqrt(var + layer.eps)
    return Map(scale, beta - mean * scale)


def weights_of(affine: Affine) -> Weights:
    """Return W and b of an affine layer; b is 0 where it has none."""
    weight = wide(affine.weight)
    bias = wide(affine.bias) if affine.bias is not None else torch.zeros(out_features(affine), dtype=torch.float64)
    return Weights(weight, bias)


def fold_after(affine: Affine, weights: Weights, after: Map) -> Weights:
    """Return the weights of scale * (Wu + b) + shift."""
    scale = after.scale
    if isinstance(affine, Transposed):
        # W is (in, out / groups, *kernel), and input i belongs to group i // (in / groups).
        per_group = scale.reshape(affine.groups, -1)
        scale = per_group.repeat_interleave(affine.in_channels // affine.groups, dim=0)
    weight = weights.weight * _over_kernel(scale, weights.weight)
    return Weights(weight, after.scale * weights.bias + after.shift)


def fold_before(affine: Affine, weights: Weights, before: Map) -> Weights:
    """Return the weights of W(scale * u + shift) + b, exact where every output sees all of the kernel's inputs."""
    scale, shift = before
    if isinstance(affine, Transposed):
        return Weights(weights.weight * _over_kernel(scale, weights.weight), weights.bias)
    if not isinstance(affine, nn.Linear):
        # W is (out, in / groups, *kernel), and output o belongs to group o // (out / groups).
        out_per_group = affine.out_channels // affine.groups
        scale, shift = (v.reshape(affine.groups, -1).repeat_interleave(out_per_group, dim=0) for v in before)
    else:
        scale, shift = (v.reshape(1, -1) for v in before)
    shifted = (weights.weight * _over_kernel(shift, weights.weight)).flatten(1).sum(1)
    return Weights(weights.weight * _over_kernel(scale, weights.weight), weights.bias + shifted)


def out_features(affine: Affine) -> int:
    """Return the number of features that come out of an affine layer."""
    return affine.out_features if isinstance(affine, nn.Linear) else affine.out_channels


def wide(t: Tensor) -> Tensor:
    """Return a copy in float64 on the CPU, where every device's numbers can be computed with."""
    return t.detach().cpu().double()


def _over_kernel(v: Tensor, weight: Tensor) -> Tensor:
    return v.reshape(*v.shape, *[1] * (weight.dim() - v.dim()))
