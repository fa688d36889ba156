"""The files that runs write; figures and tables are made from these files alone, without images or a GPU.

Every run writes a small result file, ``NAME.json``. A member of Figure 4's ensemble also writes its class
probabilities, ``NAME.npz``. The ensemble is computed from these probabilities, so each member is evaluated only once,
on the machine that has its checkpoint.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data.image_sources import check_same_data
from ...errors import differences
from ...evaluate import Predictions
from ...evaluate.crops import Count
from ...results import environment, write_atomically
from ...train import Recipe, Result
from ...train import metrics as lines
from .plan import Plan, PlannedRun

KEYS = ("curve", "result", "data", "environment", "seconds", "steps_per_second")
CROPS: tuple[Count, ...] = (1, 144)
COLUMNS = ("step", "val_top1", "val_top5", "train_loss", "train_top1", "val_loss")


class Point(NamedTuple):
    """One validation, and the mean loss and accuracy of the training records since the previous validation."""

    step: int
    val_top1: float
    val_top5: float | None  # None if the data has too few classes
    train_loss: float | None
    train_top1: float | None
    val_loss: float | None = None  # missing in older result files


@dataclass(frozen=True)
class Finished:
    """The contents of a run's result file."""

    run: PlannedRun
    curve: tuple[Point, ...]
    result: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    seconds: float
    steps_per_second: float | None

    @property
    def diverged(self) -> bool:
        """Whether the loss, or an output of the final network, became NaN or infinite."""
        return bool(self.result["diverged"])

    @property
    def points(self) -> list[tuple[int, float]]:
        """The points (step, top-1 validation accuracy), in order."""
        return [(point.step, point.val_top1) for point in self.curve]


class RunFiles(NamedTuple):
    """A run's result file, and the folder that the run is trained in."""

    run: PlannedRun
    results: Path
    out: Path

    @property
    def result(self) -> Path:
        """The result file."""
        return self.results / f"{self.run.name}.json"

    @property
    def folder(self) -> Path:
        """The folder of the run's checkpoints and metrics."""
        return self.out / "runs" / self.run.name

    def read(self) -> Finished | None:
        """Return the run's result, or None if the run is not finished."""
        if not self.result.is_file():
            return None
        content = read_result(self.result, ("recipe", "evaluate_every", *KEYS))
        recipe = Recipe.from_json(json.dumps(content["recipe"]))
        planned = {**asdict(self.run.recipe), "evaluate_every": self.run.evaluate_every}
        if other := differences({**asdict(recipe), "evaluate_every": content["evaluate_every"]}, planned):
            raise ValueError(
                f"{self.result} belongs to another plan ({'; '.join(other)}): choose another --results, or move the"
                " file away"
            )
        curve = tuple(Point(*row) for row in content["curve"])
        return Finished(self.run, curve, *(content[key] for key in KEYS[1:]))

    def write(self, result: Result, data: dict[str, Any], **more: Any) -> None:
        """Write the result file of a run that has ended, with ``more`` as further entries."""
        records = lines.read(self.folder / "metrics.jsonl")
        content = {
            "run": self.run.name,
            "group": self.run.group,
            "variant": self.run.variant,
            "recipe": asdict(self.run.recipe),
            "evaluate_every": self.run.evaluate_every,
            "data": data,
            "result": {k: v for k, v in asdict(result).items() if k not in ("recipe", "steps_to")},
            "environment": environment(),
            "seconds": round(_seconds(records), 1),
            "steps_per_second": _pace(records),
            **more,
            "columns": COLUMNS,
            "curve": [list(point) for point in curve(records)],
        }
        write_atomically(self.result, _readable(content).encode())


