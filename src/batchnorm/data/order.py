"""Divide examples among steps and ranks, and sample batches of balanced sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from .random_numbers import permutation, seed_at

Shuffle = Literal["fixed", "epoch"]


@dataclass(frozen=True)
class Order:
    """Divide each epoch into steps: every example is used once, and the ranks share each step.

    A step has ``batch_size`` examples over all ranks together, so the examples of a step do not depend on the number of
    ranks. Each rank takes consecutive examples of the step, and the ranks' numbers of examples differ by at most one.

    If the number of examples is not a multiple of the batch size, the last step is smaller. In training, a rank needs
    at least two examples to normalize, so the last two steps share their examples evenly if the last step would be less
    than half full. In evaluation, the examples are not moved between steps, and a rank may get no examples in the last
    step.

    Args:
        shard_sizes: the number of examples in each shard.
        batch_size: the number of examples in a step, over all ranks.
        train: True for random order and balanced last steps, False for the stored order.
        shuffle: ``"fixed"`` uses one random order for all epochs, so the same examples always share a mini-batch;
            ``"epoch"`` draws a new order each epoch. Both settings shuffle the shards and the examples within each
            shard.
        seed: the seed of the random order.
        rank: the rank of this process.
        world_size: the number of processes.

    Raises:
        ValueError: if an argument is invalid, or if a rank would get fewer than two examples in a training step.

    >>> order = Order((5, 4), batch_size=4, train=True, shuffle="epoch", seed=0)
    >>> len(order), [order.step_size(step) for step in range(3)]
    (3, [4, 3, 2])

    Paper: Sec. 4.2.1, "Shuffle training examples more thoroughly"
    """

    shard_sizes: tuple[int, ...]
    batch_size: int
    train: bool
    shuffle: Shuffle
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: a step needs at least one example")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank}: must be from 0 to {self.world_size - 1} (world_size={self.world_size})"
            )
        if self.shuffle not in ("fixed", "epoch"):
            raise ValueError(f"shuffle={self.shuffle!r} is unknown: choose 'fixed' or 'epoch'")
        least = min((self.step_size(s) for s in range(max(0, len(self) - 2), len(self))), default=0)
        if self.train and least < 2 * self.world_size:
            enough, several = 4 * self.world_size, self.world_size > 1
            raise ValueError(
                f"with {self.num_examples} examples and a batch size of {self.batch_size}"
                f"{f' over {self.world_size} ranks' if several else ''}, some step has fewer than 2 examples"
                f"{' per rank' if several else ''}, too few for batch normalization: use at least {enough} examples and"
                f" a batch size of {enough} or more{', or fewer ranks' if several else ''}"
            )

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, over all ranks."""
        return sum(self.shard_sizes)

    def __len__(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def step_size(self, step: int) -> int:
        """Return the number of examples in the step, over all ranks."""
        lo, hi = self._bounds(step)
        return hi - lo

    def rows(self, step: int) -> slice:
        """Return this rank's slice of the step's examples."""
        each, extra = divmod(self.step_size(step), self.world_size)
        start = self.rank * each + min(self.rank, extra)
        return slice(start, start + each + (self.rank < extra))

    def batch(self, permuted: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """Return this rank's examples of a step; ``permuted`` comes from :meth:`examples`."""
        lo, hi = self._bounds(step)
        return permuted[lo:hi][self.rows(step)]

    def examples(self, epoch: int) -> NDArray[np.int64]:
        """Return all examples of an epoch, over all ranks, in the epoch's order."""
        if not self.train:
            return np.arange(self.num_examples)
        key = seed_at(self.seed, epoch if self.shuffle == "epoch" else 0)
        first = np.concatenate([[0], np.cumsum(self.shard_sizes)])
        shards = permutation(seed_at(key, 0), len(self.shard_sizes))
        return np.concatenate([first[s] + permutation(seed_at(key, 1 + s), self.shard_sizes[s]) for s in shards])

    def _bounds(self, step: int) -> tuple[int, int]:
        n, last = self.num_examples, len(self) - 1
        if not 0 <= step <= last:
            raise IndexError(f"step {step} is out of range: an epoch has {last + 1} steps")
        tail = n - last * self.batch_size
        middle = last * self.batch_size
        if self.train and last > 0 and tail < self.batch_size / 2:
            middle = n - (self.batch_size + tail) // 2
        edges = (*(s * self.batch_size for s in range(step, min(step + 2, last))), middle, n)
        return (edges[0], edges[1])


class BalancedBatches(Sampler[list[int]]):
    """Sample mini-batches whose sizes differ by at most one, so that no batch has a single example.

    Use it as a loader's ``batch_sampler``. Every example is used once per epoch, in ceil(n / batch_size) batches.

    Args:
        n: the number of examples, at least 2.
        batch_size: the largest size of a batch, at least 2.
        shuffle: whether to draw a new permutation each epoch.
        generator: the generator that draws the permutation.

    Raises:
        ValueError: if a batch of one example cannot be avoided.

    >>> [len(batch) for batch in BalancedBatches(65, batch_size=32)]
    [22, 22, 21]

    Beyond the paper: no batch has a single example, because Alg. 1 needs m > 1 (Sec. 3.1).
    """

    def __init__(
        self, n: int, batch_size: int, *, shuffle: bool = False, generator: torch.Generator | None = None
    ) -> None:
        if n < 2 or batch_size < 2:
            raise ValueError(f"n={n} and batch_size={batch_size}: batch normalization needs both to be at least 2")
        if batch_size == 2 and n % 2:
            raise ValueError(
                f"{n} examples in batches of 2 leave a batch of one, which cannot be normalized; use batch_size=3"
            )
        self.n, self.batch_size, self.shuffle, self.generator = n, batch_size, shuffle, generator

    def __len__(self) -> int:
        return -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n, generator=self.generator) if self.shuffle else torch.arange(self.n)
        return (part.tolist() for part in order.tensor_split(len(self)))
