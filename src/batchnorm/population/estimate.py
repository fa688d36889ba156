"""Run a network over mini-batches to find the population statistics of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..graph import Call, Graph, trace
from ..network_copy import restored
from ..progress import progress
from ..tally import Totals
from ..verb_report import Site
from .functional import FunctionalCalls
from .observer import Observer
from .report import Population, Rule, compare, statistics

Upstream = Literal["batch", "population"]


def estimate_(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    rule: Rule = "paper",
    upstream: Upstream = "batch",
    forward: network_call.Forward | None = None,
) -> Population:
    """Replace the running statistics of a network by population statistics over mini-batches, in place.

    Rule "paper": E[x] = E_B[mu_B] and Var[x] = m/(m-1) E_B[sigma_B^2]; for batches of unequal m, means are weighted
    by m and Var[x] = sum(m sigma_B^2) / sum(m - 1). In convolutional layers m counts locations too.
    Rule "pooled": mean and variance of all the samples together.

    Only batch normalization runs as in training: dropout is off, frozen layers (frozen by ``freeze_``, or in evaluation
    mode inside a network in training mode) keep their statistics and normalize by them. Calls of ``F.batch_norm``
    outside a layer are not estimated; the report lists them. Nothing else of the network changes, and nothing at all
    if an exception ends the pass. After weights were averaged (EMA, SWA), call it once:
    averaged weights have other statistics than any of the networks they come from. In a distributed run every rank
    calls it on its own batches, and all get the statistics of all batches.

    Args:
        net: any network with batch normalization of this library or of ``torch.nn``.
        batches: training mini-batches, moved to the network's device; see :mod:`batchnorm.network_call` for their form.
        rule: "paper" or "pooled".
        upstream: what a layer's input is normalized by further up: "batch", as in training, in one pass; or
            "population", the statistics just found, in one pass for each depth of the network. The latter does not
            depend on how the data is cut into batches.
        forward: how to call the network, if the rule for batches does not fit.

    Raises:
        ValueError: without layers or batches, for a bare tensor instead of batches, if a batch has one value per
            feature (with ``upstream="population"`` and rule "paper": if every batch has) or gives non-finite moments.
        TypeError: if the network cannot take the batches as they are: say how with ``forward=``.

    >>> net = nn.Sequential(nn.BatchNorm1d(1))
    >>> report = estimate_(net, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    >>> net[0].running_mean, net[0].running_var
    (tensor([3.]), tensor([2.]))

    Paper: Alg. 2, l. 8-10; Sec. 3.1
    """
    if rule not in ("paper", "pooled") or upstream not in ("batch", "population"):
        raise ValueError(
            f"rule is 'paper' or 'pooled' and upstream 'batch' or 'population', not {rule!r}, {upstream!r}"
        )
    if isinstance(batches, Tensor):
        raise ValueError(
            f"the batches are one tensor of shape {tuple(batches.shape)}, and going through it would give its rows:"
            " write [x] for one batch, x.split(64) for several"
        )
    layers, left_alone = _choose(net)
    functional = FunctionalCalls(net)
    with torch.no_grad(), network_call.eagerly(), restored(net):
        for module in net.modules():
            module.training = False
        if not layers:
            _run(net, islice(batches, 1), rule, forward, [], functional, "looking for batch normalization")
            why = "; ".join(map(str, [*left_alone, *functional.sites])) or "it has no batch normalization layers"
            raise ValueError(f"the network has no statistics to estimate: {why}")
        run = _batch_pass if upstream == "batch" else _population_passes
        reached = run(net, layers, batches, rule, forward, functional)
    left_alone += functional.sites
    if not reached:
        raise ValueError("no batches, or none that reaches a batch normalization layer: nothing was estimated")
    for layer, path in layers.items():
        if layer not in reached:
            left_alone.append(Site(path, "left alone", "not called on these batches"))
    found = [compare(path, layer, reached[layer], rule) for layer, path in layers.items() if layer in reached]
    for layer, totals in reached.items():
        _write(layer, *statistics(totals, rule), batches=totals.batches)
    return Population(tuple(found), tuple(left_alone))


def _choose(net: nn.Module) -> tuple[dict[TorchBatchNorm, str], list[Site]]:
    chosen, left = {}, []
    for path, m in net.named_modules():
        if not isinstance(m, TorchBatchNorm):
            continue
        if m.running_mean is None or m.running_var is None:
            left.append(Site(path, "left alone", "keeps no running statistics"))
        elif getattr(m, "frozen_statistics", False):
            left.append(Site(path, "left alone", "its statistics are frozen"))
        elif net.training and not m.training:
            left.append(Site(path, "left alone", "in evaluation mode inside a network in training mode"))
        else:
            chosen[m] = path
    return chosen, left


def _batch_pass(
    net: nn.Module,
    layers: dict[TorchBatchNorm, str],
    batches: Iterable[Any],
    rule: Rule,
    forward: network_call.Forward | None,
    functional: FunctionalCalls,
) -> dict[TorchBatchNorm, Totals]:
    """Let every layer normalize by its mini-batch and note the statistics it used."""
    observers = [Observer(layer, path) for layer, path in layers.items()]
    for layer in layers:
        layer.training = True
    _run(net, batches, rule, forward, observers, functional, "estimating population statistics")
    return {observer.layer: observer.totals for observer in observers if observer.totals is not None}


def _population_passes(
    net: nn.Module,
    layers: dict[TorchBatchNorm, str],
    batches: Iterable[Any],
    rule: Rule,
    forward: network_call.Forward | None,
    functional: FunctionalCalls,
) -> dict[TorchBatchNorm, Totals]:
    """Find the statistics of the layers at one depth at a time, each with those above it already in place."""
    if iter(batches) is batches:
        raise ValueError(
            "upstream='population' reads the batches once for each depth of the network; give a list or a loader, not"
            " an iterator that is empty after one pass"
        )
    first = next(iter(batches), None)
    graph = trace(net, first, forward) if first is not None else Graph([], {})
    for layer in layers:
        # What a layer gives to its own later calls can only be normalized by the mini-batch until it is found.
        layer.training = len(graph.calls_of(layer)) > 1
    found: dict[TorchBatchNorm, Totals] = {}
    depths = _depths(graph, layers)
    for depth in range(1, max(depths.values(), default=0) + 1):
        observers = [Observer(m, path, direct=True) for m, path in layers.items() if depths.get(m) == depth]
        if not observers:
            continue
        _run(net, batches, rule, forward, observers, functional, f"estimating population statistics, depth {depth}")
        for observer in observers:
            observer.layer.training = False
            if observer.totals is not None:
                found[observer.layer] = observer.totals
                mean, var = statistics(observer.totals, rule)
                buffers = observer.layer._buffers
                buffers["running_mean"] = mean.to(buffers["running_mean"])
                buffers["running_var"] = var.to(buffers["running_var"])
    return found


def _depths(graph: Graph, layers: dict[TorchBatchNorm, str]) -> dict[TorchBatchNorm, int]:
    """Number the layers by how many others lie on the longest way from the network's input."""
    depths: dict[TorchBatchNorm, int] = {}
    reached: dict[Call, int] = {}
    for call in graph.calls:
        above = max((reached.get(v.producer, 0) for v in call.inputs if v.producer is not None), default=0)
        if isinstance(call.module, TorchBatchNorm) and call.module in layers:
            # A shared layer is as deep as its last call, where that does not wait for the layer itself.
            depths[call.module] = max(depths.get(call.module, 0), above + 1)
            above = depths[call.module]
        reached[call] = above
    return depths


def _run(
    net: nn.Module,
    batches: Iterable[Any],
    rule: Rule,
    forward: network_call.Forward | None,
    observers: list[Observer],
    functional: FunctionalCalls,
    label: str,
) -> None:
    device = network_call.device_of(net)
    handles = [handle for observer in observers for handle in observer.register()]
    try:
        for number, batch in enumerate(progress(batches, label)):
            with functional if number == 0 else nullcontext():
                network_call.call(net, network_call.to_device(batch, device), forward)
    finally:
        for handle in handles:
            handle.remove()
    for observer in observers:
        observer.conclude(rule)


def _write(layer: TorchBatchNorm, mean: Tensor, var: Tensor, batches: int) -> None:
    assert layer.running_mean is not None and layer.running_var is not None  # noqa: PT018
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(batches)
