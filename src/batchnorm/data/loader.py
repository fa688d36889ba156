"""What a worker does: read, decode and crop one batch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

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


# The default: four, but no more than this process has cores, of which torch would warn.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class _Requests:
    """Let one loader, whose workers stay alive, go over other requests each time."""

    current: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.current)


class Prefetcher:
    """Answer requests in their order, by ``workers`` processes that stay alive, or in this process where it is 0.

    Only one sequence of answers is under way at a time: asking for the next one abandons the last.
    """

    def __init__(self, reader: BatchReader, workers: int, device: torch.device) -> None:
        self.reader, self.workers, self.device = reader, workers, device
        self._requests = _Requests()
        self._turn = 0
        self._loader = self._start() if workers else None

    def __call__(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yield the answers, images and labels on the device."""
        self._turn += 1
        answers = self._answers(requests)
        ahead = _copy_ahead(answers, self.device) if self.device.type == "cuda" else answers
        return self._guarded(ahead, self._turn)

    def _answers(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        if self._loader is None:
            return map(self.reader.__getitem__, requests)
        self._requests.current = requests
        return cast("Iterator[Decoded]", iter(self._loader))

    def _guarded(self, answers: Iterator[Decoded], turn: int) -> Iterator[Decoded]:
        for answer in answers:
            yield answer
            if turn != self._turn:
                raise RuntimeError("these batches were asked for another epoch meanwhile; open them a second time")

    def _start(self) -> DataLoader[Decoded]:
        return DataLoader(
            self.reader,
            batch_size=None,
            sampler=cast("Iterable[int]", self._requests),  # a request where torch's types expect an index
            num_workers=self.workers,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_obey_the_parent_alone,
            # Else each epoch would draw from torch's global generator, and runs with and without workers would differ.
            generator=torch.Generator(),
        )


def _obey_the_parent_alone(worker: int) -> None:
    """Let this worker ignore Ctrl-C, and any SIGTERM that is not its parent's.

    Both often reach the whole group of processes, and a parent that saves its work first must not lose its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_the_parents_end, args=(os.getppid(),), daemon=True).start()


def _await_the_parents_end(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler does it


def _copy_ahead(answers: Iterator[Decoded], device: torch.device) -> Iterator[Decoded]:
    """Copy each batch on a stream of its own, one batch ahead of the one in use."""
    stream = torch.cuda.Stream(device)
    waiting: tuple[Decoded, torch.cuda.Event] | None = None
    for answer in answers:
        with torch.cuda.stream(stream):
            images, labels = (t.pin_memory().to(device, non_blocking=True) for t in (answer.images, answer.labels))
            copied = stream.record_event()
        if waiting is not None:
            yield _received(*waiting)
        waiting = answer._replace(images=images, labels=labels), copied
    if waiting is not None:
        yield _received(*waiting)


def _received(batch: Decoded, copied: torch.cuda.Event) -> Decoded:
    current = torch.cuda.current_stream(batch.images.device)
    # Not for the whole stream, which is busy with the next batch by now.
    current.wait_event(copied)
    for tensor in (batch.images, batch.labels):
        # Its memory belongs to the copying stream: keep it from being reused there while it is read here.
        tensor.record_stream(current)
    return batch