class MemberFiles(NamedTuple):
    """The files of one member of an ensemble: ``NAME.json`` and ``NAME.npz``."""

    name: str
    results: Path

    @property
    def result(self) -> Path:
        """The member's result file."""
        return self.results / f"{self.name}.json"

    @property
    def probabilities(self) -> Path:
        """The file with the member's class probabilities for each number of crops, and with the labels."""
        return self.results / f"{self.name}.npz"

    def missing(self) -> str | None:
        """Return why the member is left out of the ensemble, or None if it is part of the ensemble."""
        if not self.result.is_file():
            return "not yet run"
        if not self.read()["crops"]:
            return "diverged in training"
        if self.probabilities.is_file():
            return None
        return (
            f"left out of the ensemble: {self.probabilities.name} is missing; to compute it again, add --data DIR (and"
            " --runs, if you used it)"
        )

    def finished(self) -> bool:
        """Return whether the member has been evaluated, or diverged in training."""
        return self.missing() in (None, "diverged in training")

    def read(self) -> dict[str, Any]:
        """Return the contents of the result file."""
        return read_result(self.result, ("crops", "data", "recipe", "weights", "environment"))

    def predictions(self, crops: int) -> tuple[Tensor, Tensor]:
        """Return the class probabilities of all images, averaged over this many crops, and the labels."""
        with np.load(self.probabilities, allow_pickle=False) as arrays:
            return torch.from_numpy(arrays[f"crops{crops}"]), torch.from_numpy(arrays["labels"])

    def write_probabilities(self, found: Mapping[int, Predictions]) -> None:
        """Write the probabilities for each number of crops, and the labels.

        The file stores float32: in float16, small probabilities could become equal, and the top five classes would then
        be ambiguous.
        """
        arrays = {f"crops{crops}": one.probabilities.cpu().numpy() for crops, one in found.items()}
        arrays["labels"] = found[CROPS[0]].labels.cpu().numpy()
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **arrays)
        write_atomically(self.probabilities, content.getvalue())


def read_result(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Return the contents of a result file; raise ValueError if it is not valid JSON or lacks one of these keys."""
    try:
        content = dict(json.loads(path.read_text()))
        if missing := [key for key in keys if key not in content]:
            raise ValueError(f"it has no {', '.join(map(repr, missing))}")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not the result file of a run ({error}): choose another --results, or move the file away"
        ) from error
    return content


def read_all(plan: Plan, results: Path, out: Path) -> dict[str, Finished]:
    """Return the finished runs by name, in the plan's order."""
    found = {run.name: RunFiles(run, results, out).read() for run in plan.runs}
    finished = {name: one for name, one in found.items() if one is not None}
    check_same_data({name: one.data for name, one in finished.items()})
    return finished


def curve(records: Sequence[dict[str, Any]]) -> list[Point]:
    """Return a run's validations, each with the means of the training records since the previous validation.

    >>> lines = [{"step": 1, "loss": 2.0, "train_top1": 0.2}, {"step": 2, "loss": 1.0, "train_top1": 0.4}]
    >>> curve([*lines, {"step": 2, "val_top1": 0.3, "val_top5": 0.6}])
    [Point(step=2, val_top1=0.3, val_top5=0.6, train_loss=1.5, train_top1=0.30000000000000004, val_loss=None)]
    """
    points, loss, right = [], [], []
    for record in records:
        if record.get("loss") is not None:
            loss.append(record["loss"])
            right.append(record["train_top1"])
        elif "val_top1" in record and not record.get("final"):
            means = [statistics.fmean(values) if values else None for values in (loss, right)]
            validation = (record["step"], record["val_top1"], record.get("val_top5"))
            points.append(Point(*validation, means[0], means[1], record.get("val_loss")))
            loss, right = [], []
    return points


def _seconds(records: Sequence[dict[str, Any]]) -> float:
    """Return the sum of the times of each session's last record; each session's clock starts at 0."""
    clock = [record["seconds"] for record in records]
    return float(sum(a for a, b in pairwise([*clock, 0.0]) if b < a))


def _pace(records: Sequence[dict[str, Any]]) -> float | None:
    """Return the median speed, in steps per second, between consecutive training records.

    A pair of records counts only if no validation comes between them and the clock does not restart between them. The
    result is None if no pair counts.
    """
    paces = [
        (b["step"] - a["step"]) / (b["seconds"] - a["seconds"])
        for a, b in pairwise(records)
        if "train_top1" in a and "train_top1" in b and b["seconds"] > a["seconds"]
    ]
    return round(statistics.median(paces), 1) if paces else None


def _readable(content: dict[str, Any]) -> str:
    """Return JSON with one line for each key, and one line for each row of the curve."""
    rounded = [[round(v, 5) if isinstance(v, float) else v for v in row] for row in content["curve"]]
    rows = ",\n  ".join(map(json.dumps, rounded))
    keys = [f' "{k}": {json.dumps(v)}' for k, v in content.items() if k != "curve"]
    return "{\n" + ",\n".join([*keys, f' "curve": [\n  {rows}\n ]']) + "\n}\n"
