"""Open image folders and tar shards, read their encoded images, and check and identify data sets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import listed
from ..optional_packages import require
from .decode import IMAGE_SUFFIXES
from .tar_shards import TarSource

PART = re.compile(r"(\w+)\[(?::([\d.e-]+)|([\d.e-]+):)\]")


class ImageSource(Protocol):
    """Provide the encoded bytes, the name and the label of each example of one split."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is an index into them."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each example."""

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """How many examples each shard has; examples are numbered consecutively, shard by shard."""

    def read(self, index: int) -> bytes:
        """Return the encoded image."""

    def name(self, index: int) -> str:
        """Return where the example is stored."""


@dataclass(frozen=True)
class FolderSource:
    """Read the images of one split of an image folder, SPLIT/CLASS/*.jpg; the whole split is one shard."""

    root: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    # Do not use a list of str: reading an item changes its reference count, so each forked worker would copy the items.
    paths: NDArray[np.bytes_]

    @classmethod
    def open(cls, root: Path, split: str) -> FolderSource:
        """List the images of a split; the classes are those of train/ if it exists, so that splits agree on labels."""
        present = _class_names(root / split)
        reference = root / "train"
        classes = _class_names(reference) if reference.is_dir() else present
        unknown = sorted(set(present) - set(classes))
        if unknown:
            raise ValueError(
                f"{root / split} has classes that {reference} lacks ({listed(unknown)}): add them to {reference}, or"
                f" remove them from {root / split}"
            )
        index = {name: i for i, name in enumerate(classes)}
        files = [(f"{split}/{name}/{file}", index[name]) for name in present for file in _images(root / split / name)]
        if not files:
            loose = len(_images(root / split))
            raise FileNotFoundError(
                f"{root / split} has no images ({', '.join(IMAGE_SUFFIXES)}) in its class folders"
                + f", but has {loose} outside of them: move them into a folder for each class" * bool(loose)
            )
        paths = np.array([os.fsencode(path) for path, _ in files])
        return cls(root, classes, np.array([label for _, label in files], dtype=np.int64), paths)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """One number, the number of images, because all images are in one shard."""
        return (len(self.paths),)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return (self.root / os.fsdecode(self.paths[index])).read_bytes()

    def name(self, index: int) -> str:
        """Return the file's path."""
        return str(self.root / os.fsdecode(self.paths[index]))


@dataclass(frozen=True)
class PartSource:
    """Read only some of the examples of another source."""

    whole: ImageSource
    examples: NDArray[np.int64]

    @classmethod
    def open(cls, root: Path, split: str, share: float, *, held_out: bool) -> PartSource:
        """Open the held-out images of a split or, if ``held_out`` is False, all its other images.

        The given share of each class is held out: at least one image, but never all of them. A hash of the file names
        decides which images are held out, so the choice is the same for every seed and on every machine.
        """
        whole = open_source(root, split)
        # `folder` is root with a trailing slash, or empty if root is ".".
        folder = str(root / "_").replace(os.sep, "/").removesuffix("_")
        paths = (whole.name(k).replace(os.sep, "/") for k in range(len(whole.labels)))
        names = [f"/{path.removeprefix(folder)}" for path in paths]
        ranked = np.array(sorted(range(len(names)), key=lambda k: hashlib.sha256(os.fsencode(names[k])).digest()))
        chosen = np.zeros(len(names), dtype=bool)
        for label, name in enumerate(whole.classes):
            mine = ranked[whole.labels[ranked] == label]
            if len(mine) == 1:
                raise ValueError(
                    f"{root} has only one image of class {name}, but holding out a share of {share} needs at least two"
                    " of each class: add images, or remove the class"
                )
            chosen[mine[: min(max(1, round(share * len(mine))), len(mine) - 1)]] = True
        return cls(whole, np.flatnonzero(chosen == held_out))

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the whole source."""
        return self.whole.classes

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each example."""
        return self.whole.labels[self.examples]

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """How many of this source's examples are in each shard of the whole source; zeros are left out."""
        ends = np.searchsorted(self.examples, np.cumsum(self.whole.shard_sizes))
        return tuple(n for n in np.diff(ends, prepend=0).tolist() if n)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return self.whole.read(int(self.examples[index]))

    def name(self, index: int) -> str:
        """Return where the example is stored."""
        return self.whole.name(int(self.examples[index]))


def has_split(path: str | Path, split: str) -> bool:
    """Return whether a folder holds a split, as a subfolder or as shards."""
    root = Path(path).expanduser()
    return (root / split).is_dir() or any(root.glob(f"{split}-*.tar"))


def training_splits(path: str | Path, validate: float) -> tuple[str, str]:
    """Return the splits to train on and to validate with, in the notation of :func:`open_source`.

    Args:
        path: the folder with the data.
        validate: the share of the training images to hold out for validation; 0 if the data has a validation set.

    Raises:
        ValueError: if the data has a validation set and ``validate`` is not 0.
        FileNotFoundError: if the data has training images but no validation set, and ``validate`` is 0.
    """
    if validate and has_split(path, "val"):
        raise ValueError(
            f"{path} has a validation set, val, so --validate is not needed: remove that option, or move val elsewhere"
        )
    if validate:
        return f"train[{validate}:]", f"train[:{validate}]"
    if has_split(path, "train") and not has_split(path, "val"):
        raise FileNotFoundError(
            f"{path} has no validation set (val/CLASS/*.jpg or val-*.tar): add one, or hold out a tenth of the training"
            " images with --validate 0.1"
        )
    return "train", "val"


def _class_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _images(folder: Path) -> list[str]:
    names = (entry.name for entry in os.scandir(folder))
    return sorted(n for n in names if n.lower().endswith(IMAGE_SUFFIXES) and not n.startswith("."))


def open_source(path: str | Path, split: str) -> ImageSource:
    """Open one split of an image folder or of a folder of tar shards, whichever ``path`` is.

    The split ``train[:0.1]`` is a tenth of each class of ``train``, and ``train[0.1:]`` is the rest.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        name = split.partition("[")[0]
        raise FileNotFoundError(f"{root} is not a folder: give one with {name}/CLASS/*.jpg or with {name}-*.tar")
    part = PART.fullmatch(split)
    if part is not None:
        whole, held_out, kept = part.groups()
        return PartSource.open(root, whole, float(held_out or kept), held_out=held_out is not None)
    shards = sorted(root.glob(f"{split}-*.tar"))
    if shards and (root / split).is_dir():
        raise FileNotFoundError(f"{root} has both {split}/ and {split}-*.tar: move one of them elsewhere")
    if shards:
        return TarSource.open(root, split, shards)
    if (root / split).is_dir():
        return FolderSource.open(root, split)
    found = listed(sorted(entry.name for entry in root.iterdir()), 8) or "nothing"
    hint = f"; did you mean {root.parent}?" if (root.parent / split).is_dir() else ""
    raise FileNotFoundError(f"{root} has neither {split}/CLASS/*.jpg nor {split}-*.tar; it holds: {found}{hint}")


def check_complete(source: ImageSource, path: str | Path, split: str) -> None:
    """Check that every class has images in a split; the error names ``path`` and ``split``."""
    examples = np.bincount(source.labels, minlength=len(source.classes))
    empty = [name for name, n in zip(source.classes, examples.tolist(), strict=True) if not n]
    if empty:
        raise ValueError(
            f"{path} has no images for {len(empty)} of {len(source.classes)} classes in split {split!r}"
            f" ({listed(empty)}): add images, or remove these classes"
        )


def sample_examples(source: ImageSource, count: int) -> list[int]:
    """Return the indices of at most ``count`` examples, evenly spaced."""
    return [int(i) for i in np.unique(np.linspace(0, len(source.labels) - 1, count).astype(int))]


def small_images_note(source: ImageSource, size: int) -> str | None:
    """Return a note if most images of a sample are smaller than the network's input, otherwise None."""
    sides = []
    for example in sample_examples(source, 32):
        try:
            with require("PIL.Image", "train").open(BytesIO(source.read(example))) as image:
                sides.append(min(image.size))
        except Exception:  # Pillow raises many kinds of errors; training reports unreadable files later
            continue
    usual = int(median(sides)) if sides else size
    if usual >= size:
        return None
    return (
        f"in a sample, most images are smaller than --size {size} and will be enlarged; the median short side is"
        f" {usual} px"
    )


def check_same_data(data: dict[str, dict[str, Any]]) -> None:
    """Check that results come from the same images.

    Args:
        data: a mapping from each result's name to what :func:`describe_data` returned for its images.

    Raises:
        ValueError: if the data of two results differ; the message names both results.

    >>> check_same_data({"a": {"train": 3}, "b": {"train": 4}})
    Traceback (most recent call last):
        ...
    ValueError: a and b use different data (train 3 and 4); keep their results in separate folders
    """
    (first, expected), *rest = data.items() if data else [("", {})]
    for name, found in rest:
        if found != expected:
            keys = dict.fromkeys((*expected, *found))
            what = ", ".join(
                f"{k} {expected.get(k)} and {found.get(k)}" for k in keys if expected.get(k) != found.get(k)
            )
            raise ValueError(f"{first} and {name} use different data ({what}); keep their results in separate folders")


def describe_data(path: Path, splits: Sequence[str] = ("train", "val")) -> dict[str, Any]:
    """Return the numbers of images and classes, and a hash of labels, class names, shard sizes and sample images."""
    sources = {split: open_source(path, split) for split in splits}
    digest = hashlib.sha256()
    for source in sources.values():
        for part in _identifying(source):
            digest.update(part)
    return {
        **{split: len(source.labels) for split, source in sources.items()},
        "classes": len(sources[splits[0]].classes),
        "sha256": digest.hexdigest()[:16],
    }


def _identifying(source: ImageSource) -> Iterable[bytes]:
    yield json.dumps([source.classes, source.shard_sizes]).encode()
    yield source.labels.tobytes()
    for example in sample_examples(source, 64):
        with contextlib.suppress(OSError):  # training also skips unreadable files, such as broken links
            yield source.read(example)
