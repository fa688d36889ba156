"""Validation accuracy at 1 and at 5 from a single crop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Accuracy(NamedTuple):
    """Hold the fraction of examples whose label is the first, or among the first five, of the predictions.

    Paper: Sec. 4.2, "validation accuracy @1"
    """

    top1: float
    top5: float
    examples: int

    @classmethod
    def of(cls, counts: Tensor) -> Accuracy:
        """Read what :func:`count_correct` counted, summed over ranks where there are several.

        >>> Accuracy.of(torch.tensor([1.0, 3.0, 4.0]))
        Accuracy(top1=0.25, top5=0.75, examples=4)
        """
        top1, top5, count = counts.tolist()
        return cls(top1 / max(count, 1), top5 / max(count, 1), int(count))


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes each example's label stands behind; among equal scores the lower class comes first.

    So an example is right at k where its rank is below k, and ties are decided alike on every device. A label whose
    score is not a number stands behind all.

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
) -> Tensor:
    """Count examples that are right at 1, right at 5, and all, as one float64 tensor that ranks can add up.

    The network runs in the mode it is in; put it into ``eval()`` first. Empty batches, which a rank may get at the end
    of an epoch, count nothing. With fewer than five classes, right at 5 is right among all of them.

    Args:
        net: gives class scores.
        batches: pairs of uint8 images and labels.
        prepare: turns such images into the network's input.
        device: where the count is kept.
        bf16: run under autocast.

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
        ranks = label_ranks(scores, labels)
        counts += torch.stack([(ranks < 1).sum(), (ranks < 5).sum(), torch.full_like(labels[0], len(labels))])
    return counts
