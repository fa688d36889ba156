"""Read runs from folders with a ``metrics.jsonl``, written by this library's commands or by a user's code."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..monitor import Change, Percentiles, Record, drift, typical_unit
from ..results import parse_json, read_json
from .train_runs import STATISTICS, used

T = TypeVar("T")
Curve = list[tuple[int, float]]

LAST_STEP = 2**53  # integers below this are exact in JavaScript

# Endings of the names of accuracy curves: this library's commands write "accuracy" and "val_top1".
ACCURACIES = ("accuracy", "top1")
# The final accuracies of `batchnorm train` have names that start with this word.
TOP1 = "top-1"


@dataclass(frozen=True)
class Run:
    """The settings, curves and records of one run, or the mean curves of several runs."""

    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    curves: dict[str, Curve]
    percentiles: list[Record] = field(repr=False)
    gradient_changes: list[Record] = field(repr=False)
    bands: dict[str, dict[Literal["low", "high"], Curve]] = field(default_factory=dict, repr=False)
    """for each curve with a band around it, the edges of the band at the curve's steps"""

    @property
    def steps(self) -> int:
        """The last step at which a number was recorded."""
        points = [step for curve in self.curves.values() for step, _ in curve]
        return max([*points, *(r.step for r in (*self.percentiles, *self.gradient_changes))], default=0)

    @property
    def accuracy(self) -> Curve:
        """The first accuracy curve that was not measured on training data; empty if there is none."""
        return next((c for name, c in self.curves.items() if _place(name) == 0), [])

    @property
    def accuracy_kind(self) -> Literal["top-1 validation accuracy", "test accuracy"]:
        """The name of the accuracy; ``val_top1``, written by ``batchnorm train``, is measured on validation images."""
        return "top-1 validation accuracy" if "val_top1" in self.curves else "test accuracy"

    @cached_property
    def layers(self) -> list[str]:
        """The layers whose percentiles are in every record, in the network's order."""
        first, *others = [r.percentiles for r in self.percentiles] or [{}]
        return [layer for layer in first if all(layer in p for p in others)]

    def typical(self, layer: str) -> int:
        """Return the index of the layer's unit with the median drift, or 0 if there are fewer than two records."""
        return typical_unit(self.percentiles, layer) if len(self.percentiles) > 1 else 0

    def steps_to(self, accuracy: float) -> int | None:
        """Return the first step at which the run reached this accuracy, or None if it never did."""
        return next((step for step, value in self.accuracy if value >= accuracy), None)

    def drift_curve(self, layer: str, of: Literal["z", "x"]) -> Curve:
        """Return, for each record after the first, its step and the units' median drift since the previous record."""
        steps = [r.step for r in self.percentiles][1:]
        if not steps:
            return []
        values = drift(self.percentiles, layer, of).median(1).values.tolist()
        return list(zip(steps, values, strict=True))

    def line(self) -> str:
        """Summarize the run in one line."""
        parts = [f"{self.name}: step {self.steps:,}"]
        final = self.summary.get("accuracy")
        if isinstance(final, dict):
            for name, value in final.items():
                shown, value_text = _printable(name), f"{value:.2%}"
                parts.append(f"{shown}: {value_text}" if name.startswith(TOP1) else f"accuracy {value_text} ({shown})")
        elif self.accuracy:
            parts.append(f"{TOP1 if 'val_top1' in self.curves else 'accuracy'} {self.accuracy[-1][1]:.2%}")
        if "seconds" in self.summary:
            parts.append(f"{self.summary['seconds']:.0f} s")
        return ", ".join(parts)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run in the given folders and their subfolders.

    Args:
        paths: folders that hold a ``metrics.jsonl``, or folders with such folders in them.

    Raises:
        FileNotFoundError: if a path holds no run.
        ValueError: if there is no path, or if a file of a run is malformed; the message names the file.
    """
    if not paths:
        raise ValueError("give at least one run folder")
    folders: list[Path] = []
    for path in paths:
        found = sorted(p.parent for p in path.rglob("metrics.jsonl"))
        if not found:
            raise FileNotFoundError(
                f"{path}: neither this folder nor a folder below it has a metrics.jsonl; give the folder of a run"
            )
        folders += [p for p in found if p not in folders]
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    # If there is one path, put the run without batch normalization first, as in the paper's figures. If there are
    # several paths, keep their order.
    return sorted(runs, key=lambda run: run.config.get("batch_norm") is not False) if len(paths) == 1 else runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names or, if two folders have the same name, their paths below the common parent folder."""
    last = [_printable(f.resolve().name) for f in folders]
    if len(set(last)) == len(last):
        return last
    common = os.path.commonpath([f.resolve() for f in folders])
    return [_printable(str(f.resolve().relative_to(common))) for f in folders]


