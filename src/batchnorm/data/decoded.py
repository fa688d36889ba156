"""Decoded images in a file, for the next run on the same data and for those beside this one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from ..extras import require
from .cache import DeviceCache, cached_side
from .reader import CorruptFile
from .source import open_source


def open_decoded(
    data: Path, split: str, size: int, *, folder: Path, workers: int, device: torch.device | str
) -> DeviceCache:
    """Return the decoded images of a split, from the file in ``folder`` where one of the same data is there.

    A file is of the same data where names, sizes and times of the image files, or of the shards, are the same. Those
    of other data are left alone.

    Beyond the paper: the input pipeline.
    """
    source, where = open_source(data, split), torch.device(device)
    side = cached_side(source, size)
    path = folder / f"{split}-{side}px-{_state_of(data, split)}.safetensors"
    if path.is_file():
        return _load(path, where)
    cache = DeviceCache.fill(source, size, workers, where)
    _save(cache, path)
    return cache


def _state_of(data: Path, split: str) -> str:
    shards = sorted(data.glob(f"{split}-*.tar"))
    digest = hashlib.sha256()
    for path in shards or sorted(data.joinpath(split).rglob("*")):
        if path.is_file():
            stat = path.stat()
            digest.update(f"{path.relative_to(data)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _save(cache: DeviceCache, path: Path) -> None:
    tensors = {"images": cache.images, "labels": cache.labels}
    arrays = {"row_of": cache.row_of, "sizes": cache.sizes}
    tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
    corrupt = json.dumps([file._asdict() for file in cache.corrupt])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    require("safetensors.torch", "train").save_file(host, temporary, {"corrupt": corrupt})
    temporary.replace(path)  # whole or absent


def _load(path: Path, device: torch.device) -> DeviceCache:
    with require("safetensors", "train").safe_open(path, framework="pt", device=str(device)) as file:
        images, labels = file.get_tensor("images"), file.get_tensor("labels")
        row_of, sizes = (np.asarray(file.get_tensor(name).cpu()) for name in ("row_of", "sizes"))
        corrupt = [CorruptFile(**entry) for entry in json.loads(file.metadata()["corrupt"])]
    return DeviceCache(images, labels, row_of, sizes, corrupt)
