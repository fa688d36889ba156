"""Separate the parameters that should not have weight decay."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import at_least
from ..network_call import check_network

NORMALIZATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def own_parameters(norm: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer and of its parametrizations, but not those of its other child modules."""
    return [p for name, p in norm.named_parameters() if "." not in name or name.startswith("parametrizations.")]


def param_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: one with weight decay and, for gamma and beta, one without.

    Decay on the weights W before a batch normalization only changes their effective step size, since BN((aW)u) = BN(Wu)
    for any a > 0. Decay on gamma and beta changes what the network computes. Gamma and beta are recognized by their
    layer (batch, instance, layer, group or RMS normalization), not by their shape. If such a layer has child modules,
    for example a Linear in a conditional normalization, their parameters are decayed, unless they parametrize gamma or
    beta. Parameters with ``requires_grad=False`` are left out, and a shared parameter appears once.

    Args:
        net: any network.
        weight_decay: the decay of the first group, which holds all parameters except gamma and beta.

    Raises:
        TypeError: if ``net`` is not a network, or ``weight_decay`` is not a number.
        ValueError: if ``weight_decay`` is negative or not finite.

    >>> net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
    >>> [(len(group["params"]), group["weight_decay"]) for group in param_groups(net, 1e-4)]
    [(1, 0.0001), (2, 0.0)]

    Beyond the paper: Sec. 4.2.1 reduces the L2 weight regularization, but does not mention gamma and beta.
    """
    check_network(net)
    given: object = weight_decay
    if not isinstance(given, Real | Tensor):
        raise TypeError(f"weight_decay must be a number, such as 1e-4, not {type(given).__name__}")
    at_least(0, weight_decay=float(weight_decay))
    norms = [module for module in net.modules() if isinstance(module, NORMALIZATIONS)]
    spared = {id(p) for norm in norms for p in own_parameters(norm)}
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in spared], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in spared], "weight_decay": 0.0},
    ]
