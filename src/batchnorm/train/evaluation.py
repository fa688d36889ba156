"""``batchnorm evaluate``: finished runs on data, with any number of crops and networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn
from tyro.conf import arg

from ..data.prefetch import WORKERS
from ..evaluate import Crops, EnsembleReport, SquareBatches, evaluate_networks, open_squares
from ..evaluate.crops import Count
from ..results import environment, write_json
from .distributed import Ranks, ranks
from .saved import SavedRun, open_run


def evaluate(
    runs: Annotated[tuple[Path, ...], arg(metavar="RUN...", help_behavior_hint="(one or more)")],
    /,
    data: Path,
    crops: Count = 1,
    split: str = "val",
    device: str = "auto",
    batch_size: int = 256,
    workers: int = WORKERS,
    out: Path | None = None,
) -> EnsembleReport:
    """Print the top-1 and top-5 error of finished runs and of the mean of their class probabilities.

    Networks are folded, and one is in memory at a time. Under torchrun the images are spread over the ranks.

    Args:
        runs: folders that batchnorm train has left; several are also averaged.
        data: folder with val/CLASS/*.jpg or with val-*.tar.
        crops: of each image: 1 (centre), 10, or 144 (4 scales x 3 squares x 6 crops x 2 mirrors).
        split: which part of the data.
        device: cpu, cuda, or auto.
        batch_size: crops that a network takes at a time.
        workers: processes that decode images, for each rank.
        out: JSON file for the result.

    Raises:
        FileNotFoundError: where a run or the data is not found.
        ValueError: where a run and the data, or the runs among themselves, do not fit.

    Paper: Sec. 4.2.3; Fig. 4
    """
    opened = open_runs(runs)
    with ranks(device) as here:
        batches = open_for(opened, data, crops, split, here, batch_size, workers)
        report = evaluate_networks(loaders(opened, batches), batches, batch_size=batch_size)
        if here.main:
            print(report)
        if here.main and out is not None:
            given = {"runs": [str(run) for run in runs], "data": str(data), "split": split}
            write_json(out, {"options": given, "environment": environment(), **report.as_dict()})
            print(f"result: {out}")
    return report


def open_runs(folders: Sequence[Path]) -> dict[str, SavedRun]:
    """Open runs that can be averaged, under names that tell them apart.

    Raises:
        ValueError: without runs, or where they take images of different sizes.

    Beyond the paper: evaluating runs.
    """
    if not folders:
        raise ValueError("give at least one run: a folder that batchnorm train has left")
    opened = [open_run(folder) for folder in folders]
    sizes = {run.recipe.size: run.folder for run in opened}
    if len(sizes) > 1:
        (a, first), (b, second), *_ = sizes.items()
        raise ValueError(f"{first} takes images of {a} px and {second} of {b} px: evaluate them one at a time")
    unique = len({run.name for run in opened}) == len(opened)
    named = {run.name if unique else str(run.folder): run for run in opened}
    if len(named) < len(opened):
        raise ValueError("a run is given twice, which would count it twice in the mean: name each once")
    return named


def open_for(
    runs: dict[str, SavedRun], data: Path, crops: Count, split: str, here: Ranks, batch_size: int, workers: int
) -> SquareBatches:
    """Open the data at the size that the runs take."""
    size = next(iter(runs.values())).recipe.size
    return open_squares(
        data,
        split,
        crops=Crops.of(crops, size),
        batch_size=batch_size,
        workers=workers,
        rank=here.rank,
        world_size=here.world_size,
        device=here.device,
    )


def loaders(runs: dict[str, SavedRun], batches: SquareBatches) -> dict[str, Callable[[], nn.Module]]:
    """Return, by name, the functions that load the runs' networks for a device."""
    return {name: partial(_load, run, batches) for name, run in runs.items()}


def _load(run: SavedRun, batches: SquareBatches) -> nn.Module:
    net: Any = run.load(batches.classes)
    cuda = batches.device.type == "cuda"
    return net.to(memory_format=torch.channels_last) if cuda else net  # type: ignore[no-any-return]
