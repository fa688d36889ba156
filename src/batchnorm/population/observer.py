"""Note the statistics of every mini-batch that a layer sees."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import collectives
from ..layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from ..ops.moments import batch_moments
from ..tally import Tally, Totals, merge
from .report import Rule, has_variance

# Layers known to leave exactly a batch's mean and unbiased variance in their buffers when momentum is 1.
KNOWN = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d),
)


class Observer:
    """Note the moments of each call of a layer.

    A known layer computes them itself in training mode: with momentum 1 and fresh buffers, the buffers hold exactly
    them after the call, and nothing is computed twice. For other layers, and where ``direct``, they are computed here.
    """

    def __init__(self, layer: TorchBatchNorm, path: str, *, direct: bool = False) -> None:
        self.layer, self.path = layer, path
        wide = layer.running_mean is not None and layer.running_mean.dtype.itemsize >= 4
        own = getattr(layer, "statistics", None)
        uncounted = layer.num_batches_tracked is None
        self.direct = direct or type(layer) not in KNOWN or not wide or own is not None or uncounted
        self.tally = Tally(unbiased=not self.direct)
        self.totals: Totals | None = None
        self._calls = 0
        self._count: Tensor | int = 0

    def register(self) -> Iterator[Any]:
        """Hook the layer; yield the handles to undo it."""
        yield self.layer.register_forward_pre_hook(self._before, with_kwargs=True)
        if not self.direct:
            # Counts the calls whose statistics the layer could use.
            self.layer._buffers["num_batches_tracked"] = torch.zeros_like(self.layer.num_batches_tracked)  # type: ignore[arg-type]
            self.layer.momentum = 1.0
            yield self.layer.register_forward_hook(self._after)

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["input"]
        mask = args[2] if len(args) > 2 else kwargs.get("mask")
        features = tuple(self.layer.running_mean.shape)  # type: ignore[union-attr]
        positions = (x.shape[0], *x.shape[1 + len(features) :])
        self._count = prod(positions) if mask is None else mask.sum(dtype=torch.float64)
        if self.layer.training and mask is None and self._count == 1:
            raise ValueError(
                f"layer '{self.path}': a batch of shape {tuple(x.shape)} has one value per feature, whose variance says"
                " nothing; drop that batch, or use upstream='population' with rule='pooled'"
            )
        if self.direct:
            self._measure(x, mask, features)
        else:
            for key in ("running_mean", "running_var"):
                self.layer._buffers[key] = torch.zeros_like(self.layer._buffers[key])  # type: ignore[arg-type]

    def _measure(self, x: Tensor, mask: Tensor | None, features: tuple[int, ...]) -> None:
        k = len(features)
        dims = [0, *range(1 + k, x.dim())]
        where = None if mask is None else mask.reshape(mask.shape[0], *[1] * k, *mask.shape[1:])
        moments, _ = batch_moments(x, dims, where)
        self.tally.add(self._count, moments.mean.reshape(features), moments.var.reshape(features))

    def _after(self, layer: nn.Module, args: Any, out: Any) -> None:
        mean, var = self.layer.running_mean, self.layer.running_var
        assert mean is not None and var is not None  # noqa: PT018
        if isinstance(self._count, int) and self._count == 0:
            return  # an empty batch says nothing
        self._calls += 1
        self.tally.add(self._count, mean, var)

    def conclude(self, rule: Rule) -> None:
        """Add up what all ranks noted, and refuse what the rule cannot make statistics of."""
        lost = not self.direct and int(self.layer.num_batches_tracked) != self._calls  # type: ignore[arg-type]
        ranks = collectives.gather_objects((self.tally.totals(), lost))
        totals = merge(part for part, _ in ranks)
        self.totals = totals = None if totals is None or totals.count == 0 else totals  # empty batches say nothing
        finite = totals is None or bool((totals.mean + totals.within + totals.between).isfinite().all())
        if not finite or any(lost for _, lost in ranks):
            raise ValueError(
                f"layer '{self.path}': a batch gave no usable statistics; the network is as it was. Look for inf or NaN"
                " in the batches or in the weights before this layer, or for a mask that leaves a single value"
            )
        if totals is not None and not has_variance(totals, rule):
            if rule == "paper":
                raise ValueError(
                    f"layer '{self.path}': every batch has one value per feature, so rule='paper', which averages the"
                    " variances within batches, has none to average; the network is as it was. Use larger batches, or"
                    " rule='pooled'"
                )
            raise ValueError(
                f"layer '{self.path}': the batches have one value per feature in all, whose variance says nothing; the"
                " network is as it was. Use more data"
            )
