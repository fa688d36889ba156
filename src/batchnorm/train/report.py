"""What rank 0 tells: metrics.jsonl, monitor.jsonl, a progress bar or plain lines, TensorBoard."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..extras import require
from ..monitor.records import Record
from ..monitor.sinks import as_json
from .metrics import Metrics


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
