"""A progress bar for passes that take long: rich's on a terminal, plain lines elsewhere, nothing for short ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 3.0
LINE_EVERY = 30.0


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items; once this has taken a few seconds, show on stderr how far it is.

    >>> list(progress([1, 2], "counting"))
    [1, 2]

    Beyond the paper: for people who wait.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    start = time.monotonic()
    iterator = enumerate(items, 1)
    for done, item in iterator:
        yield item
        if time.monotonic() - start > PATIENCE:
            show = _bar if sys.stderr.isatty() else _lines
            yield from show(iterator, label, done, total)
            return


def _bar(rest: Iterator[tuple[int, T]], label: str, done: int, total: int | None) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, completed=done)
        for done, item in rest:
            yield item
            bar.update(task, completed=done)


def _lines(rest: Iterator[tuple[int, T]], label: str, done: int, total: int | None) -> Iterator[T]:
    last = float("-inf")
    for done, item in rest:
        yield item
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            print(f"{label}: {done}" + (f" of {total}" if total else ""), file=sys.stderr, flush=True)
