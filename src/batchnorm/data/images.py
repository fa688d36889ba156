"""Batches of images from folders or tar shards; a step has the same images with any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import at_least
from .crop_boxes import CROP_AREA
from .device_cache import DeviceCache, open_decoded
from .image_sources import ImageSource, open_source
from .loader import BatchReader, CorruptFile, Crop, Prefetcher, Request, center_crops, random_crops
from .order import Order, Shuffle


class TooManyCorruptError(ValueError):
    """Raised if too many files cannot be read, in total or in one training batch.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "train/cat").mkdir(parents=True)
    >>> _ = (folder / "train/cat/0.jpg").write_bytes(b"not an image")
    >>> batches = open_images(folder, size=32, batch_size=1, train=False, max_corrupt=0)
    >>> next(batches.epoch(0))
    Traceback (most recent call last):
    batchnorm.data.images.TooManyCorruptError: 1 files could not be read, more than max_corrupt=0: ...

    Beyond the paper: reading damaged data.
    """


class ImageBatches:
    """Batches of images, made by :func:`open_images`; reading can start at any step of any epoch.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "train/cat").mkdir(parents=True)
    >>> for k in range(6): Image.new("RGB", (48, 40), "green").save(folder / f"train/cat/{k}.jpg")
    >>> batches = open_images(folder, size=32, batch_size=2, train=True)
    >>> len(batches), len(list(batches.epoch(0, start=1))), len(batches.centered(batch_size=6))
    (3, 2, 1)

    Beyond the paper: the input pipeline.
    """

    def __init__(
        self, source: ImageSource, order: Order, crop: Crop, size: int, load: Prefetcher | DeviceCache, max_corrupt: int
    ) -> None:
        self.order = order
        self.size = size
        self.max_corrupt = max_corrupt
        self._source, self._crop, self._load = source, crop, load
        self._corrupt: dict[int, CorruptFile] = {}
        if isinstance(load, DeviceCache):
            self._note(load.corrupt)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is an index into them."""
        return self._source.classes

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch over all ranks, including corrupt ones."""
        return self.order.num_examples

    @property
    def corrupt(self) -> list[CorruptFile]:
        """The files that this process has skipped so far, without duplicates."""
        return list(self._corrupt.values())

    def __len__(self) -> int:
        """Return the number of steps in an epoch, the same on every rank."""
        return len(self.order)

    def centered(self, batch_size: int) -> ImageBatches:
        """Return batches of the same examples for evaluation: the center square of each image, in stored order."""
        order = replace(self.order, train=False, batch_size=batch_size)
        crop, load = partial(center_crops, size=self.size), self._load
        if isinstance(load, Prefetcher):
            load = Prefetcher(BatchReader(self._source, crop, self.size), load.workers, load.device)
        return ImageBatches(self._source, order, crop, self.size, load, self.max_corrupt)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches of an epoch from step ``start`` on.

        Images are uint8 of shape (n, 3, size, size), channels last in memory; labels are int64 of shape (n,). A batch
        does not depend on earlier batches, so resuming from (epoch, step) is exact. Corrupt files are left out of their
        batches. In evaluation, a rank's batch may be empty.

        Raises:
            ValueError: if ``start`` is out of range.
            TooManyCorruptError: if this process finds more than ``max_corrupt`` unreadable files, or if a training
                batch has fewer than two readable images.
        """
        for images, labels, _ in self.numbered_epoch(epoch, start):
            yield images, labels

    def numbered_epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the same batches as :meth:`epoch`, each with its images' positions in the step.

        Positions count the examples of all ranks, including corrupt ones. So random numbers that are chosen by position
        depend neither on the number of ranks nor on which other images are corrupt.

        Raises:
            ValueError: for the same reasons as :meth:`epoch`.
            TooManyCorruptError: for the same reasons as :meth:`epoch`.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start} is out of range: an epoch has {len(self)} steps")
        requests = _requests(self.order, epoch, start)
        for step, (images, labels, rows) in enumerate(self._batches(requests), start):
            if self.order.train and len(labels) < 2:
                raise TooManyCorruptError(
                    f"step {step} of epoch {epoch} has {len(labels)} readable image(s), too few for batch"
                    " normalization: replace or remove the files that could not be read; the first ones:"
                    f" {self._listed()}"
                )
            yield images.permute(0, 3, 1, 2), labels, rows + self.order.rows(step).start

    def _batches(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if isinstance(self._load, DeviceCache):
            for request in requests:
                yield self._load.batch(request, self._crop, self.size)
            return
        for part in self._load(requests):
            self._note(part.corrupt)
            yield part.images, part.labels, part.rows

    def _note(self, corrupt: list[CorruptFile]) -> None:
        self._corrupt |= {file.example: file for file in corrupt}
        if len(self._corrupt) > self.max_corrupt:
            raise TooManyCorruptError(
                f"{len(self._corrupt)} files could not be read, more than max_corrupt={self.max_corrupt}: replace or"
                f" remove them (in Python, you can also raise max_corrupt); the first ones: {self._listed()}"
            )

    def _listed(self) -> str:
        return "; ".join(f"{file.name} ({file.reason})" for file in self.corrupt[:5])


def _requests(order: Order, epoch: int, start: int) -> Iterator[Request]:
    """Yield the requests of an epoch.

    This is not a method, because a generator that refers to the ImageBatches would form a reference cycle, and the
    workers would live until the garbage collector finds the cycle.
    """
    examples = order.examples(epoch)
    for step in range(start, len(order)):
        yield Request(epoch, order.batch(examples, step))


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
    decoded: Path | None = None,
    device: torch.device | str = "cpu",
    max_corrupt: int | None = None,
    crop_area: tuple[float, float] = CROP_AREA,
) -> ImageBatches:
    """Open one split of an image folder or of tar shards as batches of crops.

    In training (``train=True``), every example is used once per epoch, in random order and with a random crop. In
    evaluation, the examples are used in stored order, each as its center square. The images are only decoded and
    cropped; use :class:`batchnorm.data.Augment` to mirror, distort and normalize them.

    Args:
        path: a folder with ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``, or with WebDataset's ``train-*.tar`` and
            ``val-*.tar``; images are JPEG, PNG or WebP.
        split: the name of the split, such as ``"train"``; ``"train[:0.1]"`` is a tenth of each class.
        size: the side of the crops.
        batch_size: the number of examples in a step over all ranks; :class:`batchnorm.data.Order` explains how
            ranks share a step, and how large the last steps are.
        train: True for random order and random crops, False for stored order and center squares.
        shuffle: the random order of training, ``"fixed"`` or ``"epoch"``; see :class:`batchnorm.data.Order`.
        seed: the seed of the order and the crops.
        rank: the rank of this process.
        world_size: the number of processes.
        workers: the number of processes that decode ahead; 0 decodes in this process.
        cache: ``"device"`` decodes all images once and keeps them on the device; see
            :class:`batchnorm.data.device_cache.DeviceCache` for the differences from ``"none"``.
        decoded: with ``cache="device"``, a folder to save the decoded images in for later runs.
        device: the device that batches are copied to.
        max_corrupt: how many unreadable files this process may skip; by default 10 plus a thousandth of all examples.
        crop_area: the range of a random crop's share of the image's area.

    Raises:
        FileNotFoundError: if ``path`` has the split in neither of the two layouts or in both, or if the split's class
            folders have no images.
        ValueError: if an argument is invalid, if the data is damaged or does not fit on the device, or if a rank would
            get fewer than two examples of a training step.
        TooManyCorruptError: with ``cache="device"``, if more than ``max_corrupt`` files are unreadable; with
            ``cache="none"``, the error is raised later, while batches are read.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (folder / "train" / name).mkdir(parents=True)
    ...     for k in range(3):
    ...         Image.new("RGB", (48, 40), "green").save(folder / "train" / name / f"{k}.jpg")
    >>> batches = open_images(folder, size=32, batch_size=4, train=True)
    >>> [(tuple(images.shape), len(labels)) for images, labels in batches.epoch(0)], batches.classes
    ([((4, 3, 32, 32), 4), ((2, 3, 32, 32), 2)], ('cat', 'dog'))

    Paper: Sec. 4.2.1, "Shuffle training examples more thoroughly"
    """
    if cache not in ("none", "device"):
        raise ValueError(f"cache={cache!r} is unknown: choose 'none' or 'device'")
    at_least(1, size=size)
    if not 0 < crop_area[0] <= crop_area[1] <= 1:
        raise ValueError(f"crop_area={crop_area}: must be two shares of the image's area, the smaller one first")
    where = torch.device(device)
    source = open_source(path, split)
    order = Order(source.shard_sizes, batch_size, train, shuffle, seed, rank, world_size)
    crop: Crop = partial(random_crops, seed=seed, area=crop_area) if train else partial(center_crops, size=size)
    load: Prefetcher | DeviceCache
    if cache == "device" and decoded is not None:
        load = open_decoded(Path(path).expanduser(), split, size, folder=decoded, workers=workers, device=where)
    elif cache == "device":
        load = DeviceCache.fill(source, size, workers, where)
    else:
        load = Prefetcher(BatchReader(source, crop, size), workers, where)
    allowed = 10 + order.num_examples // 1000 if max_corrupt is None else max_corrupt
    return ImageBatches(source, order, crop, size, load, allowed)
