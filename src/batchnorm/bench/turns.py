"""Processes that compile side by side and have the device in turns, so that a benchmark over many shapes ends soon."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

Work = Callable[..., Any]


class Done(NamedTuple):
    """Hold what one job came to: a result, or what went wrong.

    Beyond the paper: how benchmarks share a device.
    """

    job: tuple[Any, ...]
    result: Any
    error: BaseException | None


@contextmanager
def workers(processes: int) -> Iterator[Callable[[Work, Sequence[tuple[Any, ...]], float], Iterator[Done]]]:
    """Give ``run(work, jobs, seconds)``: ``work(*job)`` in other processes, none begun after so many seconds.

    With no processes the work is done here, one job after the other.
    """
    if not processes:
        yield _one_by_one
        return
    # Each process compiles by itself: the compiler's own pool in every one of them would be too many.
    before = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, context, _begin, (context.Lock(),)) as pool:

            def run(work: Work, jobs: Sequence[tuple[Any, ...]], seconds: float) -> Iterator[Done]:
                end = time.monotonic() + seconds
                waiting = list(reversed(jobs))
                running: dict[Future[Any], tuple[Any, ...]] = {}

                def feed() -> None:
                    while waiting and len(running) < processes and time.monotonic() < end:
                        job = waiting.pop()
                        running[pool.submit(work, *job)] = job

                feed()
                while running:
                    future = next(as_completed(running))
                    job, error = running.pop(future), future.exception()
                    feed()
                    yield Done(job, None if error else future.result(), error)

            yield run
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        else:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = before


def _one_by_one(work: Work, jobs: Sequence[tuple[Any, ...]], seconds: float) -> Iterator[Done]:
    end = time.monotonic() + seconds
    for job in jobs:
        if time.monotonic() >= end:
            return
        try:
            done = Done(job, work(*job), None)
        except Exception as error:
            done = Done(job, None, error)
        yield done


@contextmanager
def alone() -> Iterator[None]:
    """Have the device to oneself among the workers; elsewhere this does nothing."""
    global _held
    if _lock is None or _held:  # a backward pass runs in a thread of its own, and its process has the device already
        yield
        return
    with _lock:
        _held = True
        try:
            yield
        finally:
            _held = False


_lock: AbstractContextManager[Any] | None = None  # of this process, where it is a worker
_held = False


def _begin(lock: AbstractContextManager[Any]) -> None:
    """Let torch.compile choose among its kernels while nothing else runs on the device."""
    global _lock
    _lock = lock
    from torch._inductor.runtime.benchmarking import benchmarker

    measure = benchmarker.benchmark_gpu

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return measure(*args, **kwargs)

    benchmarker.benchmark_gpu = in_turn  # type: ignore[method-assign]
