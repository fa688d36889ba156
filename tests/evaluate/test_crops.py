"""Compare crop boxes with coordinates computed separately, on images whose colors encode each pixel's position."""

import io
import sys

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from evaluating import folder, picture
from pictures import real_jpegs

from batchnorm.data import open_images
from batchnorm.data.decode import CorruptImageError
from batchnorm.evaluate import Crops, open_squares
from batchnorm.evaluate.predictions import cut_views
from batchnorm.evaluate.square_crops import cut_squares, decode
from batchnorm.optional_packages import MissingExtraError


def coordinates(width, height):
    """Return an image whose pixel at (x, y) is (x mod 256, y mod 256, 16 (x div 256) + y div 256)."""
    y, x = np.mgrid[:height, :width]
    return torch.from_numpy(np.stack([x % 256, y % 256, 16 * (x // 256) + y // 256], axis=-1).astype(np.uint8))


def corners_of(view):
    """Read from a crop's colors where its first and last pixels were in the image, and whether it is mirrored."""
    (x0, y0), (x1, y1) = (
        (int(p[0]) + 256 * (int(p[2]) // 16), int(p[1]) + 256 * (int(p[2]) % 16))
        for p in (view[:, 0, 0], view[:, -1, -1])
    )
    return (min(x0, x1), y0, max(x0, x1) + 1, y1 + 1), x0 > x1


def views_of(image, crops):
    return [cut_views(level.movedim(-1, 1), crops) for level in cut_squares(image, crops)]


# Computed by hand from the protocol: the position (x, y) of each 224 px crop's upper left pixel. The images are not
# resized, because their short side is 256. For each square: center, upper left, upper right, lower left, lower right.
WIDE_341 = [
    [(16, 16), (0, 0), (32, 0), (0, 32), (32, 32)],  # left square, x from 0
    [(58, 16), (42, 0), (74, 0), (42, 32), (74, 32)],  # center, x from (341 - 256) // 2 = 42
    [(101, 16), (85, 0), (117, 0), (85, 32), (117, 32)],  # right, x from 341 - 256 = 85
]
HIGH_400 = [
    [(16, 16), (0, 0), (32, 0), (0, 32), (32, 32)],
    [(16, 88), (0, 72), (32, 72), (0, 104), (32, 104)],
    [(16, 160), (0, 144), (32, 144), (0, 176), (32, 176)],
]


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(341, 256, WIDE_341), (256, 400, HIGH_400), (256, 256, WIDE_341[:1])],
    ids=["landscape", "portrait", "square"],
)
def test_boxes_at_the_first_scale(width, height, expected):
    views = views_of(coordinates(width, height), Crops.of(144, size=224))[0]
    assert views.shape == (12, len(expected), 3, 224, 224)
    for s, places in enumerate(expected):
        for k, (x, y) in enumerate(places):
            assert corners_of(views[k, s]) == ((x, y, x + 224, y + 224), False)
            assert corners_of(views[6 + k, s]) == ((x, y, x + 224, y + 224), True)


@pytest.mark.parametrize(
    ("scale", "width", "height", "long"),
    # 500 x 375: 500 / 375 times 288, 320 and 352 is 384, 426.67 and 469.33; 30 x 40: 40 / 30 * 352 = 469.33.
    [(288, 500, 375, 384), (320, 500, 375, 427), (352, 500, 375, 469), (352, 30, 40, 469), (288, 1, 3, 864)],
    ids=["288", "320", "352", "tiny", "smallest"],
)
def test_boxes_at_the_other_scales(scale, width, height, long):
    image = torch.from_numpy(np.array(picture(width, height)))
    views = dict(zip((256, 288, 320, 352), views_of(image, Crops.of(144, size=224)), strict=True))[scale]
    size = (scale, long) if width > height else (long, scale)
    whole = F.interpolate(image.movedim(-1, 0)[None], size, mode="bilinear", antialias=True)[0]
    room = scale - 224
    for s, start in enumerate((0, (long - scale) // 2, long - scale)):
        square = whole[:, :, start : start + scale] if width > height else whole[:, start : start + scale]
        places = [(room // 2, room // 2), (0, 0), (room, 0), (0, room), (room, room)]
        for k, (x, y) in enumerate(places):
            crop = square[:, y : y + 224, x : x + 224]
            assert torch.equal(views[k, s], crop)
            assert torch.equal(views[6 + k, s], crop.flip(-1))
        small = F.interpolate(square[None].float(), (224, 224), mode="bilinear", antialias=True)[0]
        assert (views[5, s].float() - small).abs().max() <= 0.5 + 1e-3
        assert torch.equal(views[11, s], views[5, s].flip(-1))


def test_resizing_is_that_of_pillow():
    pixels = picture(500, 375)
    square = cut_squares(torch.from_numpy(np.array(pixels)), Crops.of(10, size=224))[0][0]
    expected = np.array(pixels.resize((341, 256), PIL.Image.Resampling.BILINEAR))[:, 42 : 42 + 256]
    assert np.abs(square.numpy().astype(int) - expected).max() <= 1


def test_ten_crops_are_of_the_center_square():
    (views,) = views_of(coordinates(341, 256), Crops.of(10, size=224))
    assert views.shape == (10, 1, 3, 224, 224)
    assert [corners_of(v)[0][:2] for v in views[:5, 0]] == WIDE_341[1]
    assert [corners_of(v) for v in views[5:, 0]] == [(corners_of(v)[0], True) for v in views[:5, 0]]


def test_sizes_and_scales_of_small_crops():
    crops = Crops.of(144, size=64)
    # 64 / 224 times 256, 288, 320 and 352 is 73.1, 82.3, 91.4 and 100.6.
    assert crops.scales == (73, 82, 91, 101)
    views = views_of(torch.from_numpy(np.array(picture(64, 64))), crops)
    assert [tuple(v.shape) for v in views] == [(12, 1, 3, 64, 64)] * 4
    assert crops.count == 144


def test_a_long_image_is_cut_before_it_is_enlarged():
    # Enlarged before the cut, the image would have 3 x 2,560,000 x 256 values.
    views = views_of(torch.from_numpy(np.array(picture(10000, 1))), Crops.of(144, size=224))
    assert [tuple(v.shape) for v in views] == [(12, 3, 3, 224, 224)] * 4
    image = torch.from_numpy(np.array(picture(1000, 256)))
    square = cut_squares(image, Crops.of(144, size=224))[0]
    assert torch.equal(square, torch.stack([image[:, x : x + 256] for x in (0, 372, 744)]))


def test_one_crop_is_that_of_validation_in_training(tmp_path):
    folder(tmp_path, [(90, 60), (60, 90), (64, 64), (20, 30)])
    (images, labels), *rest = open_images(tmp_path, "val", size=48, batch_size=8, train=False).epoch(0)
    (squares,) = open_squares(tmp_path, crops=Crops.of(1, size=48))
    views = cut_views(squares.pixels[0].movedim(-1, 1), Crops.of(1, size=48))
    assert not rest
    assert torch.equal(views[0], images)
    assert torch.equal(squares.labels, labels)
    assert squares.enlarged == 1


def test_crops_of_an_image_share_one_decode(tmp_path, monkeypatch):
    folder(tmp_path, [(90, 60), (60, 90), (50, 50)])
    opened, read = [], []
    real = PIL.Image.open
    monkeypatch.setattr(PIL.Image, "open", lambda *a: opened.append(1) or real(*a))
    batches = open_squares(tmp_path, crops=Crops.of(144, size=32))
    source = type(batches.source)
    read_one = source.read
    monkeypatch.setattr(source, "read", lambda self, k: read.append(k) or read_one(self, k))
    views = sum(len(level) * 12 for squares in batches for level in squares.pixels)
    assert views == 2 * 144 + 48
    assert len(opened) == 3
    assert sorted(read) == [0, 1, 2]


def test_real_photographs():
    crops = Crops.of(144, size=224)
    for _, data in real_jpegs(8):
        image = decode(data)
        height, width = image.shape[:2]
        levels = cut_squares(image, crops)
        squares = 1 if width == height else 3
        assert [tuple(level.shape) for level in levels] == [(squares, s, s, 3) for s in crops.scales]
        # Resizing keeps the mean color of the center square.
        side = min(width, height)
        top, left = (height - side) // 2, (width - side) // 2
        expected = image[top : top + side, left : left + side].float().mean().item()
        for level in levels:
            assert abs(level[squares // 2].float().mean().item() - expected) < 1


def test_gray_and_palette_images_are_decoded():
    for mode in ("L", "P", "CMYK"):
        buffer = io.BytesIO()
        picture(8, 6).convert(mode).save(buffer, "JPEG" if mode == "CMYK" else "PNG")
        assert decode(buffer.getvalue()).shape == (6, 8, 3)


def test_the_reason_for_a_corrupt_image_names_no_python_object():
    with pytest.raises(CorruptImageError, match=r"^UnidentifiedImageError: cannot identify image file$"):
        decode(b"no image")


def test_without_pillow_no_image_is_called_corrupt(monkeypatch):
    monkeypatch.delitem(sys.modules, "PIL.Image")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"^pillow is not installed"):
        decode(b"")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Crops(224, scales=(256, 200)), "a crop of 224 px does not fit into a short side of 200 px"),
        (lambda: Crops(224, scales=(256,), squares=2), "squares=2: must be 1"),
        (lambda: Crops.of(12, size=224), "choose 1, 10 or 144"),
        (lambda: Crops(0), "size=0: must be 1 or more"),
        (lambda: Crops(224, squares=3), "squares=3, corners and whole need scales"),
        (lambda: Crops(224, corners=True), "squares=3, corners and whole need scales"),
    ],
)
def test_what_cannot_be_cut(make, message):
    with pytest.raises(ValueError, match=message):
        make()
