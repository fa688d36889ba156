"""WebDataset's tar shards, read in any order through an index of where each member lies."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .folder import IMAGE_SUFFIXES

CLASSES_FILE = "classes.txt"


@dataclass(frozen=True)
class TarSource:
    """Read the images of one split of tar shards (``key.jpg|jpeg|webp|png`` + ``key.cls``).

    Beyond the paper: WebDataset's layout.
    """

    shards: tuple[Path, ...]
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    shard_sizes: tuple[int, ...]
    shard_of: NDArray[np.int32]
    spans: NDArray[np.int64]  # offset and length
    members: NDArray[np.bytes_]
    _files: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, root: Path, split: str, shards: list[Path]) -> TarSource:
        """Index the shards."""
        rows: list[tuple[str, int, int, int]] = []
        shard_of: list[int] = []
        for number, shard in enumerate(shards):
            found = scan(shard)
            rows += found
            shard_of += [number] * len(found)
        labels = np.array([row[3] for row in rows], dtype=np.int64)
        names = root / CLASSES_FILE
        classes = (
            tuple(names.read_text(encoding="utf-8").splitlines())
            if names.exists()
            else tuple(str(k) for k in range(int(labels.max()) + 1))
        )
        return cls(
            shards=tuple(shards),
            classes=classes,
            labels=labels,
            shard_sizes=tuple(np.bincount(shard_of, minlength=len(shards)).tolist()),
            shard_of=np.array(shard_of, dtype=np.int32),
            spans=np.array([row[1:3] for row in rows], dtype=np.int64),
            members=np.array([os.fsencode(row[0]) for row in rows]),
        )

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        shard = int(self.shard_of[index])
        if shard not in self._files:
            self._files[shard] = os.open(self.shards[shard], os.O_RDONLY)
        offset, length = self.spans[index].tolist()
        # pread has no file position: forked workers may share the descriptor.
        return os.pread(self._files[shard], length, offset)

    def name(self, index: int) -> str:
        """Return the shard's path and the member's name."""
        return f"{self.shards[self.shard_of[index]]}:{os.fsdecode(self.members[index])}"


def scan(shard: Path) -> list[tuple[str, int, int, int]]:
    """Return (member, offset, length, label) of each example of a shard, in stored order."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(shard, "r:") as tar:
        for member in tar:
            key, _, suffix = member.name.rpartition(".")
            if member.isfile() and f".{suffix.lower()}" in IMAGE_SUFFIXES:
                images[key] = (member.name, member.offset_data, member.size)
            elif member.isfile() and suffix == "cls":
                labels[key] = int(tar.extractfile(member).read())  # type: ignore[union-attr]
    return [(*images[key], labels[key]) for key in images]
