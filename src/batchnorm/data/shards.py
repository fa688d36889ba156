"""WebDataset's tar shards, read in any order through an index of where each member lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .index import ShardIndex

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
        classes = tuple(names.read_text(encoding="utf-8").splitlines())
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
        offset, length = self.index.spans[index].tolist()
        # Opened each time: no descriptors to share with forked workers or to run out of, and it costs microseconds.
        with (self.root / self._shard(index)).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)

    def name(self, index: int) -> str:
        """Return the shard's path and the member's name."""
        return f"{self.root / self._shard(index)}:{os.fsdecode(self.index.members[index])}"

    def _shard(self, index: int) -> str:
        return os.fsdecode(self.index.shards[self.index.shard_of[index]])
