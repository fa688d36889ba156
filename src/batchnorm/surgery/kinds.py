"""The two kinds of batch normalization layer: what corresponds, what moves over, whether both compute the same."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import calling
from ..exchange import Memo, relative_error, restored, tolerance_for
from ..graph import Graph, trace
from ..layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d

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


def traces(net: nn.Module, example: Any, forward: calling.Forward | None) -> list[Graph]:
    """Trace evaluation, and training where the example allows it."""
    graphs = []
    for training in (False, True):
        with restored(net):
            try:
                graphs.append(trace(net.train(training), example, forward))
            except ValueError:
                # One value per feature, or SyncBatchNorm without a GPU: training cannot run on this example.
                if not training:
                    raise
    return graphs


def compare(old: nn.Module, new: nn.Module, example: Any, forward: calling.Forward | None, modes: int) -> float:
    """Return the relative error of the outputs, the larger of evaluation and, with two modes, training.

    Raises:
        ValueError: where it is more than rounding can make.
    """
    error = 0.0
    for training in (False, True)[:modes]:
        with restored(old), restored(new):
            was = calling.evaluate(old.train(training), example, forward)
            now = calling.evaluate(new.train(training), example, forward)
        error = max(error, relative_error(now, was))
    if not error <= tolerance_for(old):
        raise ValueError(
            f"the exchanged network's output differs from the original's by {error:.2e} (relative); nothing was changed"
        )
    return error
