"""Test shrinking images while they are packed into shards."""

import io

import numpy as np
import pytest
from pictures import encoded, image_folder, real_jpegs, smooth
from PIL import Image

from batchnorm.data.image_sources import open_source
from batchnorm.data.sharding import shard, shrink


def opened(data):
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((500, 375), (133, 100)),  # wide
        ((300, 901), (100, 300)),  # tall
        ((101, 101), (100, 100)),
        ((3000, 2000), (150, 100)),  # the JPEG decoder shrinks it first
        ((101, 5000), (100, 4950)),
    ],
)
def test_the_shorter_side_has_the_pixels_asked_for(size, expected):
    data, suffix = shrink(encoded(smooth(*size), "JPEG"), ".jpeg", 100)
    assert suffix == ".jpg"
    assert opened(data).size == expected


def test_small_images_are_copied():
    data = encoded(smooth(400, 100), "WEBP")
    assert shrink(data, ".webp", 100) == (data, ".webp")


def test_what_cannot_be_read_is_copied_and_reported_later():
    whole = encoded(smooth(400, 300), "JPEG")
    for data in (b"no image", whole[: len(whole) // 2]):
        assert shrink(data, ".jpg", 100) == (data, ".jpg")


@pytest.mark.parametrize(
    ("mode", "kind", "result"),
    [("L", "PNG", "L"), ("CMYK", "JPEG", "RGB"), ("P", "PNG", "RGB"), ("RGBA", "PNG", "RGB"), ("I;16", "PNG", "RGB")],
)
def test_modes(mode, kind, result):
    picture = smooth(300, 300).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        picture = Image.fromarray(np.array(picture).astype(np.uint16) * 256)
    smaller = opened(shrink(encoded(picture, kind), f".{kind.lower()}", 100)[0])
    assert smaller.mode == result
    wanted = smooth(300, 300).convert(result).resize((100, 100), Image.Resampling.BICUBIC)
    if mode not in ("P", "I;16", "CMYK"):
        assert np.abs(np.array(smaller, int) - np.array(wanted, int)).mean() < 2


def test_the_picture_stays_the_same():
    for _, data in real_jpegs(8):
        # Compare gray levels only, because JPEG stores colors at half the resolution.
        before, after = opened(data).convert("L"), opened(shrink(data, ".jpg", 128)[0]).convert("L")
        assert min(after.size) == min(128, *before.size)
        difference = np.array(after, int) - np.array(before.resize(after.size, Image.Resampling.BICUBIC), int)
        assert np.abs(difference).mean() < 2


def test_shards_of_smaller_images(tmp_path):
    folder = image_folder(tmp_path / "set", [(80, 60)] * 7 + [(20, 30)] * 5)
    for out in ("a", "b"):
        shard(folder, tmp_path / out, per_shard=5, short_side=32)
    assert (tmp_path / "a/train-000000.tar").read_bytes() == (tmp_path / "b/train-000000.tar").read_bytes()
    whole, small = open_source(folder, "train"), open_source(tmp_path / "a", "train")
    sizes = sorted(opened(small.read(i)).size for i in range(12))
    assert sizes == [(20, 30)] * 5 + [(43, 32)] * 7
    # Image k has the gray level k, which shows that each image still has its label.
    pairs = [
        sorted((round(np.array(opened(s.read(i)).convert("L")).mean()), int(s.labels[i])) for i in range(12))
        for s in (whole, small)
    ]
    assert pairs[0] == pairs[1]


def test_a_side_has_pixels(tmp_path):
    with pytest.raises(ValueError, match="short_side=0: must be 1 or more"):
        shard(tmp_path, tmp_path / "out", short_side=0)
