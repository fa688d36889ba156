"""On the CPU, prepare images for evaluation: decode each once, resize it to every scale, cut it into squares."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.crop_boxes import center_box
from ..data.decode import CorruptImageError, decode_crop, reason_of, to_rgb
from ..data.image_sources import ImageSource, check_complete, open_source
from ..data.loader import CorruptFile
from ..data.order import Order
from ..optional_packages import require
from .crops import Crops, resized, square_boxes

# The largest aspect ratio at which an image's three squares cover the whole image.
LONG = 3


class Squares(NamedTuple):
    """The squares of one step's images.

    All squares of one scale have the same size, whatever their images' shapes, so one tensor holds them.
    """

    pixels: list[Tensor]
    """uint8 tensors of shape (squares, side, side, 3), one for each scale"""
    rows: Tensor
    """the indices of each image's squares in ``pixels``, of shape (images, squares); a square image has only one
    square, whose index is repeated"""
    labels: Tensor
    examples: Tensor
    """the index of each image in its split"""
    enlarged: int
    """number of images that are smaller than the crop"""
    corrupt: list[CorruptFile]


@dataclass(frozen=True)
class SquareReader(Dataset[Squares]):
    """Read and decode images, and cut them into squares; corrupt images are left out and listed."""

    source: ImageSource
    crops: Crops

    def __getitem__(self, examples: NDArray[np.int64]) -> Squares:
        kept: list[int] = []
        found: list[list[Tensor]] = []
        corrupt: list[CorruptFile] = []
        enlarged = 0
        for example in examples.tolist():
            try:
                squares, short = self._read(example)
            except (CorruptImageError, OSError) as error:
                corrupt.append(CorruptFile(example, self.source.name(example), str(error)))
                continue
            kept.append(example)
            found.append(squares)
            enlarged += short < self.crops.size
        pixels = [
            torch.cat([torch.empty(0, side, side, 3, dtype=torch.uint8), *(squares[k] for squares in found)])
            for k, side in enumerate(self.crops.sides)
        ]
        labels = torch.from_numpy(self.source.labels[kept])
        return Squares(pixels, self._rows(found), labels, torch.tensor(kept, dtype=torch.int64), enlarged, corrupt)

    def _rows(self, found: list[list[Tensor]]) -> Tensor:
        counts = torch.tensor([len(squares[0]) for squares in found], dtype=torch.int64)
        place = torch.minimum(torch.arange(self.crops.squares), counts[:, None] - 1)
        return (counts.cumsum(0) - counts)[:, None] + place

    def _read(self, example: int) -> tuple[list[Tensor], int]:
        """Return an image's squares and its short side."""
        data, size = self.source.read(example), self.crops.size
        if self.crops.scales:
            image = decode(data)
            return cut_squares(image, self.crops), min(image.shape[:2])
        square = torch.empty(1, size, size, 3, dtype=torch.uint8)
        return [square], min(decode_crop(data, partial(center_box, size=size), square[0]))


