"""Compute the fixed affine map that BN applies at inference, and fold it into weights or apply it as a module."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph.kinds import Affine, Transposed
from ..ops import Activation


class Map(NamedTuple):
    """Hold a fixed affine map of features, y = scale * x + shift, in float64 on the CPU.

    Paper: Alg. 2, l. 11
    """

    scale: Tensor
    shift: Tensor

    def then(self, other: Map) -> Map:
        """Return the map that applies this map and then ``other``."""
        return Map(other.scale * self.scale, other.scale * self.shift + other.shift)

    def select(self, index: Tensor) -> Map:
        """Return the map of the features at the indices ``index``, which may repeat and have any order."""
        return Map(self.scale.flatten()[index], self.shift.flatten()[index])


class Weights(NamedTuple):
    """Hold the weight W and the bias b of an affine layer in float64."""

    weight: Tensor
    bias: Tensor


def map_of(layer: TorchBatchNorm) -> Map:
    """Return the map that a layer applies at inference.

    y = gamma / sqrt(Var[x] + eps) * x + (beta - gamma * E[x] / sqrt(Var[x] + eps))

    >>> layer = nn.BatchNorm1d(1, eps=0.0); _ = layer.running_var.fill_(4.0); _ = layer.running_mean.fill_(6.0)
    >>> map_of(layer)
    Map(scale=tensor([0.5000], dtype=torch.float64), shift=tensor([-3.], dtype=torch.float64))
    """
    assert layer.running_mean is not None and layer.running_var is not None  # noqa: PT018
    mean, var = _wide(layer.running_mean), _wide(layer.running_var)
    gamma = _wide(layer.weight) if layer.weight is not None else torch.ones_like(mean)
    beta = _wide(layer.bias) if layer.bias is not None else torch.zeros_like(mean)
    scale = gamma / torch.sqrt(var + layer.eps)
    return Map(scale, beta - mean * scale)


def weights_of(affine: Affine) -> Weights:
    """Return the weight W and the bias b of an affine layer; b is 0 if the layer has no bias."""
    outputs = affine.out_features if isinstance(affine, nn.Linear) else affine.out_channels
    bias = torch.zeros(outputs, dtype=torch.float64, device="cpu") if affine.bias is None else _wide(affine.bias)
    return Weights(_wide(affine.weight), bias)


def fold_after(affine: Affine, weights: Weights, after: Map) -> Weights:
    """Return the weights of an affine layer that computes scale * (Wu + b) + shift."""
    scale = after.scale
    if isinstance(affine, Transposed):
        # The weight has shape (in, out / groups, *kernel). Input channel i belongs to group i // (in / groups).
        per_group = scale.reshape(affine.groups, -1)
        scale = per_group.repeat_interleave(affine.in_channels // affine.groups, dim=0)
    weight = weights.weight * _over_kernel(scale, weights.weight)
    return Weights(weight, after.scale * weights.bias + after.shift)


def fold_before(affine: Affine, weights: Weights, before: Map) -> Weights:
    """Return the weights of an affine layer that computes W(scale * u + shift) + b.

    With a nonzero shift, the result is exact only if the layer does not pad with zeros. For transposed convolutions,
    the shift is ignored, so it must be 0.
    """
    scale, shift = before
    if isinstance(affine, Transposed):
        return Weights(weights.weight * _over_kernel(scale, weights.weight), weights.bias)
    if not isinstance(affine, nn.Linear):
        # The weight has shape (out, in / groups, *kernel). Output channel o belongs to group o // (out / groups).
        out_per_group = affine.out_channels // affine.groups
        scale, shift = (v.reshape(affine.groups, -1).repeat_interleave(out_per_group, dim=0) for v in before)
    else:
        scale, shift = (v.reshape(1, -1) for v in before)
    shifted = (weights.weight * _over_kernel(shift, weights.weight)).flatten(1).sum(1)
    return Weights(weights.weight * _over_kernel(scale, weights.weight), weights.bias + shifted)


def _wide(t: Tensor) -> Tensor:
    """Return the tensor in float64 on the CPU, because not every device supports float64."""
    return t.detach().cpu().double()


def _over_kernel(v: Tensor, weight: Tensor) -> Tensor:
    return v.reshape(*v.shape, *[1] * (weight.dim() - v.dim()))


class FixedAffine(nn.Module):
    """Apply a fixed scale and shift per feature and a nonlinearity: y = g(scale * x + shift + residual).

    This module replaces a batch normalization that could not be folded, or that is called with a residual or a mask. A
    ``FixedAffine`` has no statistics and no parameters.

    Args:
        scale: one value per feature, in the shape of the feature dimensions; None if the map was folded into weights.
        shift: like ``scale``.
        activation: the nonlinearity g.

    >>> FixedAffine(torch.tensor([2.0]), torch.tensor([-1.0]), Activation("relu"))(torch.tensor([[0.0], [3.0]]))
    tensor([[0.],
            [5.]])
    """

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, scale: Tensor | None, shift: Tensor | None, activation: Activation | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.activation = activation or Activation()

    def forward(self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return g(scale * input + shift + residual), and 0 where ``mask`` is False."""
        if mask is not None:
            # Where the mask is False, the input may hold NaN, which must not reach the gradients.
            mask = mask.reshape(mask.shape[0], *[1] * (input.dim() - mask.dim()), *mask.shape[1:])
            input = torch.where(mask, input, 0)
            residual = None if residual is None else torch.where(mask, residual, 0)
        y = input
        if self.scale is not None and self.shift is not None:
            shape = self.scale.shape + (1,) * (input.dim() - 1 - self.scale.dim())
            scale, shift = self.scale.view(shape), self.shift.view(shape)
            # On CUDA, addcmul needs only one kernel launch. On the CPU, a product and an in-place sum were faster.
            y = torch.addcmul(shift, y, scale) if y.is_cuda else (y * scale).add_(shift)
        if residual is not None:
            y = y + residual
        y = self.activation(y).to(input.dtype)
        return y if mask is None else torch.where(mask, y, 0)

    def extra_repr(self) -> str:
        """Return the shape of the features and the name of the activation."""
        features = "" if self.scale is None else "x".join(map(str, self.scale.shape)) + " features, "
        return f"{features}activation={self.activation.name}"
