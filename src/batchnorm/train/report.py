"""What rank 0 tells: metrics.jsonl, a progress bar or plain lines, TensorBoard."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ..extras import require
from .metrics import Metrics


class Reporter:
    """Write records to the run's folder and show them: a bar on a terminal, a line each elsewhere.

    Args:
        folder: of the run.
        position: the length of the metrics file that is to be kept.
        total: steps of the whole run.
        tensorboard: also write scalars for TensorBoard.

    Beyond the paper: for people who wait.
    """

    def __init__(self, folder: Path, position: int, total: int, *, tensorboard: bool = False) -> None:
        self.metrics = Metrics(folder / "metrics.jsonl", position)
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
        text = "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items())
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        else:
            print(text, file=sys.stderr, flush=True)
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(key, value, record["step"])

    def position(self) -> int:
        """Return the length of the metrics file, all of it on the disk."""
        return self.metrics.position()

    def close(self) -> None:
        """Close all files."""
        self.metrics.close()
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()
