"""The report of ``bench kernels``: which goals are reached, the mean speedups, and a picture.

To redraw the picture of a result file: python -m batchnorm.bench.kernels_report results/kernels-h200.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from ..pictures import BLUE, GRAY, GREEN, ORANGE, picture_beside
from ..results import write_atomically
from .bars import Bar, geometric_mean

CHIP = 26.4e6  # bytes that fit into the shared memory of an H200: 200 KB in each of its 132 multiprocessors
# Passes that move fewer than MOVED bytes are not compared with the bandwidth limit, because launch overhead dominates
# their time.
MOVED = 20e6
# How many tensors a forward and a backward pass move if there is no residual. ONCE is for passes that read each input
# once, TWICE for passes that read each input twice.
ONCE, TWICE = (2, 3), (3, 5)

# The name of each contender in result files, with its name in the picture, its color and its marker.
STYLES = {
    "batchnorm": ("batchnorm", BLUE, "o"),
    "compile": ("torch.compile", ORANGE, "s"),
    "compile-max": ("torch.compile, max-autotune", "#b58a00", "v"),
    "cudnn-fp16": ("cuDNN (fp16)", GREEN, "^"),
    "eager": ("eager torch", GRAY, "x"),
}


def bars(rows: Iterable[dict[str, Any]]) -> list[Bar]:
    """Check the measured bfloat16 rows against the goals.

    >>> row = {"layout": "NCHW", "op": "BN+ReLU", "dtype": "bfloat16", "megabytes": 20.0, "limit_us": [10.0, 15.0]}
    >>> row["us"] = {"batchnorm": [12.0, 18.0], "compile": [30.0, 30.0], "eager": [60.0, 90.0]}
    >>> for bar in bars([row])[:2]:
    ...     print(bar.line())
    BN+ReLU NCHW: geometric mean of torch.compile over ours: 2.000, goal at least 1.5, 1 rows: reached
    BN+ReLU NCHW: geometric mean of eager over ours: 5.000, goal at least 4, 1 rows: reached
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["dtype"] == "bfloat16" and "batchnorm" in row["us"]:
            groups.setdefault((row["layout"], row["op"]), []).append(row)
    return [bar for (layout, op), members in groups.items() for bar in _judged(layout, op, members)]


def _judged(layout: str, op: str, rows: Sequence[dict[str, Any]]) -> list[Bar]:
    compiled, eager = ([ratio(row, name) for row in rows if name in row["us"]] for name in ("compile", "eager"))
    kept, streamed = [], []
    for row in rows:
        for i in (0, 1):
            times = row["us"]["batchnorm"][i] / row["limit_us"][i]
            tensor, added = row["megabytes"] * 1e6, op != "BN+ReLU"
            if tensor * (i + 1) > CHIP:
                streamed.append(times * (ONCE[i] + added) / (TWICE[i] + added))
            elif tensor * (ONCE[i] + added) >= MOVED:
                kept.append(times)

    def bar(what: str, wanted: float, values: Sequence[float], measured: float | None, at_least: bool) -> Bar:
        return Bar(f"{op} {layout}: {what}", wanted, measured, at_least, len(values))

    # Leave out the goals that memory bandwidth makes impossible for this layout or operation; docs/kernels.md has the
    # numbers. With a residual, torch.compile's kernels and ours both move one more tensor per pass, so ours cannot
    # be 1.5 times as fast. In NHWC, eager torch moves so few bytes that our kernels cannot be 4 times as fast.
    means = [
        bar("geometric mean of torch.compile over ours", 1.5, compiled, geometric_mean(compiled), True),
        bar("geometric mean of eager over ours", 4.0, eager, geometric_mean(eager), True),
    ]
    possible = [op == "BN+ReLU", layout == "NCHW"]
    return [
        *compress(means, possible),
        bar("worst layer, torch.compile over ours", 0.95, compiled, min(compiled, default=None), True),
        bar("worst pass over the one-read limit, data on chip", 1.25, kept, max(kept, default=None), False),
        bar("worst pass over the streaming limit, data too large", 1.15, streamed, max(streamed, default=None), False),
    ]


