"""What a worker does: read, decode and crop one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from .crop_boxes import CROP_AREA, DRAWS, Box, centre_box, random_box
from .decode import Choose, CorruptImageError, decode_crop
from .image_sources import ImageSource
from .random_numbers import seed_at, uniforms


class Request(NamedTuple):
    """Ask for examples as an epoch sees them."""

    epoch: int
    examples: NDArray[np.int64]


class CorruptFile(NamedTuple):
    """Say which file was skipped, and why."""

    example: int
    name: str
    reason: str


class Decoded(NamedTuple):
    """Hold the readable images of a batch as (n, size, size, 3), and what is known of each."""

    images: Tensor
    labels: Tensor
    examples: Tensor
    sizes: Tensor  # width and height before the crop
    corrupt: list[CorruptFile]


class Crop(Protocol):
    """Give, for each example of a request, the function from its width and height to its box."""

    def __call__(self, request: Request) -> Sequence[Choose]:
        """Return one function for each example."""


@dataclass(frozen=True)
class RandomCrop:
    """Cut out a random rectangle that depends on the seed, the epoch and the example alone."""

    seed: int
    area: tuple[float, float] = CROP_AREA

    def __call__(self, request: Request) -> Sequence[Choose]:
        """Return one function for each example."""
        draws = uniforms(seed_at(self.seed, request.epoch, 0), request.examples, DRAWS).tolist()
        return [partial(random_box, row, area=self.area) for row in draws]


@dataclass(frozen=True)
class CentreCrop:
    """Cut out the centre square."""

    size: int

    def __call__(self, request: Request) -> Sequence[Choose]:
        """Return one function for each example."""
        return [partial(centre_box, size=self.size)] * len(request.examples)


class WholeImage:
    """Keep all of the image."""

    def __call__(self, request: Request) -> Sequence[Choose]:
        """Return one function for each example."""
        return [partial(Box, 0, 0)] * len(request.examples)


@dataclass(frozen=True)
class BatchReader(Dataset[Decoded]):
    """Read, decode and crop the examples of a request; corrupt ones are left out and listed."""

    source: ImageSource
    crop: Crop
    size: int

    def __getitem__(self, request: Request) -> Decoded:
        images = torch.empty(len(request.examples), self.size, self.size, 3, dtype=torch.uint8)
        kept: list[int] = []
        sizes: list[tuple[int, int]] = []
        corrupt: list[CorruptFile] = []
        for example, choose in zip(request.examples.tolist(), self.crop(request), strict=True):
            try:
                sizes.append(decode_crop(self.source.read(example), choose, images[len(kept)]))
                kept.append(example)
            except (CorruptImageError, OSError) as error:
                corrupt.append(CorruptFile(example, self.source.name(example), str(error)))
        labels = torch.from_numpy(self.source.labels[kept])
        return Decoded(images[: len(kept)], labels, torch.tensor(kept), torch.tensor(sizes).view(-1, 2), corrupt)
