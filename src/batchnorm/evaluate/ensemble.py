"""Ensembles: the arithmetic mean of several networks' class probabilities, with one network in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives import add_across_ranks, gather_objects
from ..data.loader import CorruptFile
from .accuracy import Score, score
from .predictions import Predictions, predict
from .square_crops import SquareBatches


class Member(NamedTuple):
    """A network's own score, and the score of the mean probabilities of all networks added so far.

    >>> ensemble, label = Ensemble(), torch.tensor([0])
    >>> a = ensemble.add("a", torch.tensor([[0.8, 0.2]]), label)
    >>> b = ensemble.add("b", torch.tensor([[0.4, 0.6]]), label)
    >>> b.name, b.alone.top1_error, b.together.top1_error
    ('b', 1.0, 0.0)

    Paper: Sec. 4.2.3
    """

    name: str
    alone: Score
    together: Score


class EnsembleReport(NamedTuple):
    """The scores of networks and of their mean probabilities. ``print`` shows them as a table.

    >>> ensemble, p = Ensemble(), torch.tensor([[0.8, 0.2], [0.6, 0.4]])
    >>> last = Predictions(p, labels=torch.tensor([0, 1]), examples=torch.arange(2), enlarged=0, corrupt=())
    >>> _ = ensemble.add("a", p, last.labels)
    >>> print(ensemble.report(crops=1, last=last))
    a            top-1 error 50.00%, log loss 0.570, calibration error 40.00%
    2 images, 1 crop of each

    Paper: Sec. 4.2.3; Fig. 4
    """

    crops: int
    members: tuple[Member, ...]
    disagreement: float | None
    """the share of images for which two networks predict different classes, averaged over all pairs of networks; None
    for a single network"""
    enlarged: int
    """number of images that were enlarged because they are smaller than the crop"""
    corrupt: tuple[CorruptFile, ...]

    @property
    def score(self) -> Score:
        """The score of the mean probabilities of all networks."""
        return self.members[-1].together

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        scores = {m.name: {"alone": m.alone._asdict(), "together": m.together._asdict()} for m in self.members}
        return {**self._asdict(), "members": scores, "corrupt": [file._asdict() for file in self.corrupt]}

    def __str__(self) -> str:
        width = max(len("mean of all"), *(len(member.name) for member in self.members))
        lines = [f"{member.name:{width}}  {member.alone}" for member in self.members]
        if self.disagreement is not None:
            lines.append(f"{'mean of all':{width}}  {self.score}")
            lines.append(f"on average, two networks disagree on {self.disagreement:.2%} of the images")
        lines.append(f"{self.score.examples:,} images, {self.crops} {'crop' if self.crops == 1 else 'crops'} of each")
        if self.enlarged:
            lines.append(f"{self.enlarged:,} images are smaller than the crop and were enlarged")
        if self.corrupt:
            names = "; ".join(f"{file.name} ({file.reason})" for file in self.corrupt[:5])
            lines.append(f"{len(self.corrupt):,} files could not be read and were left out: {names}")
        return "\n".join(lines)


class Ensemble:
    """Average the class probabilities of any number of networks; memory does not grow with their number.

        p(y | image) = 1/K sum_k p_k(y | image)

    For each image and class, the ensemble stores the sum of the networks' probabilities, and the number of networks
    that predict this class.

    >>> ensemble, labels = Ensemble(), torch.tensor([0, 1])
    >>> a = ensemble.add("a", torch.tensor([[0.8, 0.2], [0.6, 0.4]]), labels)
    >>> b = ensemble.add("b", torch.tensor([[0.6, 0.4], [0.1, 0.9]]), labels)
    >>> a.alone.top1_error, b.together.top1_error, ensemble.disagreement()
    (0.5, 0.0, 0.5)

    Paper: Sec. 4.2.3, "the arithmetic average of class probabilities"
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._sum: Tensor | None = None
        self._votes: Tensor | None = None
        self._labels: Tensor | None = None

    def add(self, name: str, probabilities: Tensor, labels: Tensor) -> Member:
        """Add a network's probabilities for this rank's images; every rank must call this method.

        Raises:
            ValueError: if there are no images, if a probability is NaN or infinite, or if the labels or the number of
                classes differ from those of earlier networks.
        """
        if self._sum is None or self._votes is None or self._labels is None:
            total, votes = torch.zeros_like(probabilities), torch.zeros_like(probabilities, dtype=torch.int16)
        elif self._sum.shape != probabilities.shape or not torch.equal(self._labels, labels):
            first, (images, classes) = self.members[0].name, self._sum.shape
            found = f"{len(labels):,} images and {probabilities.shape[1]} classes, not {images:,} and {classes}"
            why = "the labels differ" if self._sum.shape == probabilities.shape else f"{name} has {found}"
            raise ValueError(f"{name} was not evaluated on the same data as {first}: {why}")
        else:
            total, votes = self._sum, self._votes
        alone = score(probabilities, labels, name)  # raises an error before the ensemble is changed
        total += probabilities
        votes.scatter_add_(1, probabilities.argmax(1, keepdim=True), votes.new_ones(len(labels), 1))
        self._sum, self._votes, self._labels = total, votes, labels
        together = score(total / (len(self.members) + 1), labels, "the ensemble")
        self.members.append(Member(name, alone, together))
        return self.members[-1]

    def mean(self) -> Tensor:
        """Return the mean of all networks' probabilities, for this rank's images.

        Raises:
            ValueError: if no network was added.
        """
        if self._sum is None:
            raise ValueError("the ensemble is empty: add a network first")
        return self._sum / len(self.members)

    def report(self, crops: int, last: Predictions) -> EnsembleReport:
        """Return the report; every rank must call this method.

        Args:
            crops: the number of crops of each image that were averaged.
            last: the predictions of the last network, for the number of enlarged images and the corrupt files; these
                are the same for all networks.
        """
        corrupt = tuple(file for part in gather_objects(last.corrupt) for file in part)
        enlarged = sum(gather_objects(last.enlarged))
        return EnsembleReport(crops, tuple(self.members), self.disagreement(), enlarged, corrupt)

    def disagreement(self) -> float | None:
        """Return the share of images for which two networks predict different classes; every rank must call it.

        The share is averaged over all pairs of networks; it is None for fewer than two networks. If v_c of K networks
        predict class c for an image, the result is the mean over images of 1 - sum_c v_c (v_c - 1) / (K (K - 1)).
        """
        k = len(self.members)
        if k < 2 or self._votes is None:
            return None
        votes = self._votes.double()
        agreeing = (votes * (votes - 1)).sum() / (k * (k - 1))
        agree, images = add_across_ranks(torch.stack([agreeing, agreeing.new_tensor(len(votes))])).tolist()
        return float(1 - agree / images)


