"""Update running averages in place, by the rules that every path (composite, CPU and CUDA) follows.

The rules:

- The running variance averages the unbiased estimate m/(m-1) sigma_B^2.
- ``momentum=None`` computes the cumulative average.
- A batch with non-finite moments only increments the count of skipped batches.
- A batch with fewer than two values per feature has no unbiased variance and changes nothing.
- A forward pass that runs again inside a backward pass (activation checkpointing) changes nothing. The operator
  ``update_running_`` checks this when it runs, not when it is traced, so the rule also holds for compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .moments import Moments
from .torch_state import is_recomputation, is_transformed, is_wrapped


class Running(NamedTuple):
    """Hold the tensors that a layer keeps between batches; they are updated in place.

    Attributes:
        mean: the running mean.
        var: the running average of the unbiased variance.
        num_batches: how many batches updated the averages.
        num_skipped: how many batches had non-finite moments and were skipped.

    >>> from batchnorm import ops
    >>> running = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> y, moments = ops.batch_norm_(torch.tensor([[0.0], [4.0]]), None, None, running, momentum=0.5)
    >>> running.mean, running.num_batches
    (tensor([1.]), tensor(1))

    Paper: Sec. 3.1, moving averages
    """

    mean: Tensor
    var: Tensor
    num_batches: Tensor
    num_skipped: Tensor


ONCE = (
    "a Renorm layer cannot be recomputed in the backward pass, because its output depends on running statistics, which"
    " the forward pass has already changed; leave it out of torch.utils.checkpoint"
)
# A Running, or a plain tuple of the same tensors, which is faster to create.
Kept = tuple[Tensor, Tensor, Tensor, Tensor]


def update_(running: Kept, moments: Moments, momentum: float | None) -> None:
    """Update the running averages with a batch's moments: r <- r + momentum * (moment - r).

    Args:
        running: the averages, updated in place.
        moments: the batch's moments, with the biased variance.
        momentum: the weight of the new batch; None weights all batches equally.

    >>> r = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), torch.tensor(0))
    >>> update_(r, Moments(torch.tensor(2.0), torch.tensor([4.0]), torch.tensor([1.0])), momentum=0.5)
    >>> r.mean, r.var
    (tensor([2.]), tensor([1.5000]))

    Paper: Sec. 3.1, moving averages
    """
    new = (moments.count.detach(), moments.mean.detach(), moments.var.detach())
    if is_transformed():
        # torch.func transforms support plain operations, but not the operator update_running_.
        mean, var, batches, skipped = running
        if is_wrapped(batches) and not is_wrapped(skipped):
            # The transformed function got its buffers from a state dict, which does not contain num_skipped. The
            # function cannot change a tensor that was not passed to it, so discard the count.
            skipped = torch.zeros_like(batches)
        _update(mean, var, batches, skipped, *new, momentum)
    else:
        torch.ops.batchnorm.update_running_(*running, *new, momentum)


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
    """Update without synchronizing with the host: a bool tensor on the device says whether to use the batch."""
    if is_recomputation():
        return
    usable = mean.isfinite().all() & var.isfinite().all() & (count > 1)
    num_batches.add_(usable)
    num_skipped.add_(~usable & (count > 1))
    factor = momentum if momentum is not None else 1 / num_batches.to(mean.dtype)
    unbiased = Moments(count, mean, var).unbiased_var
    for r, value in ((running_mean, mean), (running_var, unbiased)):
        weight = factor.to(r.dtype) if isinstance(factor, Tensor) else factor
        # r + weight * (value - r) would round a small value to a multiple of r's precision, even with a weight of 1.
        r.copy_(torch.where(usable, torch.lerp(r, value.to(r.dtype), weight), r))


def _update_meta(*args: Tensor | float | None) -> None:
    """Do nothing if all tensors are on the meta device; raise RuntimeError if only some of them are.

    Torch's dispatcher calls this function if at least one tensor is on the meta device.
    """
    if not all(arg.is_meta for arg in args if isinstance(arg, Tensor)):
        raise RuntimeError(
            "the running averages cannot be updated: the input, the averages and the counters must all be on the meta"
            " device, or none of them; to move a layer off the meta device, load a state dict with assign=True, or"
            " call to_empty(device=...) and reset_parameters()"
        )


def snapshot(average: Tensor, *, once: bool = False) -> Tensor:
    """Return a copy of a running average, for a backward pass that may run after training has updated the average.

    With ``once``, raise RuntimeError if activation checkpointing runs the forward pass again. Compiled code calls an
    operator, because in place of ``average.clone()``, its backward pass may read the average itself.
    """
    copy: Tensor = average.clone() if is_transformed() else torch.ops.batchnorm.snapshot(average, once)
    return copy


def _snapshot(average: Tensor, once: bool) -> Tensor:
    if once and is_recomputation():
        raise RuntimeError(ONCE)
    return average.clone()


_library = torch.library.Library("batchnorm", "FRAGMENT")
_library.define("snapshot(Tensor average, bool once) -> Tensor")
_library.impl("snapshot", _snapshot, "CompositeExplicitAutograd")
_library.impl("snapshot", lambda average, once: torch.empty_like(average), "Meta")
_library.define(
    "update_running_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) num_batches, Tensor(d!) num_skipped,"
    " Tensor count, Tensor mean, Tensor var, float? momentum) -> ()"
)
_library.impl("update_running_", _update, "CompositeExplicitAutograd")
_library.impl("update_running_", _update_meta, "Meta")
