"""Collect what the rules judge: a trace of the network, and what its layers receive and return on the batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import collectives, network_call
from ..graph import Graph, trace
from ..graph.kinds import keeps_torch_forward
from ..layers import BatchNorm, Ghost, Sync
from ..layers.norm_act import NormAct
from ..network_copy import SharedWithOriginalError, isolated, private_copy
from ..ops.moments import AveragedMoments, MomentAccumulator
from ..population import equal_on_all_ranks, is_synchronized, moments_of
from ..progress import length_of, progress
from ..surgery.convert import convertible


class SingleValueError(Exception):
    """Raised to skip a batch if a layer would have to compute batch statistics from a single value per feature."""


@dataclass(eq=False)
class Layer:
    """A batch normalization layer of the user's network, and what its copy received and returned on the batches."""

    path: str
    module: TorchBatchNorm
    trains: bool
    """Whether ``net.train()`` puts the layer into training mode."""
    ran_in_training: bool
    """Whether the layer's copy was in training mode on the batches."""
    inputs: list[MomentAccumulator] = field(default_factory=list)
    """The moments of the layer's inputs: one accumulator for the first call in a pass, one for the second, ..."""
    m: float = 0.0
    """The largest number of values per feature that statistics were computed from."""
    not_finite: Tensor | int = 0
    """How many of the layer's inputs had an inf or NaN."""
    largest: Tensor | None = None
    """The largest output of each feature."""
    called: bool = False
    single: int = 0
    """The number of batches that were skipped because they gave this layer a single value per feature."""
    calls: int = 0
    """The number of calls in the current forward pass."""

    @property
    def standard(self) -> bool:
        """Whether the layer's forward is torch's or this library's, so that it is known to normalize its input."""
        ours = type(self.module).forward in (BatchNorm.forward, NormAct.forward) and "forward" not in vars(self.module)
        return ours or keeps_torch_forward(self.module)

    @property
    def frozen(self) -> bool:
        """Whether training normalizes by the running statistics and does not update them."""
        return bool(getattr(self.module, "frozen_statistics", False))

    @property
    def updates(self) -> bool:
        """Whether training updates the layer's running averages."""
        return self.trains and self.module.running_mean is not None and not self.frozen

    @property
    def uses_batch(self) -> bool:
        """Whether training normalizes by the statistics of the batch."""
        return self.module.running_mean is None or (self.trains and not self.frozen)

    @property
    def used_batch(self) -> bool:
        """Whether the layer's copy normalized the batches by their own statistics."""
        return self.module.running_mean is None or (self.ran_in_training and not self.frozen)

    @property
    def averages(self) -> list[AveragedMoments]:
        """The averages of the moments in ``inputs``, except those of calls that never had values."""
        return [found for found in (moments.averages() for moments in self.inputs) if found is not None]

    def watch(self, twin: nn.Module) -> None:
        """Record the calls of the layer's copy."""
        copied = twin.get_submodule(self.path)
        copied.register_forward_pre_hook(self._before, with_kwargs=True)
        copied.register_forward_hook(self._after, with_kwargs=True)

    def _given(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None, tuple[int, ...]] | None:
        """Return the input, the mask and the shape of the statistics, or None if the call cannot be judged."""
        x = args[0] if args else kwargs.get("input")
        mask = args[2] if len(args) > 2 else kwargs.get("mask")
        features = getattr(self.module, "features", None) or (self.module.num_features,)
        fits = isinstance(x, Tensor) and tuple(x.shape[1 : 1 + len(features)]) == features and x.numel() > 0
        return (x, mask, features) if self.standard and fits else None

    def _before(self, copied: Any, args: Any, kwargs: Any) -> None:
        self.called = True
        given = self._given(args, kwargs)
        if given is None:
            return
        x, mask, features = given
        k = len(features)
        m = prod((x.shape[0], *x.shape[1 + k :])) if mask is None else float(mask.sum())
        statistics = getattr(copied, "statistics", None)
        if isinstance(statistics, Sync):
            m *= collectives.world_size(statistics.group)
        elif isinstance(copied, nn.SyncBatchNorm):
            m *= collectives.world_size(copied.process_group)
        elif isinstance(statistics, Ghost):
            m /= statistics.groups(x, k)
        falls_back = getattr(copied, "on_single", "error") == "running"
        if m == 1 and copied.training and self.uses_batch and not falls_back:
            self.single += 1
            raise SingleValueError
        self.m = max(self.m, m)

    def _after(self, copied: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = self._given(args, kwargs)
        if given is None or not isinstance(out, Tensor) or out.shape != given[0].shape:
            return
        x, mask, features = given
        k = len(features)
        dims = [0, *range(1 + k, x.dim())]
        if mask is not None:
            mask = mask.reshape(mask.shape[0], *[1] * k, *mask.shape[1:])
            x = torch.where(mask, x, 0)
        self.not_finite = self.not_finite + (~x.isfinite().all()).long()
        largest = out.amax(dims)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        if self.calls == len(self.inputs):
            self.inputs.append(MomentAccumulator())
        for moments in moments_of(copied, given[0], given[1], features):
            self.inputs[self.calls].add(*moments)
        self.calls += 1


@dataclass(frozen=True)
class Evidence:
    """What the rules of :mod:`batchnorm.diagnosis.rules` judge."""

    net: nn.Module
    layers: tuple[Layer, ...]
    graph: Graph
    shows_training: bool
    """Whether the graph was traced in training mode, so that it shows dropout."""
    batches: int
    optimizer: torch.optim.Optimizer | None

    @cached_property
    def convertible(self) -> set[nn.Module]:
        """The layers that ``convert`` can replace by layers of this library."""
        return set(convertible(self.net, self.graph)[0])


def collect(
    net: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None,
    forward: network_call.Forward | None,
) -> Evidence:
    """Trace a copy of the network on the first batch, and run another copy on all batches."""
    twin = private_copy(net)
    if isinstance(net, torch.jit.ScriptModule):
        raise TypeError("the network is scripted or traced: pass the original network, which you gave to torch.jit")
    iterator = equal_on_all_ranks(batches) if any(map(is_synchronized, net.modules())) else iter(batches)
    first = next(iterator, None)
    if first is None:
        raise ValueError("batches is empty: pass a few batches of training data")
    with network_call.at_index(0, first):
        graph, shows_training = _trace(net, first, forward)
    twin.train()
    trains = {path: twin.get_submodule(path).training for path, m in net.named_modules()}
    layers = tuple(
        Layer(path, m, trains[path], m.training if net.training else trains[path])
        for path, m in net.named_modules()
        if isinstance(m, TorchBatchNorm)
    )
    twin.eval()
    for layer in layers:
        twin.get_submodule(layer.path).training = layer.ran_in_training
        layer.watch(twin)
    number = 0
    shown = progress(chain([first], iterator), "diagnosing", length_of(batches), unit="batch")
    for number, batch in enumerate(shown, 1):
        for layer in layers:
            layer.calls = 0
        with isolated(net, twin, seed=number), network_call.at_index(number - 1, batch):
            try:
                network_call.call(twin, network_call.copy_for(net, batch), forward)
            except SingleValueError:
                continue
    return Evidence(net, layers, graph, shows_training, number, optimizer)


def _trace(net: nn.Module, example: Any, forward: network_call.Forward | None) -> tuple[Graph, bool]:
    """Trace the network in training mode or, if that does not work on the example, in evaluation mode."""
    try:
        return trace(net, example, forward, training=True), True
    except SharedWithOriginalError:
        raise
    except Exception:
        return trace(net, example, forward, training=False), False
