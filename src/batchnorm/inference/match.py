"""Match the features of a batch normalization with those of the affine layer beside it.

Calls that only move elements may lie between the two. They are made again on tensors of feature numbers, which shows
where each feature goes, whatever the code between does with shapes.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph import Call
from ..graph.kinds import Convolution, Transposed


class Refusal(Exception):
    """Say why a batch normalization cannot go into some weights."""


def match_up(source: Call, moves: list[Call], call: Call, layer: TorchBatchNorm) -> Tensor:
    """Return which of the layer's features each feature of the source becomes."""
    assert source.module is not None
    origin, target = source.outputs[0].shape, call.argument(0, "input").shape
    dims = _feature_dims(source.module, len(origin))
    kept = _feature_dims(layer, len(target))
    if not moves and dims == kept:
        return torch.arange(prod(origin[d] for d in dims))
    features = _replayed(_numbered(origin, dims), moves)
    return _function_of(features, _numbered(target, kept), prod(origin[d] for d in dims))


def match_down(call: Call, moves: list[Call], sink: Call, layer: TorchBatchNorm) -> Tensor:
    """Return which of the layer's features each input feature of the sink is."""
    assert sink.module is not None
    origin, target = call.outputs[0].shape, sink.inputs[0].shape
    dims = _feature_dims(layer, len(origin))
    kept = _feature_dims(sink.module, len(target))
    if not moves and dims == kept:
        return torch.arange(prod(origin[d] for d in dims))
    features = _replayed(_numbered(origin, dims), moves)
    return _function_of(_numbered(target, kept), features, prod(target[d] for d in kept))


def _function_of(inner: Tensor, outer: Tensor, size: int) -> Tensor:
    """Return f with f[inner] = outer at every place; refuse where one number meets two."""
    if inner.shape != outer.shape:
        raise Refusal("the shapes between the two do not match")
    index = torch.zeros(size, dtype=torch.long)
    index[inner.flatten()] = outer.flatten()
    if not torch.equal(index[inner], outer):
        raise Refusal("it does not normalize the features of the affine layer beside it, but another dimension")
    return index


def _replayed(x: Tensor, moves: list[Call]) -> Tensor:
    for move in moves:
        try:
            x = move.replay(x.contiguous())
        except Exception as error:
            raise Refusal(f"{move} cannot be made again on another tensor ({error})") from error
        if not isinstance(x, Tensor):
            raise Refusal(f"{move} returns more than a tensor")
    return x


def _numbered(shape: tuple[int, ...], dims: list[int]) -> Tensor:
    """Return a tensor that holds at each place the number of its feature."""
    sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
    return torch.arange(prod(sizes)).reshape(sizes).expand(shape)


def _feature_dims(module: nn.Module, rank: int) -> list[int]:
    if isinstance(module, nn.Linear):
        return [rank - 1]
    if isinstance(module, Convolution | Transposed):
        return [rank - 1 - len(module.kernel_size)]
    return [1 + d for d in range(len(feature_shape(module)))]


def feature_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of one set of a layer's statistics."""
    assert isinstance(layer, TorchBatchNorm)
    assert layer.running_mean is not None
    return tuple(layer.running_mean.shape)
