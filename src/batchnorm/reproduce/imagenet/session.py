"""A session: train the runs of a plan, one or more at a time on one device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from ...data.device_cache import discard_decoded, open_decoded
from ...data.image_sources import check_complete, check_same_data, describe_data, open_source
from ...errors import at_least
from ...jobs import Job, run_side_by_side
from ...optional_packages import check_installed
from ...results import check_writable
from ...train import Recipe
from ...train.distributed import find_device
from .plan import Plan
from .result_files import Finished, read_all
from .sharing import checked_gpu


@dataclass(frozen=True)
class Session:
    """The options of a session that trains a plan's runs."""

    data: Path | None = None
    """Folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with train-*.tar and val-*.tar; without it, nothing is
    trained."""
    out: Path = Path("runs")
    """Folder for figures, tables and the runs' checkpoints."""
    results: Path | None = None
    """Folder of the runs' result files, by default OUT/results."""
    plan: Path | None = None
    """A plan file, or the name of one of the library's plans; the default is for 100 classes at 64 px."""
    only: tuple[str, ...] = ()
    """Train only the runs with these names."""
    jobs: int = 1
    """Number of runs to train at the same time on the device."""
    minutes: float | None = None
    """Save and stop after this many minutes."""
    device: str = "auto"
    """cpu, cuda, or auto (a GPU if there is one)."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU."""
    cache: Literal["none", "device"] = "device"
    """--cache device keeps the decoded images in device memory, and stops with an error if they do not fit."""
    workers: int = 2
    """Processes per run that decode images."""

    @property
    def result_files(self) -> Path:
        """The folder of the runs' result files."""
        return self.results or self.out / "results"

    @property
    def images(self) -> Path:
        """The folder of the images."""
        if self.data is None:
            raise ValueError("no images to train on: give --data DIR")
        return self.data

    @property
    def decoded(self) -> Path | None:
        """The folder of the decoded images that all runs share, or None if each run decodes its own images."""
        return self.out / "decoded" if self.cache == "device" else None

    @property
    def threads(self) -> int:
        """Number of threads of each run."""
        return max(1, (os.cpu_count() or 1) // self.jobs)

    def after(self, started: float) -> Self:
        """Return the options with ``minutes`` reduced by the time since ``started``, a :func:`time.monotonic` value."""
        if self.minutes is None:
            return self
        return replace(self, minutes=max(0.0, self.minutes - (time.monotonic() - started) / 60))

    def check(self) -> None:
        """Check the options before any work."""
        at_least(1, jobs=self.jobs)
        at_least(0, workers=self.workers, minutes=self.minutes)
        if self.data is not None:
            check_installed("PIL", "safetensors")
            find_device(self.device)
        elif not any(self.result_files.rglob("*.json")):
            raise FileNotFoundError(
                f"{self.result_files} has no result files: to train the networks, add --data DIR; to use existing"
                " results, give their folder with --results"
            )

    def open_data(self, plan: Plan) -> tuple[dict[str, Any], dict[str, Finished]]:
        """Check the images; return their description from :func:`describe_data`, and the finished runs."""
        finished = read_all(plan, self.result_files, self.out)
        for split in ("train", "val"):
            check_complete(open_source(self.images, split), self.images, split)
        data = describe_data(self.images)
        check_same_data({"this command": data, **{name: one.data for name, one in finished.items()}})
        return data, finished

    def run(
        self, waiting: Sequence[Job], recipes: Sequence[Recipe], evaluate_batch: int, publish: Callable[[], Path]
    ) -> Path:
        """Run up to ``self.jobs`` jobs at a time, then call ``publish`` and return its result.

        If several jobs run at a time and ``cache`` is "device", the images are first decoded once for all jobs. If
        several jobs share a GPU and ``precision`` is not "fp32", the bfloat16 convolutions of their networks are first
        checked.

        Args:
            waiting: the jobs.
            recipes: the recipes of the jobs that train a network.
            evaluate_batch: images per validation batch.
            publish: a function that is called after the jobs, even if some failed or were stopped.

        Raises:
            OSError: if a folder is not writable.
            ValueError: if the environment sets a GPU share that was not tested, or if convolutions are wrong at the
                share that each job gets.
            JobsFailedError: if a job failed; the results of the other jobs are kept.
            KeyboardInterrupt: if the jobs were stopped.
        """
        for folder in (self.out, self.result_files) if waiting else (self.out,):
            check_writable(folder / "result.json")
        complete, failure = True, None
        try:
            complete = self._side_by_side(waiting, recipes, evaluate_batch)
        except RuntimeError as error:
            failure = error
        published = publish()
        if failure is not None:
            raise failure
        if not complete:
            raise KeyboardInterrupt
        if self.data is not None:  # without --data, keep the decoded images, because another session may use them
            discard_decoded(self.out / "decoded")
        return published

    def _side_by_side(self, waiting: Sequence[Job], recipes: Sequence[Recipe], evaluate_batch: int) -> bool:
        together = min(self.jobs, len(waiting))
        if together > 1 and self.decoded is not None:
            for size in {recipe.size for recipe in recipes}:
                print(f"decoding the images of {self.images} for all runs", flush=True)
                for split in ("train", "val"):
                    cores = os.cpu_count() or 1
                    open_decoded(self.images, split, size, folder=self.decoded, workers=cores, device="cpu")
        on_gpu = together > 1 and find_device(self.device).type == "cuda"
        with checked_gpu(together if on_gpu else 1, recipes, evaluate_batch, self.precision):
            return run_side_by_side(waiting, jobs=self.jobs, minutes=self.minutes)