def _printable(name: str) -> str:
    """Replace characters that would control a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _read(folder: Path, name: str) -> Run:
    curves: dict[str, Curve] = {}
    percentiles: list[Record] = []
    changes: list[Record] = []
    for where, line in (*_lines(folder / "metrics.jsonl"), *_lines(folder / "monitor.jsonl")):
        step = line.pop("step", None)
        if step is None or line.get("final"):
            continue  # the line describes the whole run, not a step
        if not (_is_number(step) and isinstance(step, int) and 0 <= step < LAST_STEP):
            raise ValueError(f"{where}: step is {_short(step)}, but must be a whole number from 0 to 2^53 - 1")
        if "percentiles" in line:
            percentiles.append(Record(step, _by_layer(line, "percentiles", _percentiles, where)))
        if "gradient_change" in line:
            changes.append(Record(step, {}, _by_layer(line, "gradient_change", _change, where)))
        for key, value in line.items():
            if _is_number(value):
                curves.setdefault(key, []).append((step, _float(value)))
    _check_shapes(percentiles, folder)
    ordered = dict(sorted(curves.items(), key=lambda item: _place(item[0])))
    return Run(name, _config(folder, percentiles), _summary(folder), ordered, percentiles, changes)


def _config(folder: Path, percentiles: Sequence[Record]) -> dict[str, Any]:
    path = folder / "config.json"
    config = _json(path)
    levels, counts = config.get("percentiles"), {len(p.z) for r in percentiles for p in r.percentiles.values()}
    if counts and levels is not None:
        numbers = isinstance(levels, list) and all(_is_number(q) and 0 <= q <= 100 for q in levels)
        if not numbers or counts != {len(levels)}:
            raise ValueError(
                f"{path}: percentiles is {_short(levels)}, but must list the {max(counts)} percentiles that the"
                " run recorded"
            )
    return config or _recipe(folder)


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    summary = _json(path)
    if not summary:
        return _result(folder)
    accuracy = summary.get("accuracy")
    numbers = accuracy if isinstance(accuracy, dict) else {}
    for key, value in {**numbers, "seconds": summary.get("seconds", 0)}.items():
        _check_number(value, key, path)
    return summary


def _place(curve: str) -> int:
    """Return a curve's sort key: held-out accuracy comes first, then training accuracy, then all others."""
    if not curve.endswith(ACCURACIES):
        return 2
    return 1 if curve.startswith("train") else 0


def _recipe(folder: Path) -> dict[str, Any]:
    """Return the settings that a run of ``batchnorm train`` uses, keyed by the names that the page shows.

    The names have spaces instead of underscores, so a recipe's ``batch_norm`` becomes ``batch norm``. Under the key
    ``batch_norm``, the report would mistake the run for one of the two networks of Section 4.1.
    """
    return {key.replace("_", " "): value for key, value in used(_json(folder / "recipe.json")).items()}


def _result(folder: Path) -> dict[str, Any]:
    """Return the result of a run of ``batchnorm train`` in the format of a ``summary.json``."""
    path = folder / "result.json"
    result = _json(path)
    kind = result.get("statistics")
    names = [f"{TOP1} {how}".strip() for how in STATISTICS[kind if kind in [*STATISTICS] else "population"]]
    found = dict(zip(names, (result.get("running_top1"), result.get("top1")), strict=True))
    accuracy = {name: value for name, value in found.items() if value is not None}
    for name, value in accuracy.items():
        _check_number(value, name, path)
    return {"accuracy": accuracy} if accuracy else {}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a JSON Lines file, together with its file name and line number for error messages."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            if text.strip():
                yield where, parse_json(text, where)
        except ValueError:
            # The last line may be incomplete, because the run was killed or is still writing it.
            if number < len(lines):
                raise


def _by_layer(line: dict[str, Any], key: str, read: Callable[[Any], T], where: str) -> dict[str, T]:
    tables = line.pop(key)
    if not isinstance(tables, dict):
        raise ValueError(f"{where}: {key} is {_short(tables)}, but must be an object with an entry for each layer")
    found = {}
    for layer, table in tables.items():
        try:
            found[layer] = read(table)
        except KeyError as error:
            raise ValueError(f"{where}: {key} of layer '{layer}' has no entry {error}") from error
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{where}: {key} of layer '{layer}' cannot be read: {error}") from error
    return found


def _percentiles(table: Any) -> Percentiles:
    z = _table(table["z"])
    x = _table(table["x"]) if "x" in table else z
    if z.dim() != 2 or len(z) < 2 or not z.numel() or x.shape != z.shape:
        raise ValueError(
            f"z and x have the shapes {tuple(z.shape)} and {tuple(x.shape)}, but must have the same shape (percentiles,"
            " units), with at least 2 percentiles and 1 unit"
        )
    return Percentiles(z, x)


def _table(rows: Any) -> torch.Tensor:
    return torch.tensor([[math.nan if v is None else v for v in row] for row in rows], dtype=torch.float32)


def _change(table: Any) -> Change:
    if isinstance(table, dict):
        table = {key: math.nan if value is None else value for key, value in table.items()}
    if not (isinstance(table, dict) and table.keys() == set(Change._fields) and all(map(_is_number, table.values()))):
        keys = " and ".join(map(repr, Change._fields))
        raise ValueError(f"{_short(table)} must be an object with the numbers {keys} and nothing else")
    return Change(**{key: _float(value) for key, value in table.items()})


def _check_shapes(records: Sequence[Record], folder: Path) -> None:
    shapes: dict[str, torch.Size] = {}
    for record in records:
        for layer, (z, _) in record.percentiles.items():
            if shapes.setdefault(layer, z.shape) != z.shape:
                raise ValueError(
                    f"{folder}: the percentiles of {_short(layer)} have the shape {tuple(z.shape)} at step"
                    f" {record.step}, but {tuple(shapes[layer])} at earlier steps: all steps must have the same shape"
                )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _check_number(value: Any, key: str, path: Path) -> None:
    if not _is_number(value) or math.isinf(_float(value)):
        raise ValueError(f"{path}: {_printable(key)} is {_short(value)}, but must be a finite number or NaN")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _short(value: object) -> str:
    return ascii(value)[:60]
