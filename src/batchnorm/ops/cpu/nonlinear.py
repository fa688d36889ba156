"""The activation in place on a fresh output, and its derivative from what the forward pass left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import Activation

_aten = torch.ops.aten

# Up to here a second buffer costs less than what autograd does for an operation in place.
SMALL = 1 << 14
# From here on the passes over half-precision values, which torch widens one by one, cost more than Python's backward.
LARGE_HALF = 1 << 20


def apply_(activation: Activation, z: Tensor) -> Tensor:
    """Overwrite ``z`` by g(z): a second buffer would cost more than the arithmetic."""
    match activation.name:
        case "relu":
            return z.relu_()
        case "leaky_relu":
            return F.leaky_relu(z, activation.slope, inplace=True)
        case "sigmoid":
            return z.sigmoid_()
        case "tanh":
            return z.tanh_()
        case "silu":
            return F.silu(z, inplace=True)
        case "relu6":
            return F.relu6(z, inplace=True)
        case "hardswish":
            return F.hardswish(z, inplace=True)
    return z


def for_fresh(activation: Activation, elements: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Return what makes g(z) of an output z that nobody has seen and that its own derivative does not need."""
    if activation.name == "identity":
        return None
    if activation.name != "relu":
        return activation.__call__
    if elements <= SMALL:
        return Tensor.relu
    return Tensor.relu_ if elements < LARGE_HALF or dtype.itemsize > 2 else _half_relu


def _half_relu(z: Tensor) -> Tensor:
    return HalfRelu.apply(z)  # type: ignore[no-any-return, no-untyped-call]


class HalfRelu(torch.autograd.Function):
    """ReLU in place on float16 or bfloat16 by their bit patterns, for torch widens the values to compare them.

    Read as int16, values of 0 and more are not negative; below 0 they lie at or below that of -inf, and NaN above it.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        """Set to 0 what is not above -inf's pattern: negative values, not NaN."""
        torch.threshold_(z.view(torch.int16), -(1 << 7) if z.dtype is torch.bfloat16 else -(1 << 10), 0)
        ctx.mark_dirty(z)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Let pass what belongs to positive outputs."""
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or dy.dtype is not y.dtype:
            return backward(Activation("relu"), dy, y)
        dz: Tensor = _aten.threshold_backward(dy.view(torch.int16), y.view(torch.int16), 0)
        return dz.view(dy.dtype)


def derivative_needs(activation: Activation, dtype: torch.dtype) -> str | None:
    """Name what g' is computed from: "y" = g(z) in ``dtype`` if that is enough, else "z"; None for the identity."""
    match activation.name:
        case "identity":
            return None
        case "silu" | "hardswish":
            return "z"
        case "leaky_relu" if activation.slope < 0:
            return "z"
        case "relu6" if dtype.itemsize == 2:  # rounds values a little below 6 to 6
            return "z"
    return "y"


def backward(activation: Activation, dy: Tensor, at: Tensor | None) -> Tensor:
    """Return dl/dz = dl/dy * g'(z) with ``at`` as :func:`derivative_needs` says; differentiable again."""
    match activation.name:
        case "relu":
            return _aten.threshold_backward(dy, at, 0)  # type: ignore[no-any-return]
        case "leaky_relu":
            return _aten.leaky_relu_backward(dy, at, activation.slope, activation.slope >= 0)  # type: ignore[no-any-return]
        case "sigmoid":
            return _aten.sigmoid_backward(dy, at)  # type: ignore[no-any-return]
        case "tanh":
            return _aten.tanh_backward(dy, at)  # type: ignore[no-any-return]
        case "silu" if at is not None and torch.is_grad_enabled():  # torch's operator has no derivative
            sigmoid = torch.sigmoid(at)
            return dy * sigmoid * (1 + at * (1 - sigmoid))
        case "silu":
            return _aten.silu_backward(dy, at)  # type: ignore[no-any-return]
        case "relu6":
            return _aten.hardtanh_backward(dy, at, 0, 6)  # type: ignore[no-any-return]
        case "hardswish":
            return _aten.hardswish_backward(dy, at)  # type: ignore[no-any-return]
    return dy
