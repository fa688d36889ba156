"""Train several runs at a time, each in a process of its own, and let them all save and stop together."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess
from typing import Any

from ...train.run import stop_signal
from .files import RunFiles
from .plan import Plan
from .train_one import STOPPED, Machine, train_one
from .watch import Watch

POLL = 0.2


def train_side_by_side(
    waiting: Sequence[RunFiles], plan: Plan, machine: Machine, data: dict[str, Any], *, jobs: int, minutes: float | None
) -> bool:
    """Train the runs in their order, ``jobs`` of them at a time; return whether all came to their end.

    Ctrl-C, SIGTERM and the time limit let every run save its state and stop; the same command goes on from there.

    Raises:
        RuntimeError: naming the runs that failed, once the others are through, with the ends of their logs.

    Beyond the paper: one GPU has room for several.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    left, running, failed = deque(waiting), dict[SpawnProcess, RunFiles](), dict[str, str]()
    context = multiprocessing.get_context("spawn")
    asked = unfinished = False
    with stop_signal() as stop, Watch(data) as watch:
        while left or running:
            stopping = stop.requested or time.monotonic() > deadline
            while left and len(running) < jobs and not stopping:
                files = left.popleft()
                watch.add(files)
                process = context.Process(target=train_one, args=(files, plan, machine, data), name=files.run.name)
                process.start()
                running[process] = files
            if stopping and not asked:
                asked, unfinished = True, unfinished or bool(left)
                left.clear()
                for process in running:
                    process.terminate()  # SIGTERM, and once: a run saves on the first
            for process in [process for process in running if not process.is_alive()]:
                files = running.pop(process)
                finished = files.result.is_file()  # even where a signal then cut its exit short
                unfinished = unfinished or not finished
                if not finished and process.exitcode != STOPPED and not stopping:
                    failed[files.run.name] = _last_words(files, process.exitcode)
                watch.ended(files, finished=finished)
            watch.look()
            time.sleep(POLL)
    if failed:
        raise RuntimeError("\n".join(f"{name} failed: {why}" for name, why in failed.items()))
    return not unfinished


def _last_words(files: RunFiles, code: int | None) -> str:
    log = files.folder / "log.txt"
    end = "\n".join(log.read_text().splitlines()[-15:]) if log.exists() else ""
    return f"exit status {code}; {log} ends:\n{end}"
