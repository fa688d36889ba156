"""The table *paper versus here* for Section 4.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..monitor import drift
from .runs import Run

ACCURACIES = (0.8, 0.9, 0.95, 0.96, 0.97, 0.98)


def steps_to(runs: Sequence[Run]) -> list[list[str]]:
    """Tabulate the first step at which each run reached given test accuracies; the first row is the header.

    Paper: Fig. 1 a, "train faster"
    """
    if not any(run.accuracy for run in runs):
        return []
    rows = [["test accuracy", *(run.name for run in runs)]]
    for accuracy in ACCURACIES:
        reached = [run.steps_to(accuracy) for run in runs]
        rows.append([f"{accuracy:.0%}", *("not reached" if s is None else f"{s:,}" for s in reached)])
    return rows


def paper_versus_here(runs: Sequence[Run]) -> list[list[str]]:
    """Tabulate what Section 4.1 says and what these runs show; empty without a run of either kind.

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
        "x": "not measured: what BN's own normalization cannot hide",
    }
    names = {"z": "sigmoid inputs", "x": "x = Wu before normalization"}
    rows = []
    kinds: tuple[Literal["z", "x"], ...] = ("z", "x")
    for of in kinds:
        values = [_path(r, of) for r in (plain, bn)]
        what = f"path of {names[of]}, last hidden layer, median unit, in widths of its distribution"
        rows.append([what, quotes[of], *(f"{v:.1f}" for v in values)])
    return rows


def _path(run: Run, of: Literal["z", "x"]) -> float:
    """Return the median over units of the total drift over the run."""
    return float(drift(run.percentiles, run.layers[-1], of).sum(0).median())
