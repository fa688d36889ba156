"""How good class probabilities are: top-1 and top-5 error, log loss and calibration."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import add_across_ranks
from .accuracy import label_ranks

BINS = 15


class Score(NamedTuple):
    """Hold the errors of class probabilities over all examples of all ranks.

    Paper: Fig. 4 (top-1 and top-5 error)
    """

    examples: int
    top1_error: float
    top5_error: float
    log_loss: float
    """-1/n sum log p(label)"""
    calibration_error: float
    """how far confidence and accuracy are apart"""

    def __str__(self) -> str:
        return (
            f"top-1 error {self.top1_error:.2%}, top-5 error {self.top5_error:.2%},"
            f" log loss {self.log_loss:.3f}, calibration error {self.calibration_error:.2%}"
        )


def score(probabilities: Tensor, labels: Tensor, name: str = "the network") -> Score:
    """Score class probabilities, one row an example; in a distributed run over the examples of all ranks.

    The calibration error bins examples by their confidence, the largest probability, into B_1 to B_15 of equal width:

        sum_b |B_b| / n * |accuracy(B_b) - confidence(B_b)|

    Args:
        probabilities: (n, classes); n may be 0 on some ranks.
        labels: (n,).
        name: what messages call the network.

    Raises:
        ValueError: on every rank, where there are no examples or a probability on any rank is not a number.

    >>> print(score(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])))
    top-1 error 50.00%, top-5 error 0.00%, log loss 0.837, calibration error 25.00%

    Paper: Fig. 4; beyond the paper: calibration (Guo et al., 2017)
    """
    ranks = label_ranks(probabilities, labels)
    confidence = probabilities.amax(1).double() if len(labels) else probabilities.new_zeros(0, dtype=torch.float64)
    finite = probabilities.isfinite().all(1)
    own = probabilities.gather(1, labels[:, None])[:, 0].double()
    # A probability that underflowed to 0 costs what the smallest one costs, not infinitely much.
    loss = -own.clamp_min(torch.finfo(torch.float32).tiny).log()
    totals = torch.stack([ranks < 1, ranks < 5, loss, ~finite, torch.ones_like(loss)]).sum(1)
    bins = torch.stack([torch.ones_like(confidence), ranks < 1, confidence], dim=1)
    place = (confidence.nan_to_num(0.0) * BINS).long().clamp(0, BINS - 1)
    binned = bins.new_zeros(BINS, 3).index_add_(0, place, bins)
    return _read(add_across_ranks(torch.cat([totals, binned.flatten()])), name)


def _read(sums: Tensor, name: str) -> Score:
    top1, top5, loss, broken, n = sums[:5].tolist()
    if not n:
        raise ValueError(f"there are no examples to score {name} on: every file was unreadable or the split is empty")
    if broken:
        raise ValueError(
            f"{name} gives probabilities that are not numbers for {broken:.0f} of {n:.0f} images: it has diverged, so"
            " leave it out or go back to an earlier checkpoint"
        )
    _, right, confidence = sums[5:].unflatten(0, (BINS, 3)).unbind(1)
    gap = (right - confidence).abs().sum().item() / n
    return Score(int(n), 1 - top1 / n, 1 - top5 / n, loss / n, gap)
