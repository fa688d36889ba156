"""The statistics of a mini-batch, (count, mean, var), and how those of several batches merge into one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Hold the count m, the mean mu_B and the biased variance sigma_B^2 of each feature over a mini-batch.

    Paper: Alg. 1, l. 1-2
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nothing needs
    mean: Tensor
    var: Tensor

    @property
    def unbiased_var(self) -> Tensor:
        """The estimate m/(m-1) sigma_B^2 of the population variance; 0 where m < 2."""
        return self.var * (self.count / (self.count - 1).clamp(min=1))


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which statistics of ``x`` are kept: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def batch_moments(
    x: Tensor, dims: list[int], mask: Tensor | None = None, mean_dtype: torch.dtype | None = None
) -> tuple[Moments, Tensor]:
    """Return the moments of ``x`` over ``dims`` (kept as ones) and the centred values x - mu_B, in at least float32.

    ``mean_dtype`` asks for the mean in another type than the rest.

    ``mask`` has the shape of ``x`` with a one for the features; where it is False, x counts for nothing and the
    centred value is 0.

    The mean is found in two parts, mu = hi + lo with lo the mean of x - hi: x - hi is exact for values near
    their mean, so nothing is lost when the mean is a million standard deviations.

    Paper: Alg. 1, l. 1-2
    """
    x = x.to(statistics_dtype(x))
    if mask is None:
        m = 1
        for d in dims:
            m *= x.shape[d]
        count = torch.full((), m, dtype=x.dtype, device=x.device)
    else:
        # `where` and not a product: what lies in masked positions may be inf or NaN.
        x = torch.where(mask, x, 0)
        count = mask.sum(dtype=x.dtype)
    total = count.clamp(min=1)

    def average(v: Tensor) -> Tensor:
        return v.sum(dims, keepdim=True) / total

    hi = average(x).detach()
    hi = torch.where(hi.isfinite(), hi, 0)
    shifted = x - hi if mask is None else torch.where(mask, x - hi, 0)
    lo = average(shifted)
    centred = shifted - lo if mask is None else torch.where(mask, shifted - lo, 0)
    var = average(centred * centred)
    mean = hi.to(mean_dtype) + lo.to(mean_dtype) if mean_dtype else hi + lo
    return Moments(count, mean, var), centred


def merge(parts: Moments) -> Moments:
    """Merge moments stacked along their first dimension into those of all their samples together.

    mean = sum(m_b mean_b) / sum(m_b) and m var = sum(m_b var_b) + sum(m_b (mean_b - mean)^2). Empty parts
    (count 0) count for nothing, whatever their mean and variance hold.

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
    # Relative to one of the parts, so that a large common mean does not cost digits of the differences.
    base = means[parts.count.argmax()].detach()
    delta = torch.where(seen, means - base, 0)
    shift = (weight * delta).sum(0)
    between = (weight * (delta - shift).square()).sum(0)
    within = (weight * torch.where(seen, parts.var, 0)).sum(0)
    return Moments(count, base + shift, within + between)
