"""What each run leaves: one small result file, from which figures and tables are made without data or GPU."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...data.fingerprint import check_same_data
from ...results import environment, write_atomically
from ...train import Recipe, Result
from ...train import metrics as lines
from .plan import Plan, PlannedRun, differing

KEYS = ("curve", "result", "data", "environment", "seconds", "steps_per_second")
COLUMNS = ("step", "val_top1", "val_top5", "train_loss", "train_top1")


class Point(NamedTuple):
    """Hold one validation, and the training batches' means since the one before.

    Paper: Fig. 2
    """

    step: int
    val_top1: float
    val_top5: float
    train_loss: float | None
    train_top1: float | None


@dataclass(frozen=True)
class Finished:
    """Hold what a run's result file says.

    Paper: Figs. 2, 3
    """

    run: PlannedRun
    curve: tuple[Point, ...]
    result: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    seconds: float
    steps_per_second: float | None

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being a number, which ended the run."""
        return bool(self.result["diverged"])

    @property
    def points(self) -> list[tuple[int, float]]:
        """(step, validation accuracy at 1) in order."""
        return [(point.step, point.val_top1) for point in self.curve]


class RunFiles(NamedTuple):
    """Stand for a run's result file and for the folder that it is trained in.

    Beyond the paper: resuming.
    """

    run: PlannedRun
    results: Path
    out: Path

    @property
    def result(self) -> Path:
        """The result file."""
        return self.results / f"{self.run.name}.json"

    @property
    def folder(self) -> Path:
        """The folder of the training: checkpoints and metrics."""
        return self.out / "runs" / self.run.name

    def read(self) -> Finished | None:
        """Return the run's result, None where it is not finished.

        Raises:
            ValueError: where the file is of another recipe or plan.
        """
        if not self.result.is_file():
            return None
        content = read_result(self.result, ("recipe", "evaluate_every", *KEYS))
        other = differing(Recipe.from_json(json.dumps(content["recipe"])), self.run.recipe)
        if content["evaluate_every"] != self.run.evaluate_every:
            other.append(f"evaluate_every is {content['evaluate_every']} and {self.run.evaluate_every}")
        if other:
            raise ValueError(
                f"{self.result} is of another plan: there and here, {'; '.join(other)}; choose another --results, or"
                " move the file away"
            )
        curve = tuple(Point(*row) for row in content["curve"])
        return Finished(self.run, curve, *(content[key] for key in KEYS[1:]))

    def write(self, result: Result, data: dict[str, Any], commit: str | None, **more: Any) -> None:
        """Write the result file of a run that has ended in its folder, and what more was found out about it."""
        records = lines.read(self.folder / "metrics.jsonl")
        content = {
            "run": self.run.name,
            "group": self.run.group,
            "variant": self.run.variant,
            "recipe": asdict(self.run.recipe),
            "evaluate_every": self.run.evaluate_every,
            "data": data,
            "result": {k: v for k, v in asdict(result).items() if k not in ("recipe", "steps_to")},
            "environment": environment(commit),
            "seconds": round(_seconds(records), 1),
            "steps_per_second": _pace(records),
            **more,
            "columns": COLUMNS,
            "curve": [list(point) for point in curve(records)],
        }
        write_atomically(self.result, _readable(content).encode())


def read_result(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Return what a result file holds.

    Raises:
        ValueError: naming the file, if it is not a JSON object with these keys.

    Beyond the paper: results are not mixed.
    """
    try:
        content = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the result file of a run: {error}") from error
    missing = [key for key in keys if key not in content]
    if missing:
        raise ValueError(f"{path} is not the result file of a run: it has no {', '.join(map(repr, missing))}")
    return content


def read_all(plan: Plan, results: Path, out: Path) -> dict[str, Finished]:
    """Return what is finished, by name, in the plan's order.

    Raises:
        ValueError: where a file is of another plan, or two are of different data.

    Beyond the paper: results are not mixed.
    """
    found = {run.name: RunFiles(run, results, out).read() for run in plan.runs}
    finished = {name: one for name, one in found.items() if one is not None}
    check_same_data({name: one.data for name, one in finished.items()})
    return finished


def curve(records: Sequence[dict[str, Any]]) -> list[Point]:
    """Return a run's validations with the means of the training lines between them.

    >>> lines = [{"step": 1, "loss": 2.0, "train_top1": 0.2}, {"step": 2, "loss": 1.0, "train_top1": 0.4}]
    >>> curve([*lines, {"step": 2, "val_top1": 0.3, "val_top5": 0.6}])
    [Point(step=2, val_top1=0.3, val_top5=0.6, train_loss=1.5, train_top1=0.30000000000000004)]

    Paper: Fig. 2
    """
    points, loss, right = [], [], []
    for record in records:
        if record.get("loss") is not None:
            loss.append(record["loss"])
            right.append(record["train_top1"])
        elif "val_top1" in record and not record.get("final"):
            means = [statistics.fmean(values) if values else None for values in (loss, right)]
            points.append(Point(record["step"], record["val_top1"], record["val_top5"], *means))
            loss, right = [], []
    return points


def _seconds(records: Sequence[dict[str, Any]]) -> float:
    """Return how long the run took: a sitting's clock starts at 0."""
    clock = [record["seconds"] for record in records]
    return float(sum(a for a, b in pairwise([*clock, 0.0]) if b < a))


def _pace(records: Sequence[dict[str, Any]]) -> float | None:
    """Return the median of the steps per second between training lines with nothing else between them."""
    paces = [
        (b["step"] - a["step"]) / (b["seconds"] - a["seconds"])
        for a, b in pairwise(records)
        if "train_top1" in a and "train_top1" in b and b["seconds"] > a["seconds"]
    ]
    return round(statistics.median(paces), 1) if paces else None


def _readable(content: dict[str, Any]) -> str:
    """Return JSON with one line for each key, and for each row of the curve."""
    rows = ",\n  ".join(json.dumps(_rounded(row)) for row in content["curve"])
    keys = [f' "{k}": {json.dumps(v)}' for k, v in content.items() if k != "curve"]
    return "{\n" + ",\n".join([*keys, f' "curve": [\n  {rows}\n ]']) + "\n}\n"


def _rounded(row: Sequence[float | None]) -> list[float | None]:
    return [round(value, 5) if isinstance(value, float) else value for value in row]
