"""What every command that runs a plan is asked: on what data, where to, how many at a time, for how long."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ...data.device_cache import discard_decoded, open_decoded
from ...errors import at_least
from ...extras import check_installed
from ...jobs import Job, run_side_by_side
from ...results import check_writable
from ...train.distributed import device_of
from .gpu_sharing import CONTROL, shared_gpu
from .training import Machine, Training


@dataclass(frozen=True)
class Sitting:
    """Hold the options of one sitting of a plan's runs.

    Beyond the paper: running it.
    """

    data: Path | None = None
    """Folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with train-*.tar and val-*.tar; none trains nothing."""
    out: Path = Path("runs")
    """Folder for what is made of the results, and for the runs' checkpoints."""
    results: Path | None = None
    """Folder of the runs' result files, by default OUT/results."""
    plan: Path | None = None
    """The plan of the runs; by default that of the library, for 100 classes at 64 px."""
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

    @property
    def result_files(self) -> Path:
        """The folder of the runs' result files."""
        return self.results or self.out / "results"

    def check(self) -> None:
        """Check what can be known before any work.

        Raises:
            FileNotFoundError: if there is no such folder of results.
            MissingExtraError: if a package is missing that training needs.
            ValueError: if an option is none that can be used.
        """
        at_least(1, jobs=self.jobs)
        at_least(0, workers=self.workers, minutes=self.minutes)
        if self.data is not None:
            check_installed("PIL", "safetensors")
            device_of(self.device)
        elif not any(self.result_files.glob("*.json")):
            raise FileNotFoundError(
                f"{self.result_files} holds no result files: give --data DIR to train, or --results DIR"
            )

    def machine(self, data: Path) -> Machine:
        """Say on what each run runs."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        decoded = self.out / "decoded" if self.cache == "device" else None
        return Machine(data, self.device, self.precision, self.cache, self.workers, threads, self.commit, decoded)

    def carry_out(self, waiting: Sequence[Job], publish: Callable[[], Path]) -> Path:
        """Do the jobs side by side, make of the results what there is to be made, and return the path of that.

        Raises:
            OSError: if nothing can be written to the folders.
            RuntimeError: if a job failed; the others count all the same.
            KeyboardInterrupt: if they were stopped before their end.
        """
        for folder in (self.out, self.result_files) if waiting else (self.out,):
            check_writable(folder / "result.json")
        complete, failure = True, None
        try:
            complete = self._side_by_side(waiting)
        except RuntimeError as error:
            failure = error
        published = publish()
        if failure is not None:
            raise failure
        if not complete:
            raise KeyboardInterrupt
        if self.data is not None:  # not where figures are made while another sitting trains
            discard_decoded(self.out / "decoded")  # for runs to come, and none will
        return published

    def _side_by_side(self, waiting: Sequence[Job]) -> bool:
        on_gpu = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        if self.jobs > 1:
            _decode(waiting)
        with shared_gpu(min(self.jobs, len(waiting)) if on_gpu else 1) as shared:
            if on_gpu and len(waiting) > 1 and self.jobs > 1 and not shared:
                print(f"{CONTROL} is not to be had: the runs get the GPU in turns, and gain little by being together")
            return run_side_by_side(waiting, jobs=self.jobs, minutes=self.minutes)


def _decode(waiting: Sequence[Job]) -> None:
    """Decode the images that several runs will want, once and with all cores."""
    wanted = {(job.machine, job.files.run.recipe.size) for job in waiting if isinstance(job, Training)}
    for machine, size in wanted:
        if machine.decoded is not None and len(waiting) > 1:
            print(f"decoding the images of {machine.data} for all runs", flush=True)
            for split in ("train", "val"):
                cores = os.cpu_count() or 1
                open_decoded(machine.data, split, size, folder=machine.decoded, workers=cores, device="cpu")
