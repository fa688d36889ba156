"""Destinations for a monitor's records: memory, JSON lines, TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from ..optional_packages import require
from ..results import write_atomically
from .records import Record


class Sink(Protocol):
    """Receive a monitor's records."""

    def write(self, record: Record) -> None:
        """Write one record."""

    def close(self) -> None:
        """Close the sink."""


class Memory:
    """Keep at most ``points`` records of a run of any length: when the memory is full, every second record is dropped.

    Args:
        points: the maximum number of records, at least 2.

    >>> memory = Memory(points=4)
    >>> for step in range(6): memory.write(Record(step))
    >>> [record.step for record in memory.records]
    [0, 2, 4, 5]

    Beyond the paper: bounded memory.
    """

    def __init__(self, points: int = 500) -> None:
        if points < 2:
            raise ValueError(f"points must be at least 2, not {points}, to keep the first record and a later one")
        self.points = points
        self.thinned = 0
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        """Store one record; if the memory is full, first drop every second record."""
        if len(self.records) == self.points:
            self.records = self.records[::2]
            self.thinned += 1
        self.records.append(record)

    def close(self) -> None:
        """Do nothing: the records stay in memory."""


class JSONLines:
    """Append one line of JSON per record: ``{"step": 100, "percentiles": {"sigmoid1": {"z": [...], "x": [...]}}}``.

    ``x`` is left out if it is the same as ``z``. Numbers are rounded to five significant digits. If the file has
    records of an earlier run, those at or after the step of the new run's first record are removed. An incomplete last
    line is removed too.

    Args:
        path: the file; its folder is created if needed.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> from batchnorm.monitor import Change
    >>> sink = JSONLines(path); sink.write(Record(7, gradient_change={"fc2": Change(0.5, 0.9)})); sink.close()
    >>> path.read_text()
    '{"step": 7, "gradient_change": {"fc2": {"relative": 0.5, "cosine": 0.9}}}\\n'

    Beyond the paper: saving records.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        self._begun = False

    def write(self, record: Record) -> None:
        """Append one line."""
        if not self._begun:
            self._begun = True
            self._cut(record.step)
        self._file.write(json.dumps(as_json(record)).encode() + b"\n")
        self._file.flush()

    def _cut(self, step: int) -> None:
        """Remove an earlier run's records at or after ``step``, and an incomplete last line."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] < step]
        if kept != lines:
            self._file.close()
            write_atomically(self._path, b"".join(kept))
            self._file = self._path.open("ab")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> JSONLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()


class TensorBoard:
    """Write scalars for TensorBoard: each percentile's mean over a layer's units, and relative gradient changes.

    Args:
        folder: the folder for the event files.
        percentiles: the percentiles that the monitor records; they appear in the scalars' names.

    Raises:
        MissingExtraError: if tensorboard is not installed.

    >>> import tempfile
    >>> from batchnorm.monitor import Change
    >>> folder = tempfile.mkdtemp()
    >>> sink = TensorBoard(folder); sink.write(Record(7, gradient_change={"fc2": Change(0.5, 0.9)})); sink.close()
    >>> len(list(Path(folder).glob("events.out.tfevents.*")))
    1

    Beyond the paper: watching a run in TensorBoard.
    """

    def __init__(self, folder: str | Path, percentiles: Sequence[float] = (15, 50, 85)) -> None:
        require("tensorboard", "train")
        self._writer: Any = require("torch.utils.tensorboard", "train").SummaryWriter(str(folder))
        self._percentiles = percentiles

    def write(self, record: Record) -> None:
        """Add the record's scalars."""
        for layer, (z, x) in record.percentiles.items():
            for symbol, values in (("z", z), ("x", x)) if x is not z else (("z", z),):
                for q, value in zip(self._percentiles, values.mean(1).tolist(), strict=True):
                    self._writer.add_scalar(f"{symbol} {layer}/p{q:g}", value, record.step)
        for layer, change in record.gradient_change.items():
            self._writer.add_scalar(f"gradient change/{layer}", change.relative, record.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def as_json(record: Record) -> dict[str, Any]:
    """Convert the record to values that can be written as JSON; NaN and infinities become None."""
    line: dict[str, Any] = {"step": record.step}
    if record.percentiles:
        line["percentiles"] = {
            name: {symbol: _numbers(values) for symbol, values in (("z", z), ("x", x)) if symbol == "z" or x is not z}
            for name, (z, x) in record.percentiles.items()
        }
    for name, change in record.gradient_change.items():
        rounded = {key: _rounded(value) for key, value in change._asdict().items()}
        line.setdefault("gradient_change", {})[name] = rounded
    return line


def _numbers(values: Tensor) -> list[list[float | None]]:
    return [[_rounded(v) for v in row] for row in values.tolist()]


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if isfinite(value) else None
