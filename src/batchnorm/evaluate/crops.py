"""Choose the boxes of the crops that are cut from each image in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# GoogLeNet resizes an image to these short sides for crops of 224 px ("Going deeper with convolutions", Sec. 7).
SCALES = (256, 288, 320, 352)
CROP = 224

Count = Literal[1, 10, 144]


class Square(NamedTuple):
    """A square in an image, in whole pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True)
class Crops:
    """The crops of each image in evaluation; the class probabilities of all crops are averaged.

    The image is resized once for each of ``scales``, so that its short side equals the scale. Smaller images are
    enlarged, so every image has the same number of crops. Squares are then cut out of each resized image: one at the
    center, or three at the left, center and right (top, center and bottom of a tall image). A square's side is the
    short side of the resized image. Each square gives a crop of ``size`` at its center, and the crops that the last
    three arguments add.

    By default, ``scales`` is empty and there is one crop: the center square that validation during training uses
    (:func:`batchnorm.data.crop_boxes.center_box`).

    Args:
        size: height and width of the crops, which are the network's inputs.
        scales: short sides of the resized images, each at least ``size``.
        squares: the number of squares from each resized image, 1 or 3.
        corners: add the crops in each square's four corners.
        whole: add each square itself, resized to ``size``.
        mirror: add the mirror image of each crop.

    Raises:
        ValueError: if ``size`` is below 1, a scale is smaller than the crop, or ``squares`` is neither 1 nor 3;
            also if ``scales`` is empty, but ``squares=3``, ``corners`` or ``whole`` is set.

    >>> Crops.of(144, size=224)
    Crops(size=224, scales=(256, 288, 320, 352), squares=3, corners=True, whole=True, mirror=True)
    >>> [Crops.of(n, size=64).count for n in (1, 10, 144)], Crops.of(144, size=64).scales
    ([1, 10, 144], (73, 82, 91, 101))

    Paper: Sec. 4.2.3, "The details of ensemble and multicrop inference"
    """

    size: int
    scales: tuple[int, ...] = ()
    squares: Literal[1, 3] = 1
    corners: bool = False
    whole: bool = False
    mirror: bool = False

    def __post_init__(self) -> None:
        if self.squares not in (1, 3):
            raise ValueError(f"squares={self.squares}: must be 1 (the center) or 3")
        if not self.scales and (self.squares == 3 or self.corners or self.whole):
            raise ValueError("squares=3, corners and whole need scales: give scales, or leave out these arguments")
        small = [scale for scale in self.scales if scale < self.size]
        if self.size < 1:
            raise ValueError(f"size={self.size}: must be 1 or more")
        if small:
            raise ValueError(
                f"a crop of {self.size} px does not fit into a short side of {', '.join(map(str, small))} px: use"
                " scales that are at least as large as the crop"
            )

    @classmethod
    def of(cls, count: Count, size: int) -> Crops:
        """Return one of the usual sets of 1, 10 or 144 crops, with its scales adapted to crops of ``size`` pixels.

        A set of 1 has only the center crop. A set of 10 has five crops of the center square, at its corners and in its
        middle, and their mirror images (Krizhevsky et al., 2012). A set of 144 has GoogLeNet's crops: 4 scales x 3
        squares x 6 crops, and their mirror images.
        """
        scales = tuple(round(size * scale / CROP) for scale in SCALES)
        if count == 1:
            return cls(size)
        if count == 10:
            return cls(size, scales[:1], corners=True, mirror=True)
        if count == 144:
            return cls(size, scales, 3, corners=True, whole=True, mirror=True)
        raise ValueError(f"crops={count} is unknown: choose 1, 10 or 144")

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides of the squares that crops are cut from."""
        return self.scales or (self.size,)

    @property
    def per_square(self) -> int:
        """The number of crops from one square, including mirror images."""
        return (len(crop_boxes(self.size, self.size, self.corners)) + self.whole) * (1 + self.mirror)

    @property
    def count(self) -> int:
        """The number of crops from one image."""
        return len(self.sides) * self.squares * self.per_square


def resized(width: int, height: int, scale: int) -> tuple[int, int]:
    """Return the width and height of an image after resizing its short side to ``scale``.

    >>> resized(500, 375, 256), resized(30, 40, 256)
    ((341, 256), (256, 341))
    """
    short = min(width, height)
    return round(width * scale / short), round(height * scale / short)


def square_boxes(width: int, height: int, squares: int) -> tuple[Square, ...]:
    """Return the squares of a resized image: from left to right in a wide image, from top to bottom in a tall one.

    >>> square_boxes(341, 256, 3)[1]
    Square(left=42, top=0, right=298, bottom=256)
    """
    side = min(width, height)
    room = max(width, height) - side
    offsets = (0, room // 2, room) if squares == 3 else (room // 2,)
    return tuple(_square(o, 0, side) if width >= height else _square(0, o, side) for o in offsets)


def crop_boxes(side: int, size: int, corners: bool) -> tuple[Square, ...]:
    """Return the boxes of the crops in a square: the center, then the corners.

    >>> crop_boxes(256, 224, corners=False)
    (Square(left=16, top=16, right=240, bottom=240),)
    """
    room = side - size
    center = _square(room // 2, room // 2, size)
    if not corners:
        return (center,)
    return (center, *(_square(left, top, size) for top in (0, room) for left in (0, room)))


def _square(left: int, top: int, side: int) -> Square:
    return Square(left, top, left + side, top + side)
