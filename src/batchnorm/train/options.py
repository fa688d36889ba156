"""The options of a run besides its recipe: data, folder, device and how often to report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..data.loader import WORKERS
from ..errors import at_least
from .recipe import Recipe


@dataclass(frozen=True)
class Options:
    """The options of a run that are not in its recipe, such as the data, the device and how often to report.

    >>> options = Options(Path("images"), device="cpu", workers=0, max_steps=1000)
    >>> options.log_every, options.checkpoint_every
    (100, 5000)

    Beyond the paper: options of a run.
    """

    data: Path
    """folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with tar shards; if there is no val, add --validate"""
    out: Path | None = None
    """folder for the results, by default runs/NAME or, for compare, runs/compare-NAME; an unfinished run is resumed"""
    device: str = "auto"
    """cpu, cuda, or auto (a GPU if there is one)"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 on a GPU and fp32 on the CPU"""
    compile: Literal["network", "nothing"] | None = None
    """what torch.compile compiles; the default is nothing, except for the paper's network on several GPUs"""
    graph: bool | None = None
    """capture the training step as a CUDA graph; by default, only for the paper's network on a single GPU"""
    workers: int = WORKERS
    """processes per rank that decode images; 0 decodes in the training process"""
    cache: Literal["none", "device"] = "none"
    """--cache device keeps the decoded images in device memory, and stops with an error if they do not fit"""
    decoded: Path | None = None
    """with --cache device, a folder that stores the decoded images for the next run on the same data"""
    log_every: int = 100
    """steps between records of the training loss in metrics.jsonl; there is also a record before each validation"""
    evaluate_every: int = 0
    """steps between validations, or 0 to validate once per epoch; the last step is always followed by a validation"""
    checkpoint_every: int = 5000
    """steps between checkpoints; there is also a checkpoint at the end and when the run is stopped"""
    evaluate_batch: int = 256
    """examples per validation batch, over all ranks"""
    estimate_batches: int = 200
    """after training, estimate the population statistics from this many batches, at most an epoch (Alg. 2, l. 10)"""
    score_training: bool = False
    """also score the final network on the training images, cropped to their center square"""
    targets: tuple[float, ...] = ()
    """report the first step that reaches each of these validation accuracies, such as 0.722"""
    max_steps: int | None = None
    """stop after this many steps, even if the recipe has more; run again with a larger number to continue"""
    monitor_every: int = 0
    """steps between records of the percentiles of each nonlinearity's inputs, as in Fig. 1 (b, c); 0 disables them"""
    tensorboard: bool = False
    """also write scalars for TensorBoard"""

    def __post_init__(self) -> None:
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
