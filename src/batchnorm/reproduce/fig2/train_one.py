"""Train one run of the plan, in a process of its own, and leave its result file."""

from __future__ import annotations

import fcntl
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...train import Options, Stopped, train
from .files import RunFiles
from .plan import Plan

FAILED, STOPPED = 1, 2


@dataclass(frozen=True)
class Machine:
    """Say on what the runs run.

    Beyond the paper: running it.
    """

    data: Path
    device: str = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    cache: Literal["none", "device"] = "device"
    workers: int = 2
    threads: int = 1
    commit: str | None = None


def train_one(files: RunFiles, plan: Plan, machine: Machine, data: dict[str, Any]) -> None:
    """Train a run to its end, or go on with it, and write its result file; exit with how it went.

    What it prints goes to ``log.txt`` in its folder.

    Paper: Sec. 4.2.2
    """
    torch.set_num_threads(machine.threads)
    with _own(files.folder) as log:
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        try:
            files.write(train(files.run.recipe, _options(files, plan, machine)), data, machine.commit)
        except Stopped as stopped:
            print(stopped, file=sys.stderr, flush=True)
            sys.exit(STOPPED)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            sys.exit(FAILED)


def _options(files: RunFiles, plan: Plan, machine: Machine) -> Options:
    return Options(
        machine.data,
        files.folder,
        device=machine.device,
        precision=machine.precision,
        workers=machine.workers,
        cache=machine.cache,
        log_every=plan.log_every,
        evaluate_every=files.run.evaluate_every,
        checkpoint_every=plan.checkpoint_every,
        evaluate_batch=plan.evaluate_batch,
        score_training=True,
    )


@contextmanager
def _own(folder: Path) -> Iterator[int]:
    """Open the run's log, which is also what keeps a second process out of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"another process is training in {folder}", file=sys.stderr)
            sys.exit(FAILED)
        yield log.fileno()
