"""Freeze and unfreeze layers; ``train()`` does not unfreeze them, and the state dict stores what is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph.kinds import is_scripted_norm
from ..network_call import check_network
from .batch_norm import BIAS, STATISTICS, WEIGHT, BatchNorm

Network = TypeVar("Network", bound=nn.Module)


def freeze_(net: Network, *, statistics: bool = True, affine: bool = True) -> Network:
    """Freeze the batch normalization of a network, in place, until :func:`unfreeze_`; return the network.

    Args:
        net: any network with layers of this library.
        statistics: normalize by the running statistics in training too, and do not update them.
        affine: stop training gamma and beta.

    Raises:
        ValueError: if the network has batch normalization of ``torch.nn`` (convert it first), or no batch normalization
            of this library. With ``statistics``, also if it has scripted batch normalization, or a layer without
            running statistics. With ``affine``, also if a gamma or beta is parametrized. After an error, the network is
            unchanged.
        TypeError: if ``net`` is not a network.

    >>> freeze_(BatchNorm(3)).train().frozen_statistics
    True

    Beyond the paper: fine-tuning with fixed statistics.
    """
    check_network(net)
    scripted = [name for name, m in net.named_modules() if is_scripted_norm(m, that_updates=True)]
    if scripted and statistics:
        raise ValueError(
            f"cannot freeze {', '.join(scripted)}: it is scripted, and train() would unfreeze it; use the original,"
            " unscripted module, or pass the other layers to freeze_ one by one"
        )
    layers = list(_layers(net, "freeze"))
    for name, layer in layers:
        if statistics and layer.running_mean is None:
            raise ValueError(
                f"{name} has no running statistics to freeze; create the layer with track_running_stats=True"
            )
        if affine:
            _require_parameters(name, layer, WEIGHT | BIAS)
    for _, layer in layers:
        if statistics:
            layer._frozen |= STATISTICS
        if affine:
            for bit, parameter in ((WEIGHT, layer.weight), (BIAS, layer.bias)):
                # Skip parameters that were not being trained, because unfreeze_ must not make them trainable.
                if parameter is not None and parameter.requires_grad:
                    parameter.requires_grad_(False)
                    layer._frozen |= bit
    return net


def unfreeze_(net: Network, *, statistics: bool = True, affine: bool = True) -> Network:
    """Undo :func:`freeze_`, in place, and return the network.

    Parameters that had ``requires_grad=False`` before ``freeze_`` keep it.

    Args:
        net: any network with layers of this library.
        statistics: normalize by batch statistics in training again, and update the running statistics.
        affine: train gamma and beta again.

    Raises:
        ValueError: if the network has ``torch.nn`` batch normalization, or no batch normalization at all. With
            ``affine``, also if a gamma or beta was parametrized after it was frozen. After an error, the network is
            unchanged.
        TypeError: if ``net`` is not a network.

    >>> unfreeze_(freeze_(BatchNorm(3))).weight.requires_grad
    True

    Beyond the paper: fine-tuning with fixed statistics.
    """
    layers = list(_layers(net, "unfreeze"))
    for name, layer in layers:
        if affine:
            _require_parameters(name, layer, layer._frozen)
    for _, layer in layers:
        if statistics:
            layer._frozen &= ~STATISTICS
        if affine:
            for bit, parameter in ((WEIGHT, layer.weight), (BIAS, layer.bias)):
                if layer._frozen & bit and parameter is not None:
                    parameter.requires_grad_(True)
                    layer._frozen &= ~bit
    return net


def _require_parameters(name: str, layer: BatchNorm, bits: int) -> None:
    for bit, key in ((WEIGHT, "weight"), (BIAS, "bias")):
        if bits & bit and key not in layer._parameters:
            raise ValueError(
                f"the {key} of {name} is not a parameter but computed from other parameters, for example by"
                " torch.nn.utils.parametrize: pass affine=False, and set requires_grad of those parameters yourself"
            )


def _layers(net: nn.Module, verb: str) -> Iterator[tuple[str, BatchNorm]]:
    check_network(net)
    found = [(name or type(m).__name__, m) for name, m in net.named_modules() if isinstance(m, TorchBatchNorm)]
    foreign = [name for name, m in found if not isinstance(m, BatchNorm)]
    if foreign and verb == "unfreeze":
        raise ValueError(
            f"nothing to unfreeze in {', '.join(foreign)}: only this library's layers can be frozen; if the network"
            " also has layers of this library, pass each of them to unfreeze_"
        )
    if foreign:
        raise ValueError(
            f"cannot {verb} {', '.join(foreign)}: only this library's layers can be frozen, because train() would"
            " unfreeze torch.nn layers; convert the network first: net = batchnorm.convert(net, example). If convert"
            " refuses a layer, net.report says why"
        )
    if not found:
        raise ValueError(f"nothing to {verb}: the network has no batch normalization layers of this library")
    return ((name, m) for name, m in found if isinstance(m, BatchNorm))
