"""``batchnorm evaluate``: score finished runs, and the mean of their predictions, on one or many crops per image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..arguments import arg
from ..data.loader import WORKERS
from ..errors import at_least
from ..evaluate import EnsembleReport, evaluate_networks
from ..evaluate.crops import Count
from ..results import check_writable, environment, write_json
from .distributed import ranks
from .saved_runs import loaders, open_for, open_runs


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
    trust: bool = False,
) -> EnsembleReport:
    """Print the top-1 and top-5 error of finished runs, and of their averaged class probabilities.

    The networks are loaded and folded one at a time. Under torchrun, the images are divided among the ranks.

    Args:
        runs: folders written by batchnorm train; with several, the mean of their class probabilities is scored too.
        data: folder with val/CLASS/*.jpg or with val-*.tar; for runs trained with --validate, the folder of the
            training data is enough.
        crops: crops per image: 1 (center), 10 (center and corners, and their mirror images), or 144 (4 scales x 3
            squares x 6 crops, and their mirror images).
        split: the split to evaluate on; if val is missing, the images that --validate held out are used.
        device: cpu, cuda, or auto (a GPU if there is one).
        batch_size: crops per forward pass, approximately.
        workers: processes per rank that decode images.
        out: JSON file for the result.
        trust: allow calling the functions named in the runs' recipe.json; networks of your own need this.

    Raises:
        FileNotFoundError: if a run or the data is not found.
        ValueError: if an option is invalid, a run cannot be loaded, or a run does not fit the data or the other runs.

    Paper: Sec. 4.2.3; Fig. 4
    """
    at_least(0, workers=workers)
    check_writable(out)
    opened = open_runs(runs, trust=trust)
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
