"""Draw what ``bench.kernels`` measured: the share of the copy bandwidth that each contender reaches, by tensor size.

python -m batchnorm.bench.kernels_picture results/kernels-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..extras import MissingExtraError, require

STYLES = {
    "batchnorm": ("C3", "o"),
    "compile": ("C0", "s"),
    "compile-max": ("C9", "v"),
    "cudnn-fp16": ("C2", "^"),
    "eager": ("0.5", "x"),
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a picture of one panel per layout and operation; 1 is every byte moved once at copy bandwidth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    types = [r["dtype"] for r in report["rows"]]
    dtype = "bfloat16" if "bfloat16" in types else types[0]
    panels = sorted({(r["layout"], r["op"]) for r in report["rows"] if r["dtype"] == dtype})
    figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (layout, op) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        rows = [r for r in report["rows"] if (r["layout"], r["op"], r["dtype"]) == (layout, op, dtype)]
        for name, (color, marker) in STYLES.items():
            points = [(r["megabytes"], sum(r["limit_us"]) / sum(r["us"][name])) for r in rows if name in r["us"]]
            if points:
                axes.semilogx(*zip(*sorted(points), strict=True), color=color, marker=marker, ls="", label=name)
        axes.axhline(1, color="k", lw=0.6)
        axes.set(title=f"{op}, {layout}, {dtype}", xlabel="one tensor, MB", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of the one-read limit, forward + backward")
    figure.axes[-1].legend(loc="upper left")  # cuDNN has channels_last alone, which comes last
    figure.suptitle(f"{report['hardware']['device']}, torch {report['hardware']['torch']}")
    figure.savefig(path, dpi=130)


def picture(path: Path) -> None:
    """Draw beside a result file, or say what is missing for it."""
    try:
        require("matplotlib", "report")
    except MissingExtraError as error:
        print(f"no picture: {error}, then python -m batchnorm.bench.kernels_picture {path}")
        return
    draw(json.loads(path.read_text()), path.with_suffix(".png"))
    print(f"picture: {path.with_suffix('.png')}")


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