class SquareBatches:
    """Batches of squares from this rank's images of a split, each image once per pass; made by :func:`open_squares`.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "val/cat").mkdir(parents=True)
    >>> Image.new("RGB", (48, 40)).save(folder / "val/cat/0.png")
    >>> batches = open_squares(folder, crops=Crops.of(144, size=32))
    >>> len(batches), batches.num_examples, batches.classes, batches.crops.count
    (1, 1, ('cat',), 144)

    Beyond the paper: loading images for evaluation.
    """

    def __init__(self, source: ImageSource, crops: Crops, order: Order, workers: int, device: torch.device) -> None:
        self.source, self.crops, self.order, self.device = source, crops, order, device
        examples = order.examples(0)
        steps = [order.batch(examples, step) for step in range(len(order))]
        self.num_examples = sum(map(len, steps))
        """the number of this rank's images, including corrupt ones"""
        self._loader = DataLoader(
            SquareReader(source, crops),
            batch_size=None,
            sampler=cast("list[int]", steps),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # otherwise the loader would draw from torch's global generator
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is an index into them."""
        return self.source.classes

    def __len__(self) -> int:
        """Return the number of steps, the same on every rank."""
        return len(self.order)

    def __iter__(self) -> Iterator[Squares]:
        """Yield this rank's part of each step, with pixels in pinned memory if the device is a GPU."""
        return cast("Iterator[Squares]", iter(self._loader))


def open_squares(
    path: str | Path,
    split: str = "val",
    *,
    crops: Crops,
    batch_size: int = 256,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> SquareBatches:
    """Open a split of an image folder or of tar shards for evaluation; all ranks together see every image exactly once.

    Args:
        path: a folder with SPLIT/CLASS/*.jpg or with SPLIT-*.tar.
        split: the name of the split.
        crops: the crops of each image.
        batch_size: each step gives a rank about ``batch_size / crops.per_square`` images.
        workers: the number of processes that decode ahead; 0 decodes in this process.
        rank: the rank of this process.
        world_size: the number of processes.
        device: the network's device.

    Raises:
        FileNotFoundError: if ``path`` has the split in neither of the two layouts or in both, or if the split's class
            folders have no images.
        ValueError: if an argument is out of range, the data is damaged, or a class has no images.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "val/cat").mkdir(parents=True)
    >>> Image.new("RGB", (48, 40)).save(folder / "val/cat/0.png")
    >>> [(squares.labels, squares.pixels[0].shape) for squares in open_squares(folder, crops=Crops.of(1, size=32))]
    [(tensor([0]), torch.Size([1, 32, 32, 3]))]

    Beyond the paper: loading images for evaluation.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be 1 or more")
    source = open_source(path, split)
    check_complete(source, path, split)
    images = max(1, round(batch_size / crops.per_square))
    order = Order(source.shard_sizes, images * world_size, False, "epoch", 0, rank, world_size)
    return SquareBatches(source, crops, order, workers, torch.device(device))


def decode(data: bytes) -> Tensor:
    """Return an image's pixels, uint8 of shape (height, width, 3).

    Raises:
        CorruptImageError: if the image cannot be decoded; the message gives the decoder's reason.
    """
    pillow = require("PIL.Image", "train")
    try:
        return torch.from_numpy(np.array(to_rgb(pillow.open(io.BytesIO(data)))))
    except Exception as error:  # Pillow raises many kinds of errors for a broken file
        raise CorruptImageError(reason_of(error)) from error


def cut_squares(image: Tensor, crops: Crops) -> list[Tensor]:
    """Return the squares of an image for each scale, in tensors of shape (squares, side, side, 3).

    The left, center and right squares of a square image are the same, so only one of them is returned.

    >>> [tuple(squares.shape) for squares in cut_squares(torch.zeros(48, 64, 3, dtype=torch.uint8), Crops.of(10, 32))]
    [(1, 37, 37, 3)]
    """
    height, width = image.shape[:2]
    squares = 1 if width == height else crops.squares
    if max(width, height) > LONG * min(width, height):
        # GoogLeNet's protocol resizes the image and then cuts out the squares. For a very long image, cut out the
        # squares first, because enlarging the whole image could exhaust memory.
        parts = [image[t:b, left:r] for left, t, r, b in square_boxes(width, height, squares)]
        return [torch.stack([_resize(part, scale, scale) for part in parts]) for scale in crops.scales]
    levels = []
    for scale in crops.scales:
        w, h = resized(width, height, scale)
        scaled = _resize(image, w, h)
        levels.append(torch.stack([scaled[t:b, left:r] for left, t, r, b in square_boxes(w, h, squares)]))
    return levels


def _resize(image: Tensor, width: int, height: int) -> Tensor:
    """Resize with torch's antialiased bilinear filter, which is also used for the crops in training."""
    planes = image.permute(2, 0, 1)[None]
    return F.interpolate(planes, (height, width), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
