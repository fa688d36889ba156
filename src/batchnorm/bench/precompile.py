"""Fill the compilers' on-disk caches with several processes, so that a benchmark over many shapes starts soon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

Work = Callable[..., None]


@contextmanager
def compilers(processes: int) -> Iterator[Callable[[Work, Sequence[tuple[Any, ...]]], list[str]]]:
    """Give a function that calls ``work(*job)`` for every job in other processes and returns what went wrong."""
    # Each process compiles by itself: the compiler's own pool in every one of them would be too many.
    before = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:

            def run(work: Work, jobs: Sequence[tuple[Any, ...]]) -> list[str]:
                futures = {pool.submit(work, *job): job for job in jobs}
                return [f"{futures[f]}: {f.exception()!r}" for f in as_completed(futures) if f.exception() is not None]

            yield run
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        else:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = before
