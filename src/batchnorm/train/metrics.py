"""What a run leaves behind: a file of JSON lines that survives kills, and the questions asked of it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..extras import require
from ..monitor.records import Record
from ..monitor.sinks import as_json
from ..results import parse_json


class Metrics:
    """Append one line of JSON a record; after a crash go on where the checkpoint stood, without gaps or doubles.

    A checkpoint notes :meth:`position`, after the lines are on the disk; a resumed run cuts the file there and writes
    the later lines again.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> metrics = Metrics(path); metrics.write({"step": 1}); kept = metrics.position()
    >>> metrics.write({"step": 2}); metrics.close()
    >>> metrics = Metrics(path, kept); metrics.write({"step": 2, "again": True}); metrics.close()
    >>> [line["step"] for line in read(path)]
    [1, 2]

    Beyond the paper: resuming.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        path.touch()
        if not 0 <= position <= path.stat().st_size:
            raise ValueError(f"{path} is shorter than when the checkpoint was written: lines are missing; restore it")
        os.truncate(path, position)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; numbers that are not finite become null."""
        line = memoryview((json.dumps({k: _finite(v) for k, v in record.items()}) + "\n").encode())
        with self._named():
            while line:  # a full disk takes a part first
                line = line[self._file.write(line) :]

    def position(self) -> int:
        """Return the length of the file, all of it on the disk."""
        with self._named():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the file's name to an error: writing to an open file does not know it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; a last line that is still being written is left out.

    Raises:
        ValueError: naming the file and the line, if one is not a record.

    Beyond the paper: results.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = parse_json(line, where)
    accuracy = record.get("val_top1")
    if not isinstance(record.get("step"), int) or not (accuracy is None or isinstance(accuracy, int | float)):
        raise ValueError(f"{where} is not a record of a step and numbers")
    return record


def curve(records: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation accuracy at 1) in order: Figure 2.

    >>> curve([{"step": 5, "loss": 1.0}, {"step": 10, "val_top1": 0.5}])
    [(10, 0.5)]

    Paper: Fig. 2
    """
    return [(r["step"], r["val_top1"]) for r in records if r.get("val_top1") is not None and not r.get("final")]


def steps_to(points: Sequence[tuple[int, float]], accuracy: float) -> int | None:
    """Return the first step whose validation accuracy is at least ``accuracy``; None where it is never reached.

    >>> steps_to([(100, 0.3), (200, 0.5), (300, 0.45)], 0.4), steps_to([(100, 0.3)], 0.4)
    (200, None)

    Paper: Fig. 3
    """
    return next((step for step, reached in points if reached >= accuracy), None)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Reporter:
    """Write records to the run's folder and show them: a bar on a terminal, a line each elsewhere.

    Args:
        folder: of the run.
        positions: how much of metrics.jsonl and monitor.jsonl is to be kept.
        total: steps of the whole run.
        tensorboard: also write scalars for TensorBoard.

    Beyond the paper: for people who wait.
    """

    def __init__(self, folder: Path, positions: tuple[int, int], total: int, *, tensorboard: bool = False) -> None:
        self.metrics = Metrics(folder / "metrics.jsonl", positions[0])
        self.monitor = Metrics(folder / "monitor.jsonl", positions[1])
        self.started = time.perf_counter()
        self.board: Any = None
        if tensorboard:
            self.board = require("torch.utils.tensorboard", "train").SummaryWriter(str(folder / "tensorboard"))
        self.bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("training", total=total)
            self.bar.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def line(self, record: dict[str, Any]) -> None:
        """Keep and show a record."""
        self.metrics.write({**record, "seconds": round(time.perf_counter() - self.started, 3)})
        text = "  ".join(_shown(key, value) for key, value in record.items())
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        else:
            print(text, file=sys.stderr, flush=True)
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, record["step"])

    def watched(self, record: Record) -> None:
        """Keep what the Monitor saw, in ``monitor.jsonl``."""
        self.monitor.write(as_json(record))

    def positions(self) -> tuple[int, int]:
        """Return the lengths of the two files, all of them on the disk."""
        return self.metrics.position(), self.monitor.position()

    def close(self) -> None:
        """Close all files, even if one cannot be."""
        with ExitStack() as stack:
            stack.callback(self.metrics.close)
            stack.callback(self.monitor.close)
            if self.bar is not None:
                stack.callback(self.bar.stop)
            if self.board is not None:
                stack.callback(self.board.close)


def _shown(key: str, value: Any) -> str:
    if value is True:
        return key
    return f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}"
