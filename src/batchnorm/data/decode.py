"""Encoded bytes to the pixels of one crop."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..extras import require
from .crops import Box


def decode_crop(data: bytes, choose: Callable[[int, int], Box], size: int) -> NDArray[np.uint8]:
    """Decode an image and return one crop of it, resized to (size, size, 3)."""
    image_module = require("PIL.Image", "train")
    image = image_module.open(io.BytesIO(data)).convert("RGB")
    box = choose(*image.size)
    pixels: NDArray[np.uint8] = np.asarray(image.resize((size, size), image_module.Resampling.BILINEAR, box=box))
    return pixels
