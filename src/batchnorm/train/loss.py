"""The cross-entropy loss and its gradient, on a GPU in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import dispatch
from ..ops.cuda.autograd import DTYPES, HAS_TRITON
from ..ops.cuda.schedule import power_up

MAX_CLASSES = 2**14  # a program keeps the scores of one example on chip


def cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each example, in float32 or better, and the gradient of the mean loss.

    >>> losses, gradient = cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
    >>> losses, gradient[0]
    (tensor([1.3863, 1.3863]), tensor([-0.3750,  0.1250,  0.1250,  0.1250]))
    """
    usual = scores.dim() == 2 and scores.is_contiguous() and labels.is_contiguous() and scores.numel() > 0
    kernel = HAS_TRITON and dispatch.FAST and scores.is_cuda and torch.version.hip is None
    if usual and kernel and scores.dtype in DTYPES and labels.dtype == torch.int64 and scores.shape[1] <= MAX_CLASSES:
        return run_cross_entropy(scores, labels)
    with torch.enable_grad():
        leaf = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).requires_grad_()
        losses = F.cross_entropy(leaf, labels, reduction="none")
        (gradient,) = torch.autograd.grad(losses.mean(), leaf)
    return losses.detach(), gradient.to(scores.dtype)


def run_cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Run the kernel on dense tensors."""
    from .triton.loss import cross_entropy as kernel

    n, classes = scores.shape
    losses, gradient = scores.new_empty(n, dtype=torch.float32), torch.empty_like(scores)
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        kernel[(n,)](scores, labels, losses, gradient, classes, power_up(classes))
    return losses, gradient