def evaluate_networks(
    networks: Mapping[str, Callable[[], nn.Module]], batches: SquareBatches, *, batch_size: int = 256
) -> EnsembleReport:
    """Score networks and the mean of their class probabilities, with one network in memory at a time.

    In a distributed run, every rank calls this function with its own part of the images and gets the scores over all
    images.

    Args:
        networks: a mapping from each network's name to a function that builds or loads it.
        batches: the images, from :func:`batchnorm.evaluate.open_squares`; each network runs on them once.
        batch_size: crops per forward pass, approximately.

    Raises:
        ValueError: if there are no networks or no images, or if a network does not fit the data or gives NaN or
            infinite probabilities.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from batchnorm.evaluate import Crops, open_squares
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, color in ("a", "red"), ("b", "lime"), ("c", "blue"):
    ...     (folder / "val" / name).mkdir(parents=True)
    ...     Image.new("RGB", (48, 40), color).save(folder / "val" / name / "0.png")
    >>> net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())  # scores are the means of red, green and blue
    >>> print(evaluate_networks({"color": lambda: net}, open_squares(folder, crops=Crops.of(1, size=32))))
    color        top-1 error 0.00%, log loss 0.024, calibration error 2.41%
    3 images, 1 crop of each

    Paper: Sec. 4.2.3; Fig. 4
    """
    if not networks:
        raise ValueError("there are no networks to evaluate: pass at least one")
    ensemble = Ensemble()
    for name, load in networks.items():
        # Do not assign the network to a variable: it must be freed before the next network is loaded.
        found = predict(load(), batches, batch_size=batch_size, name=name)
        ensemble.add(name, found.probabilities, found.labels)
    return ensemble.report(batches.crops.count, found)
