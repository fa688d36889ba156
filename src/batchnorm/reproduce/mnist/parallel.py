"""Many short trainings on all cores: one process a core, one thread a process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from ...data import MNIST, Digits, mnist
from .threads import one_thread, use_one_thread
from .training import Setting, accuracy, train_

Job = TypeVar("Job")
Result = TypeVar("Result")


def spread_out(work: Callable[[Job], Result], jobs: Sequence[Job], processes: int | None = None) -> list[Result]:
    """Return ``[work(job) for job in jobs]``, computed by several processes; with 1, in this one.

    Beyond the paper: uses the machine.
    """
    console = Console(stderr=True)
    watch = partial(track, total=len(jobs), description="training", console=console, disable=not console.is_terminal)
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    if processes == 1:
        with one_thread():
            return [work(job) for job in watch(jobs)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=use_one_thread) as pool:
        return list(watch(pool.map(work, jobs)))


@lru_cache(maxsize=1)
def digits() -> MNIST:
    """Return MNIST, unpacked once a process."""
    return mnist()


def held_out(count: int = 5000) -> MNIST:
    """Return the training digits without the last ``count``, and these as what to choose settings on.

    Beyond the paper: choosing a rate on the test digits would favour whatever is chosen.
    """
    train = digits().train
    return MNIST(
        Digits(train.images[:-count], train.labels[:-count]), Digits(train.images[-count:], train.labels[-count:])
    )


def accuracies(setting: Setting, marks: Sequence[int], data: MNIST | None = None) -> list[float]:
    """Train a network and return its accuracy on ``data.test`` (with running averages) at each mark.

    Paper: Sec. 4.1
    """
    data = data or digits()
    net = setting.network()
    return [accuracy(net, data.test) for _ in train_(net, data.train, setting, marks)]
