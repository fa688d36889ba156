"""ImageNet as its authors give it out: one tar of a tar for each class, and one tar of validation images."""

from __future__ import annotations

import csv
import os
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
# Either says which class a validation image has: the authors' bounding boxes, or the table of Kaggle's copy.
VAL_BOXES = "ILSVRC2012_bbox_val_v3.tgz"
VAL_TABLE = "LOC_val_solution.csv"


@dataclass(frozen=True)
class OfficialTar:
    """Read one of ImageNet's tar files in place, without unpacking it.

    Beyond the paper: the data set's distribution.
    """

    path: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    members: tuple[str, ...]
    spans: NDArray[np.int64]  # offset and length

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """One shard."""
        return (len(self.members),)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        offset, length = self.spans[index].tolist()
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)

    def name(self, index: int) -> str:
        """Return the tar file's path and the member's name."""
        return f"{self.path}:{self.members[index]}"


def open_official(folder: Path) -> dict[str, OfficialTar]:
    """Open the splits of ImageNet in a folder of its official tar files; the validation part may be missing.

    Raises:
        FileNotFoundError: where the classes of the validation images are not to be found.
        ValueError: where a tar file is not what it should be.

    Beyond the paper: the data set's distribution.
    """
    path = folder / TRAIN_TAR
    rows = list(_training_images(path))
    classes = tuple(sorted({wnid for wnid, *_ in rows}))
    splits = {"train": _source(path, classes, rows)}
    if (folder / VAL_TAR).exists():
        class_of = dict(_validation_classes(folder))
        splits["val"] = _source(folder / VAL_TAR, classes, list(_validation_images(folder / VAL_TAR, class_of)))
    return splits


Row = tuple[str, str, int, int]  # class, member, offset, length


def _source(path: Path, classes: tuple[str, ...], rows: list[Row]) -> OfficialTar:
    label = {wnid: number for number, wnid in enumerate(classes)}
    unknown = sorted({wnid for wnid, *_ in rows} - set(classes))
    if unknown or not rows:
        raise ValueError(f"{path} has {'classes without training images: ' + unknown[0] if unknown else 'no images'}")
    return OfficialTar(
        path=path,
        classes=classes,
        labels=np.array([label[wnid] for wnid, *_ in rows], dtype=np.int64),
        members=tuple(member for _, member, *_ in rows),
        spans=np.array([row[2:] for row in rows], dtype=np.int64),
    )


def _training_images(path: Path) -> Iterator[Row]:
    with _open(path) as outer:
        for part in outer:
            file = outer.extractfile(part)
            if file is None or not part.name.endswith(".tar"):
                raise ValueError(f"{path} holds {part.name} where a tar file of one class is expected")
            with file, tarfile.open(fileobj=file, mode="r:") as inner:
                wnid = Path(part.name).stem
                for member in inner:
                    yield wnid, f"{wnid}/{member.name}", part.offset_data + member.offset_data, member.size


def _validation_images(path: Path, class_of: dict[str, str]) -> Iterator[Row]:
    with _open(path) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            stem = Path(member.name).stem
            if stem not in class_of:
                raise ValueError(f"{path}:{member.name} has no class in {VAL_BOXES} or {VAL_TABLE}")
            yield class_of[stem], member.name, member.offset_data, member.size


def _validation_classes(folder: Path) -> Iterator[tuple[str, str]]:
    """Return the name and the class of each validation image."""
    if (folder / VAL_TABLE).exists():
        return _from_table(folder / VAL_TABLE)
    if (folder / VAL_BOXES).exists():
        return _from_boxes(folder / VAL_BOXES)
    raise FileNotFoundError(
        f"{folder} has {VAL_TAR} but nothing that says which classes its images are: put {VAL_BOXES} (from"
        f" image-net.org) or {VAL_TABLE} (from Kaggle's copy) beside it"
    )


def _from_table(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield row["ImageId"], row["PredictionString"].split()[0]


def _from_boxes(path: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and member.name.endswith(".xml"):
                yield Path(member.name).stem, ElementTree.parse(file).findtext("object/name", "")


def _open(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:")
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not a tar file ({error}): copy it again") from error
