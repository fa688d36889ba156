"""Train one run of the plan and leave its result file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...train import Options, Result, train
from .plan import Plan
from .result_files import RunFiles


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
    decoded: Path | None = None


@dataclass(frozen=True)
class Training:
    """Train a run to its end, or go on with it: a job for :func:`run_side_by_side`.

    Args:
        files: which run, and where.
        plan: of which it is.
        machine: on what.
        data: what :func:`describe_data` says of it.

    Paper: Sec. 4.2.2
    """

    files: RunFiles
    plan: Plan
    machine: Machine
    data: dict[str, Any]

    @property
    def name(self) -> str:
        """The run's name."""
        return self.files.run.name

    @property
    def folder(self) -> Path:
        """The folder of the training."""
        return self.files.folder

    @property
    def steps(self) -> int:
        """The length of the run."""
        recipe, examples = self.files.run.recipe, int(self.data["train"])
        return round(recipe.epochs * -(-examples // recipe.batch_size))

    def finished(self) -> bool:
        """Say whether the result file is there."""
        return self.files.result.is_file()

    def __call__(self) -> None:
        """Train and write the result file."""
        self.files.write(self.train(), self.data, self.machine.commit)

    def train(self) -> Result:
        """Train to the end; a run that has come to it only concludes again."""
        torch.set_num_threads(self.machine.threads)
        options = Options(
            self.machine.data,
            self.folder,
            device=self.machine.device,
            precision=self.machine.precision,
            workers=self.machine.workers,
            cache=self.machine.cache,
            decoded=self.machine.decoded,
            log_every=self.plan.log_every,
            evaluate_every=self.files.run.evaluate_every,
            checkpoint_every=self.plan.checkpoint_every,
            evaluate_batch=self.plan.evaluate_batch,
            score_training=True,
        )
        return train(self.files.run.recipe, options)
