"""Draw the pictures of result files again, without training: ``python -m batchnorm.reproduce.mnist.redraw results``."""

from __future__ import annotations

import sys
from pathlib import Path

from ...pictures import picture_beside
from . import comparison, initialization, jacobian, optimizers, placement, saturation, scale, section2

DRAW = {
    "comparison": comparison.draw,
    "init": initialization.draw,
    "jacobian": jacobian.draw,
    "optimizers": optimizers.draw,
    "placement": placement.draw,
    "saturation": saturation.draw,
    "scale": scale.draw,
    "section2": section2.draw,
}
"""A dict from the name of a result file, without .json, to the function that draws its picture."""


def redraw(folder: Path) -> None:
    """Draw the pictures of the folder's result files that are listed in DRAW."""
    for name, draw in DRAW.items():
        if (path := folder / f"{name}.json").exists():
            picture_beside(path, draw)


if __name__ == "__main__":
    redraw(Path(sys.argv[1]))
