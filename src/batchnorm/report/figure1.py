"""Figure 1 and the claims of Section 4.1: a picture as in the paper, and tables that compare runs with the claims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..monitor import drift
from ..pictures import BLUE, ORANGE, picture
from .runs import Run

TARGETS = (*(k / 10 for k in range(1, 10)), 0.95, 0.96, 0.97, 0.98)
SHOWN = 6  # the maximum number of accuracies in the table of `steps_to`
COLORS = {False: ORANGE, True: BLUE}
LABEL = 7  # the height in points of the labels of percentiles


def draw(runs: Sequence[Run], out: Path) -> list[Path]:
    """Draw ``fig1.png`` and ``fig1.svg`` into ``out`` from a run without and a run with batch normalization.

    Args:
        runs: runs whose ``config`` has ``batch_norm``; the first run with False and the first run with True are drawn.
        out: the folder.

    Raises:
        MissingExtraError: if matplotlib is not installed.

    Paper: Fig. 1
    """
    pair = {kind: next((r for r in runs if r.config.get("batch_norm") is kind), None) for kind in (False, True)}
    paths = [out / f"fig1.{kind}" for kind in ("png", "svg")]
    for path in paths:
        picture(partial(_figure1, pair), path)
    return paths


def _figure1(pair: dict[bool, Run | None], plt: Any) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), width_ratios=(0.9, 1, 1))
    axes[2].sharey(axes[1])
    _accuracy(axes[0], pair)
    for axis, kind, letter in ((axes[1], False, "b"), (axes[2], True, "c")):
        _bands(axis, pair[kind], f"({letter}) {'With' if kind else 'Without'} BN", COLORS[kind])
    for axis, kind in ((axes[1], False), (axes[2], True)):  # the shared axis now has its final limits
        _label_percentiles(axis, pair[kind], COLORS[kind])
    return figure


def _accuracy(axis: Any, pair: dict[bool, Run | None]) -> None:
    ends = {kind: run.accuracy[-1][1] for kind, run in pair.items() if run is not None and run.accuracy}
    low = 0.7 if min(ends.values(), default=1.0) >= 0.8 else 0.0  # start at 0 if much of a curve may lie below 0.7
    sides = {False: -22, True: 7}
    if ends.get(False, 1.0) < 0.3:  # no room below this curve for its label
        sides = {False: 7, True: 18 if abs(ends.get(True, 1.0) - ends[False]) < 0.2 else 7}
    for kind, run in pair.items():
        if run is None or not run.accuracy:
            continue
        steps, values = zip(*run.accuracy, strict=True)
        axis.plot(steps, values, color=COLORS[kind], lw=1.4, ls="-" if kind else (0, (4, 2)), **_dot(steps))
        label = "With BN" if kind else "Without BN"
        end = (steps[-1], values[-1])
        axis.annotate(label, end, (0, sides[kind]), textcoords="offset points", ha="right", color=COLORS[kind])
    axis.set_ylim(low, 1.0)
    axis.set_title("(a) Test accuracy")
    _steps_axis(axis)


def _bands(axis: Any, run: Run | None, title: str, color: str) -> None:
    axis.set_title(title)
    if run is None or not run.layers:
        axis.text(0.5, 0.5, "no records", ha="center", transform=axis.transAxes)
        return
    layer, unit, steps, (low, middle, high) = _percentiles(run)
    axis.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    for values, width in ((low, 0.7), (middle, 1.3), (high, 0.7)):
        axis.plot(steps, values, color=color, lw=width, **_dot(steps))
    axis.set_ylabel(f"input of unit {unit}, {layer}", parse_math=False)
    _steps_axis(axis)


def _label_percentiles(axis: Any, run: Run | None, color: str) -> None:
    """Label the ends of the curves; if they are too close, move the outer labels away from the middle one."""
    if run is None or not run.layers:
        return
    _, _, steps, curves = _percentiles(run)
    low, middle, high = (values[-1] for values in curves)
    bottom, top = axis.get_ylim()
    points = axis.bbox.height / axis.figure.dpi * 72 / (top - bottom)  # per unit of the axis
    down, up = (max(LABEL - points * gap, 0) for gap in (middle - low, high - middle))
    for value, text, shift in ((low, "15", -down), (middle, "50", 0), (high, "85", up)):
        end, offset = (steps[-1], value), (3, -2 + shift)
        axis.annotate(text, end, offset, textcoords="offset points", color=color, fontsize=7)


def _percentiles(run: Run) -> tuple[str, int, list[int], tuple[tuple[float, ...], ...]]:
    """Return the drawn layer and unit, the steps, and the curves of the lowest, middle and highest percentile."""
    layer = run.layers[-1]
    unit = run.typical(layer)
    records = (r.percentiles[layer].z[[0, -2, -1], unit].tolist() for r in run.percentiles)
    return layer, unit, [r.step for r in run.percentiles], tuple(zip(*records, strict=True))


def _dot(steps: Sequence[int]) -> dict[str, Any]:
    """Return the options that draw a curve of a single point as a dot, because a line needs two points."""
    return {"marker": "o", "ms": 3} if len(steps) == 1 else {}


def _steps_axis(axis: Any) -> None:
    axis.set_xlabel("training steps")
    axis.set_xlim(left=0)
    right = axis.get_xlim()[1]
    if right >= 5000:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value else "0")
    else:
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlim(0, max(right, 1))


def steps_to(runs: Sequence[Run]) -> list[list[str]]:
    """Tabulate the first step at which each run reached given accuracies; the first row is the header.

    Each row is for an accuracy in TARGETS that at least one run reached. If there are more than SHOWN such accuracies,
    the table has only the SHOWN highest. If there are none, the table is empty.

    Paper: Fig. 1 a, "train faster"
    """
    targets = [t for t in TARGETS if any(run.steps_to(t) is not None for run in runs)][-SHOWN:]
    if not targets:
        return []
    kinds = {run.accuracy_kind for run in runs if run.accuracy}
    rows = [[kinds.pop() if len(kinds) == 1 else "accuracy", *(run.name for run in runs)]]
    for accuracy in targets:
        reached = [run.steps_to(accuracy) for run in runs]
        rows.append([f"{accuracy:.0%}", *("not reached" if s is None else f"{s:,}" for s in reached)])
    return rows


def paper_versus_here(runs: Sequence[Run]) -> list[list[str]]:
    """Tabulate what Section 4.1 says and what these runs show; the first row is the header.

    The first run without batch normalization is compared with the first run that has it. The table is empty if one of
    them is missing or has no accuracies.

    Paper: Sec. 4.1; Fig. 1
    """
    plain = next((r for r in runs if r.config.get("batch_norm") is False), None)
    bn = next((r for r in runs if r.config.get("batch_norm") is True), None)
    if plain is None or bn is None or not (plain.accuracy and bn.accuracy):
        return []
    rows = [["claim", "paper", "here: without BN", "here: with BN"]]
    at_step = [dict(r.accuracy) for r in (plain, bn)]
    if common := at_step[0].keys() & at_step[1].keys():
        last = max(common)
        rows.append(
            [
                f"test accuracy at step {last:,}",
                '"The batch-normalized network enjoys the higher test accuracy."',
                *(f"{accuracy[last]:.2%}" for accuracy in at_step),
            ]
        )
    reached = [(r.steps_to(0.95), r) for r in (plain, bn)]
    rows.append(
        [
            "steps to 95% test accuracy",
            '"Batch Normalization helps the network train faster"',
            *("not reached" if s is None else f"{s:,}" for s, _ in reached),
        ]
    )
    if all(len(r.percentiles) > 1 and r.layers for r in (plain, bn)):
        rows += _drift_rows(plain, bn)
    return rows


def _drift_rows(plain: Run, bn: Run) -> list[list[str]]:
    quotes = {
        "z": '"much more stable as training progresses"',
        "x": "not in the paper; BN does not keep this distribution fixed",
    }
    names = {"z": "sigmoid inputs", "x": "Wu (before normalization)"}
    rows = []
    kinds: tuple[Literal["z", "x"], ...] = ("z", "x")
    for of in kinds:
        values = [float(drift(r.percentiles, r.layers[-1], of).sum(0).median()) for r in (plain, bn)]
        what = f"drift of {names[of]} during training, in widths of the distribution (last hidden layer, median unit)"
        rows.append([what, quotes[of], *(f"{v:.1f}" for v in values)])
    return rows
