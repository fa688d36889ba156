"""Running averages of the statistics, updated in place: one opaque operator, so that every caller gets the same rules.

The rules: the unbiased variance m/(m-1) sigma_B^2 is averaged; ``momentum=None`` is the cumulative average; a batch
with non-finite moments changes nothing but the count of skipped batches; a forward pass that is run again inside a
backward pass (activation checkpointing) changes nothing at all. The last is decided when the operator runs, not when
it is traced, so it also holds around a compiled block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .context import is_forward_mode, is_observed, is_recomputation, is_transformed
from .moments import Moments


class Running(NamedTuple):
    """Hold the tensors that a layer keeps between batches; the operations that take it change them in place.

    Paper: Sec. 3.1, moving averages
    """

    mean: Tensor
    var: Tensor
    num_batches: Tensor
    num_skipped: Tensor


def update_(running: Running, moments: Moments, momentum: float | None) -> None:
    """Move the running averages towards a batch's moments: r <- r + momentum * (moment - r).

    >>> r = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> update_(r, Moments(torch.tensor(2.0), torch.tensor([4.0]), torch.tensor([1.0])), momentum=0.5)
    >>> r.mean, r.var
    (tensor([2.]), tensor([1.5000]))

    Paper: Sec. 3.1, moving averages
    """
    if _is_plain(moments.mean):
        # Nobody has to see one operator here: to call it costs 30 us, the update of 100 features 10.
        _update_cpu(*running, *moments, momentum)
        return
    args = (*running, moments.count.detach(), moments.mean.detach(), moments.var.detach(), momentum)
    if is_transformed():
        # The functional transforms have rules for plain operations, none for ours.
        _update(*args)
    else:
        torch.ops.batchnorm.update_running_(*args)


def _is_plain(mean: Tensor) -> bool:
    """Say whether these are values on the CPU and nothing else: no graph, no tangents, no transform, no tracer."""
    return (
        mean.device.type == "cpu"
        and not mean.requires_grad
        and not torch.compiler.is_compiling()
        and not (is_transformed() or is_forward_mode() or is_observed(mean))
    )


def _update(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches: Tensor,
    num_skipped: Tensor,
    count: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float | None,
) -> None:
    """Update without a host synchronization: the decision to skip is a tensor."""
    if is_recomputation():
        return
    usable = mean.isfinite().all() & var.isfinite().all() & (count > 1)
    num_batches.add_(usable)
    # A batch without anything to count (empty, or masked to one value) is no failure, just no information.
    num_skipped.add_(~usable & (count > 1))
    factor = momentum if momentum is not None else 1 / num_batches.to(mean.dtype)
    unbiased = Moments(count, mean, var).unbiased_var
    for r, value in ((running_mean, mean), (running_var, unbiased)):
        value = value.to(r.dtype)
        r.copy_(torch.where(usable, r + factor * (value - r), r))


def _update_cpu(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches: Tensor,
    num_skipped: Tensor,
    count: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float | None,
) -> None:
    """Update with branches, which on the CPU cost less than the operations they avoid."""
    m = count.item()
    if is_recomputation() or m <= 1:
        return
    if not (np.isfinite(mean.numpy()).all() and np.isfinite(var.numpy()).all()):
        num_skipped.add_(1)
        return
    num_batches.add_(1)
    factor = momentum if momentum is not None else 1 / int(num_batches)
    for r, value in ((running_mean, mean), (running_var, var * (m / (m - 1)))):
        r.lerp_(value if value.dtype == r.dtype else value.to(r.dtype), factor)


_library = torch.library.Library("batchnorm", "FRAGMENT")
_library.define(
    "update_running_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) num_batches, Tensor(d!) num_skipped,"
    " Tensor count, Tensor mean, Tensor var, float? momentum) -> ()"
)
_library.impl("update_running_", _update, "CompositeExplicitAutograd")
_library.impl("update_running_", _update_cpu, "CPU")
_library.impl("update_running_", lambda *_: None, "Meta")
