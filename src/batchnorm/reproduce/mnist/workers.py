"""Train several networks side by side, one process and one thread each, with progress and an orderly Ctrl-C."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ...errors import JobsFailedError, sentence
from .network_run import check_config, run
from .threads import one_thread, use_one_thread
from .training import Setting

POLL = 0.2


def run_all(settings: Mapping[str, Setting], out: Path, *, resume: bool, processes: int) -> bool:
    """Train each setting into ``out / name``; return whether all came to their end.

    Ctrl-C lets every network stop at its next hundredth step and leave a checkpoint; a second one does not wait.

    Args:
        settings: what to train, by name.
        out: the folder that holds the runs' folders.
        resume: go on from the checkpoints.
        processes: 1 trains one network after the other in this process, else each gets its own.

    Raises:
        OSError: if a folder cannot be made.
        ValueError: if a folder holds a run of other options.
        JobsFailedError: if a network's process failed, with its error, or the traceback of one that is not expected.

    Paper: Sec. 4.1
    """
    for name, setting in settings.items():
        # The run checks it too; this is before any process starts.
        (out / name).mkdir(parents=True, exist_ok=True)
        check_config(out / name, setting, resume=resume)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with _interruptible(stop), _Bars(settings) as bars:
        if processes == 1:
            with one_thread():
                return all(
                    run(s, out / name, resume=resume, stopped=stop.is_set, progress=bars.teller(name))
                    for name, s in settings.items()
                )
        return _run_in_processes(context, stop, settings, out, resume, bars)


def _run_in_processes(
    context: Any, stop: Event, settings: Mapping[str, Setting], out: Path, resume: bool, bars: _Bars
) -> bool:
    messages = context.Queue()
    children = [
        context.Process(target=_child, args=(name, s, out / name, resume, stop, messages), daemon=True)
        for name, s in settings.items()
    ]
    for child in children:
        child.start()
    ends: dict[str, bool] = {}
    while len(ends) < len(children):
        try:
            name, kind, values = messages.get(timeout=POLL)
        except queue.Empty:
            # A child that was killed sends no last word.
            if not any(child.is_alive() for child in children) and messages.empty():
                break
            continue
        if kind == "progress":
            bars.tell(name, *values)
        elif kind == "end":
            ends[name] = values
        else:
            stop.set()
            for child in children:
                child.join()  # the others leave their checkpoints
            raise JobsFailedError(f"training {name} failed: {values}")
    for child in children:
        child.join()
    return len(ends) == len(children) and all(ends.values())


def _child(name: str, setting: Setting, path: Path, resume: bool, stop: Event, messages: Any) -> None:
    # The terminal sends Ctrl-C to every process; only the parent acts on it, so that no step is cut in two.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_thread()

    def progress(step: int, loss: float, accuracy: float) -> None:
        messages.put((name, "progress", (step, loss, accuracy)))

    try:
        messages.put((name, "end", run(setting, path, resume=resume, stopped=stop.is_set, progress=progress)))
    except (OSError, ValueError) as error:
        messages.put((name, "error", sentence(error)))
    except BaseException:
        messages.put((name, "error", traceback.format_exc()))


@contextmanager
def _interruptible(stop: Event) -> Iterator[None]:
    """Turn the first Ctrl-C into a request to stop; the second one interrupts."""

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: signals are someone else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Bars:
    """One progress bar a network on a terminal; plain lines, ten a network, elsewhere."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self.console = Console(stderr=True)
        self.steps = {name: s.steps for name, s in settings.items()}
        self.lines = dict.fromkeys(settings, -1)
        self.bars = Progress(
            TextColumn("{task.description:12}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,} steps  {task.fields[seen]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {
            name: self.bars.add_task(name, total=s.steps, seen="") for name, s in settings.items()
        }

    def __enter__(self) -> _Bars:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def tell(self, name: str, step: int, loss: float, accuracy: float) -> None:
        """Show where a network is."""
        seen = (f"loss {loss:.4f}, " if step else "") + f"accuracy {accuracy:.2%}"
        self.bars.update(self.tasks[name], completed=step, seen=seen)
        tenth = 10 * step // self.steps[name]
        if not self.console.is_terminal and tenth > self.lines[name]:
            self.lines[name] = tenth
            self.console.print(f"{name}: step {step:,}, {seen}", highlight=False)

    def teller(self, name: str) -> Any:
        """Return a function that tells of one network."""
        return lambda step, loss, accuracy: self.tell(name, step, loss, accuracy)
