"""How population statistics follow from what was tallied, how sure they are, and how far running averages were off."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Literal

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..tally import Totals
from ..verb_report import Site

Rule = Literal["paper", "pooled"]


@dataclass(frozen=True)
class LayerStatistics:
    """Hold how one layer's population statistics compare with its running averages, and how sure they are.

    Gaps and errors are the worst over the layer's features, in units of the population's own scale: those of the mean
    in standard deviations, sqrt(Var[x] + eps), those of the variance relative to Var[x] + eps.

    Beyond the paper: how far the moving averages of Sec. 3.1 are from Alg. 2, l. 10.
    """

    path: str
    batches: int
    count: float
    mean_gap: float
    var_gap: float
    mean_error: float
    """The standard error of the mean, from the spread of the batches' means."""
    var_error: float
    """The standard error of the variance, from the spread of the batches' variances."""

    @property
    def m(self) -> float:
        """The size of a mini-batch as this layer sees it, locations counted, on average: the paper's m.

        It is that of one forward pass: where gradients are accumulated over several, of one of them.
        """
        return self.count / self.batches


@dataclass(frozen=True)
class Population:
    """Hold what :func:`estimate_` found, layer by layer; print it or query it.

    Beyond the paper: an account of Alg. 2, l. 8-10.
    """

    layers: tuple[LayerStatistics, ...]
    left_alone: tuple[Site, ...]

    def more_batches(self, tolerance: float = 0.05) -> int:
        """Return how many more batches bring every standard error down to ``tolerance``; 0 where these were enough.

        The error falls with the square root of the number of batches. A single batch says nothing about its own error:
        the answer is then 1.
        """
        more = 0
        for layer in self.layers:
            factor = (max(layer.mean_error, layer.var_error) / tolerance) ** 2
            more = max(more, ceil(layer.batches * (factor - 1)) if isfinite(factor) else 1)
        return more

    def __str__(self) -> str:
        width = max([5, *(len(layer.path) for layer in self.layers)])
        lines = [f"{'layer':{width}}  batches        m  mean gap (error)     var gap (error)"]
        lines += [
            f"{s.path:{width}}  {s.batches:7d}  {s.m:7.0f}"
            f"  {s.mean_gap:8.3f} ({s.mean_error:.3f})  {s.var_gap:10.3f} ({s.var_error:.3f})"
            for s in self.layers
        ]
        return "\n".join([*lines, *map(str, self.left_alone)])


def has_variance(totals: Totals, rule: Rule) -> bool:
    """Say whether there are enough values for Var[x]."""
    return totals.freedom > 0 if rule == "paper" else totals.count > 1


def statistics(totals: Totals, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return E[x] and Var[x] from totals that have a variance.

    Paper: Alg. 2, l. 10
    """
    if rule == "paper":
        return totals.mean, totals.within / totals.freedom
    return totals.mean, (totals.within + totals.between) / totals.count


def compare(path: str, layer: TorchBatchNorm, totals: Totals, rule: Rule) -> LayerStatistics:
    """Set what was found beside the running averages that the layer holds."""
    mean, var = statistics(totals, rule)
    running_mean, running_var = layer.running_mean.cpu().double(), layer.running_var.cpu().double()  # type: ignore[union-attr]
    scale = var + layer.eps
    freedom = totals.count * (totals.batches - 1)
    return LayerStatistics(
        path=path,
        batches=totals.batches,
        count=totals.count,
        mean_gap=_worst((running_mean - mean).abs() / scale.sqrt()),
        var_gap=_worst((running_var - var).abs() / scale),
        mean_error=_worst((totals.between / freedom / scale).sqrt()) if freedom else inf,
        var_error=_worst((totals.spread / freedom).sqrt() / scale) if freedom else inf,
    )


def _worst(per_feature: Tensor) -> float:
    return float(per_feature.max()) if per_feature.numel() else 0.0
