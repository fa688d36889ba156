"""Run resumable jobs side by side, each in its own process; on a signal, all jobs save their state and stop."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from .errors import JobsFailedError, sentence
from .processes import ChildProcess, handling
from .progress import Display

POLL = 0.2
FAILED, STOPPED = 1, 2


class Stopped(Exception):
    """Raised by a job that was asked to stop, after it has saved its state.

        try:
            train(recipe, options)
        except Stopped as stopped:
            print(stopped)  # stopped at step 1,200; run the same command again to resume

    Beyond the paper: stopping and resuming a run.
    """


class StopSignal:
    """Remember that SIGTERM or Ctrl-C arrived, so that the job can finish its step and save its state."""

    requested = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; Ctrl-C after an earlier signal raises KeyboardInterrupt at once."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Catch SIGTERM and Ctrl-C inside the block, if the block runs in the main thread.

    >>> with stop_signal() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     print(stop.requested)
    True
    """
    stop = StopSignal()
    with handling(signal.SIGTERM, signal.SIGINT, handler=stop):
        yield stop


class Job(Protocol):
    """Work that can be pickled, stopped by SIGTERM and resumed later."""

    @property
    def name(self) -> str:
        """The job's name in messages."""

    @property
    def folder(self) -> Path:
        """The folder for ``log.txt`` and, if the job trains, ``metrics.jsonl``."""

    @property
    def steps(self) -> int:
        """The number of training steps, or 0 if the job does not train."""

    def finished(self) -> bool:
        """Return whether the job's results have been written."""

    def __call__(self) -> None:
        """Do the work, or resume it.

        Raises:
            Stopped: after SIGTERM, once the state is saved.
        """


def run_side_by_side(waiting: Sequence[Job], *, jobs: int, minutes: float | None = None) -> bool:
    """Start the jobs in order and run up to ``jobs`` of them at a time; return whether all are finished.

    On Ctrl-C, on SIGTERM or after ``minutes``, every running job saves its state and stops, and no further job starts.
    A later call with the same jobs resumes them.

    Raises:
        JobsFailedError: after all jobs have ended, if some failed; the message has their names and the ends of their
            logs.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    left, running, failed = deque(waiting), dict[ChildProcess, _Running](), dict[str, str]()
    asked = unfinished = False
    with stop_signal() as stop, Display() as display:
        while left or running:
            stopping = stop.requested or time.monotonic() > deadline
            while left and len(running) < jobs and not stopping:
                one = _Running(left.popleft(), display)
                running[ChildProcess(_do, one.job)] = one
            if stopping and not asked:
                asked, unfinished = True, unfinished or bool(left)
                left.clear()
                for process in running:
                    process.signal("SIGTERM")
            for process in [process for process in running if not process.alive]:
                one = running.pop(process)
                # Do not rely on the exit status: a signal may interrupt the exit of a job that has written its results.
                finished = one.job.finished()
                unfinished = unfinished or not finished
                if not finished and process.exit_status != STOPPED and not stopping:
                    failed[one.job.name] = _end_of_log(one.job, process.exit_status)
                one.end("finished" if finished else "failed" if one.job.name in failed else "stopped")
            for one in running.values():
                one.show()
            time.sleep(POLL)
    if failed:
        raise JobsFailedError(
            "\n".join(f"{job.name} failed: {failed[job.name]}" for job in waiting if job.name in failed)
        )
    return not unfinished


class _Running:
    """Show the progress of a running job from its metrics file."""

    def __init__(self, job: Job, display: Display) -> None:
        self.job, self.display = job, display
        self.path = job.folder / "metrics.jsonl"
        self.position = self.path.stat().st_size if self.path.exists() else 0
        self.step, self.text = 0, ""
        display.add(job.name, job.steps or None, "step")
        if display.bars is None:
            display.say(f"{job.name}: started" + (f", {job.steps:,} steps" if job.steps else ""))

    def show(self) -> None:
        for record in self._new():
            self.step = record["step"]
            for key, name in (("val_top1", "validation"), ("accuracy", "accuracy")):
                if key in record:
                    self.text = f"{name} {record[key]:.2%}"
        if self.step:
            self.display.update(self.job.name, self.step, self.text)

    def end(self, how: str) -> None:
        self.show()
        self.display.end(self.job.name, how)

    def _new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            # The file may have become shorter, because a resumed run removes the records written after its checkpoint.
            self.position = min(self.position, file.seek(0, 2))
            file.seek(self.position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.position += len(whole)
        # A resumed run may have replaced lines, so the new text may start in the middle of a line.
        return [record for line in whole.splitlines() if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except ValueError:
        return None


def _do(job: Job) -> None:
    """Run a job with its output in ``log.txt``; if the job does not finish, exit with the status STOPPED or FAILED."""
    with _own(job.folder) as log:
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        try:
            job()
        except Stopped as stopped:
            print(stopped, file=sys.stderr, flush=True)
            sys.exit(STOPPED)
        except Exception as error:
            known = isinstance(error, OSError | ValueError)
            print(sentence(error) if known else traceback.format_exc(), file=sys.stderr, flush=True)
            sys.exit(FAILED)


@contextmanager
def _own(folder: Path) -> Iterator[int]:
    """Open and lock the job's log, so that no other process runs a job in this folder.

    If another process has locked the log, exit with the status FAILED.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        try:
            lock_file(log)
        except OSError as error:
            if is_locked(error):
                print(f"another process is using {folder}: wait for it to end", file=sys.stderr)
                sys.exit(FAILED)
            print(f"cannot lock {folder} ({error.strerror}): make sure that no other process uses it", file=sys.stderr)
        yield log.fileno()


def _end_of_log(job: Job, code: int | None) -> str:
    log = job.folder / "log.txt"
    end = "\n".join(log.read_text().splitlines()[-15:]) if log.exists() else ""
    return f"exit status {code}; {log} ends with:\n{end}"


def is_locked(error: OSError) -> bool:
    """Return whether an error of :func:`lock_file` says that another process has locked the file.

    Other errors say that the file cannot be locked, for example because the file system does not support locks.
    """
    return error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


if sys.platform == "win32":
    import msvcrt

    def lock_file(file: IO[Any]) -> None:
        """Lock an open file, or raise OSError; see :func:`is_locked`."""
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def lock_file(file: IO[Any]) -> None:
        """Lock an open file, or raise OSError; see :func:`is_locked`."""
        # Do not use flock: forked workers would share the lock and hold it for seconds after this process is killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
