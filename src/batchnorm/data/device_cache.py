"""All images of a split, decoded once and kept on the device; a file can store the decoded images for later runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..optional_packages import require
from ..results import sync
from .crop_boxes import CENTER_SHARE, Box
from .decode import decode_crop
from .image_sources import ImageSource, open_source, sample_examples
from .loader import BatchReader, CorruptFile, Crop, Prefetcher, Request, whole_images

CHUNK = 256


@dataclass(frozen=True)
class DeviceCache:
    """All images of a split, stretched to squares of one size, with their labels and original sizes.

    Crop boxes are chosen in the original image's pixels, so the same seed gives the same boxes as without the cache.
    The crops are then cut out of the stretched image. So two things differ from training without the cache: pixels are
    resampled twice, and crops of images that are larger than the squares lose detail.
    """

    images: Tensor  # (n, side, side, 3)
    labels: Tensor
    row_of: np.ndarray  # the index of each example in images, -1 if the example is corrupt
    sizes: np.ndarray  # width and height of each original image, 0 if the example is corrupt
    corrupt: list[CorruptFile]

    @classmethod
    def fill(cls, source: ImageSource, size: int, workers: int, device: torch.device) -> DeviceCache:
        """Decode all images of the source and keep them on the device."""
        n, side = len(source.labels), _cached_side(source, size)
        _check_room(n * side * side * 3, device)
        images = torch.empty(n, side, side, 3, dtype=torch.uint8, device=device)
        labels = torch.empty(n, dtype=torch.int64, device=device)
        row_of, sizes = np.full(n, -1), np.zeros((n, 2), dtype=np.int64)
        corrupt: list[CorruptFile] = []
        load = Prefetcher(BatchReader(source, whole_images, side), workers, device)
        row = 0
        for part in load(Request(0, np.arange(i, min(i + CHUNK, n))) for i in range(0, n, CHUNK)):
            rows = slice(row, row + len(part.images))
            images[rows], labels[rows] = part.images, part.labels
            row_of[part.examples.numpy()] = np.arange(rows.start, rows.stop)
            sizes[part.examples.numpy()] = part.sizes.numpy()
            corrupt += part.corrupt
            row = rows.stop
        return cls(images, labels, row_of, sizes, corrupt)

    def batch(self, request: Request, crop: Crop, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the crops of a request, of shape (n, size, size, 3), their labels, and their positions in the request.

        Corrupt images are left out.
        """
        side = self.images.shape[1]
        boxes = [
            choose(w, h).scaled(side / w, side / h)
            for choose, (w, h) in zip(crop(request), self.sizes[request.examples].tolist(), strict=True)
            if w
        ]
        found = self.row_of[request.examples]
        index = _to(torch.from_numpy(found[found >= 0]), self.images.device)
        cut = _to(torch.tensor(boxes, dtype=torch.float32).view(-1, 4), self.images.device)
        return (
            crop_resize(self.images[index], cut, size),
            self.labels[index],
            torch.from_numpy(np.flatnonzero(found >= 0)),
        )


def open_decoded(
    data: Path, split: str, size: int, *, folder: Path, workers: int, device: torch.device | str
) -> DeviceCache:
    """Return the decoded images of a split, from a cache file in ``folder`` if one fits the data and ``size``.

    Otherwise, decode the images and write the cache file. A cache file fits the data if the classes, the labels, and
    the names, sizes and modification times of the image files or shards are unchanged. Cache files for other data or
    sizes are kept. A cache file that cannot be read is written again. If it cannot be written, a warning is issued.
    """
    error = require("safetensors", "train").SafetensorError
    data, where = data.expanduser(), torch.device(device)
    source = open_source(data, split)
    side = _cached_side(source, size)
    name = re.sub(r"[^\w.-]", "_", split)  # Windows does not allow the colon of train[:0.1] in file names
    path = folder / f"{name}-{side}px-{_state_of(source, data, split)}.safetensors"
    # A missing or damaged file can raise errors of many kinds, from safetensors, json and others.
    with contextlib.suppress(Exception):
        return _load(path, where, source, side)
    cache = DeviceCache.fill(source, size, workers, where)
    try:
        _save(cache, path)
    except (OSError, error) as why:
        warnings.warn(
            f"cannot cache the decoded images in {folder}, so the next run decodes them again: {why}", stacklevel=2
        )
    return cache


