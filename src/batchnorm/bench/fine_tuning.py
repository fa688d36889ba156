"""Should fine-tuning with small batches freeze the statistics of batch normalization?

    python -m batchnorm bench fine-tuning --data DIR --out runs/bench/fine-tuning.json

The command trains a small network on half of the classes. It then fine-tunes the network on a few images of each class
of the other half. During fine-tuning, batch normalization uses either the statistics of each batch, or the frozen
statistics of the first training.
"""

from __future__ import annotations

import io
import statistics
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from ..data.image_sources import FolderSource, open_source
from ..errors import above, at_least
from ..processes import map_on_cores
from ..results import check_writable, write_result
from ..train import RECIPES, Options, Recipe, Result, train

QUESTION = (
    "validation accuracy after fine-tuning on other classes, by batch size, with batch statistics and with frozen"
    " statistics"
)
SETTINGS: dict[str, Any] = {"cache": "device", "workers": 0, "device": "cpu", "evaluate_every": 10**9}
NAMES = {False: "batch statistics", True: "frozen statistics"}


def build(classes: int) -> nn.Module:
    """Build a network of four convolutions with batch normalization."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 96), (96, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def fine_tuning(
    data: Path,
    classes: int = 20,
    images: int = 20,
    batches: tuple[int, ...] = (2, 4, 32),
    rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01, 0.03),
    seeds: int = 3,
    size: int = 32,
    first_epochs: float = 10.0,
    epochs: float = 4.0,
    processes: int | None = None,
    out: Path = Path("runs/bench/fine-tuning.json"),
) -> list[dict[str, Any]]:
    """Fine-tune a network with the statistics of each batch and with frozen statistics, and compare the accuracies.

    Args:
        data: folder with train/CLASS/*.jpg and val/CLASS/*.jpg.
        classes: number of classes to use: the first half for training, the second half for fine-tuning.
        images: largest number of training images per class for fine-tuning.
        batches: batch sizes for fine-tuning.
        rates: learning rates for fine-tuning; for each batch size and kind of statistics, the result is the accuracy at
            the best of these rates.
        seeds: number of seeds for each batch size, kind of statistics and rate.
        size: height and width of the images.
        first_epochs: epochs of the first training, at batch size 64.
        epochs: epochs of each fine-tuning run.
        processes: number of processes; by default one per core.
        out: the result file; the published one is results/fine-tuning.json.
    """
    told = {
        "classes": classes, "images": images, "batches": batches, "rates": rates, "seeds": seeds, "size": size,
        "first_epochs": first_epochs, "epochs": epochs,
    }  # fmt: skip
    at_least(4, classes=classes)
    at_least(2, batches=batches, seeds=seeds)
    at_least(1, images=images, size=size, processes=processes)
    above(0, rates=rates, first_epochs=first_epochs, epochs=epochs)
    check_writable(out)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        first, others = _divide(data, classes, images, folder)
        recipe = replace(
            RECIPES["bn-x5"], factory=f"{__name__}:build", normalize="convert", size=size, decay_epochs=1.0, decay=0.75
        )
        before = replace(recipe, name="first", rate=0.1, batch_size=64, epochs=first_epochs)
        start = _train((before, Options(first, folder / "first", **SETTINGS)))
        print(f"first training: accuracy {start.top1:.1%} on {classes // 2} classes", flush=True)
        cells = list(product(batches, (False, True), rates))
        again = replace(recipe, start=str(folder / "first"), epochs=epochs)
        jobs = [
            (
                replace(
                    again, name=f"{k}-{seed}", batch_size=batch, rate=rate, seed=seed + 1, freeze_statistics=freeze
                ),
                Options(others, folder / f"{k}-{seed}", **SETTINGS),
            )
            for k, (batch, freeze, rate) in enumerate(cells)
            for seed in range(seeds)
        ]
        results = map_on_cores(_train, jobs, processes)
    tried = [
        {"batch": batch, "statistics": NAMES[freeze], "rate": rate, **_means(results[k * seeds :][:seeds])}
        for k, (batch, freeze, rate) in enumerate(cells)
    ]
    rows = [
        max((one for one in tried if (one["batch"], one["statistics"]) == cell), key=lambda one: float(one["mean"]))
        for cell in product(batches, NAMES.values())
    ]
    write_result(out, QUESTION, options=told, first=start.top1, rows=rows, tried=tried)
    for row in rows:
        print(f"batch size {row['batch']}, {row['statistics']}: {row['mean']:.1%} at learning rate {row['rate']:g}")
    print(f"result: {out}")
    return rows


def _train(job: tuple[Recipe, Options]) -> Result:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return train(*job)


def _means(results: list[Result]) -> dict[str, Any]:
    """Return the folded networks' accuracies, with mean and standard deviation, and the mean with running averages."""
    ends, running = [r.top1 or 0.0 for r in results], [r.running_top1 or 0.0 for r in results]
    return {
        "mean": statistics.fmean(ends),
        "spread": statistics.stdev(ends),
        "accuracies": ends,
        "running": statistics.fmean(running),
    }


def _divide(data: Path, classes: int, images: int, folder: Path) -> tuple[Path, Path]:
    """Create and return two folders of links to images, one for each half of the classes.

    The first folder has all images of its classes. The second folder has at most ``images`` training images per class,
    and all validation images.
    """
    source = open_source(data, "train")
    if not isinstance(source, FolderSource):
        raise ValueError(f"{data} has tar shards: this benchmark needs the folders train/CLASS and val/CLASS")
    names = source.classes[:classes]
    if len(names) < classes:
        raise ValueError(f"{data} has only {len(names)} classes, but classes={classes}: choose a smaller --classes")
    half = classes // 2
    parts = {"first-images": (names[:half], None), "other-images": (names[half:], images)}
    for part, (chosen, limit) in parts.items():
        for split, name in product(("train", "val"), chosen):
            target = folder / part / split / name
            target.mkdir(parents=True)
            files = sorted((data.expanduser() / split / name).iterdir())
            for file in files[:limit] if split == "train" else files:
                (target / file.name).symlink_to(file.resolve())
    first, others = (folder / part for part in parts)
    return first, others
