"""Decoded images in a file, for the next run on the same data and for those beside this one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from pathlib import Path

import numpy as np
import torch

from ..extras import require
from ..results import sync
from .device_cache import DeviceCache, cached_side, check_room
from .image_sources import ImageSource, open_source
from .loader import CorruptFile


def open_decoded(
    data: Path, split: str, size: int, *, folder: Path, workers: int, device: torch.device | str
) -> DeviceCache:
    """Return the decoded images of a split, from the file in ``folder`` where one of the same data is there.

    A file is of the same data where classes, labels, and names, sizes and times of the image files, or of the shards,
    are the same. Those of other data are left alone. The file is a shortcut only: one that cannot be read is written
    anew, and one that cannot be written is done without, with a warning.

    Beyond the paper: the input pipeline.
    """
    error = require("safetensors", "train").SafetensorError
    data, where = data.expanduser(), torch.device(device)
    source = open_source(data, split)
    side = cached_side(source, size)
    path = folder / f"{split}-{side}px-{_state_of(source, data, split)}.safetensors"
    # Damaged files raise errors of safetensors, json and others.
    with contextlib.suppress(Exception):
        return _load(path, where, source, side)
    cache = DeviceCache.fill(source, size, workers, where)
    try:
        _save(cache, path)
    except (OSError, error) as why:
        warnings.warn(f"the decoded images cannot be kept in {folder}: {why}", stacklevel=2)
    return cache


def discard_decoded(folder: Path) -> None:
    """Remove what :func:`open_decoded` left in a folder, and the folder itself where nothing else is in it.

    Beyond the paper: the input pipeline.
    """
    for path in folder.glob("*-*px-*.safetensors"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _state_of(source: ImageSource, data: Path, split: str) -> str:
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    digest.update(source.labels.tobytes())
    shards = [str(path) for path in sorted(data.glob(f"{split}-*.tar"))]
    for path in shards or (source.name(example) for example in range(len(source.labels))):
        digest.update(os.fsencode(f"{path.removeprefix(str(data))} {_state_of_file(path)}\n"))
    return digest.hexdigest()[:16]


def _state_of_file(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:  # a link to nowhere is a corrupt image
        return "absent"
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _save(cache: DeviceCache, path: Path) -> None:
    tensors = {"images": cache.images, "labels": cache.labels}
    arrays = {"row_of": cache.row_of, "sizes": cache.sizes}
    tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
    corrupt = json.dumps([file._asdict() for file in cache.corrupt])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    try:
        require("safetensors.torch", "train").save_file(host, temporary, {"corrupt": corrupt})
        sync(temporary)
        temporary.replace(path)  # whole or absent
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path, device: torch.device, source: ImageSource, side: int) -> DeviceCache:
    with require("safetensors", "train").safe_open(path, framework="pt", device=str(device)) as file:
        if file.get_slice("images").get_shape() != [len(source.labels), side, side, 3]:
            raise ValueError(f"{path} has images of other shapes")
        check_room(len(source.labels) * side * side * 3, device)
        images, labels = file.get_tensor("images"), file.get_tensor("labels")
        row_of, sizes = (np.asarray(file.get_tensor(name).cpu()) for name in ("row_of", "sizes"))
        corrupt = [CorruptFile(**entry) for entry in json.loads(file.metadata()["corrupt"])]
    cache = DeviceCache(images, labels, row_of, sizes, corrupt)
    _check(cache, source, path)
    return cache


def _check(cache: DeviceCache, source: ImageSource, path: Path) -> None:
    """Check that a file's numbers are of the source: they are used as places in memory, and as labels."""
    n = len(source.labels)
    kept = cache.row_of >= 0
    ok = (
        [cache.images.dtype, cache.labels.dtype, cache.row_of.dtype, cache.sizes.dtype]
        == [torch.uint8, torch.int64, np.int64, np.int64]
        and [cache.labels.shape, cache.row_of.shape, cache.sizes.shape] == [(n,), (n,), (n, 2)]
        and np.array_equal(cache.row_of[kept], np.arange(kept.sum()))
        and np.array_equal(cache.labels[: kept.sum()].cpu().numpy(), source.labels[kept])
        and (cache.sizes[kept] > 0).all()
        and not cache.sizes[~kept].any()
        and [file.example for file in cache.corrupt] == np.flatnonzero(~kept).tolist()
        and all(isinstance(text, str) for file in cache.corrupt for text in (file.name, file.reason))
    )
    if not ok:
        raise ValueError(f"{path} is not of this data")
