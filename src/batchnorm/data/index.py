"""Where each image of a set of tar shards lies, kept in a file beside them."""

from __future__ import annotations

import contextlib
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .folder import IMAGE_SUFFIXES


class Member(NamedTuple):
    """Say where an image lies in its shard, and its label."""

    name: str
    offset: int
    length: int
    label: int


@dataclass(frozen=True)
class ShardIndex:
    """Hold, for each shard, its name and state, and for each image its shard, place and label.

    Names are bytes in arrays: lists of str would be copied into every worker, page by page.
    """

    shards: NDArray[np.bytes_]
    states: NDArray[np.int64]  # size and time of change of each shard, to notice that it is another one by now
    shard_of: NDArray[np.int32]
    members: NDArray[np.bytes_]
    spans: NDArray[np.int64]  # offset and length
    labels: NDArray[np.int64]

    @classmethod
    def load_or_scan(cls, path: Path, shards: list[Path]) -> ShardIndex:
        """Read the index from ``path``, or scan the shards where it is missing or older than they are."""
        names = np.array([os.fsencode(shard.name) for shard in shards])
        states = np.array([(s.stat().st_size, s.stat().st_mtime_ns) for s in shards], dtype=np.int64)
        # An index is a shortcut only: whatever is wrong with it, the shards have it all.
        with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                index = cls(**{field.name: stored[field.name] for field in fields(cls)})
            if np.array_equal(index.shards, names) and np.array_equal(index.states, states):
                return index
        index = cls._scan(names, states, shards)
        # Data may lie on a disk that is full or must not be written to.
        with contextlib.suppress(OSError):
            index._save(path)
        return index

    @classmethod
    def _scan(cls, names: NDArray[np.bytes_], states: NDArray[np.int64], shards: list[Path]) -> ShardIndex:
        found = [(number, member) for number, shard in enumerate(shards) for member in scan(shard)]
        return cls(
            shards=names,
            states=states,
            shard_of=np.array([number for number, _ in found], dtype=np.int32),
            members=np.array([os.fsencode(member.name) for _, member in found], dtype=np.bytes_),
            spans=np.array([(m.offset, m.length) for _, m in found], dtype=np.int64).reshape(-1, 2),
            labels=np.array([member.label for _, member in found], dtype=np.int64),
        )

    def _save(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in fields(self)})
        temporary.replace(path)


def scan(shard: Path) -> Iterator[Member]:
    """Yield the examples of a shard in stored order, from its headers and labels.

    Raises:
        ValueError: where it is no whole tar file, or an example lacks its image or its label.

    Beyond the paper: WebDataset's layout.
    """
    images: dict[str, Member] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                folder, _, base = member.name.rpartition("/")
                # WebDataset's rule: the key ends at the first dot of the file's name.
                stem, _, suffix = base.partition(".")
                key = f"{folder}/{stem}"
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    if key in images:
                        raise ValueError(f"{shard} has two images of one key: {images[key].name} and {member.name}")
                    images[key] = Member(member.name, member.offset_data, member.size, -1)
                elif suffix == "cls":
                    labels[key] = _label(tar, member, shard)
    except tarfile.TarError as error:
        raise ValueError(f"{shard} is not a whole, uncompressed tar file ({error}): copy it again") from error
    if odd := images.keys() ^ labels.keys():
        lacks = "no label (.cls)" if next(iter(odd)) in images else "no image"
        raise ValueError(f"{shard}: {len(odd)} of its keys are incomplete; {min(odd).lstrip('/')} has {lacks}")
    return (member._replace(label=labels[key]) for key, member in images.items())


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, shard: Path) -> int:
    file = tar.extractfile(member)
    text = file.read() if file else b""
    if not text.strip().isdigit():
        raise ValueError(f"{shard}:{member.name} holds {text[:20]!r} where a class number is expected")
    return int(text)
