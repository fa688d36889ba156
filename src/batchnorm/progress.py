"""Show progress on stderr: bars if it is a terminal and rich is installed, lines of text otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from operator import length_hint
from threading import Lock, Timer
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 3.0
LINE_EVERY = 30.0


def progress(items: Iterable[T], label: str, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Yield the items, and show progress on stderr if the loop takes more than a few seconds.

    In lines of text, ``unit`` stands before the number of items done, as in "batch 3 of 10".

    >>> list(progress([1, 2], "counting"))
    [1, 2]
    """
    total = length_of(items) if total is None else total
    start = time.monotonic()
    iterator = enumerate(items, 1)
    for _, item in iterator:
        yield item
        if time.monotonic() - start > PATIENCE:
            break
    else:
        return
    with Display(transient=True) as display:
        display.add(label, total, unit)
        for done, item in iterator:
            yield item
            display.update(label, done)


def length_of(items: Iterable[object]) -> int | None:
    """Return the number of items, or None if it is unknown or 0.

    >>> length_of([1, 2]), length_of(iter([1, 2])), length_of(x for x in [1, 2])
    (2, 2, None)
    """
    # length_hint also returns 0 if __len__ raises TypeError, as for a DataLoader of an IterableDataset.
    return length_hint(items) or None


class Steps:
    """Show the steps of a call on stderr if the call takes more than a few seconds; use this in a ``with`` statement.

    Args:
        label: the name of the call.
        total: the usual number of steps; the call may turn out to need more.
        hidden: show nothing, for example because another process shows the same steps.

    >>> with Steps("count", total=2) as step:
    ...     step("one"), step("two")
    (None, None)
    """

    def __init__(self, label: str, total: int, *, hidden: bool = False) -> None:
        self.label, self.total, self.hidden = label, total, hidden
        self.done, self.doing, self.start = -1, "", time.monotonic()
        self._display: Display | None = None
        self._lock = Lock()
        # On a terminal, the timer shows the bar even in the middle of a long step. Without a terminal, lines are
        # printed only when a step starts.
        self._timer = None if hidden or not sys.stderr.isatty() else Timer(max(PATIENCE, 0.0), self._show)

    def __enter__(self) -> Steps:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._display is not None:
            if exc[0] is None:  # all steps are done, even if there were fewer than `total`
                self._display.update(self.label, self.done + 1, total=self.done + 1)
            self._display.__exit__(*exc)

    def __call__(self, doing: str) -> None:
        """Show what the next step does; call this just before the step."""
        with self._lock:
            self.done, self.doing = self.done + 1, doing
            self.total = max(self.total, self.done + 1)
        if not self.hidden and time.monotonic() - self.start > PATIENCE:
            self._show()

    def _show(self) -> None:
        with self._lock:
            if self._display is None:
                self._display = Display(transient=True).__enter__()
                self._display.add(self.label, self.total)
            self._display.update(self.label, max(self.done, 0), self.doing, self.total)


class Display:
    """Show the progress of several named tasks; use it in a ``with`` statement.

    Args:
        every: the minimum number of seconds between two lines of text about the same task.
        transient: remove the bars at the end.
    """

    def __init__(self, every: float = LINE_EVERY, *, transient: bool = False) -> None:
        self.every = every
        self._shown: dict[str, _Shown] = {}
        self.bars = _rich_bars(transient) if sys.stderr.isatty() and find_spec("rich") else None

    def __enter__(self) -> Display:
        if self.bars is not None:
            from rich.errors import LiveError

            try:
                self.bars.start()
            except LiveError:  # before rich 14.1, only one display is allowed at a time, and the caller already has one
                self.bars = None
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bars is not None:
            self.bars.stop()
        elif exc[0] is None:
            # `update` prints at most one line per task every `self.every` seconds, so a task's last line is usually out
            # of date. Print the task's final state.
            for name, shown in self._shown.items():
                if shown.line not in ("", str(shown)):
                    self.say(f"{name}: {shown}")

    def add(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Add a task of ``total`` items; in lines of text, ``unit`` stands before the number of items done."""
        task = None if self.bars is None else self.bars.add_task(name, total=total)
        self._shown[name] = _Shown(task, total, f"{unit} " if unit else "")

    def update(self, name: str, done: int, text: str = "", total: int | None = None) -> None:
        """Set a task's progress, the text that is shown next to it and, if given, its new total."""
        shown = self._shown[name]
        shown.done, shown.text = done, f", {text}" if text else ""
        shown.total = shown.total if total is None else total
        if self.bars is not None:
            self.bars.update(shown.task, completed=done, total=shown.total, description=f"{name}{shown.text}")
        elif time.monotonic() - shown.printed > self.every:
            shown.printed, shown.line = time.monotonic(), str(shown)
            self.say(f"{name}: {shown}")

    def end(self, name: str, how: str) -> None:
        """Print how a task ended, and remove it from the display."""
        shown = self._shown.pop(name)
        if self.bars is not None:
            self.bars.remove_task(shown.task)
        self.say(f"{name}: {how}" + (f" at {shown}" if shown.done else ""))

    def say(self, text: str) -> None:
        """Print a line; if there are bars, it appears above them."""
        if self.bars is not None:
            self.bars.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


class _Shown:
    def __init__(self, task: Any, total: int | None, unit: str) -> None:
        self.task, self.total, self.unit = task, total, unit
        self.done, self.text = 0, ""
        self.printed, self.line = float("-inf"), ""
        """when the last line of text was printed, and what it said"""

    def __str__(self) -> str:
        return f"{self.unit}{self.done:,}" + (f" of {self.total:,}" if self.total else "") + self.text


def _rich_bars(transient: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=transient)
