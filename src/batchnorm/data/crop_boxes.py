"""Choose crop boxes, in pixels of the original image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Not in the paper: GoogLeNet's crops ("Going deeper with convolutions", Sec. 6) cover 8% to 100% of the image's area
# at an aspect ratio between 3/4 and 4/3.
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
# Not in the paper: the usual center crop, a square of 224 pixels from an image whose short side has 256 pixels.
CENTER_SHARE = 224 / 256

ATTEMPTS = 10
DRAWS = 4 * ATTEMPTS


class Box(NamedTuple):
    """A rectangle in an image, in pixels; right and bottom are exclusive."""

    left: float
    top: float
    right: float
    bottom: float

    def scaled(self, x: float, y: float) -> Box:
        """Return the same rectangle in the coordinates of an image scaled by ``x`` and ``y``."""
        return Box(self.left * x, self.top * y, self.right * x, self.bottom * y)


def random_box(draws: Sequence[float], width: int, height: int, area: tuple[float, float] = CROP_AREA) -> Box:
    """Return a rectangle of random area, aspect ratio and position, like GoogLeNet's training crops.

    Up to ten random rectangles are tried. If none of them fits into the image, return the largest centered rectangle
    with an allowed aspect ratio.

    Args:
        draws: :data:`DRAWS` numbers in [0, 1), four for each rectangle to try.
        width, height: the image's size.
        area: the range from which the rectangle's share of the image's area is drawn uniformly.

    >>> random_box([0.5] * DRAWS, 100, 100)
    Box(left=14, top=14, right=87, bottom=87)
    """
    (low, high), (narrow, wide) = area, CROP_ASPECT
    for k in range(0, DRAWS, 4):
        share, shape, x, y = draws[k : k + 4]
        pixels = width * height * (low + (high - low) * share)
        aspect = narrow * (wide / narrow) ** shape
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return Box(left, top, left + w, top + h)
    return _centered(min(width, round(height * wide)), min(height, round(width / narrow)), width, height)


def center_box(width: int, height: int, size: int) -> Box:
    """Return the center square for evaluation.

    The square's side is 7/8 of the image's short side. This is the part of the image that the usual method shows:
    resize the short side to 8/7 of ``size``, then cut out the center. But if 7/8 of the short side is less than
    ``size``, the square's side is ``size`` or the short side, whichever is smaller.

    >>> center_box(512, 256, 224), center_box(64, 64, 64)
    (Box(left=144, top=16, right=368, bottom=240), Box(left=0, top=0, right=64, bottom=64))
    """
    short = min(width, height)
    side = max(round(short * CENTER_SHARE), min(short, size))
    return _centered(side, side, width, height)


def _centered(w: int, h: int, width: int, height: int) -> Box:
    left, top = (width - w) // 2, (height - h) // 2
    return Box(left, top, left + w, top + h)
