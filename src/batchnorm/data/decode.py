"""Decode images and cut one crop out of each."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..optional_packages import MissingExtraError, require
from .crop_boxes import Box

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# The JPEG decoder can downscale by these factors, which is much cheaper than decoding every pixel.
JPEG_SCALES = (8, 4, 2)

Choose = Callable[[int, int], Box]


class CorruptImageError(ValueError):
    """Raised for an image that cannot be decoded."""


def decode_crop(data: bytes, choose: Choose, out: Tensor) -> tuple[int, int]:
    """Decode an image, crop and resize it into ``out``, and return the original width and height.

    The image is converted to 8-bit RGB without transparency, cropped, and resized with torch's antialiased bilinear
    filter. If the crop of a JPEG is at least twice as wide and high as ``out``, the JPEG is decoded at a half, a
    quarter or an eighth of its size. The crop's edges are rounded to whole pixels of the decoded image. For a
    downscaled JPEG, this moves an edge by at most half an output pixel.

    Args:
        data: the encoded image.
        choose: a function that takes the image's width and height and returns the crop's box.
        out: the result, uint8 of shape (size, size, 3).

    Raises:
        CorruptImageError: if the image cannot be decoded; the message gives the decoder's reason.
    """
    size = out.shape[0]
    try:
        image, box, original = _load(data, choose, size)
    except MissingExtraError:
        raise
    # Pillow raises OSError, SyntaxError, ValueError, struct.error and others for a broken file.
    except Exception as error:
        raise CorruptImageError(reason_of(error)) from error
    _resize(_pixels(image, box), out)
    return original


def reason_of(error: Exception) -> str:
    """Return why an image cannot be decoded, from the decoder's error."""
    # Some of Pillow's messages end with <_io.BytesIO object at 0x...>, which does not help a user.
    return f"{type(error).__name__}: {str(error).partition(' <_io.')[0]}"


def crop_image(image: Image | Tensor, choose: Choose, out: Tensor) -> None:
    """Crop and resize a decoded image into ``out``, as :func:`decode_crop` does with an image decoded at full size.

    An image given as a tensor must be uint8 of shape (3, height, width).

    Raises:
        CorruptImageError: if a Pillow image cannot be decoded; the message gives the decoder's reason.
    """
    if isinstance(image, Tensor):
        height, width = image.shape[1:]
        left, top, right, bottom = _whole_pixels(choose(width, height), width, height)
        _resize(image[:, top:bottom, left:right].permute(1, 2, 0).cpu().contiguous(), out)
        return
    try:
        image = to_rgb(image)
    except Exception as error:  # Pillow decodes lazily, so a damaged image raises an error only here
        raise CorruptImageError(f"{type(error).__name__}: {error}") from error
    _resize(_pixels(image, choose(*image.size)), out)


def _pixels(image: Image, box: Box) -> Tensor:
    return torch.from_numpy(np.array(image.crop(_whole_pixels(box, *image.size))))


def _resize(pixels: Tensor, out: Tensor) -> None:
    # This is the operator behind F.interpolate(antialias=True). Unlike F.interpolate, it can write into `out`, which is
    # faster than allocating the result.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        pixels.permute(2, 0, 1)[None], list(out.shape[:2]), False, out=out.permute(2, 0, 1)[None]
    )


def _load(data: bytes, choose: Choose, size: int) -> tuple[Image, Box, tuple[int, int]]:
    """Return the decoded image, which may be downscaled, the crop's box in it, and the original width and height."""
    image = require("PIL.Image", "train").open(io.BytesIO(data))
    width, height = image.size
    box = choose(width, height)
    room = min(box.right - box.left, box.bottom - box.top) / size
    scale = next((s for s in JPEG_SCALES if s <= room), 1)
    drafted = image.draft(None, (width // scale, height // scale)) if scale > 1 else None
    if drafted is not None:
        # Scale the box by the exact, fractional size that draft() returns, not by the size of the decoded image. The
        # decoder rounds sizes up, so the last pixels of the decoded image cover fewer pixels of the original image.
        _, (_, _, right, bottom) = drafted
        box = box.scaled(right / width, bottom / height)
    return to_rgb(image), box, (width, height)


def to_rgb(image: Image) -> Image:
    """Load the image and return it as RGB; transparency is dropped and 16 bits become 8.

    Raises:
        ValueError: if the range of the image's values is unknown (modes I and F).
    """
    if image.mode == "RGB":
        image.load()
        return image
    # convert() would clip values to 255 instead of scaling them.
    if image.mode in ("I", "F"):
        raise ValueError(f"the range of its 32-bit values (mode {image.mode}) is unknown: scale it to 8 or 16 bits")
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _whole_pixels(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    left, top = min(round(box.left), width - 1), min(round(box.top), height - 1)
    return left, top, max(round(box.right), left + 1), max(round(box.bottom), top + 1)
