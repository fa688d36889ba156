"""``batchnorm diagnose``: say what is wrong with the batch normalization of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..arguments import Positional, arg
from ..data import Augment, open_images
from ..data.image_sources import has_split
from ..data.loader import WORKERS
from ..diagnosis import diagnose as find_problems
from ..errors import at_least
from .distributed import find_device
from .final_network import augmented_batches
from .saved_runs import open_run
from .step import make_optimizer


def diagnose(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    data: Path,
    batches: int = 20,
    device: str = "auto",
    workers: int = WORKERS,
    trust: bool = False,
) -> None:
    """Print what is wrong with the batch normalization of a finished run, where, and how to fix it.

    The run's network, before folding, is called on batches of the training data, augmented as in training. For other
    networks, use bn.diagnose in Python.

    Args:
        run: a folder written by batchnorm train.
        data: the folder of the training data.
        batches: number of training batches to run the network on.
        device: cpu, cuda, or auto (a GPU if there is one).
        workers: processes that decode images.
        trust: allow calling the function named in the run's recipe.json; networks of your own need this.

    Raises:
        FileNotFoundError: if the run or the data is not found.
        ValueError: if an option is invalid, the run cannot be loaded or does not fit the data, or the network has no
            batch normalization.
    """
    at_least(1, batches=batches)
    at_least(0, workers=workers)
    where = find_device(device)
    saved = open_run(run.expanduser(), trust=trust)
    recipe = saved.recipe
    held_out = recipe.validate and not has_split(data, "val")
    images = open_images(
        data,
        f"train[{recipe.validate}:]" if held_out else "train",
        size=recipe.size,
        batch_size=recipe.batch_size,
        train=True,
        shuffle=recipe.shuffle,
        seed=recipe.seed,
        workers=workers,
        device=where,
    )
    net = saved.trained(images.classes)[0].train().to(where)
    augment = Augment(recipe.photometric).to(where)
    if len(images) < batches:
        print(f"batches: {len(images)} instead of {batches}, because an epoch of this run has no more")
    given = augmented_batches(images, augment, epoch=0, seed=recipe.seed, count=batches)
    print(find_problems(net, given, optimizer=make_optimizer(net, recipe, where)))
