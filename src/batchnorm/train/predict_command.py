"""``batchnorm predict``: classify images with a finished run."""

from __future__ import annotations

import csv as csv_format
import io
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from ..arguments import arg
from ..data.decode import IMAGE_SUFFIXES
from ..errors import JobsFailedError, at_least, sentence
from ..progress import progress
from ..results import check_writable, write_atomically
from .distributed import find_device
from .trained_run import TrainedRun, load


def predict(
    run: Annotated[Path, arg(metavar="RUN")],
    images: Annotated[tuple[Path, ...], arg(metavar="IMAGE...", help_behavior_hint="(one or more)")],
    /,
    top: int = 5,
    csv: Path | None = None,
    device: str = "auto",
    batch_size: int = 64,
    trust: bool = False,
) -> None:
    """Print the most probable classes of images, predicted by a finished run's folded network.

    Images are cropped and normalized as in the run's validation. Files that cannot be read are skipped and listed; if
    there are any, the exit status is 1.

    Args:
        run: a folder written by batchnorm train.
        images: image files, or folders of images; subfolders are searched too.
        top: number of classes to print for each image.
        csv: file for the probabilities of all classes, one row per image.
        device: cpu, cuda, or auto (a GPU if there is one).
        batch_size: images per forward pass.
        trust: allow calling the function named in the run's recipe.json; a network of your own needs this.

    Raises:
        FileNotFoundError: if the run or an image is not found.
        ValueError: if an option is invalid, or if the run cannot be loaded.
        JobsFailedError: if images cannot be read; raised after the other images' predictions are printed and written.
    """
    at_least(1, top=top, batch_size=batch_size)
    if not images:
        raise ValueError("give at least one image, or a folder of images")
    if run.is_file():
        raise ValueError(f"{run} is a file, not the folder of a run: write batchnorm predict RUN IMAGE...")
    where = find_device(device)
    check_writable(csv)
    files = [file for image in images for file in _files(image)]
    trained = load(run, device=where, trust=trust)
    readable, probabilities, unreadable = _predict(trained, files, batch_size)
    # As in validation, the class with the lower index comes first if two classes are equally probable.
    values, order = probabilities.sort(dim=1, descending=True, stable=True)
    for file, row, classes in zip(readable, values.tolist(), order.tolist(), strict=True):
        best = zip(row[:top], classes[:top], strict=True)
        print(f"{file}: {', '.join(f'{trained.classes[k]} {100 * p:.1f}%' for p, k in best)}")
    if csv is not None and readable:
        _write(csv, trained.classes, readable, probabilities)
        print(f"probabilities: {csv}")
    if unreadable:
        listed = "\n  ".join(unreadable)
        raise JobsFailedError(f"{len(unreadable)} of {len(files)} images could not be read:\n  {listed}")


def _predict(trained: TrainedRun, files: list[Path], batch_size: int) -> tuple[list[Path], Tensor, list[str]]:
    """Return the readable files, their probabilities, and an error message for each unreadable file."""
    readable, parts, unreadable = list[Path](), list[Tensor](), list[str]()
    for start in progress(range(0, len(files), batch_size), f"batches of {batch_size} images"):
        crops: list[Tensor] = []
        for file in files[start : start + batch_size]:
            try:
                crops += trained.preprocessing.crops(file)
            except (OSError, ValueError) as error:
                unreadable.append(sentence(error))
            else:
                readable.append(file)
        parts.append(trained.predict(crops, batch_size=batch_size).probabilities)
    return readable, torch.cat(parts), unreadable


def _files(image: Path) -> list[Path]:
    if not image.is_dir():
        if not image.exists():
            raise FileNotFoundError(f"{image} does not exist: give image files, or folders of images")
        return [image]
    files = sorted(file for file in image.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(image).parts)]
    if not files:
        raise FileNotFoundError(f"{image} has no files that end with {', '.join(IMAGE_SUFFIXES)}")
    return files


def _write(path: Path, classes: tuple[str, ...], files: list[Path], probabilities: Tensor) -> None:
    text = io.StringIO()
    rows = csv_format.writer(text, lineterminator="\n")
    rows.writerow(["image", *classes])
    for file, row in zip(files, probabilities.tolist(), strict=True):
        rows.writerow([file, *(f"{p:.9g}" for p in row)])
    write_atomically(path, text.getvalue().encode(errors="surrogateescape"))  # file names may not be UTF-8
