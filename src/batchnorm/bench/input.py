"""How fast does this library decode and crop images, compared with a plain Pillow loader?

How many CPU cores does it take to decode images as fast as a GPU trains on them?
"""

from __future__ import annotations

import io
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import open_images
from ..data.image_sources import ImageSource, open_source
from ..data.loader import BatchReader, Request, random_crops
from ..errors import above, at_least
from ..optional_packages import require
from ..processes import torch_threads
from ..results import check_writable, environment, write_json

BATCH = 50


@dataclass(frozen=True)
class InputRate:
    """Images per second of one core with each loader, and of all workers together."""

    data: str
    images: int
    size: int
    rounds: int
    plain: float
    ours: float
    ratio: float
    workers: int
    together: float
    gpu_rate: float

    def __str__(self) -> str:
        per_worker = self.together / self.workers
        return "\n".join(
            [
                f"{self.data}, {self.images} images, random crops of {self.size} px, median of {self.rounds} rounds",
                f"plain Pillow loader  {self.plain:8.0f} images/s per core",
                f"batchnorm.data       {self.ours:8.0f} images/s per core, {self.ratio:.2f} times as many",
                f"{self.workers} workers {self.together:18.0f} images/s together, {per_worker:.0f} each",
                f"a GPU that trains on {self.gpu_rate:.0f} images/s needs {math.ceil(self.gpu_rate / self.ours)} cores"
                f" at the single-core rate, or {math.ceil(self.gpu_rate / per_worker)} at the rate per worker",
            ]
        )


def input_rate(
    data: Path | None = None,
    /,
    *,
    split: str = "train",
    size: int = 224,
    images: int = 500,
    rounds: int = 7,
    workers: int = os.cpu_count() or 1,
    gpu_rate: float = 15_000.0,
    out: Path = Path("runs/bench/input.json"),
) -> InputRate:
    """Compare how fast this library and a plain Pillow loader decode images and cut out the same crops.

    The rate of one core is measured in CPU time, so other work on the machine has little effect. The two loaders are
    timed alternately. The workers' rate is measured in elapsed time, and includes the transfer to this process through
    shared memory.

    Args:
        data: an image folder or tar shards; by default, generated images of about 500x375 pixels.
        split: the split of the data to use.
        size: height and width of the crops.
        images: maximum number of images for each timing of one core; the images are spread evenly over the data.
        rounds: number of times each loader is timed.
        workers: number of worker processes.
        gpu_rate: images per second that a GPU trains on; the command prints how many cores it takes to load as many.
        out: the result file; published result files are in results/.
    """
    at_least(1, size=size, images=images, rounds=rounds, workers=workers)
    above(0, gpu_rate=gpu_rate)
    check_writable(out)
    with ExitStack() as stack:
        root = data or photographs(Path(stack.enter_context(tempfile.TemporaryDirectory())), split)
        stack.enter_context(torch_threads(1))
        source = open_source(root, split)
        chosen = np.unique(np.linspace(0, len(source.labels) - 1, images).astype(np.int64))
        requests = [Request(0, chosen[i : i + BATCH]) for i in range(0, len(chosen), BATCH)]
        reader = BatchReader(source, partial(random_crops, seed=0), size)
        _check(reader, requests[0])
        plain, ours = [], []
        for _ in range(rounds):
            plain.append(_core_rate(lambda request: _plain(source, reader, request), requests))
            ours.append(_core_rate(lambda request: reader[request].images, requests))
        rate = InputRate(
            data=data.name if data else "generated images of about 500x375 pixels",
            images=len(chosen),
            size=size,
            rounds=rounds,
            plain=statistics.median(plain),
            ours=statistics.median(ours),
            ratio=statistics.median(b / a for a, b in zip(plain, ours, strict=True)),
            workers=workers,
            together=_workers_rate(root, split, size, workers),
            gpu_rate=gpu_rate,
        )
    print(rate)
    write_json(out, {"what": "images per second, decoded and cropped", **asdict(rate), "environment": environment()})
    return rate


def _plain(source: ImageSource, reader: BatchReader, request: Request) -> Tensor:
    """Load a uint8 batch with Pillow: decode, crop and resize each image."""
    pillow = require("PIL.Image", "train")
    batch = []
    for example, choose in zip(request.examples.tolist(), reader.crop(request), strict=True):
        image = pillow.open(io.BytesIO(source.read(example))).convert("RGB")
        image = image.crop(choose(*image.size)).resize((reader.size, reader.size), pillow.Resampling.BILINEAR)
        batch.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())
    return torch.stack(batch)


def _check(reader: BatchReader, request: Request) -> None:
    plain, ours = _plain(reader.source, reader, request), reader[request].images.permute(0, 3, 1, 2)
    difference = (plain.float() - ours.float()).abs().mean().item()
    # Our loader may decode a JPEG at a reduced size, and rounds the crop to whole pixels. These differences change
    # pixel values by a few gray levels, but a wrong crop would change them by tens of gray levels.
    if difference > 10:
        raise RuntimeError(
            f"the loaders return different images ({difference:.1f} gray levels apart on average), so nothing was timed"
        )


def _core_rate(load: Callable[[Request], Tensor], requests: list[Request]) -> float:
    start = time.process_time()
    count = sum(len(load(request)) for request in requests)
    return count / (time.process_time() - start)


def _workers_rate(root: Path, split: str, size: int, workers: int, seconds: float = 5.0) -> float:
    batches = open_images(root, split, size=size, batch_size=BATCH, train=True, workers=workers)
    next(batches.epoch(0))
    count, start, epoch = 0, time.perf_counter(), 1
    while True:
        for _, labels in batches.epoch(epoch):
            count += len(labels)
            if (elapsed := time.perf_counter() - start) > seconds:
                return count / elapsed
        epoch += 1


def photographs(folder: Path, split: str, count: int = 200) -> Path:
    """Fill a split of an image folder with JPEG files about as large and detailed as photographs; return the folder."""
    image_module, rng = require("PIL.Image", "train"), np.random.default_rng(0)
    (folder / split / "all").mkdir(parents=True)
    for k in range(count):
        width, height = ((500, 375), (375, 500), (500, 333))[k % 3]
        # A blend of noise at several scales has about the detail and file size of a photograph.
        layers = [
            image_module.fromarray(rng.integers(0, 256, (height // s, width // s, 3), dtype=np.uint8)).resize(
                (width, height), image_module.Resampling.BICUBIC
            )
            for s in (64, 16, 4)
        ]
        mixed = image_module.blend(image_module.blend(layers[0], layers[1], 0.4), layers[2], 0.25)
        mixed.save(folder / split / "all" / f"{k:05d}.jpg", quality=90)
    return folder
