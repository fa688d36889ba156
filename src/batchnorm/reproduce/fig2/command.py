"""``batchnorm reproduce fig2``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .files import RunFiles, read_all
from .identity import check_same_data, describe_data
from .plan import Group, Plan, read_plan
from .publication import publish
from .sharing import CONTROL, shared_gpu
from .side_by_side import train_side_by_side
from .train_one import Machine


@dataclass(frozen=True)
class Fig2:
    """Train the networks of Section 4.2 by a plan, and make Figures 2 and 3 of what is finished.

    The work spreads over as many sittings and machines as it needs: each run leaves a result file of its own, and the
    same command goes on where it stopped. Without --data nothing is trained, and the figures are made of the files.

    Paper: Sec. 4.2.1, 4.2.2; Figs. 2, 3
    """

    data: Path | None = None
    """Folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with train-*.tar and val-*.tar; none trains nothing."""
    out: Path = Path("runs/fig2")
    """Folder for the figures, the tables, the page, and the runs' checkpoints."""
    results: Path | None = None
    """Folder of the runs' result files, by default OUT/results."""
    plan: Path | None = None
    """The plan of the runs; by default that of the library, for 100 classes at 64 px."""
    group: tuple[Group, ...] = ()
    """Train runs of these groups alone."""
    only: tuple[str, ...] = ()
    """Train the runs of these names alone."""
    jobs: int = 1
    """Runs that train side by side on the one device."""
    minutes: float | None = None
    """Save and stop after so long."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 on a GPU."""
    cache: Literal["none", "device"] = "device"
    """device keeps the decoded images on the device, for sets that fit."""
    workers: int = 2
    """Processes that decode images, for each run."""
    commit: str | None = None
    """Commit to note in the result files, where git cannot tell."""


def fig2(options: Fig2) -> Path:
    """Train what is missing, write the figures, and return the path of the table.

    Raises:
        FileNotFoundError: where there is no such folder of results, plan or data.
        ValueError: where a result is of another plan or of other data, or no run may train.
        RuntimeError: where a run failed.
        KeyboardInterrupt: where the runs were stopped before their end.

    Paper: Sec. 4.2.1, 4.2.2; Figs. 2, 3
    """
    if options.jobs < 1:
        raise ValueError(f"jobs={options.jobs}: at least one run trains at a time")
    plan = read_plan(options.plan)
    results = options.results or options.out / "results"
    if options.data is None and options.results is not None and not results.is_dir():
        raise FileNotFoundError(f"{results} is not a folder: give that of the runs' result files, or --data to train")
    complete, failure = True, None
    try:
        if options.data is not None:
            complete = _train(options.data, options, plan, results)
    except RuntimeError as error:
        failure = error  # the other runs count all the same
    table = publish(plan, read_all(plan, results, options.out), options.out)
    if failure is not None:
        raise failure
    if not complete:
        raise KeyboardInterrupt
    return table


def _train(path: Path, options: Fig2, plan: Plan, results: Path) -> bool:
    finished = read_all(plan, results, options.out)
    data = describe_data(path)
    check_same_data({"the data given": data, **{name: one.data for name, one in finished.items()}})
    missing = [
        RunFiles(run, results, options.out)
        for run in plan.chosen(options.group, options.only)
        if run.name not in finished
    ]
    machine = Machine(
        path,
        options.device,
        options.precision,
        options.cache,
        options.workers,
        threads=max(1, (os.cpu_count() or 1) // max(options.jobs, 1)),
        commit=options.commit,
    )
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    with shared_gpu(options.jobs if on_gpu else 1) as shared:
        if on_gpu and options.jobs > 1 and not shared:
            print(f"{CONTROL} is not to be had: the runs get the GPU in turns, and gain little from being side by side")
        return train_side_by_side(missing, plan, machine, data, jobs=options.jobs, minutes=options.minutes)
