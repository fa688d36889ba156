"""Draw pictures of results, all in the same style."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .optional_packages import MissingExtraError, require
from .results import read_json, write_atomically

# In pictures of networks with and without batch normalization, BLUE means with it, and ORANGE without it.
BLUE, ORANGE, GREEN, GRAY = "#2a6fc9", "#d9622b", "#14835b", "#8b8a84"


def picture(draw: Callable[[Any], Any], path: Path) -> None:
    """Draw a figure with ``matplotlib.pyplot`` in this project's style, and save it."""
    require("matplotlib", "report").use("agg")
    plt = require("matplotlib.pyplot", "report")
    style = {
        "font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
        "axes.linewidth": 0.6, "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.25, "grid.linewidth": 0.5,
        "legend.frameon": False, "lines.linewidth": 1.3, "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.08,  # inches on each side of a panel, so that tick labels do not touch
        "svg.hashsalt": "batchnorm", "axes.prop_cycle": plt.cycler(color=(BLUE, ORANGE, GREEN, GRAY)),
    }  # fmt: skip
    with plt.rc_context(style):
        figure = draw(plt)
        # Write no date, so that the same results give the same file.
        content, no_date = io.BytesIO(), {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(content, format=path.suffix[1:], dpi=200, metadata=no_date)
        plt.close(figure)
    write_atomically(path, content.getvalue())


def picture_beside(path: Path, draw: Callable[[dict[str, Any], Any], Any]) -> None:
    """Draw a picture of a result file and save it next to the file, or print which package is missing.

    Args:
        path: the result file.
        draw: takes the file's content and ``matplotlib.pyplot``, and returns a figure.
    """
    try:
        picture(partial(draw, read_json(path)), path.with_suffix(".png"))
        print(f"picture: {path.with_suffix('.png')}")
    except MissingExtraError as error:
        print(f"no picture: {error}, then run the same command again")
