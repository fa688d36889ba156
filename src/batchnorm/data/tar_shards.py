"""WebDataset's tar shards, read in any order through an index of where each member lies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .index import MAX_CLASSES, ShardIndex
from .tar import read_at

CLASSES_FILE = "classes.txt"


@dataclass(frozen=True)
class TarSource:
    """Read the images of one split of tar shards: ``SPLIT-*.tar`` with ``key.jpg|jpeg|webp|png`` and ``key.cls``.

    Class names are the lines of ``classes.txt`` beside the shards, or the labels themselves where there is none.

    Beyond the paper: WebDataset's layout.
    """

    root: Path
    classes: tuple[str, ...]
    index: ShardIndex

    @classmethod
    def open(cls, root: Path, split: str, shards: list[Path]) -> TarSource:
        """Open the shards; the first time this scans them, later it reads ``SPLIT.index.npz`` beside them."""
        index = ShardIndex.load_or_scan(root / f"{split}.index.npz", shards)
        if not len(index.labels):
            raise ValueError(f"{root}/{split}-*.tar hold no images")
        names = root / CLASSES_FILE
        highest = int(index.labels.max())
        if not names.exists():
            return cls(root, tuple(map(str, range(highest + 1))), index)
        classes = read_classes(names)
        if highest >= len(classes):
            raise ValueError(f"{names} names {len(classes)} classes, but {split}-*.tar have label {highest}")
        return cls(root, classes, index)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each example."""
        return self.index.labels

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """How many examples each shard has."""
        return tuple(np.bincount(self.index.shard_of, minlength=len(self.index.shards)).tolist())

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return read_at(self.root / self._shard(index), *self.index.spans[index].tolist())

    def name(self, index: int) -> str:
        """Return the shard's path and the member's name."""
        return f"{self.root / self._shard(index)}:{self.index.members[index].decode(errors='replace')}"

    def _shard(self, index: int) -> str:
        return os.fsdecode(self.index.shards[self.index.shard_of[index]])


def classes_text(classes: Sequence[str]) -> bytes:
    """Return what ``classes.txt`` holds: a name a line.

    Raises:
        ValueError: if a name has a line break, which would move all names after it to other labels.

    Beyond the paper: WebDataset's layout.
    """
    for name in classes:
        if "\n" in name or "\r" in name:
            raise ValueError(f"the class {name!r} has a line break in its name: rename its folder")
    return "".join(f"{name}\n" for name in classes).encode(errors="surrogateescape")


def read_classes(path: Path) -> tuple[str, ...]:
    """Return the names in a ``classes.txt``, one a line.

    Raises:
        ValueError: if it names more classes than there can be.

    Beyond the paper: WebDataset's layout.
    """
    classes = tuple(path.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n").split("\n"))
    if len(classes) > MAX_CLASSES:
        raise ValueError(f"{path} names {len(classes):,} classes: there can be {MAX_CLASSES:,}")
    return classes
