"""Train any variant of Section 4.1's network with autograd and any optimizer, on the same order of examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from ...data import Digits
from .training import Setting, order


def train_eagerly_(
    net: nn.Module, data: Digits, setting: Setting, optimizer: Optimizer, marks: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """Train and yield (step, loss of its batch) at each of the marks, in order, as :func:`training.train_` does.

    Of the setting, the steps, the batch size and the seed count here; the optimizer has the rate.

    Paper: Sec. 3.1
    """
    start = 0
    for mark in sorted({m for m in marks if 0 < m <= setting.steps}):
        loss = float("nan")
        for rows in order(setting, len(data.images), start, mark).unbind():
            value = F.cross_entropy(net(data.images[rows]), data.labels[rows])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            loss = value.item()
        start = mark
        yield mark, loss
