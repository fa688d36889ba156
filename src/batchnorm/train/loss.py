"""The cross-entropy loss and its gradient; on NVIDIA GPUs, one Triton kernel usually computes both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import dispatch
from ..ops.cuda.autograd import DTYPES
from ..ops.cuda.schedule import power_up

NO_LABEL = torch.iinfo(torch.int64).min  # passed to torch as ignore_index, whose default would ignore the label -100
MAX_CLASSES = 2**14  # the Triton kernel's maximum, because each program holds all scores of an example on chip


def cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each example, in at least float32, and the mean loss's gradient with respect to ``scores``.

    Every label must be a class index. Unlike ``F.cross_entropy``, this function does not ignore the label -100.

    >>> losses, gradient = cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
    >>> losses, gradient[0]
    (tensor([1.3863, 1.3863]), tensor([-0.3750,  0.1250,  0.1250,  0.1250]))
    """
    if dispatch.has_kernels(scores) and takes(scores, labels):
        return run_cross_entropy(scores, labels)
    with torch.enable_grad():
        leaf = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).requires_grad_()
        losses = F.cross_entropy(leaf, labels, reduction="none", ignore_index=NO_LABEL)
        (gradient,) = torch.autograd.grad(losses.mean(), leaf)
    return losses.detach(), gradient.to(scores.dtype)


def takes(scores: Tensor, labels: Tensor) -> bool:
    """Return whether the Triton kernel supports the shapes, layouts and dtypes of these tensors."""
    if scores.dim() != 2 or labels.shape != scores.shape[:1] or not 0 < scores.shape[1] <= MAX_CLASSES:
        return False
    dense = scores.is_contiguous() and labels.is_contiguous() and scores.numel() > 0
    return dense and scores.dtype in DTYPES and labels.dtype == torch.int64


def run_cross_entropy(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel for :func:`cross_entropy` on contiguous tensors."""
    from .triton.loss import cross_entropy as kernel

    n, classes = scores.shape
    losses, gradient = scores.new_empty(n, dtype=torch.float32), torch.empty_like(scores)
    with torch.cuda.device_of(scores):
        kernel[(n,)](scores, labels, losses, gradient, classes, power_up(classes))
    return losses, gradient
