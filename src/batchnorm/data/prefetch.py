"""Batches decoded ahead of their use, by worker processes, and copied to the device while it computes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch.utils.data import DataLoader

from .loader import BatchReader, Decoded, Request

# The default: four, but no more than this process has cores, of which torch would warn.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class _Requests:
    """Let one loader, whose workers stay alive, go over other requests each time."""

    current: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.current)


class Prefetcher:
    """Answer requests in their order, by ``workers`` processes that stay alive, or in this process where it is 0.

    Only one sequence of answers is under way at a time: asking for the next one abandons the last.
    """

    def __init__(self, reader: BatchReader, workers: int, device: torch.device) -> None:
        self.reader, self.workers, self.device = reader, workers, device
        self._requests = _Requests()
        self._turn = 0
        self._loader = self._start() if workers else None

    def __call__(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """Yield the answers, images and labels on the device."""
        self._turn += 1
        answers = self._answers(requests)
        ahead = _copy_ahead(answers, self.device) if self.device.type == "cuda" else answers
        return self._guarded(ahead, self._turn)

    def _answers(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        if self._loader is None:
            return map(self.reader.__getitem__, requests)
        self._requests.current = requests
        return cast("Iterator[Decoded]", iter(self._loader))

    def _guarded(self, answers: Iterator[Decoded], turn: int) -> Iterator[Decoded]:
        for answer in answers:
            yield answer
            if turn != self._turn:
                raise RuntimeError("these batches were asked for another epoch meanwhile; open them a second time")

    def _start(self) -> DataLoader[Decoded]:
        return DataLoader(
            self.reader,
            batch_size=None,
            sampler=cast("Iterable[int]", self._requests),  # a request where torch's types expect an index
            num_workers=self.workers,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_obey_the_parent_alone,
            # Else each epoch would draw from torch's global generator, and runs with and without workers would differ.
            generator=torch.Generator(),
        )


def _obey_the_parent_alone(worker: int) -> None:
    """Let this worker ignore Ctrl-C, and any SIGTERM that is not its parent's.

    Both often reach the whole group of processes, and a parent that saves its work first must not lose its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_the_parents_end, args=(os.getppid(),), daemon=True).start()


def _await_the_parents_end(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler does it


def _copy_ahead(answers: Iterator[Decoded], device: torch.device) -> Iterator[Decoded]:
    """Copy each batch on a stream of its own, one batch ahead of the one in use."""
    stream = torch.cuda.Stream(device)
    waiting: tuple[Decoded, torch.cuda.Event] | None = None
    for answer in answers:
        with torch.cuda.stream(stream):
            images, labels = (t.pin_memory().to(device, non_blocking=True) for t in (answer.images, answer.labels))
            copied = stream.record_event()
        if waiting is not None:
            yield _received(*waiting)
        waiting = answer._replace(images=images, labels=labels), copied
    if waiting is not None:
        yield _received(*waiting)


def _received(batch: Decoded, copied: torch.cuda.Event) -> Decoded:
    current = torch.cuda.current_stream(batch.images.device)
    # Not for the whole stream, which is busy with the next batch by now.
    current.wait_event(copied)
    for tensor in (batch.images, batch.labels):
        # Its memory belongs to the copying stream: keep it from being reused there while it is read here.
        tensor.record_stream(current)
    return batch
