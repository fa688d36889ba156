"""Training Section 4.1's network: settings, order of the examples, loop and accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ...data import MNIST, Digits, mnist
from ...errors import SEED_MAX, above, at_least, between
from ...evaluate.predictions import evaluating
from ...models import perceptron


@dataclass(frozen=True)
class Setting:
    """All settings of one training run of Section 4.1's network.

    The paper does not give the learning rate or the standard deviation of the initial weights.

    Paper: Sec. 4.1
    """

    batch_norm: bool = True
    steps: int = 50_000
    rate: float = 0.1
    std: float = 0.1
    batch_size: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps)
        between(2, 60_000, batch_size=self.batch_size)
        above(0, rate=self.rate, std=self.std)
        between(0, SEED_MAX, seed=self.seed)

    def network(self) -> nn.Sequential:
        """Build the network; with the same seed, its weights are the same with and without batch normalization."""
        return perceptron(batch_norm=self.batch_norm, std=self.std, seed=self.seed)


def order(setting: Setting, examples: int, start: int, stop: int) -> Tensor:
    """Return the indices of the examples in steps ``start`` to ``stop - 1``, of shape (steps, batch size).

    Each epoch is a new permutation. The batch of a step does not depend on ``start`` or ``stop``, so a resumed run has
    the same batches as an uninterrupted run.

    >>> a, b = (order(Setting(), 6000, *span) for span in ((0, 150), (90, 150)))
    >>> torch.equal(a[90:], b), len(a[:100].unique())
    (True, 6000)
    """
    per_epoch = examples // setting.batch_size
    rows = []
    for epoch in range(start // per_epoch, -(-stop // per_epoch)):
        generator = torch.Generator().manual_seed(1_000_003 * (setting.seed + 1) + epoch)
        permutation = torch.randperm(examples, generator=generator)[: per_epoch * setting.batch_size]
        first = epoch * per_epoch
        rows.append(permutation.reshape(per_epoch, -1)[max(start - first, 0) : stop - first])
    return torch.cat(rows) if rows else torch.empty(0, setting.batch_size, dtype=torch.long)


def train_(
    net: nn.Module,
    data: Digits,
    setting: Setting,
    marks: Iterable[int],
    *,
    start: int = 0,
    optimizer: Optimizer | None = None,
) -> Iterator[tuple[int, float]]:
    """Train on the mean cross-entropy and yield (step, loss of that step's batch) at each mark, in order.

    A mark is a number of updates since the beginning of training. The first ``start`` updates were made earlier, so
    marks up to ``start`` are skipped. Marks after the last step are skipped too. The default optimizer is plain SGD at
    the setting's rate.

    Paper: Sec. 3.1; Sec. 4.1
    """
    optimizer = optimizer or SGD(net.parameters(), lr=setting.rate)
    for mark in sorted({m for m in marks if start < m <= setting.steps}):
        for rows in order(setting, len(data.images), start, mark).unbind():
            # index_select is faster than images[rows].
            images, labels = data.images.index_select(0, rows), data.labels.index_select(0, rows)
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        start = mark
        yield mark, loss.item()


def evenly(steps: int, count: int) -> list[int]:
    """Return ``count`` evenly spaced steps, of which the last is ``steps``.

    >>> evenly(100, 4)
    [25, 50, 75, 100]
    """
    return [max(steps * k // count, 1) for k in range(1, count + 1)]


@torch.no_grad()
def accuracy(net: nn.Module, digits: Digits) -> float:
    """Return the fraction of correct predictions in evaluation mode, and restore the network's mode."""
    with evaluating(net):
        # Evaluate 2,000 digits at a time, so that the activations fit in the CPU's cache.
        predictions = torch.cat([net(part).argmax(1) for part in digits.images.split(2000)])
    return float((predictions == digits.labels).double().mean())


@lru_cache(maxsize=1)
def digits() -> MNIST:
    """Return MNIST, unpacked once per process."""
    return mnist()


def held_out(count: int = 5000) -> MNIST:
    """Return MNIST with the last ``count`` training digits as its test set, and the others as its training set."""
    images, labels = digits().train
    return MNIST(Digits(images[:-count], labels[:-count]), Digits(images[-count:], labels[-count:]))


def accuracies(setting: Setting, marks: Iterable[int], data: MNIST | None = None) -> list[float]:
    """Train a network and return its accuracy on ``data.test`` (with running averages) at each mark."""
    data = data or digits()
    net = setting.network()
    return [accuracy(net, data.test) for _ in train_(net, data.train, setting, marks)]
