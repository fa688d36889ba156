"""Exchange ``torch.nn``'s batch normalization for this library's, with the activation after it fused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.utils import parametrize

from .. import calling
from ..exchange import Memo, exchange
from ..graph import Graph
from ..layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, Sync
from ..layers.fusion import Fused, activations_after
from ..ops import Activation
from ..ops.activation import as_activation
from ..sites import Report, Site, attach
from .kinds import OURS, OWN, THEIRS, compare, has_extras, move_state, notes_on, traces

BY_DIMENSIONS = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}


def convert(net: nn.Module, example: Any, *, forward: calling.Forward | None = None) -> nn.Module:
    """Return the network with this library's layers in place of ``torch.nn``'s, each with the activation after it.

    ``BatchNorm1d/2d/3d`` and ``SyncBatchNorm`` are exchanged; parameters, statistics, hooks, sharing, modes, devices
    and types stay. If a Sequential calls an activation module on the layer's output, and nothing else in the network
    refers to either, the activation goes into the layer. Layers of this library without an activation get one likewise.
    Anything else (a subclass, a patched forward, a parametrization) is refused and stays as it is, and calls of
    ``F.batch_norm`` are listed. The outputs for ``example`` are compared in both modes. ``net`` is not changed.

    Args:
        net: any network.
        example: a batch; with at least two examples training mode is looked at too.
        forward: how to call the network, where the rule for batches does not fit.

    Returns:
        The network with a ``report``: each layer, what was done, and what was not, and why.

    Raises:
        ValueError: where the converted network computes something else.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> convert(net, torch.randn(2, 3, 5, 5))[1].activation.name
    'relu'

    Beyond the paper: for networks that have batch normalization already.
    """
    graphs = traces(net, example, forward)
    layers, refused = _convertible(net, graphs[0])
    fused, unfused = activations_after(net, graphs, [m for m in layers if _has_room(m, graphs)])
    makers: dict[nn.Module, Any] = {
        layer: partial(_ours, layer, kind, as_activation(fused.get(layer))) for layer, kind in layers.items()
    }
    for activation in set(fused.values()):
        makers[activation] = partial(_fused, activation, [m for m, a in fused.items() if a is activation])
    result = exchange(net, makers)
    error = compare(net, result, example, forward, modes=len(graphs))
    sites = []
    for name, module in net.named_modules():
        if module in refused:
            sites.append(Site(name, "refused", refused[module]))
        elif module in layers:
            action = "converted" + (f" with {type(fused[module]).__name__}" if module in fused else "")
            sites.append(Site(name, action, f"activation: {unfused[module]}" if module in unfused else ""))
    functional = [call for graph in graphs for call in graph.functions("batch_norm", "native_batch_norm")]
    why = "a functional batch_norm is no module to exchange"
    sites.extend(dict.fromkeys(Site(call.path, "not converted", why) for call in functional))
    return attach(result, Report("convert", tuple(sites), error, notes_on(graphs)))


def _convertible(net: nn.Module, graph: Graph) -> tuple[dict[TorchBatchNorm, type[BatchNorm]], dict[nn.Module, str]]:
    layers: dict[TorchBatchNorm, type[BatchNorm]] = {}
    refused: dict[nn.Module, str] = {}
    for module in net.modules():
        if not isinstance(module, TorchBatchNorm):
            continue
        kind = type(module)
        calls = graph.calls_of(module)
        if parametrize.is_parametrized(module):
            refused[module] = "it is parametrized"
        elif "forward" in vars(module):
            refused[module] = "its forward is patched"
        elif kind in OURS:
            layers[module] = OURS[kind]
        elif isinstance(module, BatchNorm) and kind in THEIRS:
            layers[module] = type(module)
        elif kind is nn.SyncBatchNorm and calls:
            layers[module] = BY_DIMENSIONS[len(calls[0].inputs[0].shape)]
        elif kind is nn.SyncBatchNorm:
            refused[module] = "not called on the example, so whether it is 1d, 2d or 3d is unknown"
        else:
            refused[module] = f"{kind.__name__} is a subclass, which may behave in its own way"
    return layers, refused


def _has_room(layer: nn.Module, graphs: list[Graph]) -> bool:
    """Say whether an activation could still go into the layer."""
    applies_one = isinstance(layer, BatchNorm) and layer.activation.name != "identity"
    return not applies_one and not has_extras(layer, graphs)


def _ours(layer: TorchBatchNorm, kind: type[BatchNorm], activation: Activation, memo: Memo) -> nn.Module:
    new = kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    own, skipped = {key: vars(new)[key] for key in OWN}, new.num_batches_skipped
    move_state(layer, new, memo)
    if not isinstance(layer, BatchNorm):
        vars(new).update(own)
        if skipped is not None and new.running_mean is not None:
            skipped = skipped.to(new.running_mean.device)
        new.register_buffer("num_batches_skipped", skipped, persistent=False)
        new._keep_statistics_wide()
    if isinstance(layer, nn.SyncBatchNorm):
        del new.process_group
        new.statistics = Sync(layer.process_group)
    if activation.name != "identity":
        new.activation = activation
    return new


def _fused(activation: nn.Module, layers: list[nn.Module], memo: Memo) -> nn.Module:
    # Layers are exchanged before activations, so the memo has them.
    return Fused(copy.deepcopy(activation, memo), [memo[id(layer)] for layer in layers])
