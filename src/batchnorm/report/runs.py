"""Read runs from their folders: any run that left a ``metrics.jsonl``, of this library's commands or of a user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from ..monitor import Change, Percentiles, Record, drift, typical_unit

Curve = list[tuple[int, float]]

# How names of curves of accuracies end: this library's commands write "accuracy" and "val_top1".
ACCURACIES = ("accuracy", "top1")


@dataclass(frozen=True)
class Run:
    """Hold what one run left behind.

    Beyond the paper: what is compared.
    """

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    curves: dict[str, Curve]
    percentiles: list[Record] = field(repr=False)
    gradient_changes: list[Record] = field(repr=False)

    @property
    def steps(self) -> int:
        """The last step that anything was written for."""
        points = [step for curve in self.curves.values() for step, _ in curve]
        return max([*points, *(r.step for r in (*self.percentiles, *self.gradient_changes))], default=0)

    @property
    def accuracy(self) -> Curve:
        """The first curve of an accuracy that is not one on training data."""
        return next((c for name, c in self.curves.items() if _place(name) == 0), [])

    @cached_property
    def layers(self) -> list[str]:
        """The layers with percentiles, in the order of the network."""
        return list(self.percentiles[0].percentiles) if self.percentiles else []

    def typical(self, layer: str) -> int:
        """Return the unit of the median drift in a layer."""
        return typical_unit(self.percentiles, layer) if len(self.percentiles) > 1 else 0

    def steps_to(self, accuracy: float) -> int | None:
        """Return the first step at which the accuracy was at least this, or None."""
        return next((step for step, value in self.accuracy if value >= accuracy), None)

    def drift_curve(self, layer: str, of: Literal["z", "x"]) -> Curve:
        """Return the median over units of the drift since the record before, by step."""
        steps = [r.step for r in self.percentiles][1:]
        if not steps:
            return []
        values = drift(self.percentiles, layer, of).median(1).values.tolist()
        return list(zip(steps, values, strict=True))

    def line(self) -> str:
        """Say in one line what the run came to."""
        parts = [f"{self.name}: step {self.steps:,}"]
        final = self.summary.get("accuracy")
        if isinstance(final, dict):
            parts += [f"accuracy {value:.2%} ({name})" for name, value in final.items()]
        elif self.accuracy:
            parts.append(f"accuracy {self.accuracy[-1][1]:.2%}")
        if "seconds" in self.summary:
            parts.append(f"{self.summary['seconds']:.0f} s")
        return ", ".join(parts)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run in the given folders and below them.

    Args:
        paths: folders that hold a ``metrics.jsonl``, or folders with such folders in them.

    Raises:
        FileNotFoundError: where a path holds no run.
        ValueError: without a path, or where a run's settings cannot be read.

    Beyond the paper: ``batchnorm report``.
    """
    if not paths:
        raise ValueError("name at least one folder of a run")
    folders: list[Path] = []
    for path in paths:
        found = sorted(p.parent for p in path.rglob("metrics.jsonl"))
        if not found:
            raise FileNotFoundError(f"{path}: no metrics.jsonl in it or below it; give the folder of a run")
        folders += [p for p in found if p not in folders]
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    # The baseline first, as in the paper's figures.
    return sorted(runs, key=lambda run: run.config.get("batch_norm") is not False) if len(paths) == 1 else runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Name runs by the last part of their path, or by what tells them apart where that is not enough."""
    last = [f.resolve().name for f in folders]
    if len(set(last)) == len(last):
        return last
    common = os.path.commonpath([f.resolve() for f in folders])
    return [str(f.resolve().relative_to(common)) for f in folders]


def _read(folder: Path, name: str) -> Run:
    curves: dict[str, Curve] = {}
    percentiles: list[Record] = []
    changes: list[Record] = []
    for line in (*_lines(folder / "metrics.jsonl"), *_lines(folder / "monitor.jsonl")):
        step = line.pop("step", None)
        if not isinstance(step, int) or line.get("final"):
            continue  # a summary of the run, not a point of it
        if "percentiles" in line:
            percentiles.append(Record(step, {k: _percentiles(v) for k, v in line["percentiles"].items()}))
        if "gradient_change" in line:
            changes.append(Record(step, {}, {k: Change(**v) for k, v in line["gradient_change"].items()}))
        for key, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(key, []).append((step, float(value)))
    ordered = dict(sorted(curves.items(), key=lambda item: _place(item[0])))
    config = _json(folder / "config.json") or _recipe(folder)
    return Run(name, config, _json(folder / "summary.json") or _result(folder), ordered, percentiles, changes)


def _place(curve: str) -> int:
    """Return the place of a curve among the others: a comparison opens with the accuracy on data not trained on."""
    if not curve.endswith(ACCURACIES):
        return 2
    return 1 if curve.startswith("train") else 0


def _recipe(folder: Path) -> dict[str, Any]:
    """Return the settings of a run of ``batchnorm train``, by the names that the table shows.

    Not under ``batch_norm``, which marks the pair of Section 4.1.
    """
    return {key.replace("_", " "): value for key, value in _json(folder / "recipe.json").items()}


def _result(folder: Path) -> dict[str, Any]:
    """Return what a run of ``batchnorm train`` came to, as a ``summary.json`` says it."""
    result = _json(folder / "result.json")
    found = {"running": result.get("running_top1"), "folded": result.get("top1")}
    accuracy = {name: value for name, value in found.items() if value is not None}
    return {"accuracy": accuracy} if accuracy else {}


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed, or is still running
        if isinstance(line, dict):
            yield line


def _percentiles(table: dict[str, Any]) -> Percentiles:
    z = torch.tensor(table["z"])
    return Percentiles(z, torch.tensor(table["x"]) if "x" in table else z)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
