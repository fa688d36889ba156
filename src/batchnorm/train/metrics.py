"""What a run leaves behind: a file of JSON lines that survives kills, and the questions asked of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