def ratio(row: dict[str, Any], other: str) -> float:
    """Return ``other``'s time divided by our kernels' time, forward plus backward."""
    return float(sum(row["us"][other]) / sum(row["us"]["batchnorm"]))


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the geometric mean and the minimum of :func:`ratio` for each layout, dtype, operation and contender."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "batchnorm" in row["us"]:
            groups.setdefault((row["layout"], row["dtype"], row["op"]), []).append(row)
    found = []
    for (layout, dtype, op), members in groups.items():
        entry: dict[str, Any] = {"layout": layout, "dtype": dtype, "op": op, "layers": len(members)}
        for other in ("compile", "compile-max", "eager", "cudnn-fp16"):
            ratios = [ratio(r, other) for r in members if other in r["us"]]
            if ratios:
                entry[other] = {"geometric_mean": geometric_mean(ratios), "worst": min(ratios), "n": len(ratios)}
        found.append(entry)
    return found


def line(row: dict[str, Any]) -> str:
    """Return a row as text: microseconds forward/backward and, in parentheses, multiples of the bandwidth limit."""
    shape = f"{row['batch']}x{row['channels']}x{row['size']}x{row['size']}"
    text = f"{shape:>16} {row['layout']} {row['dtype']:>8} {row['op']:>11} {row['megabytes']:7.1f} MB"
    for name, us in row["us"].items():
        times = [t / limit for t, limit in zip(us, row["limit_us"], strict=True)]
        text += f" | {name} {us[0]:.1f}/{us[1]:.1f} ({times[0]:.2f}/{times[1]:.2f})"
    return text + (f" | {row['refused']} {row['errors']}" if "refused" in row else "")


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report with the rows measured so far."""
    rows = list(report["rows"].values())
    judged = [{**bar._asdict(), "reached": bar.reached} for bar in bars(rows)]
    report = {**report, "rows": rows, "summary": summary(rows), "bars": judged}
    write_atomically(path, json.dumps(report, indent=1).encode())


def draw(report: dict[str, Any], plt: Any) -> Any:
    """Draw one panel per layout and operation.

    y = 1 means that each tensor is moved once, at the bandwidth that an elementwise kernel reaches.
    """
    types = [r["dtype"] for r in report["rows"]]
    dtype = "bfloat16" if "bfloat16" in types else types[0]
    panels = sorted({(r["layout"], r["op"]) for r in report["rows"] if r["dtype"] == dtype})
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    size = (3.8 * columns, 2.6 * lines + 0.6)
    figure, grid = plt.subplots(lines, columns, sharex=True, sharey=True, squeeze=False, figsize=size)
    for axes, (layout, op) in zip(grid.flat, panels, strict=False):
        rows = [r for r in report["rows"] if (r["layout"], r["op"], r["dtype"]) == (layout, op, dtype)]
        for key, (name, color, marker) in STYLES.items():
            points = [(r["megabytes"], sum(r["limit_us"]) / sum(r["us"][key])) for r in rows if key in r["us"]]
            if points:
                axes.semilogx(*zip(*sorted(points), strict=True), color=color, marker=marker, ms=3, ls="", label=name)
        axes.axhline(1, color="k", lw=0.6)
        axes.set(title=f"{op}, {layout}", ylim=(0, 1.05))
    for axes in grid[-1]:
        axes.set_xlabel("size of one tensor, MB")
    figure.supylabel("one-read limit / measured time", fontsize=8)
    # Take the legend from the last panel. It shows NHWC, the only layout in which cuDNN is timed.
    handles, names = figure.axes[len(panels) - 1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(STYLES), fontsize=7)
    told = report["hardware"]
    figure.suptitle(f"{told['device']}, torch {told['torch']}, {dtype}: forward and backward", fontsize=9)
    return figure


if __name__ == "__main__":
    picture_beside(Path(sys.argv[1]), draw)
