"""Scores of predictions: top-1 and top-5 accuracy, log loss and calibration error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..collectives import add_across_ranks

BINS = 15
TOP5_CLASSES = 6
"""With fewer classes, every example is top-5 correct, so top-5 accuracy and error are not shown."""


class Accuracy(NamedTuple):
    """The fractions of examples whose label has the highest score (top-1), or one of the five highest (top-5).

    >>> Accuracy.of(torch.tensor([1.0, 3.0, 4.0]))
    Accuracy(top1=0.25, top5=0.75, examples=4)

    Paper: Sec. 4.2, "validation accuracy @1"
    """

    top1: float
    top5: float
    examples: int

    @classmethod
    def of(cls, counts: Tensor) -> Accuracy:
        """Compute accuracies from the counts that :func:`count_correct` returns.

        In a distributed run, sum the counts over all ranks first.
        """
        top1, top5, count = counts.tolist()
        return cls(top1 / max(count, 1), top5 / max(count, 1), int(count))


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Return each label's rank among the class scores, counted from 0.

    An example is top-k correct if its label's rank is below k. Among equal scores, the class with the lower index comes
    first, on every device. If a label's score is NaN, its rank is the number of classes.

    >>> label_ranks(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]), torch.tensor([2, 1]))
    tensor([1, 1])

    Paper: Sec. 4.2 (accuracy at 1), Fig. 4 (top-1 and top-5 error)
    """
    own = scores.gather(1, labels[:, None])
    earlier = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    return (~(scores < own) & ((scores != own) | earlier)).sum(1)


@torch.no_grad()
def count_correct(
    net: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    prepare: Callable[[Tensor], Tensor],
    device: torch.device | str = "cpu",
    *,
    bf16: bool = False,
    loss: Tensor | None = None,
) -> Tensor:
    """Return the numbers of top-1 correct examples, top-5 correct examples and all examples, as a float64 tensor.

    In a distributed run, sum the tensors of all ranks. The network's mode is not changed; call ``eval()`` first. Empty
    batches, which a rank may get at the end of an epoch, are skipped. With five classes or fewer, every example is
    top-5 correct.

    Args:
        net: a network that returns class scores.
        batches: pairs of images and labels.
        prepare: a function that turns the images into the network's input.
        device: the device of the batches and of the result.
        bf16: run the network under autocast to bfloat16.
        loss: a float64 tensor of one element, to which the sum of the examples' cross-entropies is added.

    >>> scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    >>> count_correct(nn.Identity(), [(scores, torch.tensor([0, 2]))], lambda x: x)
    tensor([1., 2., 2.], dtype=torch.float64)

    Paper: Sec. 4.2
    """
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        if not len(labels):
            continue
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            scores = net(prepare(images)).float()
        if loss is not None:
            loss += F.cross_entropy(scores, labels, reduction="sum")
        ranks = label_ranks(scores, labels)
        counts += torch.stack([(ranks < 1).sum(), (ranks < 5).sum(), torch.full_like(labels[0], len(labels))])
    return counts


class Score(NamedTuple):
    """The errors of a network's class probabilities; in a distributed run, over the examples of all processes.

    >>> found = score(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 0]))
    >>> found.examples, found.top1_error, found.classes
    (2, 0.5, 2)

    Paper: Fig. 4 (top-1 and top-5 error)
    """

    examples: int
    top1_error: float
    top5_error: float
    log_loss: float
    """-1/n sum log p(label)"""
    calibration_error: float
    """the mean gap between confidence and accuracy; see :func:`score`"""
    classes: int
    """number of classes"""

    def __str__(self) -> str:
        top5 = f", top-5 error {self.top5_error:.2%}" if self.classes >= TOP5_CLASSES else ""
        return (
            f"top-1 error {self.top1_error:.2%}{top5},"
            f" log loss {self.log_loss:.3f}, calibration error {self.calibration_error:.2%}"
        )


def score(probabilities: Tensor, labels: Tensor, name: str = "the network") -> Score:
    """Score class probabilities, one row per example; in a distributed run, over the examples of all ranks.

    An example's confidence is its largest probability. To compute the calibration error, examples are sorted by
    confidence into bins B_1 to B_15 of equal width, and the gaps between accuracy and confidence are averaged:

        sum_b |B_b| / n * |accuracy(B_b) - confidence(B_b)|

    Args:
        probabilities: a tensor of shape (n, classes); n may be 0 on some ranks.
        labels: a tensor of shape (n,).
        name: the network's name in messages.

    Raises:
        ValueError: on every rank, if there are no examples or a probability on any rank is NaN or infinite.

    >>> print(score(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])))
    top-1 error 50.00%, log loss 0.837, calibration error 25.00%

    Paper: Fig. 4; beyond the paper: calibration (Guo et al., 2017)
    """
    ranks = label_ranks(probabilities, labels)
    confidence = probabilities.amax(1).double() if len(labels) else probabilities.new_zeros(0, dtype=torch.float64)
    finite = probabilities.isfinite().all(1)
    own = probabilities.gather(1, labels[:, None])[:, 0].double()
    # Clamp probabilities that underflowed to 0, because their loss would be infinite.
    loss = -own.clamp_min(torch.finfo(torch.float32).tiny).log()
    totals = torch.stack([ranks < 1, ranks < 5, loss, ~finite, torch.ones_like(loss)]).sum(1)
    bins = torch.stack([torch.ones_like(confidence), ranks < 1, confidence], dim=1)
    place = (confidence.nan_to_num(0.0) * BINS).long().clamp(0, BINS - 1)
    binned = bins.new_zeros(BINS, 3).index_add_(0, place, bins)
    return _read(add_across_ranks(torch.cat([totals, binned.flatten()])), probabilities.shape[1], name)


def _read(sums: Tensor, classes: int, name: str) -> Score:
    top1, top5, loss, broken, n = sums[:5].tolist()
    if not n:
        raise ValueError(f"there are no examples to score {name} on: every file was unreadable or the split is empty")
    if broken:
        raise ValueError(
            f"{name} gives NaN or infinite probabilities for {broken:.0f} of {n:.0f} images, perhaps because its"
            " training diverged: leave this network out, or use an earlier checkpoint"
        )
    _, right, confidence = sums[5:].unflatten(0, (BINS, 3)).unbind(1)
    gap = (right - confidence).abs().sum().item() / n
    return Score(int(n), 1 - top1 / n, 1 - top5 / n, loss / n, gap, classes)
