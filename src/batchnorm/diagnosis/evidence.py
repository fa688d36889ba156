"""Collect what the rules judge: a trace of the network, and what its layers receive and return on the batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..change_report import LayerStatistics
from ..graph import Graph, trace_modes
from ..network_copy import private_copy
from ..ops.moments import AveragedMoments, MomentAccumulator, batch_moments
from ..population import estimate_, layers_to_estimate


@dataclass(eq=False)
class Layer:
    """A batch normalization layer of the user's network, and what its copy received and returned on the batches."""

    path: str
    module: TorchBatchNorm
    statistics: LayerStatistics | None = None
    """The comparison of its running averages with the population statistics, or None if these were not estimated."""
    var: Tensor | None = None
    """Var[x], or None if it was not estimated."""
    called: bool = False
    not_finite: Tensor | int = 0
    """How many of its inputs had an inf or NaN."""
    largest: Tensor | None = None
    """The largest output of each feature."""
    inputs: list[MomentAccumulator] = field(default_factory=list)
    """The moments of its inputs: one accumulator for the first call in each forward pass, one for the second, ..."""
    calls: int = 0
    """The number of calls in the current forward pass."""

    @property
    def updates(self) -> bool:
        """Whether training updates the layer's running averages."""
        return self.module.running_mean is not None and not getattr(self.module, "frozen_statistics", False)

    def averages(self) -> list[AveragedMoments]:
        """Return the averaged moments of each call in a forward pass."""
        return [found for found in (moments.averages() for moments in self.inputs) if found is not None]

    def record(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Record one call, as a forward hook."""
        x = args[0] if args else kwargs["input"]
        mask = args[2] if len(args) > 2 else kwargs.get("mask")
        features = _features(self.module)
        k = len(features)
        fits = isinstance(x, Tensor) and isinstance(out, Tensor) and tuple(x.shape[1 : 1 + k]) == features
        if not fits or not x.numel() or out.shape != x.shape:
            return
        self.called = True
        dims = [0, *range(1 + k, x.dim())]
        if mask is not None:
            mask = mask.reshape(mask.shape[0], *[1] * k, *mask.shape[1:])
            x = torch.where(mask, x, 0)
        self.not_finite = self.not_finite + (~x.isfinite().all()).long()
        largest = out.amax(dims)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        if self.calls == len(self.inputs):
            self.inputs.append(MomentAccumulator())
        (m, mean, var), _ = batch_moments(x, dims, mask)
        self.inputs[self.calls].add(m, mean.reshape(features), var.reshape(features))
        self.calls += 1


@dataclass(frozen=True)
class Evidence:
    """What the rules of :mod:`batchnorm.diagnosis.rules` judge."""

    net: nn.Module
    layers: tuple[Layer, ...]
    graph: Graph
    batches: int
    trained_graph: bool
    """Whether the trace is one of training mode, in which dropout can be seen."""
    failure: str
    """Why the population statistics could not be estimated, or an empty string."""
    optimizer: torch.optim.Optimizer | None


def collect(
    net: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None,
    forward: network_call.Forward | None,
) -> Evidence:
    """Trace a copy of the network on the first batch, and run another copy on all batches."""
    layers = tuple(Layer(path, m) for path, m in net.named_modules() if isinstance(m, TorchBatchNorm))
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        raise ValueError("batches is empty: pass a few batches of training data")
    graphs = trace_modes(net, first, forward)
    twin = private_copy(net)
    for layer in layers:
        twin.get_submodule(layer.path).register_forward_hook(layer.record, with_kwargs=True)
    passes = _Passes(layers, chain([first], iterator))
    failure = ""
    if layers_to_estimate(twin)[0]:
        try:
            population = estimate_(twin, passes, forward=forward)
        except ValueError as error:
            if not passes.done:
                raise
            failure = str(error)
        else:
            compared = {statistics.path: statistics for statistics in population.layers}
            for layer in layers:
                layer.statistics = compared.get(layer.path)
                if layer.statistics is not None:
                    layer.var = _twin_of(layer, twin).running_var
    else:
        with torch.no_grad(), network_call.eagerly():
            for batch in passes:
                network_call.call(
                    twin.eval(), network_call.to_device(batch, network_call.device_of(twin), copy=True), forward
                )
    return Evidence(net, layers, graphs[-1], passes.done, len(graphs) > 1, failure, optimizer)


class _Passes:
    """Iterate over the batches, count them, and tell the layers when a forward pass starts."""

    def __init__(self, layers: tuple[Layer, ...], batches: Iterable[Any]) -> None:
        self.layers, self.batches, self.done = layers, batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            for layer in self.layers:
                layer.calls = 0
            yield batch
            self.done += 1


def _twin_of(layer: Layer, twin: nn.Module) -> TorchBatchNorm:
    found = twin.get_submodule(layer.path)
    assert isinstance(found, TorchBatchNorm)
    return found


def _features(module: TorchBatchNorm) -> tuple[int, ...]:
    features = getattr(module, "features", None)
    return features if isinstance(features, tuple) else (module.num_features,)
