"""The network of Section 4.1: fully connected hidden layers of sigmoids, with and without batch normalization."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from ..layers import BatchNorm1d


def perceptron(
    *,
    batch_norm: bool = True,
    inputs: int = 784,
    widths: Sequence[int] = (100, 100, 100),
    classes: int = 10,
    std: float = 0.1,
    seed: int | None = None,
) -> nn.Sequential:
    """Build the multi-layer perceptron of Section 4.1, whose hidden layers compute z = g(BN(Wu)) or z = g(Wu + b).

    The submodules are named linear1, bn1, sigmoid1, linear2, ..., output. Without batch normalization, the bn layers
    are absent.

    Args:
        batch_norm: normalize before each sigmoid. The initial weights for a given seed are the same with and without
            normalization.
        inputs: the number of inputs; 784 for the paper's 28x28 images.
        widths: the number of activations of each hidden layer.
        classes: the number of outputs.
        std: the standard deviation of the initial weights. The paper says only "small random Gaussian values". Biases
            start at 0.
        seed: the seed of the initial weights; None draws them from torch's global generator.

    >>> [name for name, _ in perceptron(widths=(5,)).named_children()]
    ['linear1', 'bn1', 'sigmoid1', 'output']

    Paper: Sec. 4.1
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, width in enumerate(widths, 1):
        # With batch normalization, the mean subtraction would cancel the bias b; beta replaces b (Sec. 3.2).
        layers[f"linear{k}"] = nn.Linear(inputs, width, bias=not batch_norm)
        if batch_norm:
            layers[f"bn{k}"] = BatchNorm1d(width)
        layers[f"sigmoid{k}"] = nn.Sigmoid()
        inputs = width
    layers["output"] = nn.Linear(inputs, classes)
    for layer in layers.values():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(layers)
