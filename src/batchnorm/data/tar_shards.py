"""Read the images of WebDataset's tar shards in any order, with an index of their positions."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..results import write_atomically
from .decode import IMAGE_SUFFIXES
from .tar import members, read_at

CLASSES_FILE = "classes.txt"
# These limits bound the memory that a damaged file can use: one wrong label must not create a billion classes.
MAX_CLASSES = 1_000_000
MAX_LABEL = 64  # the maximum number of bytes to read from a .cls file
MAX_NAME = 256  # the maximum number of bytes of a member's name to store for messages


@dataclass(frozen=True)
class TarSource:
    """Read the images of one split of tar shards: ``SPLIT-*.tar`` with ``key.jpg|jpeg|webp|png`` and ``key.cls``.

    Class names are the lines of ``classes.txt`` in the folder of the shards, or the labels themselves if that file is
    missing.
    """

    root: Path
    classes: tuple[str, ...]
    index: ShardIndex

    @classmethod
    def open(cls, root: Path, split: str, shards: list[Path]) -> TarSource:
        """Open the shards. The first call scans them and writes ``SPLIT.index.npz``, which later calls read."""
        index = ShardIndex.load_or_scan(root / f"{split}.index.npz", shards)
        if not len(index.labels):
            raise ValueError(f"the shards {root}/{split}-*.tar hold no images")
        names = root / CLASSES_FILE
        highest = int(index.labels.max())
        if not names.exists():
            return cls(root, tuple(map(str, range(highest + 1))), index)
        classes = read_classes(names)
        if highest >= len(classes):
            raise ValueError(
                f"{names} lists {len(classes)} classes, but the shards {split}-*.tar contain the label {highest}"
                " (labels start at 0): list one class name for each label"
            )
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
    """Return the content of ``classes.txt``: one name per line."""
    for name in classes:
        if "\n" in name or "\r" in name:  # a line break would shift all later names to other labels
            raise ValueError(f"the class {name!r} has a line break in its name: rename its folder")
    return "".join(f"{name}\n" for name in classes).encode(errors="surrogateescape")


def read_classes(path: Path) -> tuple[str, ...]:
    """Return the class names, which are the lines of a ``classes.txt``."""
    classes = tuple(path.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n").split("\n"))
    if len(classes) > MAX_CLASSES:
        raise ValueError(f"{path} names {len(classes):,} classes: the limit is {MAX_CLASSES:,}")
    return classes


class ShardImage(NamedTuple):
    """An image's name, its position in its shard, and its label."""

    name: str
    offset: int
    length: int
    label: int


