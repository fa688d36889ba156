"""The metrics of a run: log them during training, read them back, and summarize them in ``result.json``."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ..monitor.records import Record
from ..monitor.sinks import as_json
from ..optional_packages import require
from ..progress import Display
from ..results import parse_json, write_atomically
from .distributed import Ranks


class Metrics:
    """Append records to a JSON Lines file; a resumed run continues the file without gaps or duplicates.

    A checkpoint stores :meth:`position`, the length of the file when the checkpoint was written. A resumed run
    truncates the file to that length and writes the later lines again.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> metrics = Metrics(path); metrics.write({"step": 1}); kept = metrics.position()
    >>> metrics.write({"step": 2}); metrics.close()
    >>> metrics = Metrics(path, kept); metrics.write({"step": 2, "again": True}); metrics.close()
    >>> [line["step"] for line in read(path)]
    [1, 2]
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        path.touch()
        if not 0 <= position <= path.stat().st_size:
            raise ValueError(
                f"{path} is shorter than when the checkpoint was written: restore it from a backup, or start a new run"
            )
        os.truncate(path, position)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; NaN and infinities become null."""
        line = memoryview((json.dumps({k: _finite(v) for k, v in record.items()}) + "\n").encode())
        with self._named():
            while line:  # one call may write only part of the line if the disk is almost full
                line = line[self._file.write(line) :]

    def position(self) -> int:
        """Flush the file to disk and return its length."""
        with self._named():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the file's name to an OSError, because errors from writing to an open file do not include it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class Logger:
    """Write a run's records to its folder, and print them.

    On a terminal, show a progress bar, and print only the records of validations. Only rank 0 has a logger.

    Args:
        folder: the run's folder.
        positions: the lengths in bytes to which metrics.jsonl and monitor.jsonl are truncated before records are added.
        total: number of steps of the whole run.
        tensorboard: also write scalars for TensorBoard.
    """

    def __init__(self, folder: Path, positions: tuple[int, int], total: int, *, tensorboard: bool = False) -> None:
        self._open = ExitStack()
        self.metrics = self._open.enter_context(closing(Metrics(folder / "metrics.jsonl", positions[0])))
        self.monitor = self._open.enter_context(closing(Metrics(folder / "monitor.jsonl", positions[1])))
        self.board: Any = None
        if tensorboard:
            board = require("torch.utils.tensorboard", "train").SummaryWriter(str(folder / "tensorboard"))
            self.board = self._open.enter_context(closing(board))
        self.started, self._text = time.perf_counter(), ""
        # Without a terminal, Display would print lines of progress. Disable them, because log() prints the records.
        self.display = self._open.enter_context(Display(every=math.inf))
        self.display.add("training", total)

    def advance(self, step: int) -> None:
        """Move the progress bar to this step."""
        self.display.update("training", step, self._text)

    def log(self, record: dict[str, Any]) -> None:
        """Write a record to metrics.jsonl, and to TensorBoard if requested, and show the record."""
        self.metrics.write({**record, "seconds": round(time.perf_counter() - self.started, 3)})
        self._text = "  ".join(_shown(key, value) for key, value in record.items())
        if self.display.bars is None or "val_top1" in record:
            self.display.say(self._text)
        self.advance(record["step"])
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, record["step"])

    def log_monitor(self, record: Record) -> None:
        """Write a Monitor's record to monitor.jsonl."""
        self.monitor.write(as_json(record))

    def positions(self) -> tuple[int, int]:
        """Flush both files to disk and return their lengths."""
        return self.metrics.position(), self.monitor.position()

    def close(self) -> None:
        """Close all files, even if closing one of them fails."""
        self._open.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; an incomplete last line is left out, because a run may still be writing it.

    Raises:
        ValueError: if a line is not a record; the message names the file and the line.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def curve(records: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return a run's curve, as in Figure 2: the points (step, top-1 validation accuracy), in order.

    The accuracy of the final, folded network is left out.

    >>> curve([{"step": 5, "loss": 1.0}, {"step": 10, "val_top1": 0.5}])
    [(10, 0.5)]

    Paper: Fig. 2
    """
    return [(r["step"], r["val_top1"]) for r in records if r.get("val_top1") is not None and not r.get("final")]


def steps_to(points: Sequence[tuple[int, float]], accuracy: float) -> int | None:
    """Return the first step whose validation accuracy is at least ``accuracy``, or None if no step reaches it.

    >>> steps_to([(100, 0.3), (200, 0.5), (300, 0.45)], 0.4), steps_to([(100, 0.3)], 0.4)
    (200, None)

    Paper: Fig. 3
    """
    return next((step for step, reached in points if reached >= accuracy), None)


Statistics = Literal["population", "frozen", "none"]


@dataclass
class Result:
    """The summary of a run, as written to its ``result.json``.

        result = train(recipe, options)  # a Result
        print(result.top1, result.best_step, result.hardware)

    Paper: Fig. 3 (steps to an accuracy, maximum accuracy)
    """

    recipe: str
    steps: int
    examples: int
    classes: int
    diverged: bool = False
    best_top1: float | None = None
    best_step: int | None = None
    top1: float | None = None
    """top-1 and top-5 validation accuracy of the final network (folded, if it has running averages)"""
    top5: float | None = None
    train_top1: float | None = None
    """top-1 accuracy of the final network on the training images, if ``score_training`` is set"""
    running_top1: float | None = None
    """top-1 validation accuracy with running averages, at the last step"""
    statistics: Statistics = "population"
    """which statistics the final network normalizes by; "none" if no layer has running averages"""
    steps_to: dict[str, int | None] = field(default_factory=dict)
    corrupt: int = 0
    corrupt_files: tuple[str, ...] = ()
    """at most 20 of the unreadable files, with the reasons"""
    hardware: dict[str, Any] = field(default_factory=dict)


def write_run_result(folder: Path, result: Result, targets: Sequence[float]) -> None:
    """Complete a result from the run's ``metrics.jsonl`` and write it to ``result.json``.

    The metrics supply the best validation accuracy, the accuracy at the last step, and the first step that reaches
    each target.

    Paper: Fig. 3
    """
    points = curve(read(folder / "metrics.jsonl"))
    if points:
        result.best_step, result.best_top1 = max(points, key=lambda point: (point[1], -point[0]))
        result.running_top1 = points[-1][1] if points[-1][0] == result.steps else None
    result.steps_to = {f"{target:g}": steps_to(points, target) for target in targets}
    write_atomically(folder / "result.json", json.dumps(asdict(result), indent=2).encode())


def hardware(here: Ranks) -> dict[str, Any]:
    """Return a run's hardware, software versions and date, for its result file."""
    cuda = here.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(here.device) if cuda else platform.processor() or platform.machine(),
        "ranks": here.world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(key: str, value: Any) -> str:
    if value is True:
        return key
    if isinstance(value, float):
        return f"{key} {value:.4f}" if abs(value) < 1e5 else f"{key} {value:.3g}"
    return f"{key} {value}"


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = parse_json(line, where)
    accuracy = record.get("val_top1")
    if not isinstance(record.get("step"), int) or not (accuracy is None or isinstance(accuracy, int | float)):
        raise ValueError(f"{where}: step must be an integer; val_top1, if present, must be a number")
    return record
