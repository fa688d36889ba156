"""Read, decode and crop batches of images ahead of time in worker processes, and copy them to the device."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .crop_boxes import CROP_AREA, DRAWS, Box, center_box, random_box
from .decode import Choose, CorruptImageError, decode_crop
from .image_sources import ImageSource
from .random_numbers import seed_at, uniforms

# The default number of workers: four, but at most one per core that this process may use, because torch warns about
# more workers than cores.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class Request(NamedTuple):
    """Some examples of an epoch, to be loaded as one batch."""

    epoch: int
    examples: NDArray[np.int64]


class CorruptFile(NamedTuple):
    """A file that was skipped, and why."""

    example: int
    name: str
    reason: str


class Decoded(NamedTuple):
    """The readable images of a batch, of shape (n, size, size, 3), with their labels, and the corrupt files."""

    images: Tensor
    labels: Tensor
    examples: Tensor
    rows: Tensor  # the position of each image in the request
    sizes: Tensor  # width and height of each original image
    corrupt: list[CorruptFile]


# A Crop returns one function per example of a request. Each function takes its image's width and height and returns
# the box of the crop.
Crop = Callable[[Request], Sequence[Choose]]


def random_crops(request: Request, *, seed: int, area: tuple[float, float] = CROP_AREA) -> Sequence[Choose]:
    """Choose a random rectangle for each image; the random numbers depend only on the seed, the epoch and the image."""
    draws = uniforms(seed_at(seed, request.epoch, 0), request.examples, DRAWS).tolist()
    return [partial(random_box, row, area=area) for row in draws]


def center_crops(request: Request, *, size: int) -> Sequence[Choose]:
    """Choose the center square of each image."""
    return [partial(center_box, size=size)] * len(request.examples)


def whole_images(request: Request) -> Sequence[Choose]:
    """Choose the whole image as the crop, for each image."""
    return [partial(Box, 0, 0)] * len(request.examples)


@dataclass(frozen=True)
class BatchReader(Dataset[Decoded]):
    """Read, decode and crop the examples of a request; corrupt images are left out and listed."""

    source: ImageSource
    crop: Crop
    size: int

    def __getitem__(self, request: Request) -> Decoded:
        images = torch.empty(len(request.examples), self.size, self.size, 3, dtype=torch.uint8)
        rows: list[int] = []
        sizes: list[tuple[int, int]] = []
        corrupt: list[CorruptFile] = []
        for row, (example, choose) in enumerate(zip(request.examples.tolist(), self.crop(request), strict=True)):
            try:
                sizes.append(decode_crop(self.source.read(example), choose, images[len(rows)]))
                rows.append(row)
            except (CorruptImageError, OSError) as error:
                corrupt.append(CorruptFile(example, self.source.name(example), str(error)))
        kept = request.examples[rows]
        return Decoded(
            images[: len(rows)],
            torch.from_numpy(self.source.labels[kept]),
            torch.from_numpy(kept),
            torch.tensor(rows, dtype=torch.int64),
            torch.tensor(sizes).view(-1, 2),
            corrupt,
        )


class _Requests:
    """A sampler whose requests are replaced for each epoch, so that the loader and its workers can stay alive."""

    current: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.current)


class Prefetcher:
    """Decode the requested batches in order, in ``workers`` persistent processes or, if ``workers`` is 0, in this one.

    Only one sequence of batches can be open at a time: after a new call, reading an earlier sequence raises an error.
    """

    def __init__(self, reader: BatchReader, workers: int, device: torch.device) -> None:
        self.reader, self.workers, self.device = reader, workers, device
        self._requests = _Requests()
        self._turn = 0
        self._loader = self._make_loader() if workers else None

    def __call__(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yield the decoded batches, with their images and labels on the device."""
        self._turn += 1
        answers = self._answers(requests)
        if self.device.type == "cuda":
            answers = _copy_ahead(answers, self.device)
        elif self.device.type != "cpu":
            answers = (
                answer._replace(images=answer.images.to(self.device), labels=answer.labels.to(self.device))
                for answer in answers
            )
        return self._guarded(answers, self._turn)

    def _answers(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        if self._loader is None:
            return map(self.reader.__getitem__, requests)
        self._requests.current = requests
        with _signals_blocked():  # the first call of iter() starts the workers
            return cast("Iterator[Decoded]", iter(self._loader))

    def _guarded(self, answers: Iterator[Decoded], turn: int) -> Iterator[Decoded]:
        self._check(turn)
        for answer in answers:
            yield answer
            self._check(turn)

    def _check(self, turn: int) -> None:
        if turn != self._turn:
            raise RuntimeError(
                "a new epoch was started before this one was finished: to read two epochs at once, open the data twice"
            )

    def _make_loader(self) -> DataLoader[Decoded]:
        return DataLoader(
            self.reader,
            batch_size=None,
            sampler=cast("Iterable[int]", self._requests),
            num_workers=self.workers,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_obey_only_the_parent,
            # Without this generator, the loader would draw from torch's global generator in each epoch, so runs with
            # and without workers would differ.
            generator=torch.Generator(),
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM while workers start.

    The workers inherit the block, so neither signal reaches a worker before it has set up its own signal handling.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obey_only_the_parent(worker: int) -> None:
    """Ignore Ctrl-C in this worker and, on Linux, each SIGTERM that its parent did not send.

    Both signals are often sent to the whole process group. A parent may save its work before it exits, and needs its
    workers until then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_the_parent, args=(os.getppid(),), daemon=True).start()
    elif hasattr(signal, "pthread_sigmask"):  # macOS has no sigwaitinfo, so obey every SIGTERM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _exit_with_the_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _copy_ahead(answers: Iterator[Decoded], device: torch.device) -> Iterator[Decoded]:
    """Copy each batch to the device on a separate stream, while the batch before it is in use."""
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
    # Wait only for this copy, because the copying stream has already started to copy the next batch.
    current.wait_event(copied)
    for tensor in (batch.images, batch.labels):
        # The tensor belongs to the copying stream. Its memory must not be reused while the current stream reads it.
        tensor.record_stream(current)
    return batch
