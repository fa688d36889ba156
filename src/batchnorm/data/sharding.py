"""``batchnorm shard``: pack an image folder, or ImageNet's tar files, into tar shards, and optionally shrink images."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import at_least
from ..optional_packages import check_installed, require
from ..progress import progress
from ..results import check_writable, sync, write_atomically
from .decode import to_rgb
from .image_sources import FolderSource, ImageSource
from .imagenet_tars import TRAIN_TAR, open_official
from .random_numbers import permutation, seed_at
from .tar_shards import CLASSES_FILE, TarSource, classes_text

AHEAD = 256  # number of images that are read and shrunk at a time
QUALITY = 95  # JPEG quality, high enough that encoding an image a second time causes no visible loss


class ShardedSplit(NamedTuple):
    """A summary of the shards of one split."""

    split: str
    examples: int
    shards: int
    classes: int

    def __str__(self) -> str:
        shards = "1 shard" if self.shards == 1 else f"{self.shards} shards"
        return f"{self.split}: {self.examples} images of {self.classes} classes in {shards}"


def shard(
    folder: Path, out: Path, /, *, per_shard: int = 5000, seed: int = 0, short_side: int | None = None
) -> list[ShardedSplit]:
    """Pack an image folder, or ImageNet's official tar files, into tar shards in random order, and print a summary.

    Image files are copied unchanged, except those that ``short_side`` shrinks. The file ``classes.txt`` in ``out``
    lists the class names. The folder ``out`` is created only after all its files are safely on disk. The same images
    and options give the same shards, byte for byte, with the same version of Pillow.

    Args:
        folder: a folder with train/CLASS/*.jpg, val/CLASS/*.jpg or both; or with ILSVRC2012_img_train.tar and
            optionally ILSVRC2012_img_val.tar. With ILSVRC2012_img_val.tar, the folder must also have
            ILSVRC2012_bbox_val_v3.tgz or LOC_val_solution.csv, which gives the classes of the validation images.
        out: the folder to create.
        per_shard: the largest number of images in a shard.
        seed: the seed of the images' random order.
        short_side: the largest length of an image's shorter side, in pixels. Larger images are shrunk to this length
            and stored as JPEGs of quality 95; 256 is enough for crops of 224 px.

    Raises:
        FileNotFoundError: if ``folder`` has no images, or has ILSVRC2012_img_val.tar but no file with the classes.
        ValueError: if ``out`` exists, if ``per_shard`` or ``short_side`` is not positive, if the name of a class
            contains a line break, or if a tar file is damaged.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: remove it or choose another folder")
    at_least(1, per_shard=per_shard, short_side=short_side)
    if short_side is not None:
        check_installed("PIL")
    sources = _open_all(folder)
    check_writable(out)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        written = [
            _write_split(source, split, temporary, per_shard, seed, short_side) for split, source in sources.items()
        ]
        temporary.chmod(0o755)
        sync(temporary)
        temporary.rename(out)
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(out)) from error  # the error of a full disk names no file
        raise
    for line in written:
        print(line)
    return written


def _open_all(folder: Path) -> Mapping[str, ImageSource]:
    if (folder / TRAIN_TAR).exists():
        return open_official(folder)
    splits = [split for split in ("train", "val") if (folder / split).is_dir()]
    if not splits:
        raise FileNotFoundError(f"{folder} has neither train/CLASS/*.jpg, nor val/CLASS/*.jpg, nor {TRAIN_TAR}")
    return {split: FolderSource.open(folder, split) for split in splits}


def _write_split(
    source: ImageSource, split: str, out: Path, per_shard: int, seed: int, short_side: int | None
) -> ShardedSplit:
    write_atomically(out / CLASSES_FILE, classes_text(source.classes))
    n = len(source.labels)
    order = permutation(seed_at(seed, 0), n)
    parts = np.array_split(order, -(-n // per_shard))
    shards = [out / f"{split}-{number:06d}.tar" for number in range(len(parts))]
    for path, part in progress(list(zip(shards, parts, strict=True)), f"{split} shards"):
        _write_shard(path, source, part, short_side)
    TarSource.open(out, split, shards)  # writes the index
    return ShardedSplit(split, n, len(parts), len(source.classes))


def _write_shard(path: Path, source: ImageSource, examples: NDArray[np.int64], short_side: int | None) -> None:
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for example, (content, suffix) in zip(
                examples.tolist(), _contents(source, examples, short_side), strict=True
            ):
                # The key must be unique, and must not contain a dot, because WebDataset's keys end at the first dot. It
                # includes the stem of the original file name, so that messages can name the image.
                key = f"{example:08d}-{Path(source.name(example)).stem.replace('.', '_')}"
                _add(tar, f"{key}{suffix}", content)
                _add(tar, f"{key}.cls", str(source.labels[example]).encode())
        file.flush()
        os.fsync(file.fileno())


def _contents(source: ImageSource, examples: NDArray[np.int64], short_side: int | None) -> Iterator[tuple[bytes, str]]:
    """Yield the encoded images with their suffixes; if ``short_side`` is given, one thread per core shrinks them."""

    def read(example: int) -> tuple[bytes, str]:
        return source.read(example), Path(source.name(example)).suffix.lower()

    if short_side is None:
        yield from map(read, examples.tolist())
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads run in parallel, because Pillow releases the GIL
        for start in range(0, len(examples), AHEAD):
            files = [read(example) for example in examples[start : start + AHEAD].tolist()]
            yield from pool.map(lambda file: shrink(file[0], file[1], short_side), files)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def shrink(data: bytes, suffix: str, short_side: int) -> tuple[bytes, str]:
    """Shrink an encoded image if its shorter side exceeds ``short_side``; return the image and its file's suffix.

    A shrunk image is a JPEG with the same aspect ratio up to rounding; 8-bit gray stays gray, all else becomes RGB.
    An image that is small enough or cannot be read is returned unchanged; training reports unreadable images.

    Args:
        data: the encoded image.
        suffix: its file's suffix, such as ".png".
        short_side: the largest length of the result's shorter side, in pixels.

    >>> from PIL import Image
    >>> file = io.BytesIO(); Image.new("L", (400, 200)).save(file, "PNG")
    >>> smaller, suffix = shrink(file.getvalue(), ".png", 100)
    >>> Image.open(io.BytesIO(smaller)).size, suffix
    ((200, 100), '.jpg')
    """
    pillow = require("PIL.Image", "train")
    try:
        image = pillow.open(io.BytesIO(data))
        width, height = image.size
        if min(width, height) <= short_side:
            return data, suffix
        ratio = short_side / min(width, height)
        size = max(1, round(width * ratio)), max(1, round(height * ratio))
        # The decoder can downscale cheaply. Ask it for at least twice the final size, so that no loss is visible.
        image.draft(None, (2 * size[0], 2 * size[1]))
        image = image if image.mode == "L" else to_rgb(image)
        smaller = image.resize(size, pillow.Resampling.BICUBIC)
    except Exception:  # Pillow raises many kinds of errors for a broken file
        return data, suffix
    file = io.BytesIO()
    smaller.save(file, "JPEG", quality=QUALITY)
    return file.getvalue(), ".jpg"
