"""The data that a monitor records at one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly over [0, 1), however many there are."""


class Percentiles(NamedTuple):
    """The percentiles of a nonlinearity's input, and of the input of the batch normalization before it.

    ``z`` has the percentiles of the nonlinearity's input, and ``x`` has the percentiles of x = Wu, the input of the
    batch normalization. Both have shape (percentiles, units). If there is no normalization, ``x`` is ``z``.

    >>> from batchnorm.monitor import Monitor
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Sigmoid())
    >>> z, x = Monitor(net).record(step=0, batch=torch.tensor([[1.0], [3.0], [5.0]])).percentiles["1"]
    >>> z.shape, x[:, 0]  # the 15th, 50th and 85th percentile
    (torch.Size([3, 1]), tensor([1.6000, 3.0000, 4.4000]))

    Paper: Fig. 1 b, c
    """

    z: Tensor
    x: Tensor


class Change(NamedTuple):
    """How much a layer's gradient changes from g to g': ||g' - g|| / ||g||, and the cosine of the angle between them.

    >>> from batchnorm.monitor import gradient_change
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    >>> for weight in net.parameters(): _ = torch.nn.init.ones_(weight)
    >>> gradient_change(net, lambda y, batch: y.mean(), torch.ones(2, 1), rate=0.25)
    {'1': Change(relative=0.25, cosine=1.0)}

    Paper: Sec. 2, internal covariate shift
    """

    relative: float
    cosine: float


class Record(NamedTuple):
    """The percentiles and gradient changes recorded at one step, by layer name; either may be empty.

    >>> from batchnorm.monitor import Monitor
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid())
    >>> record = Monitor(net).record(step=100, batch=torch.randn(8, 4))
    >>> record.step, list(record.percentiles), record.gradient_change
    (100, ['1'], {})

    Paper: Fig. 1 b, c
    """

    step: int
    percentiles: Mapping[str, Percentiles] = {}
    gradient_change: Mapping[str, Change] = {}


def percentiles_of(
    values: Tensor, percentiles: Sequence[float], *, unit_dim: int = 1, samples: int = 4096, units: int = 256
) -> Tensor:
    """Return the percentiles of each unit's values over all other dimensions, with shape (percentiles, units).

    The percentiles are interpolated linearly. The result covers at most ``units`` evenly spaced units, and uses at most
    ``samples`` values of each unit. The percentiles of a unit with a NaN, and of empty ``values``, are NaN.

    >>> percentiles_of(torch.tensor([[0.0], [1.0], [2.0]]), (0, 50, 75))
    tensor([[0.0000],
            [1.0000],
            [1.5000]])
    """
    values = values.detach()
    if values.dim() < 2:  # a single unit, for example after a squeeze
        values = values.reshape(-1, 1)
    table = values.movedim(unit_dim, 0).flatten(1)
    if table.numel() == 0:
        return table.new_full((len(percentiles), len(table)), torch.nan, dtype=torch.float32)
    table = table[:: -(-len(table) // units)]
    if (n := table.shape[1]) > samples:
        # Do not choose values at random, because a monitor must not change the random numbers that training draws. Do
        # not choose every k-th value either: if k and an image's width have common factors, most columns are left out.
        places = (torch.arange(samples, dtype=torch.float64, device="cpu") * GOLDEN).frac() * n
        table = table.index_select(1, places.long().to(table.device))
    table = table.float().contiguous()
    position = [q / 100 * (table.shape[1] - 1) for q in percentiles]
    below, above = [floor(p) for p in position], [ceil(p) for p in position]
    part = [p - b for p, b in zip(position, below, strict=True)]
    if table.device.type == "cpu":
        ordered = np.sort(table.numpy(), axis=1)  # faster than torch.sort
        low = ordered[:, below]
        found = low + (ordered[:, above] - low) * np.asarray(part, dtype=np.float32)
        found[np.isnan(ordered[:, -1])] = np.nan
        return torch.from_numpy(np.ascontiguousarray(found.T))
    on_device = table.sort(dim=1).values
    found_there = torch.lerp(on_device[:, below], on_device[:, above], table.new_tensor(part))
    return torch.where(on_device[:, -1:].isnan(), torch.nan, found_there).t().contiguous()
