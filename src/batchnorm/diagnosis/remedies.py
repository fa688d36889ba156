"""Describe how to repair a layer. The layer's class and state decide which steps are possible and useful."""

from __future__ import annotations

from ..layers import BatchNorm
from .evidence import Evidence, Layer

LOAD_WEIGHTS = (
    "load weights without inf or NaN, for example from an earlier checkpoint, and continue training with a lower"
    " learning rate or with clipped gradients"
)


def estimate(e: Evidence, layer: Layer) -> str:
    """Say how to estimate the layer's statistics.

    ``estimate_`` skips layers that are frozen, or in evaluation mode inside a network in training mode.
    """
    if layer.frozen:
        return "unfreeze it with bn.unfreeze_, call bn.estimate_(net, batches), and freeze it again"
    if e.net.training and not layer.module.training:
        return "call net.eval() and then bn.estimate_(net, batches)"
    return "call bn.estimate_(net, batches)"


def convert(layer: Layer) -> str:
    """Say that the layer must be converted first, or return "" if it is a layer of this library."""
    return "" if isinstance(layer.module, BatchNorm) else "call bn.convert, and then "


def can_be_ours(e: Evidence, layer: Layer) -> bool:
    """Return whether the layer is one of this library, or ``convert`` can make it one."""
    return isinstance(layer.module, BatchNorm) or layer.module in e.convertible


def freeze(e: Evidence, layer: Layer) -> str:
    """Say how to freeze a layer with running statistics; ``freeze_`` needs a layer of this library."""
    if can_be_ours(e, layer):
        return f"{convert(layer)}freeze it with bn.freeze_, which train() does not undo"
    return "override the network's train() to keep the layer in evaluation mode, because bn.convert refuses it"


def fine_tune(e: Evidence, layer: Layer) -> str:
    """Say how to fine-tune with batches that are too small for the layer, or return "" if it cannot be frozen."""
    possible = layer.module.running_mean is not None and can_be_ours(e, layer)
    return f"; to fine-tune, {convert(layer)}use bn.freeze_" if possible else ""
