"""The two kinds of batch normalization layer: what corresponds, what moves over, whether both compute the same."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..graph import Graph, trace
from ..layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from ..network_copy import Memo, SharedWithOriginalError
from ..verify import verify

OURS: dict[type, type[BatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
THEIRS: dict[type, type[TorchBatchNorm]] = {ours: theirs for theirs, ours in OURS.items()}
# What a layer of this library has and torch's has not.
OWN = ("activation", "statistics", "on_single", "_frozen", "_ranks_checked")


def move_state(old: nn.Module, new: nn.Module, memo: Memo) -> None:
    """Give ``new`` everything that ``old`` holds: tensors, hooks, mode, and what users put on it."""
    memo[id(old)] = new  # before copying: a hook may be a method of the layer itself
    vars(new).update(copy.deepcopy(vars(old), memo))


def has_extras(layer: nn.Module, graphs: list[Graph]) -> bool:
    """Say whether a layer is called with a residual or a mask."""
    return any(len(call.inputs) > 1 for graph in graphs for call in graph.calls_of(layer))


def traces(net: nn.Module, example: Any, forward: network_call.Forward | None) -> list[Graph]:
    """Trace evaluation, and training where the example allows it."""
    evaluation = trace(net, example, forward, training=False)
    try:
        return [evaluation, trace(net, example, forward, training=True)]
    except SharedWithOriginalError:
        raise
    except Exception:
        # One value per feature, SyncBatchNorm without a GPU, targets wanted: training cannot run on this example.
        return [evaluation]


def notes_on(graphs: list[Graph]) -> tuple[str, ...]:
    """Say so where training could not be looked at."""
    return () if len(graphs) > 1 else ("training mode does not run on this example: only evaluation was looked at",)


def compare(old: nn.Module, new: nn.Module, example: Any, forward: network_call.Forward | None, modes: int) -> float:
    """Return the relative error of the outputs, the larger of evaluation and, with two modes, training.

    Raises:
        ValueError: if it is more than rounding can make.
    """
    return max(
        verify(old, new, example, forward, what="the exchanged network", training=training, same_weights=True)
        for training in (False, True)[:modes]
    )
