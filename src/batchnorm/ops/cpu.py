"""The CPU path."""

from __future__ import annotations

from torch import Tensor

from . import composite
from .activation import Activation
from .moments import Moments


def batch_norm(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> tuple[Tensor, Moments]:
    """Normalize a non-empty CPU tensor (N, C, ...) by its own statistics."""
    return composite.batch_norm(x, gamma, beta, eps, activation, residual)
