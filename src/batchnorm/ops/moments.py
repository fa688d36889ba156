"""Compute the moments (count, mean and variance) of mini-batches, merge them, and average them over many batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""How many mini-batches a :class:`MomentAccumulator` collects before it copies their moments to the CPU."""


class Moments(NamedTuple):
    """Hold the moments of each feature over a mini-batch.

    Attributes:
        count: m, the number of values per feature: examples times locations, without masked positions.
        mean: mu_B.
        var: sigma_B^2, the biased variance.

    >>> Moments(count=torch.tensor(4.0), mean=torch.tensor([0.0]), var=torch.tensor([3.0])).unbiased_var
    tensor([4.])

    Paper: Alg. 1, l. 1-2
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nothing uses
    mean: Tensor
    var: Tensor

    @property
    def unbiased_var(self) -> Tensor:
        """The unbiased estimate m/(m-1) sigma_B^2 of the population variance; 0 if m < 2."""
        return self.var * (self.count / (self.count - 1).clamp(min=1))


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for the statistics of ``x``: float64 if ``x`` is float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def batch_moments(
    x: Tensor, dims: list[int], mask: Tensor | None = None, mean_dtype: torch.dtype | None = None
) -> tuple[Moments, Tensor]:
    """Return the moments of ``x`` over ``dims`` (kept as size 1) and the centered values x - mu_B, in at least float32.

    The mean is computed in two parts, mu = hi + lo: hi is the rounded mean of x, and lo is the mean of x - hi. For
    values near their mean, x - hi is exact, so the centered values and the variance are precise even if the mean is a
    million standard deviations from zero.

    Args:
        x: the mini-batch.
        dims: the dimensions to average over.
        mask: bool, of the shape of ``x`` but with size 1 in each feature dimension. Positions where it is False are
            ignored; their centered value is 0.
        mean_dtype: the dtype of the mean, if it should differ from that of the variance.

    Paper: Alg. 1, l. 1-2
    """
    x = x.to(statistics_dtype(x))
    if mask is None:
        m = 1
        for d in dims:
            m *= x.shape[d]
        count = torch.full((), m, dtype=x.dtype, device=x.device)
    else:
        # Use `where` instead of multiplying by the mask, because masked positions may hold inf or NaN.
        x = torch.where(mask, x, 0)
        count = mask.sum(dtype=x.dtype)
    total = count.clamp(min=1)

    def average(v: Tensor) -> Tensor:
        return v.sum(dims, keepdim=True) / total

    hi = average(x).detach()
    hi = torch.where(hi.isfinite(), hi, 0)
    shifted = x - hi if mask is None else torch.where(mask, x - hi, 0)
    lo = average(shifted)
    centered = shifted - lo if mask is None else torch.where(mask, shifted - lo, 0)
    var = average(centered * centered)
    mean = hi.to(mean_dtype) + lo.to(mean_dtype) if mean_dtype else hi + lo
    return Moments(count, mean, var), centered


def merge(parts: Moments) -> Moments:
    """Merge moments, stacked along their first dimension, into the moments of all samples together.

    Each part b, such as a mini-batch or the samples of one rank, has the count m_b, the mean mean_b and the variance
    var_b. The results are m = sum(m_b), mean = sum(m_b mean_b) / m and
    var = sum(m_b (var_b + (mean_b - mean)^2)) / m, where each sum is over b. Empty parts (count 0) are ignored, even if
    their mean or variance is NaN.

    Args:
        parts: the moments of the parts, stacked.

    >>> a = Moments(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 10.0]), torch.tensor([1.0, 1.0]))
    >>> merge(a)
    Moments(count=tensor(5.), mean=tensor(6.), var=tensor(25.))

    Beyond the paper: Chan, Golub & LeVeque's update, for statistics over several batches or ranks.
    """
    counts = parts.count.reshape(-1, *[1] * (parts.mean.dim() - 1))
    count = parts.count.sum(0)
    seen = counts > 0
    weight = counts / count.clamp(min=1)
    means = torch.where(seen, parts.mean, 0)
    # Average the differences from one part's mean, so that no precision is lost if all means are large.
    # Use `index_select`, because `means[index]` would wait for the GPU to compute the index.
    base = means.index_select(0, parts.count.argmax().reshape(1))[0].detach()
    delta = torch.where(seen, means - base, 0)
    shift = (weight * delta).sum(0)
    between = (weight * (delta - shift).square()).sum(0)
    within = (weight * torch.where(seen, parts.var, 0)).sum(0)
    return Moments(count, base + shift, within + between)


@dataclass(frozen=True)
class AveragedMoments:
    """Hold averages over mini-batches B, weighted by their sizes m_B, in float64 on the CPU.

    Paper: Alg. 2, l. 10
    """

    batches: int
    count: float
    """The sum of all m_B."""
    mean: Tensor
    """The average of the means, E_B[mu_B]."""
    var: Tensor
    """The average of the biased variances, E_B[sigma_B^2]."""
    mean_spread: Tensor
    """The variance of the means, E_B[(mu_B - E_B[mu_B])^2]."""
    var_spread: Tensor
    """The variance of the variances, E_B[(sigma_B^2 - E_B[sigma_B^2])^2]."""


class MomentAccumulator:
    """Average the moments of mini-batches.

    Batches are merged in chunks, so most calls of :meth:`add` only append to a list.

    Args:
        unbiased: whether the added variances are the unbiased m/(m-1) sigma_B^2, as in the layers' running averages.

    >>> moments = MomentAccumulator()
    >>> moments.add(8, torch.tensor([0.0]), torch.tensor([0.0]))
    >>> moments.add(2, torch.tensor([10.0]), torch.tensor([0.0]))
    >>> averages = moments.averages()
    >>> float(averages.mean), float(averages.var + averages.mean_spread)
    (2.0, 16.0)

    Paper: Alg. 2, l. 10
    """

    def __init__(self, *, unbiased: bool = False) -> None:
        self._unbiased = unbiased
        self._pending: list[tuple[Tensor | int, Tensor, Tensor]] = []
        self._averages: AveragedMoments | None = None

    def add(self, count: Tensor | int, mean: Tensor, var: Tensor) -> None:
        """Add one mini-batch: the number of values per feature, and each feature's mean and variance."""
        self._pending.append((count, mean, var))
        if len(self._pending) >= CHUNK:
            self._merge_pending()

    def averages(self) -> AveragedMoments | None:
        """Return the averages over all non-empty mini-batches, or None if no such batch was added."""
        if self._pending:
            self._merge_pending()
        return self._averages

    def _merge_pending(self) -> None:
        counts, *moments = zip(*self._pending, strict=True)
        self._pending = []
        m = torch.tensor([float(c) for c in counts], dtype=torch.float64, device="cpu")
        means, variances = (torch.stack(column).cpu().double()[m > 0] for column in moments)
        m = m[m > 0]
        if len(m) == 0:
            return
        if self._unbiased:
            variances = variances * _column((m - 1) / m, variances)
        zeros = torch.zeros_like(means)
        self._averages = merge_averages([self._averages, _average(len(m), m, means, variances, zeros, zeros)])


def merge_averages(parts: Iterable[AveragedMoments | None]) -> AveragedMoments | None:
    """Merge averages over different mini-batches, for example from several ranks; return None if all parts are None."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    columns = ([getattr(part, name) for part in present] for name in ("mean", "var", "mean_spread", "var_spread"))
    m = torch.tensor([part.count for part in present], dtype=torch.float64, device="cpu")
    return _average(sum(part.batches for part in present), m, *map(torch.stack, columns))


def _average(
    batches: int, m: Tensor, means: Tensor, variances: Tensor, mean_spreads: Tensor, var_spreads: Tensor
) -> AveragedMoments:
    weight = _column(m / m.sum(), means)
    # Average the differences from the first mean, so that no precision is lost if all means are large.
    mean = means[0] + (weight * (means - means[0])).sum(0)
    var = (weight * variances).sum(0)
    mean_spread = (weight * (mean_spreads + (means - mean).square())).sum(0)
    var_spread = (weight * (var_spreads + (variances - var).square())).sum(0)
    return AveragedMoments(batches, float(m.sum()), mean, var, mean_spread, var_spread)


def _column(v: Tensor, like: Tensor) -> Tensor:
    return v.reshape(-1, *[1] * (like.dim() - 1))
