"""Replace this library's batch normalization with that of ``torch.nn`` or timm: undo ``convert``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

from torch import nn

from .. import network_call
from ..change_report import Site, VerbReport, attach
from ..graph import Graph, trace_modes
from ..graph.rewrite import restore_
from ..layers import BatchNorm, Sync
from ..layers.fusion import Fused
from ..layers.norm_act import NormAct
from ..network_copy import Memo, copy_with
from ..ops.activation import to_module
from .convert import OWN, THEIRS, move_state
from .verify_conversion import compare_outputs


def revert(net: nn.Module, example: Any = None, *, forward: network_call.Forward | None = None) -> nn.Module:
    """Return the network with the batch normalization of ``torch.nn`` (or timm) instead of this library's.

    ``revert`` undoes ``convert``: modules get their original classes and forwards back, and fused activation modules
    are restored. A layer that was created with an activation becomes an ``nn.Sequential`` of ``norm`` and
    ``activation``. ``net`` is not changed.

    Args:
        net: any network.
        example: a batch on which to compare outputs and to look for calls with a residual or a mask. Without
            ``example``, ``revert`` does not find such calls, and they raise an error when the returned network runs.
        forward: function that calls the network on a batch, as ``forward(net, batch)``; needed if the network takes
            several positional inputs.

    Raises:
        ValueError: if the outputs differ, or if ``torch.nn`` has no equivalent for a layer (for example with Ghost,
            Renorm, statistics per activation, frozen statistics, ``on_single``, a residual or a mask).

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    >>> import torch, batchnorm as bn
    >>> str(revert(bn.convert(net, torch.randn(2, 4)))) == str(net)
    True

    Beyond the paper: for networks that must run without this library.
    """
    network_call.check_network(net)
    graphs = [] if example is None else trace_modes(net, example, forward)[0]
    names = {module: name for name, module in net.named_modules()}
    layers = [m for m in names if isinstance(m, BatchNorm)]
    reasons = {m: reason for m in layers if (reason := _reason_to_refuse(m, graphs))}
    if reasons:
        listed = "; ".join(f"'{names[m]}': {reason}" for m, reason in reasons.items())
        raise ValueError(f"torch.nn has no equivalent for {listed}")
    markers = [m for m in names if isinstance(m, Fused)]
    elsewhere = {layer for marker in markers for layer in marker.layers}
    makers: dict[nn.Module, Any] = {m: partial(_theirs, m, m not in elsewhere) for m in layers}
    makers |= {marker: partial(copy.deepcopy, marker.activation) for marker in markers}
    result = copy_with(net, makers)
    restore_(result)
    error = compare_outputs(net, result, example, forward, modes=len(graphs)) if graphs else None
    return attach(result, VerbReport("revert", tuple(Site(names[m], "reverted") for m in layers), error))


def _reason_to_refuse(layer: BatchNorm, graphs: list[Graph]) -> str:
    if type(layer) not in THEIRS and not isinstance(layer, NormAct):
        return f"{type(layer).__name__} is a subclass of this library's layer"
    if len(layer.features) > 1:
        return "it normalizes per activation"
    if layer.statistics is not None and not isinstance(layer.statistics, Sync):
        return f"statistics={layer.statistics}"
    if layer.frozen_statistics:
        return "its statistics are frozen (call batchnorm.unfreeze_ first)"
    if layer.on_single != "error":
        return f"on_single={layer.on_single!r}"
    if isinstance(layer, NormAct) and isinstance(layer.statistics, Sync):
        return "it is synchronized across ranks"
    extras = any(graph.has_extra_inputs(layer) for graph in graphs)
    return "it is called with a residual or a mask" if extras else ""


def _theirs(layer: BatchNorm, with_activation: bool, memo: Memo) -> nn.Module:
    kind = nn.BatchNorm2d if isinstance(layer, NormAct) else THEIRS[type(layer)]
    if isinstance(layer.statistics, Sync):
        kind = nn.SyncBatchNorm
    new = kind(layer.features[0], layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    if isinstance(layer, NormAct):
        new.__class__ = layer._made_from
    move_state(layer, new, memo)
    for key in OWN:
        del vars(new)[key]
    del new._buffers["num_batches_skipped"]
    new._non_persistent_buffers_set.discard("num_batches_skipped")
    if isinstance(layer.statistics, Sync):
        vars(new)["process_group"] = layer.statistics.group
    for name in ("running_mean", "running_var"):
        buffer = new._buffers[name]
        if buffer is not None and new.weight is not None:
            # This library keeps statistics in at least float32; torch.nn keeps them in the weight's dtype.
            new._buffers[name] = buffer.to(new.weight.dtype)
    if layer.activation.name == "identity" or not with_activation:
        return new
    both = OrderedDict[str, nn.Module](norm=new, activation=to_module(layer.activation))
    return nn.Sequential(both).train(layer.training)
