"""Batches of images from folders or tar shards, exact at any position on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .crops import CROP_AREA, DRAWS, centre_box, random_box
from .decode import decode_crop
from .draws import seed_at, uniforms
from .order import Order, Shuffle
from .source import ImageSource, open_source


class CorruptFile(NamedTuple):
    """Say which file was skipped and why."""

    name: str
    reason: str


class Decoded(NamedTuple):
    """Hold the readable images of a batch."""

    images: Tensor  # (n, size, size, 3)
    labels: Tensor
    corrupt: list[CorruptFile]


@dataclass(frozen=True)
class Decoder:
    """Read, decode and crop."""

    source: ImageSource
    size: int
    train: bool
    seed: int
    area: tuple[float, float]

    def batch(self, epoch: int, indices: NDArray[np.int64]) -> Decoded:
        """Return the crops of one batch."""
        draws = uniforms(seed_at(self.seed, epoch, 2), indices, DRAWS).tolist() if self.train else None
        images, labels, corrupt = [], [], []
        for row, index in enumerate(indices.tolist()):
            choose = partial(random_box, draws[row]) if draws else partial(centre_box, size=self.size)
            try:
                images.append(decode_crop(self.source.read(index), choose, self.size))
                labels.append(int(self.source.labels[index]))
            except Exception as error:
                corrupt.append(CorruptFile(self.source.name(index), str(error)))
        pixels = np.stack(images) if images else np.empty((0, self.size, self.size, 3), np.uint8)
        return Decoded(torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64), corrupt)


class ImageBatches:
    """Give the batches of any epoch, from any step on; made by :func:`open_images`."""

    def __init__(self, source: ImageSource, order: Order, decoder: Decoder, device: torch.device) -> None:
        self.source, self.order, self.decoder, self.device = source, order, decoder, device
        self.corrupt: list[CorruptFile] = []

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is a place among them."""
        return self.source.classes

    @property
    def num_examples(self) -> int:
        """The examples of an epoch over all ranks, corrupt ones included."""
        return self.order.num_examples

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) of this rank, from step ``start`` to the end of the epoch."""
        examples = self.order.examples(epoch)
        for step in range(start, len(self)):
            decoded = self.decoder.batch(epoch, self.order.batch(examples, step))
            yield decoded.images.permute(0, 3, 1, 2).to(self.device), decoded.labels.to(self.device)


def open_images(
    path: str | Path,
    split: str = "train",
    *,
    size: int,
    batch_size: int,
    train: bool,
    shuffle: Shuffle = "epoch",
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    cache: Literal["none", "device"] = "none",
    device: torch.device | str = "cpu",
    max_corrupt: int | None = None,
    crop_area: tuple[float, float] = CROP_AREA,
) -> ImageBatches:
    """Open a split of an image folder or of tar shards as batches.

    ``batch_size`` counts the examples of a step over all ranks.
    """
    source = open_source(path, split)
    order = Order(source.shard_sizes, batch_size, train, shuffle, seed, rank, world_size)
    return ImageBatches(source, order, Decoder(source, size, train, seed, crop_area), torch.device(device))
