"""Identify data sets, so that results from different data are not mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .image_sources import ImageSource, open_source, sample_examples


def check_same_data(data: dict[str, dict[str, Any]]) -> None:
    """Check that results come from the same images.

    >>> check_same_data({"a": {"train": 3}, "b": {"train": 4}})
    Traceback (most recent call last):
        ...
    ValueError: a and b come from different data (train 3 and 4); keep them in separate folders
    """
    (first, expected), *rest = data.items() if data else [("", {})]
    for name, found in rest:
        if found != expected:
            keys = dict.fromkeys((*expected, *found))
            what = ", ".join(
                f"{k} {expected.get(k)} and {found.get(k)}" for k in keys if expected.get(k) != found.get(k)
            )
            raise ValueError(f"{first} and {name} come from different data ({what}); keep them in separate folders")


def describe_data(path: Path, splits: Sequence[str] = ("train", "val")) -> dict[str, Any]:
    """Count the images and classes, and identify the set by a hash of its labels and a sample of its images."""
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
        yield source.read(example)
