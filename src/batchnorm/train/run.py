"""Where a run happens and how it is watched, and the record of how it went."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ..data.fingerprint import check_same_data
from ..data.prefetch import WORKERS
from ..errors import at_least
from ..results import read_json, write_atomically
from . import metrics
from .distributed import Ranks
from .recipe import Recipe


@dataclass(frozen=True)
class Options:
    """Say where a run's data and results are, what it runs on and how often it reports; the recipe says the rest.

    Beyond the paper: running it.
    """

    data: Path
    """folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with train-*.tar and val-*.tar shards"""
    out: Path | None = None
    """folder of the run, by default runs/NAME; an unfinished run of the same recipe in it goes on"""
    device: str = "auto"
    """cpu, cuda, or auto"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto is bf16 on a GPU"""
    compile: Literal["network", "nothing"] | None = None
    """what torch.compile takes over; by default nothing, or the network on several GPUs, whose step is not captured"""
    graph: bool | None = None
    """capture the step as a CUDA graph; by default on a single GPU"""
    workers: int = WORKERS
    """processes that decode images, for each rank; 0 decodes in this one"""
    cache: Literal["none", "device"] = "none"
    """device keeps the decoded images on the device, for sets that fit"""
    decoded: Path | None = None
    """with cache device, folder to keep the decoded images in, for the next run on the same data"""
    log_every: int = 100
    """steps between lines of metrics.jsonl"""
    evaluate_every: int = 0
    """steps between validations; 0 is once an epoch"""
    checkpoint_every: int = 5000
    """steps between checkpoints; there is also one at the end, and where the run is asked to stop"""
    evaluate_batch: int = 256
    """examples of a validation batch, over all ranks"""
    estimate_batches: int = 200
    """training batches that the population statistics are estimated from at the end (Alg. 2, l. 10)"""
    score_training: bool = False
    """also score the final network on the training images, each as its centre square"""
    targets: tuple[float, ...] = ()
    """report the first steps that reach these validation accuracies, such as 0.722"""
    max_steps: int | None = None
    """end after so many steps, before the recipe's epochs are over; a larger number goes on from there"""
    monitor_every: int = 0
    """steps between records of the inputs' percentiles at every nonlinearity (Fig. 1 b, c); 0 is never"""
    tensorboard: bool = False
    """also write scalars for TensorBoard"""

    def __post_init__(self) -> None:
        """Check what can be known before any work.

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


@dataclass
class Result:
    """Tell how a run went; ``result.json`` in the run's folder.

    Paper: Fig. 3 (steps to an accuracy, maximum accuracy, steps to it)
    """

    recipe: str
    steps: int
    examples: int
    classes: int
    diverged: bool = False
    best_top1: float | None = None
    best_step: int | None = None
    top1: float | None = None
    """of the folded network with estimated population statistics"""
    top5: float | None = None
    train_top1: float | None = None
    """of the same network on the training images, where ``score_training`` asked for it"""
    running_top1: float | None = None
    """the same network by running averages, at the last step"""
    steps_to: dict[str, int | None] = field(default_factory=dict)
    corrupt: int = 0
    corrupt_files: tuple[str, ...] = ()
    """the first of those that could not be read, of both splits"""
    hardware: dict[str, Any] = field(default_factory=dict)


def claim_folder(out: Path, recipe: Recipe, data: dict[str, Any] | None = None) -> None:
    """Write the resolved recipe and what the data are into the run's folder, or check that they are those there.

    A longer or shorter run may go on: ``epochs`` may differ.

    Raises:
        ValueError: where the folder belongs to another recipe, whose fields it names, or to other data.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()); claim_folder(folder, Recipe()); claim_folder(folder, Recipe(epochs=3))
    >>> claim_folder(folder, Recipe(rate=1.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: ...: rate is 0.0015 there, 1.0 here; choose another --out, or remove that folder

    Beyond the paper: resuming.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "recipe.json"
    if path.exists():
        there, here = asdict(Recipe.read(path)), asdict(recipe)
        other = [f"{k} is {there[k]} there, {here[k]} here" for k in here if k != "epochs" and there[k] != here[k]]
        if other:
            raise ValueError(
                f"{path} is of another run: {'; '.join(other)}; choose another --out, or remove that folder"
            )
    known = out / "data.json"
    if data is not None and known.exists():
        check_same_data({f"the run in {out}": read_json(known), "the data given": data})
    elif data is not None:
        write_atomically(known, json.dumps(data).encode())
    write_atomically(path, recipe.to_json().encode())


def write_result(out: Path, result: Result) -> None:
    """Write ``result.json``, all at once."""
    write_atomically(out / "result.json", json.dumps(asdict(result), indent=2).encode())


def compare(result: Result, folder: Path, targets: Sequence[float]) -> Result:
    """Fill in what a run's ``metrics.jsonl`` says: the best accuracy, the last, the first steps to the targets.

    Paper: Fig. 3
    """
    points = metrics.curve(metrics.read(folder / "metrics.jsonl"))
    if points:
        result.best_step, result.best_top1 = max(points, key=lambda point: (point[1], -point[0]))
        result.running_top1 = points[-1][1] if points[-1][0] == result.steps else None
    result.steps_to = {f"{target:g}": metrics.steps_to(points, target) for target in targets}
    return result


def hardware(here: Ranks) -> dict[str, Any]:
    """Say what a run ran on, for its result file."""
    cuda = here.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(here.device) if cuda else platform.processor() or platform.machine(),
        "ranks": here.world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
