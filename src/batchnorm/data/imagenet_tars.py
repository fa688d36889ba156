"""ImageNet's official tar files: one for training, which holds a tar file per class, and one for validation."""

from __future__ import annotations

import csv
import gzip
import tarfile
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .tar import members, read_at

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
# The classes of the validation images are listed in ImageNet's file of bounding boxes, and also in a table that comes
# with Kaggle's copy of ImageNet. Either file is enough.
VAL_BOXES = "ILSVRC2012_bbox_val_v3.tgz"
VAL_TABLE = "LOC_val_solution.csv"
MAX_ANNOTATION = 2**20  # the maximum number of bytes to read from one image's annotation file


@dataclass(frozen=True)
class OfficialTar:
    """Read one of ImageNet's tar files without unpacking it."""

    path: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    members: tuple[str, ...]
    spans: NDArray[np.int64]  # offset and length of each image

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """One number, the number of images, because all images are in one shard."""
        return (len(self.members),)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return read_at(self.path, *self.spans[index].tolist())

    def name(self, index: int) -> str:
        """Return the tar file's path and the member's name."""
        return f"{self.path}:{self.members[index]}"


def open_official(folder: Path) -> dict[str, OfficialTar]:
    """Open the splits of ImageNet from a folder with its official tar files; the validation images are optional.

    Raises:
        FileNotFoundError: if the training images are missing, or if the folder has the validation images but no file
            with their classes.
        ValueError: if a file has unexpected content.
    """
    path = folder / TRAIN_TAR
    rows = list(_training_images(path))
    classes = tuple(sorted({wnid for wnid, *_ in rows}))
    splits = {"train": _source(path, classes, rows)}
    if (folder / VAL_TAR).exists():
        splits["val"] = _source(folder / VAL_TAR, classes, list(_validation_images(folder)))
    return splits


Entry = tuple[str, str, int, int]  # class, member, offset, length


def _source(path: Path, classes: tuple[str, ...], rows: list[Entry]) -> OfficialTar:
    label = {wnid: number for number, wnid in enumerate(classes)}
    unknown = sorted({wnid for wnid, *_ in rows} - set(classes))
    if unknown or not rows:
        problem = f"images of class {unknown[0]}, which has no training images" if unknown else "no images"
        raise ValueError(f"{path} has {problem}: download ImageNet's files again, and do not change them")
    return OfficialTar(
        path=path,
        classes=classes,
        labels=np.array([label[wnid] for wnid, *_ in rows], dtype=np.int64),
        members=tuple(member for _, member, *_ in rows),
        spans=np.array([row[2:] for row in rows], dtype=np.int64),
    )


def _training_images(path: Path) -> Iterator[Entry]:
    with path.open("rb") as file:
        for part in members(file, str(path)):
            if not part.name.endswith(".tar"):
                raise ValueError(
                    f"{path} contains {part.name}, but should contain one tar file per class and nothing else: download"
                    " it again"
                )
            wnid = Path(part.name).stem
            for member in members(file, f"{path}:{part.name}", part.offset_data, part.size):
                yield wnid, f"{wnid}/{member.name}", member.offset_data, member.size


def _validation_images(folder: Path) -> Iterator[Entry]:
    path, listed = folder / VAL_TAR, _file_of_classes(folder)
    class_of = dict(_from_table(listed) if listed.name == VAL_TABLE else _from_boxes(listed))
    with path.open("rb") as file:
        for member in members(file, str(path)):
            stem = Path(member.name).stem
            if stem not in class_of:
                raise ValueError(f"{path}:{member.name} is not listed in {listed}: download both files again")
            yield class_of[stem], member.name, member.offset_data, member.size


def _file_of_classes(folder: Path) -> Path:
    for name in (VAL_TABLE, VAL_BOXES):
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(
        f"{folder} has {VAL_TAR} but no file with the classes of its images: put {VAL_BOXES} (from"
        f" image-net.org) or {VAL_TABLE} (from Kaggle's copy) into this folder"
    )


def _from_table(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield row["ImageId"], row["PredictionString"].split()[0]
    except (KeyError, IndexError, AttributeError, TypeError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not Kaggle's table of ImageId and PredictionString ({error!r}): copy it again"
        ) from error


def _from_boxes(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isreg() and member.name.endswith(".xml") and (file := tar.extractfile(member)):
                    root = ElementTree.fromstring(file.read(MAX_ANNOTATION))
                    yield Path(member.name).stem, root.findtext("object/name", "")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ElementTree.ParseError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a tar file of annotations ({why}): copy it again") from error
