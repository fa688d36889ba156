"""Tell how far the jobs are that run side by side: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

LINE_EVERY = 30.0


class Watch:
    """Follow the metrics files of jobs that train.

    Beyond the paper: for people who wait.
    """

    def __init__(self) -> None:
        self.followed: dict[str, _Followed] = {}
        self.bars: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bars = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> Watch:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def add(self, name: str, folder: Path, steps: int) -> None:
        """Follow one more job, in its folder; one of 0 steps does not train."""
        self.followed[name] = followed = _Followed(folder, steps)
        if self.bars is not None:
            followed.task = self.bars.add_task(name, total=steps or None)
        else:
            self._say(f"{name}: started" + (f", {steps:,} steps" if steps else ""))

    def look(self) -> None:
        """Show what is new."""
        for name, run in self.followed.items():
            run.read()
            if self.bars is not None:
                self.bars.update(run.task, completed=run.step, description=f"{name}{run.text}")
            elif run.text and time.monotonic() - run.told > LINE_EVERY:
                run.told = time.monotonic()
                self._say(f"{name}:{run.where().removeprefix(' at')}")

    def ended(self, name: str, *, finished: bool) -> None:
        """Say how a job ended."""
        run = self.followed.pop(name)
        run.read()
        if self.bars is not None:
            self.bars.remove_task(run.task)
        self._say(f"{name}: {'finished' if finished else 'stopped'}{run.where()}")

    def _say(self, text: str) -> None:
        if self.bars is not None:
            self.bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


class _Followed:
    """Hold how far a job is known to be."""

    def __init__(self, folder: Path, total: int) -> None:
        self.path, self.total = folder / "metrics.jsonl", total
        self.position = self.path.stat().st_size if self.path.exists() else 0
        self.step, self.text, self.told = 0, "", time.monotonic()
        self.task: Any = None

    def where(self) -> str:
        """Say at which step it is, and what was last found there."""
        return f" at step {self.step:,} of {self.total:,}{self.text}" if self.total else ""

    def read(self) -> None:
        """Take in the lines that were written since the last look."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            # A run that goes on cuts off what was written after its checkpoint.
            self.position = min(self.position, file.seek(0, 2))
            file.seek(self.position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.position += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            self.step = record["step"]
            if "val_top1" in record:
                self.text = f", validation {record['val_top1']:.2%}, {record['seconds']:.0f} s"
