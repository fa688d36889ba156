"""What one network says about every image of a split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data.loader import CorruptFile
from ..progress import progress
from .square_crops import SquareBatches
from .views import MeanProbabilities


class Predictions(NamedTuple):
    """Hold what one network says about this rank's images.

    Paper: Sec. 4.2.3
    """

    probabilities: Tensor
    """(images, classes), the mean over crops"""
    labels: Tensor
    examples: Tensor
    """the number of each image in its split"""
    enlarged: int
    """images smaller than the crop"""
    corrupt: tuple[CorruptFile, ...]


@torch.no_grad()
def predict(net: nn.Module, batches: SquareBatches, *, batch_size: int = 256, name: str = "the network") -> Predictions:
    """Return a network's class probabilities for every image of this rank, averaged over the crops.

    The network is moved to the batches' device and runs in evaluation mode; its modules' modes are put back afterwards.

    Args:
        net: gives class scores for normalized images of the crops' size.
        batches: from :func:`batchnorm.evaluate.open_squares`.
        batch_size: crops that the network takes at a time.
        name: what messages call the network.

    Raises:
        ValueError: where the network does not take such images, or has other classes than the data.

    Paper: Sec. 4.2.3, "multicrop inference"
    """
    mean = MeanProbabilities(net, batches.crops, batch_size).to(batches.device)
    rows = batches.num_examples
    probabilities = torch.empty(rows, len(batches.classes), device=batches.device)
    labels, examples = torch.empty(2, rows, dtype=torch.int64)  # on the host: a copy now would wait for the device
    corrupt: list[CorruptFile] = []
    done = enlarged = 0
    with _evaluating(net):
        check_fits(mean, len(batches.classes), name)
        for squares in progress(
            batches, f"{name}, {batches.crops.count} {'crop' if batches.crops.count == 1 else 'crops'}"
        ):
            end = done + len(squares.labels)
            if end > done:
                probabilities[done:end] = mean(squares)
                labels[done:end], examples[done:end] = squares.labels, squares.examples
            done, enlarged = end, enlarged + squares.enlarged
            corrupt += squares.corrupt
    labels = labels[:done].to(batches.device)
    return Predictions(probabilities[:done], labels, examples[:done], enlarged, tuple(corrupt))


def check_fits(mean: MeanProbabilities, classes: int, name: str) -> None:
    """Try the network on one black image; every rank does, so that all of them stop where it does not fit.

    Raises:
        ValueError: as :func:`predict`.
    """
    size = mean.crops.size
    try:
        found = mean.probabilities(torch.zeros(1, 3, size, size, dtype=torch.uint8, device=mean.normalize.shift.device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{name} does not take images of 3x{size}x{size} ({error}): evaluate it at the size it was trained for"
        ) from error
    if found.shape != (1, classes):
        raise ValueError(
            f"{name} gives {' x '.join(map(str, found.shape[1:]))} classes and the data has {classes}: evaluate it on"
            " the data it was trained on"
        )


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    before = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
