"""A claim's result: one JSON file with its provenance, and one picture beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..extras import require
from ..report.summary import FIGURES
from ..results import environment, write_json

# With batch normalization, without, and two more.
BLUE, ORANGE, GREEN, GREY = "#2a6fc9", "#d9622b", "#14835b", "#8b8a84"


def colour(batch_norm: bool) -> str:
    """Return the colour of a network in every picture."""
    return BLUE if batch_norm else ORANGE


def label(batch_norm: bool) -> str:
    """Return a network's name in every picture."""
    return "with BN" if batch_norm else "without BN"


def publish(
    name: str,
    claim: str,
    options: Any,
    findings: Mapping[str, Any],
    verdicts: Mapping[str, bool],
    draw: Callable[[Any], Any],
) -> dict[str, Any]:
    """Write ``name.json`` and ``name.png`` into ``options.out``, print the finding and return what the file holds.

    Args:
        name: the claim's command.
        claim: what the paper says.
        options: the command's options, a dataclass with ``out``.
        findings: what was measured.
        verdicts: statements that follow from the claim, and whether they hold here.
        draw: from ``matplotlib.pyplot`` to a figure.

    Raises:
        MissingExtraError: if matplotlib is not installed.

    Beyond the paper: how results are kept.
    """
    out: Path = options.out
    given = {key: value for key, value in asdict(options).items() if key != "out"}
    # Whatever this process may use, each training ran on one thread: processes.map_on_cores.
    result = {"claim": claim, "options": given, "environment": {**environment(), "threads": 1}, **findings}
    result["verdicts"] = dict(verdicts)
    path = write_json(out / f"{name}.json", result)
    picture(draw, out / f"{name}.png")
    measured = next(row.measured for row in FIGURES if row.command == f"reproduce {name}")
    print(f"the paper: {claim}\nmeasured: {measured(result)}")
    for statement, holds in verdicts.items():
        print(f"{'confirmed' if holds else 'refuted'}: {statement}")
    print(f"result: {path}\npicture: {out / f'{name}.png'}")
    return result


def picture(draw: Callable[[Any], Any], path: Path) -> None:
    """Draw with the house style and save."""
    require("matplotlib", "report").use("agg")
    plt = require("matplotlib.pyplot", "report")
    style = {
        "font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
        "axes.linewidth": 0.6, "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.25, "grid.linewidth": 0.5,
        "legend.frameon": False, "lines.linewidth": 1.3, "figure.constrained_layout.use": True,
        "svg.hashsalt": "batchnorm",
    }  # fmt: skip
    with plt.rc_context(style):
        figure = draw(plt)
        # No date in the file: the same result draws the same bytes.
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