def discard_decoded(folder: Path) -> None:
    """Remove the files that :func:`open_decoded` wrote to a folder, and the folder itself if it is then empty."""
    for path in folder.glob("*-*px-*.safetensors"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def crop_resize(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Cut a box out of each image and resize it with an antialiased bilinear (triangle) filter.

    The filter is separable: the result is R X C^T, where the matrix X is a channel of an image, and the matrices R and
    C crop and resize its rows and columns. So a batch takes two batched matrix products. The boxes stay on the device,
    so the host never waits for it.

    Args:
        images: uint8 of shape (n, height, width, 3).
        boxes: the left, top, right and bottom edge of each box, in pixels.
        size: the side of the result, which has the shape (n, size, size, 3).
    """
    left, top, right, bottom = boxes.unbind(1)
    rows = _triangle_filter(top, bottom, images.shape[1], size)
    columns = _triangle_filter(left, right, images.shape[2], size)
    y = torch.einsum("niy,nyxc->nixc", rows, images.to(rows.dtype))
    y = torch.einsum("njx,nixc->nijc", columns, y)
    return y.round().clamp(0, 255).to(torch.uint8).contiguous()


def _triangle_filter(start: Tensor, stop: Tensor, pixels: int, size: int) -> Tensor:
    """Return the weight of each input pixel in each output pixel, of shape (n, size, pixels); 0 outside the box."""
    scale = ((stop - start) / size)[:, None]
    center = start[:, None] + scale * (torch.arange(size, device=start.device) + 0.5)
    pixel = torch.arange(pixels, device=start.device) + 0.5
    weight = (1 - (pixel - center[..., None]).abs() / scale.clamp(min=1)[..., None]).clamp(min=0)
    # Pixels that lie only partly in the box count as inside, so at least one pixel is always inside.
    inside = (pixel > start.floor()[:, None]) & (pixel < stop.ceil()[:, None])
    weight = weight * inside[:, None]
    return weight / weight.sum(-1, keepdim=True)


def _cached_side(source: ImageSource, size: int) -> int:
    """Return the side of the cached images: 8/7 of ``size``, but at most the longest side in a sample of images."""
    longest, pixel, whole = 1, torch.empty(1, 1, 3, dtype=torch.uint8), partial(Box, 0, 0)
    for example in sample_examples(source, 64):
        try:
            longest = max(longest, *decode_crop(source.read(example), whole, pixel))
        except (ValueError, OSError):
            continue
    return min(longest, math.ceil(size / CENTER_SHARE))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _check_room(wanted: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if wanted > free:
        raise ValueError(
            f"cache='device' needs {wanted / 2**30:.1f} GiB, but {device} has only {free / 2**30:.1f} GiB free: use"
            " cache='none'"
        )


def _state_of(source: ImageSource, data: Path, split: str) -> str:
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    digest.update(source.labels.tobytes())
    whole = split.partition("[")[0]
    shards = [str(path) for path in sorted(data.glob(f"{whole}-*.tar"))]
    for path in shards or (source.name(example) for example in range(len(source.labels))):
        digest.update(os.fsencode(f"{path.removeprefix(str(data))} {_state_of_file(path)}\n"))
    return digest.hexdigest()[:16]


def _state_of_file(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:  # for example, a broken symbolic link, which counts as a corrupt image
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
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path, device: torch.device, source: ImageSource, side: int) -> DeviceCache:
    with require("safetensors", "train").safe_open(path, framework="pt", device=str(device)) as file:
        if file.get_slice("images").get_shape() != [len(source.labels), side, side, 3]:
            raise ValueError(f"the number or the size of the images in {path} does not match the data")
        _check_room(len(source.labels) * side * side * 3, device)
        images, labels = file.get_tensor("images"), file.get_tensor("labels")
        row_of, sizes = (np.asarray(file.get_tensor(name).cpu()) for name in ("row_of", "sizes"))
        corrupt = [CorruptFile(**entry) for entry in json.loads(file.metadata()["corrupt"])]
    cache = DeviceCache(images, labels, row_of, sizes, corrupt)
    _check(cache, source, path)
    return cache


def _check(cache: DeviceCache, source: ImageSource, path: Path) -> None:
    """Check that the arrays of a cache file match the source, because they are used as indices and labels."""
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
        raise ValueError(f"{path} was made from other images, or is damaged")
