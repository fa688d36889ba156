"""Merge statistics across ranks; apart from ``train`` and ``bench``, only this module calls torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from .ops import Moments


def world_size(group: distributed.ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group``, or 1 outside of distributed runs.

    Raises:
        ValueError: if this rank is not in the group.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    size = distributed.get_world_size(group)
    if size < 0:
        raise ValueError(
            f"rank {distributed.get_rank()} is not in the process group whose ranks share statistics: pass Sync a group"
            " that this rank is in"
        )
    return size


def rank(group: distributed.ProcessGroup | None = None) -> int:
    """Return this process's rank in ``group``, or 0 outside of distributed runs."""
    return 0 if world_size(group) == 1 else distributed.get_rank(group)


def gather_moments(local: Moments, group: distributed.ProcessGroup | None = None) -> Moments:
    """Stack the moments of all ranks along a new first dimension.

    The forward pass and the backward pass run one all-reduce each. A rank without samples contributes a count of 0.
    Gradients flow back across ranks, so each rank gets the derivative of the sum of all ranks' losses.
    """
    flat = torch.cat([local.count.reshape(1), local.mean.flatten(), local.var.flatten()])
    rows: Tensor = _Gather.apply(flat, group)  # type: ignore[no-untyped-call]
    mean, var = rows[:, 1:].reshape(rows.shape[0], 2, *local.mean.shape).unbind(1)
    return Moments(rows[:, 0], mean, var)


def add_across_ranks(values: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors; outside of distributed runs, return the tensor itself."""
    if world_size() == 1:
        return values
    total = values.clone()
    distributed.all_reduce(total)
    return total


def gather_objects(value: Any, group: distributed.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order, or ``[value]`` outside of distributed runs."""
    if world_size(group) == 1:
        return [value]
    rows: list[Any] = [None] * world_size(group)
    distributed.all_gather_object(rows, value, group)
    return rows


def check_same_features(features: tuple[int, ...], name: str, group: distributed.ProcessGroup | None = None) -> None:
    """Raise RuntimeError on every rank if the ranks call different layers.

    Without this check, merging statistics could hang, or mix up the statistics of different layers.
    """
    rows = gather_objects((features, name), group)
    if any(row != rows[0] for row in rows):
        seen = "; ".join(f"rank {rank} calls {layer} with features {shape}" for rank, (shape, layer) in enumerate(rows))
        raise RuntimeError(
            f"synchronized batch normalization needs every rank to call the same layer at the same time, but {seen}."
            " Build the same network on every rank, and call the same layers on every rank"
        )


class _Gather(torch.autograd.Function):
    """Stack one row per rank; the backward pass sums the gradient of each rank's row over all ranks."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
        ctx.group = group
        # Use all-reduce instead of all-gather, because every backend supports all-reduce. Each rank fills only its own
        # row, and adds zeros to the other rows.
        rows = flat.new_zeros(world_size(group), flat.numel())
        rows[distributed.get_rank(group)] = flat
        distributed.all_reduce(rows, group=group)
        return rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad[distributed.get_rank(ctx.group)], None
