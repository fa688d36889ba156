"""Image folders: SPLIT/CLASS/*.jpg."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class FolderSource:
    """Read the images of one split of an image folder; the whole split is one shard.

    Beyond the paper: torchvision's layout.
    """

    root: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    # Bytes in one array and not a list of str: reference counts in forked workers would copy every page of a list.
    paths: NDArray[np.bytes_]

    @classmethod
    def open(cls, root: Path, split: str) -> FolderSource:
        """List the split; class names are those of train/ where it exists, so that splits agree on the labels."""
        present = class_names(root / split)
        reference = root / "train"
        classes = class_names(reference) if reference.is_dir() else present
        unknown = sorted(set(present) - set(classes))
        if unknown:
            raise ValueError(f"{root / split} has classes that {reference} lacks: {', '.join(unknown[:5])}")
        index = {name: i for i, name in enumerate(classes)}
        files = [(f"{split}/{name}/{file}", index[name]) for name in present for file in _images(root / split / name)]
        if not files:
            raise FileNotFoundError(f"{root / split} has no images ({', '.join(IMAGE_SUFFIXES)}) in its class folders")
        paths = np.array([os.fsencode(path) for path, _ in files])
        return cls(root, classes, np.array([label for _, label in files], dtype=np.int64), paths)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """One shard."""
        return (len(self.paths),)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return (self.root / os.fsdecode(self.paths[index])).read_bytes()

    def name(self, index: int) -> str:
        """Return the file's path."""
        return str(self.root / os.fsdecode(self.paths[index]))


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted: a class's label is its place among them."""
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _images(folder: Path) -> list[str]:
    names = (entry.name for entry in os.scandir(folder))
    return sorted(n for n in names if n.lower().endswith(IMAGE_SUFFIXES) and not n.startswith("."))
