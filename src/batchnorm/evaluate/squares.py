"""The CPU's share of evaluation: each image is decoded once, resized to every scale and cut into squares."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.crops import centre_box
from ..data.images import CorruptFile
from ..data.order import Order
from ..data.source import ImageSource, open_source
from ..extras import require
from .crops import Crops, resized, square_boxes

Pixels = NDArray[np.uint8]


class Squares(NamedTuple):
    """Hold the squares of one step's images.

    All squares of one scale have the same size, whatever their images' shapes, so they are one tensor.
    """

    examples: Tensor
    """the number of each readable image in its split"""
    labels: Tensor
    owner: Tensor
    """the row in ``examples`` that each square is of"""
    pixels: tuple[Tensor, ...]
    """(squares, side, side, 3), one tensor for each scale"""
    corrupt: tuple[CorruptFile, ...]
    enlarged: int
    """images smaller than the crop"""


class SquareBatches:
    """Give every image of a split once, as squares; made by :func:`open_squares`."""

    def __init__(self, source: ImageSource, crops: Crops, order: Order, workers: int) -> None:
        self.source, self.crops, self.order, self.workers = source, crops, order, workers

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is a place among them."""
        return self.source.classes

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Squares]:
        """Yield this rank's part of each step, decoded a few steps ahead by threads: Pillow leaves them free to run."""
        examples = self.order.examples(0)
        parts = (self.order.batch(examples, step) for step in range(len(self)))
        pool, ahead = ThreadPoolExecutor(max(1, self.workers)), deque[Future[Squares]]()
        try:
            for part in parts:
                ahead.append(pool.submit(self._cut, part))
                if len(ahead) > self.workers + 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _cut(self, examples: NDArray[np.int64]) -> Squares:
        kept: list[int] = []
        owner: list[int] = []
        levels: list[list[Pixels]] = [[] for _ in self.crops.sides]
        corrupt: list[CorruptFile] = []
        enlarged = 0
        for index in examples.tolist():
            try:
                image = _decode(self.source.read(index))
                squares = cut(image, self.crops)
            except Exception as error:  # whatever a decoder raises for a broken file
                corrupt.append(CorruptFile(self.source.name(index), str(error)))
                continue
            owner += [len(kept)] * len(squares[0])
            kept.append(index)
            enlarged += min(image.size) < self.crops.size
            for level, found in zip(levels, squares, strict=True):
                level += found
        return Squares(
            torch.tensor(kept, dtype=torch.int64),
            torch.from_numpy(self.source.labels[kept].astype(np.int64)),
            torch.tensor(owner, dtype=torch.int64),
            tuple(_stack(level, side) for level, side in zip(levels, self.crops.sides, strict=True)),
            tuple(corrupt),
            enlarged,
        )


def open_squares(
    path: str | Path,
    split: str = "val",
    *,
    crops: Crops,
    batch_size: int = 256,
    workers: int = 4,
    rank: int = 0,
    world_size: int = 1,
) -> SquareBatches:
    """Open a split of an image folder or of tar shards for evaluation: every image exactly once over all ranks.

    Args:
        path: folder with SPLIT/CLASS/*.jpg or with SPLIT-*.tar.
        split: which one.
        crops: which crops of each image will be wanted.
        batch_size: crops that a network takes at a time, on each rank; a step has the images that give as many.
        workers: threads that decode.
        rank, world_size: this process among all.

    Raises:
        FileNotFoundError: where the folder or its images are not found.
        ValueError: where a class has no images in the split.

    Beyond the paper: how it is run.
    """
    source = open_source(path, split)
    if not len(source.labels):
        raise FileNotFoundError(f"{path} has no images in its split {split!r}")
    _check_classes(source, path, split)
    images = max(1, round(batch_size / crops.per_square))
    order = Order(source.shard_sizes, images * world_size, False, "epoch", 0, rank, world_size)
    return SquareBatches(source, crops, order, workers)


def cut(image: Any, crops: Crops) -> list[list[Pixels]]:
    """Return the squares of a decoded image for each scale.

    Left, centre and right square of a square image are the same one, which then stands for all three.

    Beyond the paper: GoogLeNet's protocol.
    """
    bilinear = require("PIL.Image", "train").Resampling.BILINEAR
    if not crops.scales:
        box = centre_box(*image.size, crops.size)
        return [[np.asarray(image.resize((crops.size, crops.size), bilinear, box=box))]]
    squares = 1 if image.width == image.height else crops.squares
    levels: list[list[Pixels]] = []
    for scale in crops.scales:
        width, height = resized(*image.size, scale)
        boxes = square_boxes(width, height, squares)  # type: ignore[arg-type]
        if max(width, height) <= 3 * scale:
            whole = np.asarray(image.resize((width, height), bilinear))
            levels.append([whole[int(b.top) : int(b.bottom), int(b.left) : int(b.right)] for b in boxes])
        else:
            # Of a long image most is in no square, and an extreme one would not fit into memory: the same pixels
            # come from resizing the squares alone.
            x, y = image.width / width, image.height / height
            levels.append([np.asarray(image.resize((scale, scale), bilinear, box=b.scaled(x, y))) for b in boxes])
    return levels


def _decode(data: bytes) -> Any:
    return require("PIL.Image", "train").open(io.BytesIO(data)).convert("RGB")


def _stack(squares: list[Pixels], side: int) -> Tensor:
    return torch.from_numpy(np.stack(squares) if squares else np.empty((0, side, side, 3), np.uint8))


def _check_classes(source: ImageSource, path: str | Path, split: str) -> None:
    examples = np.bincount(source.labels, minlength=len(source.classes))
    if len(examples) > len(source.classes):
        raise ValueError(
            f"{path} has label {len(examples) - 1} in its split {split!r}, but names only {len(source.classes)} classes"
        )
    empty = [name for name, n in zip(source.classes, examples.tolist(), strict=True) if not n]
    if empty:
        raise ValueError(
            f"{path} has no images of {len(empty)} of its {len(source.classes)} classes in its split {split!r}"
            f" ({', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}): an error over the others would not compare"
        )
