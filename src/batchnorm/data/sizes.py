"""How large the images of a data set are."""

from __future__ import annotations

from io import BytesIO
from statistics import median

import numpy as np

from ..extras import require
from .image_sources import ImageSource

LOOKS = 32  # images to look at


def small_images_note(source: ImageSource, size: int) -> str | None:
    """Say that images are smaller than those a network takes, where most of those looked at are.

    Beyond the paper: a --size that was forgotten.
    """
    sides = []
    for example in np.unique(np.linspace(0, len(source.labels) - 1, LOOKS).astype(int)).tolist():
        try:
            with require("PIL.Image", "train").open(BytesIO(source.read(example))) as image:
                sides.append(min(image.size))
        except Exception:  # training counts and lists such files; Pillow has no one error for them
            continue
    usual = int(median(sides)) if sides else size
    if usual >= size:
        return None
    return f"most images are smaller than {size} px and are enlarged; --size {usual} takes them as they are"
