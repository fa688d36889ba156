"""Moments of many mini-batches, kept small and merged in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True)
class Totals:
    """Hold what both rules of :func:`batchnorm.estimate_` and their standard errors need, in float64 on the CPU.

    Over mini-batches b of m_b values: ``within`` = sum m_b var_b, ``between`` = sum m_b (mean_b - mean)^2,
    ``spread`` = sum m_b (var_b - within / count)^2, ``freedom`` = sum (m_b - 1).

    Paper: Alg. 2, l. 10
    """

    batches: int
    count: float
    freedom: float
    mean: Tensor
    within: Tensor
    between: Tensor
    spread: Tensor


class Tally:
    """Collect moments; a chunk of them is merged at a time, so that a batch costs next to nothing.

    Args:
        unbiased: the variances that are added are m/(m-1) sigma_B^2, as layers keep them.

    >>> tally = Tally()
    >>> tally.add(8, torch.tensor([0.0]), torch.tensor([0.0])); tally.add(2, torch.tensor([10.0]), torch.tensor([0.0]))
    >>> totals = tally.totals()
    >>> float(totals.mean), float((totals.within + totals.between) / totals.count)
    (2.0, 16.0)

    Paper: Alg. 2, l. 10
    """

    def __init__(self, *, unbiased: bool = False) -> None:
        self._unbiased = unbiased
        self._waiting: list[tuple[Tensor | int, Tensor, Tensor]] = []
        self._totals: Totals | None = None

    def add(self, count: Tensor | int, mean: Tensor, var: Tensor) -> None:
        """Add one mini-batch: how many values, their mean and variance for each feature."""
        self._waiting.append((count, mean, var))
        if len(self._waiting) >= CHUNK:
            self._merge_waiting()

    def totals(self) -> Totals | None:
        """Return the sums over everything added; None where nothing was."""
        if self._waiting:
            self._merge_waiting()
        return self._totals

    def _merge_waiting(self) -> None:
        counts, means, variances = zip(*self._waiting, strict=True)
        self._waiting = []
        m = torch.tensor([float(c) for c in counts], dtype=torch.float64)
        mean, var = torch.stack(means).cpu().double(), torch.stack(variances).cpu().double()
        if self._unbiased:
            var = var * ((m - 1) / m).reshape(-1, *[1] * (var.dim() - 1))
        self._totals = merge([self._totals, _sum_up(m, mean, var)])


def merge(parts: Iterable[Totals | None]) -> Totals | None:
    """Add up the totals of several tallies, those of other ranks too; None counts for nothing."""
    return reduce(_add, filter(None, parts), None)


def _sum_up(m: Tensor, means: Tensor, variances: Tensor) -> Totals:
    weight = (m / m.sum().clamp(min=1)).reshape(-1, *[1] * (means.dim() - 1))
    # Relative to the first, so that a large common mean costs no digits.
    mean = means[0] + (weight * (means - means[0])).sum(0)
    var = (weight * variances).sum(0)
    count = float(m.sum())
    return Totals(
        batches=len(m),
        count=count,
        freedom=float((m - 1).clamp(min=0).sum()),
        mean=mean,
        within=count * var,
        between=count * (weight * (means - mean).square()).sum(0),
        spread=count * (weight * (variances - var).square()).sum(0),
    )


def _add(a: Totals | None, b: Totals) -> Totals:
    if a is None:
        return b
    count = a.count + b.count
    share = a.count * b.count / max(count, 1.0)
    delta = b.mean - a.mean
    gap = b.within / max(b.count, 1.0) - a.within / max(a.count, 1.0)
    return Totals(
        batches=a.batches + b.batches,
        count=count,
        freedom=a.freedom + b.freedom,
        mean=a.mean + delta * (b.count / max(count, 1.0)),
        within=a.within + b.within,
        between=a.between + b.between + share * delta.square(),
        spread=a.spread + b.spread + share * gap.square(),
    )
