"""Image sets for tests: generated images, and real images from shared/data."""

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchnorm.data.sharding import shard


def smooth(width, height, seed=0):
    """Return a picture without sharp edges, so that different ways to resample it give similar results."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def image_folder(root, sizes, split="train", classes=("ant", "bee", "cow")):
    """Save an image folder in which image k of a split has the uniform gray level k, by which tests recognize it."""
    for name in classes:
        (root / split / name).mkdir(parents=True, exist_ok=True)
    names = [classes[k % len(classes)] for k in range(len(sizes))]
    # In the order in which the library reads them: by class, then by name.
    for k, (name, number) in enumerate(sorted(zip(names, range(len(sizes)), strict=True))):
        image = Image.new("RGB", sizes[k], (k, k, k))
        image.save(root / split / name / f"{number:04d}.png")
    return root


def tar_of(members, mode="w"):
    """Return the bytes of a tar file with these pairs of names and contents."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sharded(folder, out, per_shard=5000):
    shard(folder, out, per_shard=per_shard)
    return out


def contents(images):
    """Return the numbers of a batch's images, which are from an :func:`image_folder`."""
    return images[:, 0, 0, 0].tolist()


def shared_data(name):
    """Return the path of a file in shared/data; see :func:`shared_file`."""
    return shared_file(f"data/{name}")


def shared_file(name):
    """Return the path of shared/NAME in this folder or one above it; skip the test if there is none."""
    for parent in Path(__file__).resolve().parents:
        path = parent / "shared" / name
        if path.exists():
            return path
    return pytest.skip(f"needs shared/{name} beside the checkout")


def real_jpegs(n=None):
    """Return the names and bytes of the first ``n`` real ImageNet JPEGs, each of a different class."""
    with tarfile.open(shared_data("imagenet-sample-1000-short256.tar")) as tar:
        members = sorted((m for m in tar if m.isfile()), key=lambda m: m.name)
        return [(m.name, tar.extractfile(m).read()) for m in members[:n]]


def gigantic():
    """Return a PNG of a few bytes whose header says that the image has 3.6 billion pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">II5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
