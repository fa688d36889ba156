"""Smaller copies of images, made once, where decoding large ones again and again would be the limit."""

from __future__ import annotations

import io

from ..extras import require
from .decode import to_rgb

QUALITY = 95  # of JPEG; one more generation of it should not be seen


def shrink(data: bytes, suffix: str, short_side: int) -> tuple[bytes, str]:
    """Return an encoded image, and its file's suffix, made smaller where its shorter side is longer than asked for.

    The result is a JPEG, its sides in the same ratio up to rounding; grey stays grey, all else becomes RGB. What is
    small already, or no readable image, is returned as it is: reading it later says what is wrong.

    Args:
        data: the encoded image.
        suffix: of its file, such as ".png".
        short_side: pixels of the shorter side of the result, at most.

    >>> from PIL import Image
    >>> file = io.BytesIO(); Image.new("L", (400, 200)).save(file, "PNG")
    >>> smaller, suffix = shrink(file.getvalue(), ".png", 100)
    >>> Image.open(io.BytesIO(smaller)).size, suffix
    ((200, 100), '.jpg')

    Beyond the paper: the input pipeline.
    """
    pillow = require("PIL.Image", "train")
    try:
        image = pillow.open(io.BytesIO(data))
        width, height = image.size
        if min(width, height) <= short_side:
            return data, suffix
        ratio = short_side / min(width, height)
        size = max(1, round(width * ratio)), max(1, round(height * ratio))
        # The decoder may shrink first, but not by so much that it shows.
        image.draft(None, (2 * size[0], 2 * size[1]))
        image = image if image.mode == "L" else to_rgb(image)
        smaller = image.resize(size, pillow.Resampling.BICUBIC)
    except Exception:  # Pillow has no one error for a broken file
        return data, suffix
    file = io.BytesIO()
    smaller.save(file, "JPEG", quality=QUALITY)
    return file.getvalue(), ".jpg"
