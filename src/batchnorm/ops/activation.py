"""The nonlinearities g that a batch normalization can apply to its output in the same call, as in g(BN(Wu))."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Kind(NamedTuple):
    function: Callable[..., Tensor]
    module: type[nn.Module]


def _identity(z: Tensor) -> Tensor:
    return z


# The kernels identify an activation by its position in this dict, so add new activations at the end.
_KINDS = {
    "identity": _Kind(_identity, nn.Identity),
    "relu": _Kind(F.relu, nn.ReLU),
    "leaky_relu": _Kind(F.leaky_relu, nn.LeakyReLU),
    "sigmoid": _Kind(torch.sigmoid, nn.Sigmoid),
    "tanh": _Kind(torch.tanh, nn.Tanh),
    "silu": _Kind(F.silu, nn.SiLU),
    "relu6": _Kind(F.relu6, nn.ReLU6),
    "hardswish": _Kind(F.hardswish, nn.Hardswish),
}
NAMES = tuple(_KINDS)
# The derivative of these activations takes only two values, so one bit per element is enough to store it.
TWO_SLOPES = ("relu", "leaky_relu", "relu6")


class Activation(NamedTuple):
    """Describe a nonlinearity g by its name and, for leaky_relu, its slope.

    Attributes:
        name: one of :data:`batchnorm.ops.activation.NAMES`.
        slope: leaky_relu's slope below zero; other activations ignore it.

    >>> Activation("leaky_relu", 0.2)(torch.tensor([-1.0, 1.0]))
    tensor([-0.2000,  1.0000])

    Beyond the paper: the paper applies g after BN; here, one call does both.
    """

    name: str = "identity"
    slope: float = 0.01

    def __call__(self, z: Tensor) -> Tensor:
        """Return g(z)."""
        return apply(self, z)

    def backward(self, dy: Tensor, z: Tensor) -> Tensor:
        """Return dz = g'(z) dy, computed by operations that support double backward and vmap."""
        match self.name:
            case "relu":
                return torch.where(z <= 0, 0, dy)
            case "relu6":
                return torch.where((z <= 0) | (z >= 6), 0, dy)
            case "leaky_relu":
                return torch.where(z > 0, dy, dy * self.slope)
            case "sigmoid":
                s = torch.sigmoid(z)
                return dy * (s * (1 - s))
            case "tanh":
                t = torch.tanh(z)
                return dy * (1 - t * t)
            case "silu":
                s = torch.sigmoid(z)
                return dy * (s * (1 + z * (1 - s)))
            case "hardswish":
                return torch.where(z <= -3, 0, torch.where(z < 3, dy * (z / 3 + 0.5), dy))
        return dy


def apply(activation: Activation, z: Tensor) -> Tensor:
    """Return g(z).

    Code that may be compiled calls this function, not the ``Activation`` itself, because torch.compile would check the
    object's class in every call.
    """
    if activation.name == "leaky_relu":
        return F.leaky_relu(z, activation.slope)
    return _KINDS[activation.name].function(z)


IDENTITY = Activation()
_NAMED = {name: Activation(name) for name in NAMES}


def as_activation(spec: str | Activation | nn.Module | None) -> Activation:
    """Convert a name, an ``Activation``, a ``torch.nn`` module or None to an ``Activation``.

    Args:
        spec: the activation; None means the identity.

    Raises:
        TypeError: if ``spec`` has another type.
        ValueError: if the nonlinearity is unknown or cannot be fused.

    >>> as_activation("relu").name, as_activation(nn.LeakyReLU(0.2)).slope, as_activation(None).name
    ('relu', 0.2, 'identity')

    Beyond the paper: a convenience for callers.
    """
    if spec is None:
        return IDENTITY
    if type(spec) is str and spec in _NAMED:
        return _NAMED[spec]
    if type(spec) is Activation and spec.name in NAMES:
        return spec
    if isinstance(spec, nn.Module):
        found = from_module(spec)
        if found is None:
            raise ValueError(f"{spec} cannot be fused into a batch normalization; call it after the layer instead")
        return found
    if isinstance(spec, str):
        spec = Activation(spec)
    if not isinstance(spec, Activation):
        raise TypeError(
            "activation must be None, an Activation, a torch.nn module such as nn.ReLU(), or one of"
            f" {', '.join(NAMES)}; got {spec}"
        )
    if spec.name not in NAMES:
        raise ValueError(f"activation {spec.name!r} is not one of {', '.join(NAMES)}; call it after the layer instead")
    return spec


def from_module(module: nn.Module) -> Activation | None:
    """Return the activation that a ``torch.nn`` module computes, or None if the module cannot be fused."""
    # Compare exact types, because a subclass may compute something else. Check the limits of a ReLU6 too, because they
    # are attributes that users can change.
    if isinstance(module, nn.Hardtanh) and type(module) in (nn.Hardtanh, nn.ReLU6):
        return Activation("relu6") if (module.min_val, module.max_val) == (0, 6) else None
    name = _BY_MODULE.get(type(module))
    if name == "leaky_relu":
        return Activation(name, float(module.negative_slope))  # type: ignore[arg-type]
    return None if name is None else Activation(name)


_BY_MODULE = {kind.module: name for name, kind in _KINDS.items()}


def to_module(activation: Activation) -> nn.Module:
    """Return the ``torch.nn`` module that computes an activation.

    >>> to_module(Activation("leaky_relu", 0.2))
    LeakyReLU(negative_slope=0.2)
    """
    if activation.name == "leaky_relu":
        return nn.LeakyReLU(activation.slope)
    return _KINDS[activation.name].module()
