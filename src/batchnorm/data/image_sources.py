"""Encoded images on disk: image folders, and tar shards read through an index."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .folder import FolderSource
from .tar_shards import TarSource


class ImageSource(Protocol):
    """Give the encoded bytes, the name and the label of each example of one split."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is a place among them."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each example."""

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """How many examples each shard has; examples are numbered from shard to shard."""

    def read(self, index: int) -> bytes:
        """Return the encoded image."""

    def name(self, index: int) -> str:
        """Return where the example is stored, for messages."""


def open_source(path: str | Path, split: str) -> ImageSource:
    """Open one split of an image folder or of a folder of tar shards, whichever ``path`` is.

    Raises:
        FileNotFoundError: where it is neither.

    Beyond the paper: the two layouts in common use.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder: give one with {split}/CLASS/*.jpg or with {split}-*.tar")
    shards = sorted(root.glob(f"{split}-*.tar"))
    if shards and (root / split).is_dir():
        raise FileNotFoundError(f"{root} has both {split}/ and {split}-*.tar: move one of them elsewhere")
    if shards:
        return TarSource.open(root, split, shards)
    if (root / split).is_dir():
        return FolderSource.open(root, split)
    found = sorted(entry.name for entry in root.iterdir())[:8]
    raise FileNotFoundError(
        f"{root} has neither {split}/CLASS/*.jpg nor {split}-*.tar; it holds: {', '.join(found) or 'nothing'}"
    )


def check_complete(source: ImageSource, path: str | Path, split: str) -> None:
    """Check that every class has images in a split, opened from ``path``.

    Raises:
        ValueError: naming classes that have none.

    Beyond the paper: errors over fewer classes would not compare.
    """
    examples = np.bincount(source.labels, minlength=len(source.classes))
    empty = [name for name, n in zip(source.classes, examples.tolist(), strict=True) if not n]
    if empty:
        raise ValueError(
            f"{path} has no images of {len(empty)} of its {len(source.classes)} classes in its split {split!r}"
            f" ({', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}): add some, or take these classes out"
        )
