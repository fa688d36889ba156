"""Figure 1 as the paper lays it out: accuracy, then the inputs of a typical sigmoid without and with BN."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..extras import require
from ..results import write_atomically
from .runs import Run

COLOURS = {False: "#d9622b", True: "#2a6fc9"}


def draw(runs: Sequence[Run], out: Path) -> list[Path]:
    """Draw ``fig1.png`` and ``fig1.svg`` into ``out`` from a run without and a run with batch normalization.

    Args:
        runs: their ``config`` says ``batch_norm``; the first of each kind is drawn.
        out: the folder.

    Raises:
        MissingExtraError: if matplotlib is not installed.

    Paper: Fig. 1
    """
    pair = {kind: next((r for r in runs if r.config.get("batch_norm") is kind), None) for kind in (False, True)}
    matplotlib = require("matplotlib", "report")
    matplotlib.use("agg")
    plt = require("matplotlib.pyplot", "report")
    style = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "svg.hashsalt": "batchnorm",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), layout="constrained", width_ratios=(0.9, 1, 1))
        axes[2].sharey(axes[1])
        _accuracy(axes[0], pair)
        for axis, kind, letter in ((axes[1], False, "b"), (axes[2], True, "c")):
            _bands(axis, pair[kind], f"({letter}) {'With' if kind else 'Without'} BN", COLOURS[kind])
        paths = [out / f"fig1.{kind}" for kind in ("png", "svg")]
        for path in paths:
            # No date in the file: the same run draws the same bytes.
            content = io.BytesIO()
            no_date = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(content, format=path.suffix[1:], dpi=200, metadata=no_date)
            write_atomically(path, content.getvalue())
        plt.close(figure)
    return paths


def _accuracy(axis: Any, pair: dict[bool, Run | None]) -> None:
    for kind, run in pair.items():
        if run is None or not run.accuracy:
            continue
        steps, values = zip(*run.accuracy, strict=True)
        axis.plot(steps, values, color=COLOURS[kind], lw=1.4, ls="-" if kind else (0, (4, 2)))
        label = "With BN" if kind else "Without BN"
        side = 7 if kind else -22
        axis.annotate(
            label, (steps[-1], values[-1]), (0, side), textcoords="offset points", ha="right", color=COLOURS[kind]
        )
    axis.set_ylim(0.7, 1.0)
    axis.set_title("(a) Test accuracy", fontsize=8)
    _thousands(axis)


def _bands(axis: Any, run: Run | None, title: str, colour: str) -> None:
    axis.set_title(title, fontsize=8)
    if run is None or not run.layers:
        axis.text(0.5, 0.5, "no records", ha="center", transform=axis.transAxes)
        return
    layer = run.layers[-1]
    unit = run.typical(layer)
    steps = [r.step for r in run.percentiles]
    low, middle, high = zip(*(r.percentiles[layer].z[[0, -2, -1], unit].tolist() for r in run.percentiles), strict=True)
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    for values, width in ((low, 0.7), (middle, 1.3), (high, 0.7)):
        axis.plot(steps, values, color=colour, lw=width)
    for values, text in ((low, "15"), (middle, "50"), (high, "85")):
        axis.annotate(text, (steps[-1], values[-1]), (3, -2), textcoords="offset points", color=colour, fontsize=7)
    axis.set_ylabel(f"input of unit {unit}, {layer}", parse_math=False)
    _thousands(axis)


def _thousands(axis: Any) -> None:
    axis.set_xlabel("training steps")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value else "0")
    axis.set_xlim(left=0)
    axis.grid(axis="y", color="#000000", alpha=0.08, lw=0.6)
