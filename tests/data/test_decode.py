"""Compare decoding with plain Pillow: crops, all kinds of images, and the error messages for broken files."""

import io
import sys

import numpy as np
import pytest
import torch
from pictures import encoded, gigantic, smooth
from PIL import Image

from batchnorm.data.crop_boxes import Box
from batchnorm.data.decode import CorruptImageError, _load, crop_image, decode_crop
from batchnorm.optional_packages import MissingExtraError

SIZE = 32


def crop(data, box=None, size=SIZE):
    out = torch.empty(size, size, 3, dtype=torch.uint8).fill_(77)
    decode_crop(data, (lambda w, h: box or Box(0, 0, w, h)), out)
    return out


def plain(data, box=None, size=SIZE):
    """Decode, crop and resize an image with Pillow, as a simple training script does."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop(tuple(box)) if box else image
    return torch.from_numpy(np.array(image.resize((size, size), Image.Resampling.BILINEAR)))


def assert_levels(actual, expected, worst):
    torch.testing.assert_close(actual.float(), expected.float(), atol=worst, rtol=0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [32, 64, 300], ids=["smaller", "similar", "larger"])
def test_same_pixels_as_pillow(kind, size):
    data = encoded(smooth(83, 61), kind)
    box = Box(7, 5, 70, 60)
    assert_levels(crop(data, box, size), plain(data, box, size), worst=1)


@pytest.mark.parametrize("shrink", [1, 2, 3, 4, 8, 11])
def test_large_jpegs_are_decoded_at_a_fraction_of_their_size(shrink):
    side = SIZE * shrink
    data = encoded(smooth(side + 40, side + 19), "JPEG", quality=95)
    # The corner is at multiples of 8, so it is also at whole pixels of an image decoded at 1/2, 1/4 or 1/8 of the size.
    box = Box(16, 8, 16 + side, 8 + side)
    image, _, original = _load(data, lambda w, h: box, SIZE)
    scale = max(s for s in (1, 2, 4, 8) if s <= shrink)
    assert original == (side + 40, side + 19)
    assert image.size == (-(-(side + 40) // scale), -(-(side + 19) // scale))
    # The JPEG decoder shrinks by averaging, which differs slightly from Pillow's triangle filter.
    difference = (crop(data, box).float() - plain(data, box).float()).abs()
    assert difference.mean() < 1.5
    assert difference.max() < 12


def test_small_crops_of_large_jpegs_keep_their_pixels():
    data = encoded(smooth(400, 300), "JPEG")
    box = Box(301, 200, 301 + SIZE, 200 + SIZE)
    assert torch.equal(crop(data, box), plain(data, box))


MODES = {
    "gray": lambda im: encoded(im.convert("L"), "JPEG", quality=95),
    "gray and alpha": lambda im: encoded(im.convert("LA")),
    "palette": lambda im: encoded(im.convert("P")),
    "palette, one transparent": lambda im: encoded(im.convert("P"), transparency=3),
    "palette, bytes of transparency": lambda im: encoded(im.convert("P"), transparency=bytes(range(256))),
    "alpha": lambda im: encoded(im.convert("RGBA")),
    "bits": lambda im: encoded(im.convert("1")),
    "CMYK": lambda im: encoded(im.convert("CMYK"), "JPEG", quality=95),
    "progressive": lambda im: encoded(im, "JPEG", quality=95, progressive=True),
    "webp with alpha": lambda im: encoded(im.convert("RGBA"), "WEBP", lossless=True),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")  # raised in plain()
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_image_becomes_rgb(mode):
    data = MODES[mode](smooth(60, 58))
    assert_levels(crop(data), plain(data), worst=2)


def test_sixteen_bits_are_scaled_and_not_clipped():
    levels = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    data = encoded(Image.fromarray(levels))
    assert_levels(crop(data, size=64)[..., 0], torch.from_numpy(levels // 256).int(), worst=1)
    swapped = Image.frombytes("I;16B", (64, 64), levels.astype(">u2").tobytes())
    assert torch.equal(crop(encoded(swapped, "TIFF"), size=64), crop(data, size=64))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_of_unknown_range_are_not_clipped(mode):
    image = Image.new("L", (64, 64), 200).convert(mode)
    message = rf"the range of its 32-bit values \(mode {mode}\) is unknown"
    with pytest.raises(CorruptImageError, match=message):
        crop(encoded(image, "TIFF"))
    with pytest.raises(CorruptImageError, match=message):
        crop_image(image, lambda w, h: Box(0, 0, w, h), torch.empty(SIZE, SIZE, 3, dtype=torch.uint8))


BROKEN = {
    "empty": b"",
    "not an image": b"hello world" * 100,
    "JPEG cut off": encoded(smooth(200, 200), "JPEG")[:-2000],
    "PNG cut off": encoded(smooth(200, 200))[:-2000],
    "WebP cut off": encoded(smooth(200, 200), "WEBP")[:-500],
    "header alone": encoded(smooth(200, 200), "JPEG")[:180],
    "PNG with a broken chunk": encoded(smooth(50, 50)).replace(b"IDAT", b"IDAX"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_told_from_errors_of_our_own(what):
    with pytest.raises(CorruptImageError, match=r"\w+: \w+"):
        crop(BROKEN[what])


def test_without_pillow_no_image_is_called_corrupt(monkeypatch):
    data = encoded(smooth(50, 50))
    monkeypatch.delitem(sys.modules, "PIL.Image")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"^pillow is not installed"):
        crop(data)


def test_an_image_of_gigantic_dimensions_is_not_decoded():
    with pytest.raises(CorruptImageError, match="DecompressionBomb"):
        crop(gigantic())
