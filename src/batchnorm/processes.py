"""Run code in child processes: a single call, an object's methods, or many jobs in a pool of workers."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar

import torch

from .progress import progress

Given = TypeVar("Given")
Result = TypeVar("Result")
Work = Callable[..., Any]
SPAWN = get_context("spawn")


class ChildProcess:
    """Run ``target(*args)`` in a new process, which may start further processes."""

    def __init__(self, target: Work, *args: Any) -> None:
        self._process = SPAWN.Process(target=target, args=args)
        # Let the new process ignore Ctrl-C until it sets its own handler. Otherwise, Ctrl-C would print a traceback
        # from each process that is still importing torch.
        with handling(signal.SIGINT, handler=signal.SIG_IGN):
            self._process.start()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.is_alive()

    @property
    def exit_status(self) -> int | None:
        """The exit status: None while the process runs, and -n if signal n killed it."""
        return self._process.exitcode

    def signal(self, name: str) -> None:
        """Send a signal such as SIGTERM or SIGSTOP, if the process is running and the system supports the signal."""
        if hasattr(signal, name) and self.alive and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, getattr(signal, name))


@contextmanager
def handling(*numbers: signal.Signals, handler: Any) -> Iterator[None]:
    """Handle signals with ``handler`` inside the block, and restore the handlers after it.

    Only the main thread can set handlers; in other threads, nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Remote(ChildProcess):
    """Build an object with ``make(*args)`` in a new process, and call its methods there.

    The constructor does not wait until the object is built; :meth:`result` does. Call :meth:`close` at the end.
    """

    def __init__(self, make: Work, *args: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        super().__init__(_serve, theirs, make, args)
        theirs.close()
        self._busy = True
        # At exit, Python waits for its child processes, and would wait forever for this child. So close the child
        # first. Do not use atexit: if the current process is itself a child, its atexit functions run only after that
        # wait.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and return its result."""
        self.start(method, *args)
        return self.result()

    def start(self, method: str, *args: Any) -> None:
        """Start a method call; :meth:`result` waits for its result."""
        self.pipe.send((method, args))
        self._busy = True

    def result(self) -> Any:
        """Wait for the started call and return its result.

        The first call of this method waits until the object is built, and returns None.

        Raises:
            RuntimeError: if the process died, or if the call raised an exception that cannot be pickled.
            Exception: if the call raised an exception; it is raised again here, with the child's traceback as a note.
        """
        try:
            error, result = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(1)
            raise RuntimeError(f"the process died with exit status {self.exit_status}") from None
        self._busy = False
        if error is not None:
            raise error
        return result

    def close(self, patience: float = 10.0) -> None:
        """End the process; if it is not busy, first give it ``patience`` seconds to exit by itself."""
        self._at_exit.cancel()
        self.pipe.close()
        self._process.join(0 if self._busy else patience)
        self._process.kill()


def _serve(pipe: Connection, make: Work, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent closes this process
    try:
        call, given = make, args
        made: Any = None
        while True:
            try:
                result = call(*given)
                if call is make:
                    made, result = result, None
                pipe.send((None, result))
            except Exception as error:
                pipe.send((_portable(error), None))
            method, given = pipe.recv()
            call = getattr(made, method)
    except (EOFError, ConnectionError):
        return


def _portable(error: Exception) -> Exception:
    error.add_note(f"in another process:\n{traceback.format_exc()}")
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(repr(error))


class Outcome(NamedTuple):
    """The result of one job, or the error that it raised."""

    number: int
    job: tuple[Any, ...]
    result: Any
    error: Exception | None

    def value(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


Run = Callable[[Work, Sequence[tuple[Any, ...]], float], Iterator[Outcome]]


@contextmanager
def workers(processes: int, *, threads: int | None = None, device_turns: bool = False) -> Iterator[Run]:
    """Start processes and yield ``run(work, jobs, seconds)``, a function that runs jobs in these processes.

    ``run`` calls ``work(*job)`` for each job and yields the outcomes in the order in which the jobs finish. It starts
    no further jobs after ``seconds`` seconds.

    Args:
        processes: how many processes to start; 0 runs the jobs in this process, one after the other.
        threads: the number of torch threads in each process; None means torch's default.
        device_turns: whether the processes share the lock that :func:`device_turn` holds.
    """
    if not processes:
        yield _one_by_one
        return
    lock = SPAWN.Lock() if device_turns else None
    pool = list[Remote]()
    try:
        for _ in range(processes):
            pool.append(Remote(_Caller, lock, threads))
        for worker in pool:
            worker.result()
        yield partial(_run, pool)
    finally:
        for worker in pool:
            worker.close()


def _run(pool: Sequence[Remote], work: Work, jobs: Sequence[tuple[Any, ...]], seconds: float) -> Iterator[Outcome]:
    end = time.monotonic() + seconds
    waiting = list(reversed(list(enumerate(jobs))))
    idle, busy = [worker for worker in pool if worker.alive], dict[Any, tuple[Remote, int, tuple[Any, ...]]]()
    outcome = None
    while True:
        while waiting and idle and time.monotonic() < end:
            worker, (number, job) = idle.pop(), waiting.pop()
            worker.start("call", work, *job)
            busy[worker.pipe] = worker, number, job
        if outcome is not None:
            yield outcome
        if not busy:
            if waiting and not idle:
                raise RuntimeError(f"all worker processes died; jobs that were not started: {len(waiting)}")
            return
        worker, number, job = busy.pop(wait(list(busy))[0])
        outcome = _outcome(number, job, worker.result)
        if worker.alive:
            idle.append(worker)


def _one_by_one(work: Work, jobs: Sequence[tuple[Any, ...]], seconds: float) -> Iterator[Outcome]:
    end = time.monotonic() + seconds
    for number, job in enumerate(jobs):
        if time.monotonic() >= end:
            return
        yield _outcome(number, job, work, *job)


def _outcome(number: int, job: tuple[Any, ...], call: Work, *args: Any) -> Outcome:
    try:
        return Outcome(number, job, call(*args), None)
    except Exception as error:
        return Outcome(number, job, None, error)


class _Caller:
    def __init__(self, lock: AbstractContextManager[Any] | None, threads: int | None) -> None:
        # By default, Inductor starts a pool of compiler processes in each worker, which would be too many processes.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        if threads is not None:
            torch.set_num_threads(threads)
        if lock is not None:
            _share_device(lock)

    def call(self, work: Work, *job: Any) -> Any:
        return work(*job)


def map_on_cores(work: Callable[[Given], Result], jobs: Sequence[Given], processes: int | None = None) -> list[Result]:
    """Return ``[work(job) for job in jobs]``, computed by several processes with one thread each.

    By default, there is one process per core, but never more processes than jobs. If there is a single job, or
    ``processes=1``, all work is done in the current process.
    """
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    results: dict[int, Result] = {}
    with torch_threads(1), workers(processes if processes > 1 else 0, threads=1) as run:
        for outcome in progress(run(work, [(job,) for job in jobs], float("inf")), "training", len(jobs)):
            results[outcome.number] = outcome.value()
    return [results[number] for number in range(len(jobs))]


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_lock: AbstractContextManager[Any] | None = None  # the lock of the workers that share a device, if any
_held = False


@contextmanager
def device_turn() -> Iterator[None]:
    """Inside the block, hold the lock of the workers that share a device; if there is no such lock, do nothing."""
    global _held
    # If this process holds the lock already, do not wait for it. The holder may be a thread that waits for a backward
    # pass, which runs in this thread, so both would wait forever.
    if _lock is None or _held:
        yield
        return
    with _lock:
        _held = True
        try:
            yield
        finally:
            _held = False


def _share_device(lock: AbstractContextManager[Any]) -> None:
    """Set the lock for :func:`device_turn`, and make torch.compile hold the lock while it times kernels."""
    global _lock
    _lock = lock
    from torch._inductor.runtime.benchmarking import benchmarker

    measure = benchmarker.benchmark_gpu

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with device_turn():
            return measure(*args, **kwargs)

    benchmarker.benchmark_gpu = in_turn  # type: ignore[method-assign]
