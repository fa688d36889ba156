"""Finished runs and the data to evaluate them on, opened together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..evaluate import Crops, SquareBatches, open_squares
from ..evaluate.crops import Count
from .distributed import Ranks
from .saved_runs import SavedRun, open_run


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
