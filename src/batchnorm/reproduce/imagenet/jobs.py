"""Do several jobs at a time, each in a process of its own, and let them all save and stop together."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol

from ...errors import JobsFailedError
from ...train import Stopped
from ...train.lock import take
from ...train.resume import stop_signal
from .jobs_display import Watch

POLL = 0.2
FAILED, STOPPED = 1, 2


class Job(Protocol):
    """Stand for work that can be taken to another process, stopped there by SIGTERM, and gone on with later.

    Beyond the paper: running it.
    """

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def folder(self) -> Path:
        """Where it leaves ``metrics.jsonl``, if it trains, and where ``log.txt`` goes."""

    @property
    def steps(self) -> int:
        """Training steps, 0 where it does not train."""

    def finished(self) -> bool:
        """Say whether what it leaves is there."""

    def __call__(self) -> None:
        """Do it, or go on with it.

        Raises:
            Stopped: where SIGTERM came and the state is saved.
        """


def run_side_by_side(waiting: Sequence[Job], *, jobs: int, minutes: float | None) -> bool:
    """Do the jobs in their order, ``jobs`` of them at a time; return whether all came to their end.

    Ctrl-C, SIGTERM and the time limit let every job save its state and stop; the same command goes on from there.

    Raises:
        JobsFailedError: naming the jobs that failed, once the others are through, with the ends of their logs.

    Beyond the paper: one GPU has room for several.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    left, running, failed = deque(waiting), dict[SpawnProcess, Job](), dict[str, str]()
    context = multiprocessing.get_context("spawn")
    asked = unfinished = False
    with stop_signal() as stop, Watch() as watch:
        while left or running:
            stopping = stop.requested or time.monotonic() > deadline
            while left and len(running) < jobs and not stopping:
                job = left.popleft()
                watch.add(job.name, job.folder, job.steps)
                process = context.Process(target=_do, args=(job,), name=job.name)
                process.start()
                running[process] = job
            if stopping and not asked:
                asked, unfinished = True, unfinished or bool(left)
                left.clear()
                for process in running:
                    process.terminate()  # SIGTERM, and once: a job saves on the first
            for process in [process for process in running if not process.is_alive()]:
                job = running.pop(process)
                finished = job.finished()  # even where a signal then cut its exit short
                unfinished = unfinished or not finished
                if not finished and process.exitcode != STOPPED and not stopping:
                    failed[job.name] = _last_words(job, process.exitcode)
                watch.ended(job.name, finished=finished)
            watch.look()
            time.sleep(POLL)
    if failed:
        raise JobsFailedError("\n".join(f"{name} failed: {why}" for name, why in failed.items()))
    return not unfinished


def _do(job: Job) -> None:
    """Do a job in this process and exit with how it went; what it prints goes to ``log.txt`` in its folder."""
    with _own(job.folder) as log:
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        try:
            job()
        except Stopped as stopped:
            print(stopped, file=sys.stderr, flush=True)
            sys.exit(STOPPED)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            sys.exit(FAILED)


@contextmanager
def _own(folder: Path) -> Iterator[int]:
    """Open the job's log, which is also what keeps a second process out of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        try:
            take(log)
        except OSError:
            print(f"another process is at work in {folder}", file=sys.stderr)
            sys.exit(FAILED)
        yield log.fileno()


def _last_words(job: Job, code: int | None) -> str:
    log = job.folder / "log.txt"
    end = "\n".join(log.read_text().splitlines()[-15:]) if log.exists() else ""
    return f"exit status {code}; {log} ends:\n{end}"
