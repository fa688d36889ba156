"""Build the user's own network, try it on a batch, and insert, convert or remove batch normalization."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..layers.norm_act import is_norm_act
from ..network_copy import Memo, copy_with, outputs, private_copy
from ..network_factory import make_network
from ..surgery import convert, insert, revert
from .final_network import example_images

Change = Literal["as-is", "insert", "convert", "remove"]


def own_network(factory: str, change: Change, *, classes: int, size: int, seed: int) -> nn.Module:
    """Build the user's network, and insert, convert or remove batch normalization.

    Args:
        factory: the name of the function that builds the network; see
            :func:`~batchnorm.network_factory.make_network`.
        change: "insert" batch normalization, "convert" it to this library's layers, "remove" it, or leave the network
            "as-is".
        classes: number of classes in the data.
        size: height and width of the images.
        seed: seed of the initial weights.

    Raises:
        ValueError: if the network cannot be built, if it does not fit the images or the classes, or if the change
            cannot be made or has no effect.
    """
    example = example_images(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make_network(factory, classes)[0].train()
    _check(net, factory, example, classes)
    before = _count(net)
    if change in ("convert", "remove") and not before:
        raise ValueError(
            f"{factory} has no batch normalization, so normalize={change} does nothing: remove that option"
        )
    if change == "insert":
        net = insert(net, example)
    elif change == "convert":
        net = convert(net, example)
    elif change == "remove":
        net = without_batch_norm(net)
    if change == "insert" and _count(net) == before:
        why = "has no layer left to normalize" if before else "has no layer to normalize"
        raise ValueError(
            f"{factory} {why}, so normalize=insert does nothing: train the network as it is, with batchnorm train"
            " --normalize as-is"
        )
    return net.train()


def without_batch_norm(net: nn.Module) -> nn.Module:
    """Return a copy of the network without batch normalization; the layers' activations and dropout remain.

    Raises:
        ValueError: if ``torch.nn`` has no equivalent for one of this library's layers, or if a layer has a ``forward``
            of its own, which may do more than normalize.
    """
    plain = revert(net)
    layers = {m: name for name, m in plain.named_modules() if isinstance(m, TorchBatchNorm)}
    for layer, name in layers.items():
        known = (TorchBatchNorm.forward, nn.SyncBatchNorm.forward)
        if type(layer).forward not in known and not is_norm_act(type(layer)):
            raise ValueError(
                f"{name} cannot be removed: {type(layer).__name__} overrides forward; remove this layer in the"
                " network's code"
            )
    return copy_with(plain, {layer: partial(_rest, layer) for layer in layers})


def _rest(layer: Any, memo: Memo) -> nn.Module:
    """Return the part of a layer that remains without normalization: its dropout and activation, or an identity."""
    if is_norm_act(type(layer)):
        return nn.Sequential(copy.deepcopy(layer.drop, memo), copy.deepcopy(layer.act, memo))
    return nn.Identity()


def _count(net: nn.Module) -> int:
    return sum(isinstance(m, TorchBatchNorm) for m in net.modules())


def _check(net: nn.Module, factory: str, example: Tensor, classes: int) -> None:
    """Check that the network, in training mode, returns one row of class scores for each of two images."""
    try:
        private_copy(net)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{factory} returned a network that cannot be trained: {error}") from error
    try:
        scores = outputs(net, example, training=True)
    except Exception as error:
        why = str(error).partition("\n")[0]
        size = "x".join(map(str, example.shape[1:]))
        raise ValueError(
            f"{factory} cannot take images of {size}: {why}; correct the network, or try another --size"
        ) from error
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"the network of {factory} returns {type(scores).__name__} in training, not one tensor of class scores:"
            " wrap it in a module that returns only the scores"
        )
    if scores.dim() != 2 or len(scores) != 2:
        raise ValueError(
            f"the network of {factory} returns a tensor of shape {tuple(scores.shape)} for 2 images, not one row of"
            f" class scores per image: its output must have the shape (number of images, {classes})"
        )
    if scores.shape[1] != classes:
        raise ValueError(
            f"the network of {factory} has {scores.shape[1]} outputs, but the data has {classes} classes: give the"
            " function a parameter named classes, and use it as the number of outputs"
        )
    if classes > 1 and bool((scores >= 0).all()) and torch.allclose(scores.sum(1), torch.ones_like(scores[:, 0])):
        raise ValueError(
            f"the network of {factory} returns probabilities, but the loss needs the class scores before softmax:"
            " remove the softmax at the network's end"
        )
