"""Image sets for tests: made here, or real ones from ../shared/data where present."""

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
    """A picture without sharp edges, so that ways to resample it differ little."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def image_folder(root, sizes, split="train", classes=("ant", "bee", "cow")):
    """An image folder in which the k-th image of a split has one grey level, k, so that batches tell what they hold."""
    for name in classes:
        (root / split / name).mkdir(parents=True, exist_ok=True)
    names = [classes[k % len(classes)] for k in range(len(sizes))]
    # As stored: by class, then by name.
    for k, (name, number) in enumerate(sorted(zip(names, range(len(sizes)), strict=True))):
        image = Image.new("RGB", sizes[k], (k, k, k))
        image.save(root / split / name / f"{number:04d}.png")
    return root


def sharded(folder, out, per_shard=5000):
    shard(folder, out, per_shard=per_shard)
    return out


def contents(images):
    """Which images of an :func:`image_folder` a batch holds."""
    return images[:, 0, 0, 0].tolist()


def shared_data(name):
    """A file of ../shared/data, beside this checkout or any folder above it."""
    for parent in Path(__file__).resolve().parents:
        path = parent / "shared" / "data" / name
        if path.exists():
            return path
    return pytest.skip(f"needs shared/data/{name} beside the checkout")


def real_jpegs(n=None):
    """(name, bytes) of real ImageNet JPEGs, one of each class."""
    with tarfile.open(shared_data("imagenet-sample-1000-short256.tar")) as tar:
        members = sorted((m for m in tar if m.isfile()), key=lambda m: m.name)
        return [(m.name, tar.extractfile(m).read()) for m in members[:n]]


def gigantic():
    """A PNG of a few bytes that says it has 3.6 billion pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">II5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
