"""Mini-batches whose last one is not a leftover."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class BalancedBatches(Sampler[list[int]]):
    """Sample mini-batches whose sizes differ by at most one, so that no last batch of one example is left over.

    Use it as a loader's ``batch_sampler``. Every example is seen once an epoch, in ceil(n / batch_size) batches.

    Args:
        n: the number of examples, at least 2.
        batch_size: the largest size of a batch, at least 2.
        shuffle: a new permutation each epoch.
        generator: where its randomness comes from.

    Raises:
        ValueError: where a batch of one example could not be avoided.

    >>> [len(batch) for batch in BalancedBatches(65, batch_size=32)]
    [22, 22, 21]

    Beyond the paper: Alg. 1 needs m > 1 (Sec. 3.1).
    """

    def __init__(
        self, n: int, batch_size: int, *, shuffle: bool = False, generator: torch.Generator | None = None
    ) -> None:
        if n < 2 or batch_size < 2:
            raise ValueError(f"{n} example(s) in batches of {batch_size} cannot be normalized: both must be at least 2")
        if batch_size == 2 and n % 2:
            raise ValueError(f"{n} examples in batches of 2 leave one alone; use batch_size=3")
        self.n, self.batch_size, self.shuffle, self.generator = n, batch_size, shuffle, generator

    def __len__(self) -> int:
        return -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n, generator=self.generator) if self.shuffle else torch.arange(self.n)
        return (part.tolist() for part in order.tensor_split(len(self)))
