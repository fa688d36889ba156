"""One core a training: at 60 examples a second thread costs more than it brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_one_thread() -> None:
    """Give this process one core for good, as its first act."""
    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Give this process one core for a while."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
