"""Tell how far the runs are that train side by side: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from .files import RunFiles

LINE_EVERY = 30.0


class Watch:
    """Follow the runs' metrics files.

    Args:
        data: what :func:`describe_data` says, for the length of an epoch.

    Beyond the paper: for people who wait.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.examples = data["train"]
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

    def add(self, files: RunFiles) -> None:
        """Follow one more run."""
        recipe = files.run.recipe
        total = round(recipe.epochs * -(-self.examples // recipe.batch_size))
        self.followed[files.run.name] = followed = _Followed(files, total)
        if self.bars is not None:
            followed.task = self.bars.add_task(files.run.name, total=total)
        else:
            self._say(f"{files.run.name}: started, {total:,} steps")

    def look(self) -> None:
        """Show what is new."""
        for name, run in self.followed.items():
            run.read()
            if self.bars is not None:
                self.bars.update(run.task, completed=run.step, description=f"{name}{run.text}")
            elif run.text and time.monotonic() - run.told > LINE_EVERY:
                run.told = time.monotonic()
                self._say(f"{name}: step {run.step:,} of {run.total:,}{run.text}")

    def ended(self, files: RunFiles, *, finished: bool) -> None:
        """Say how a run ended."""
        run = self.followed.pop(files.run.name)
        run.read()
        if self.bars is not None:
            self.bars.remove_task(run.task)
        how = "finished" if finished else "stopped"
        self._say(f"{files.run.name}: {how} at step {run.step:,} of {run.total:,}{run.text}")

    def _say(self, text: str) -> None:
        if self.bars is not None:
            self.bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


class _Followed:
    """Hold how far a run is known to be."""

    def __init__(self, files: RunFiles, total: int) -> None:
        self.path, self.total = files.folder / "metrics.jsonl", total
        self.position = self.path.stat().st_size if self.path.exists() else 0
        self.step, self.text, self.told = 0, "", time.monotonic()
        self.task: Any = None

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