@dataclass(frozen=True)
class ShardIndex:
    """The name and state of each shard, and the shard, name, position and label of each image.

    Names are stored as bytes in arrays, not as a list of str. Reading an item of a list changes its reference count, so
    each forked worker would copy the items.
    """

    shards: NDArray[np.bytes_]
    states: NDArray[np.int64]  # size and modification time of each shard, to detect changes
    shard_of: NDArray[np.int32]
    members: NDArray[np.bytes_]
    spans: NDArray[np.int64]  # offset and length of each image
    labels: NDArray[np.int64]

    @classmethod
    def load_or_scan(cls, path: Path, shards: list[Path]) -> ShardIndex:
        """Read the index from ``path``; if it is missing, damaged or out of date, scan the shards and write a new one.

        Raises:
            ValueError: if :func:`scan` rejects a shard, or if the index lists a shard that is missing.
        """
        names = np.array([os.fsencode(shard.name) for shard in shards])
        states = np.array([(s.stat().st_size, s.stat().st_mtime_ns) for s in shards], dtype=np.int64)
        stored = cls._load(path)
        if stored is not None:
            if np.array_equal(stored.shards, names) and np.array_equal(stored.states, states):
                return stored
            if missing := sorted(set(stored.shards.tolist()) - set(names.tolist())):
                raise ValueError(
                    f"the index {path} lists the shard {missing[0].decode(errors='replace')}, which is missing: copy"
                    " that shard again, or delete the index to train without that shard"
                )
        index = cls._scan(names, states, shards)
        # The index only saves time, so a full or read-only disk is not an error.
        with contextlib.suppress(OSError):
            index._save(path)
        return index

    @classmethod
    def _load(cls, path: Path) -> ShardIndex | None:
        """Return the index stored in a file, or None if the file cannot be used."""
        # Damaged files can raise almost any error: zipfile, zlib and numpy's header parser each have their own types.
        with contextlib.suppress(Exception), zipfile.ZipFile(path) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                return None  # _save() never compresses, and a small compressed file could unpack to any size
            files = {field.name: io.BytesIO(file.read(f"{field.name}.npy")) for field in fields(cls)}
            index = cls(**{name: np.load(content, allow_pickle=False) for name, content in files.items()})
            return index if index._is_consistent() else None
        return None

    def _is_consistent(self) -> bool:
        """Return whether all types, shapes and labels are valid and every image lies inside its shard."""
        n, count = len(self.labels), len(self.shards)
        if (
            [self.shards.dtype.kind, self.members.dtype.kind] != ["S", "S"]
            or [self.shards.ndim, self.states.shape, self.shard_of.shape] != [1, (count, 2), (n,)]
            or [self.members.shape, self.spans.shape, self.labels.shape] != [(n,), (n, 2), (n,)]
            or [a.dtype for a in (self.states, self.shard_of, self.spans, self.labels)]
            != [np.int64, np.int32, np.int64, np.int64]
        ):
            return False
        if not n:
            return True
        # Examples are numbered shard by shard, so shard_of never decreases.
        if self.shard_of.min() < 0 or self.shard_of.max() >= count or (np.diff(self.shard_of) < 0).any():
            return False
        (offset, length), size = self.spans.T, self.states[self.shard_of, 0]
        inside = (offset >= 0) & (length >= 0) & (offset <= size) & (length <= size - offset)
        return bool(inside.all() and self.labels.min() >= 0 and self.labels.max() < MAX_CLASSES)

    @classmethod
    def _scan(cls, names: NDArray[np.bytes_], states: NDArray[np.int64], shards: list[Path]) -> ShardIndex:
        found = [(number, member) for number, shard in enumerate(shards) for member in scan(shard)]
        return cls(
            shards=names,
            states=states,
            shard_of=np.array([number for number, _ in found], dtype=np.int32),
            # Keep only the ends of the names: one long name would make every entry of the array just as long.
            members=np.array([os.fsencode(member.name)[-MAX_NAME:] for _, member in found], dtype=np.bytes_),
            spans=np.array([(m.offset, m.length) for _, m in found], dtype=np.int64).reshape(-1, 2),
            labels=np.array([member.label for _, member in found], dtype=np.int64),
        )

    def _save(self, path: Path) -> None:
        content = io.BytesIO()
        np.savez(content, **{field.name: getattr(self, field.name) for field in fields(self)})
        write_atomically(path, content.getvalue())


def scan(shard: Path) -> Iterator[ShardImage]:
    """Return an iterator over the images of a shard with their labels, in stored order.

    Raises:
        ValueError: if the shard is not a complete tar file, if two images have the same key, or if an example lacks its
            image or a valid label.
    """
    images: dict[str, ShardImage] = {}
    labels: dict[str, int] = {}
    with shard.open("rb") as file:
        for member in members(file, str(shard)):
            folder, _, base = member.name.rpartition("/")
            # WebDataset's rule: the key ends at the first dot of the file's name.
            stem, _, suffix = base.partition(".")
            key = f"{folder}/{stem}"
            if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                if key in images:
                    raise ValueError(
                        f"{shard} has two images with the same key: {images[key].name} and {member.name}; the key is"
                        " the name up to its first dot, so rename one image, and give it a .cls file of its own"
                    )
                images[key] = ShardImage(member.name, member.offset_data, member.size, -1)
            elif suffix == "cls":
                file.seek(member.offset_data)
                labels[key] = _label(file.read(min(member.size, MAX_LABEL)), f"{shard}:{member.name}")
    if odd := images.keys() ^ labels.keys():
        first = min(odd)
        lacks = "no label (.cls)" if first in images else "no image"
        raise ValueError(f"{shard} has {len(odd)} incomplete example(s); the first, {first.lstrip('/')}, has {lacks}")
    return (member._replace(label=labels[key]) for key, member in images.items())


def _label(text: bytes, name: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"{name} contains {text[:20]!r} instead of a class number")
    label = int(text)
    if label >= MAX_CLASSES:
        raise ValueError(f"{name} contains the class number {label}, but the largest allowed is {MAX_CLASSES - 1:,}")
    return label
