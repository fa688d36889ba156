"""The options of a run that do not change what it learns: data, folder, device, how often to report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..data.loader import WORKERS
from ..errors import at_least
from .recipe import Recipe


@dataclass(frozen=True)
class Options:
    """Say where a run's data and results are, what it runs on and how often it reports; the recipe says the rest.

    Beyond the paper: running it.
    """

    data: Path
    """folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with train-*.tar and val-*.tar shards; with --validate
    0.1 the training part alone is enough"""
    out: Path | None = None
    """folder of the run, by default runs/NAME; an unfinished run of the same recipe there is resumed"""
    device: str = "auto"
    """cpu, cuda, or auto"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 on a GPU"""
    compile: Literal["network", "nothing"] | None = None
    """what torch.compile compiles; by default nothing, or the paper's network on several GPUs, whose step is not
    captured"""
    graph: bool | None = None
    """capture the step as a CUDA graph; by default for the paper's network on a single GPU"""
    workers: int = WORKERS
    """processes that decode images, for each rank; 0 decodes in the training process"""
    cache: Literal["none", "device"] = "none"
    """device keeps the decoded images on the device, for sets that fit"""
    decoded: Path | None = None
    """with cache device, folder to keep the decoded images in, for the next run on the same data"""
    log_every: int = 100
    """steps between lines of metrics.jsonl; there is also one before each validation"""
    evaluate_every: int = 0
    """steps between validations; 0 is once an epoch"""
    checkpoint_every: int = 5000
    """steps between checkpoints; there is also one at the end, and one when the run is asked to stop"""
    evaluate_batch: int = 256
    """examples of a validation batch, over all ranks"""
    estimate_batches: int = 200
    """training batches that the population statistics are estimated from at the end (Alg. 2, l. 10)"""
    score_training: bool = False
    """also score the final network on the training images, each as its centre square"""
    targets: tuple[float, ...] = ()
    """report the first steps that reach these validation accuracies, such as 0.722"""
    max_steps: int | None = None
    """end after so many steps, before the recipe's epochs are over; a larger number resumes from there"""
    monitor_every: int = 0
    """steps between records of the inputs' percentiles at every nonlinearity (Fig. 1 b, c); 0 is never"""
    tensorboard: bool = False
    """also write scalars for TensorBoard"""

    def __post_init__(self) -> None:
        """Check the options before any work is done.

        Raises:
            ValueError: naming the first option that cannot be used.
        """
        at_least(1, log_every=self.log_every, checkpoint_every=self.checkpoint_every, max_steps=self.max_steps)
        at_least(1, evaluate_batch=self.evaluate_batch, estimate_batches=self.estimate_batches)
        at_least(0, evaluate_every=self.evaluate_every, monitor_every=self.monitor_every, workers=self.workers)
        at_least(0, targets=self.targets or None)

    def folder(self, recipe: Recipe) -> Path:
        """Return the folder of a recipe's run.

        >>> Options(Path("images")).folder(Recipe()).as_posix()
        'runs/inception'
        """
        return Path("runs") / recipe.name if self.out is None else self.out
