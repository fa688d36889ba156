"""The inference network: batch normalization folded into the weights, the rest a fixed affine map."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import calling
from ..exchange import exchange, private_copy
from ..graph import Graph, trace
from ..graph.kinds import has_hooks, keeps_torch_forward
from ..graph.trace import READS
from ..layers import BatchNorm
from ..layers.fusion import activations_after
from ..sites import Report, Site, attach
from ..verify import verify
from .affine import map_of
from .build import makers_for
from .plan import Plan, has_nonlinear_part, make_plan


def fold(
    net: nn.Module,
    example: Any,
    *,
    tolerance: float | None = None,
    traced: bool = False,
    forward: calling.Forward | None = None,
) -> nn.Module:
    """Return the inference network, in which y = scale * x + shift replaces each BN(x) and goes into weights beside it.

    A layer goes into the Linear, convolution or transposed convolution that alone makes its input; else into those that
    alone read its output, where that is exact; else it stays as a fixed affine map with the activation after it. All of
    it follows the data flow of a real forward pass on ``example``, not the order in which modules were made. The result
    is computed in float64 and its output for ``example`` compared with the original's. ``net`` is not changed.

    Args:
        net: any network; what is folded is its evaluation mode, whichever it is in.
        example: a batch that takes the path through the network that inference takes.
        tolerance: the largest relative error to accept; by default what rounding can make in the network's precision.
        traced: rewrite the network with ``torch.fx`` first, which also reaches functional batch normalization, layers
            with their own forward and modules called twice. The result is then a ``torch.fx.GraphModule``.
        forward: how to call the network, where the rule for batches does not fit.

    Returns:
        The network, in evaluation mode, with a ``report`` of what became of each layer and why.

    Raises:
        ValueError: where the outputs differ by more than the tolerance, or ``traced`` and torch.fx cannot trace it.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    >>> folded = fold(net, torch.randn(4, 2))
    >>> print(folded.report["1"])
    1: folded into '0'

    Paper: Alg. 2, l. 11
    """
    source = net
    if traced:
        from .traced import as_graph_module

        source = as_graph_module(private_copy(net).eval())
    graph = trace(source, example, forward, training=False)
    layers, kept = _choose(source)
    plan = make_plan(graph, layers)
    fused, _ = activations_after([graph], [m for m in plan.remaining if not has_nonlinear_part(graph, m)])
    result = exchange(source, makers_for(source, graph, plan, fused)).eval()
    error = _verify(net, result, example, forward, tolerance)
    reads = graph.functions(*READS)[:1]
    notes = tuple(f"Python code reads values ({call}): other inputs may take another path" for call in reads)
    return attach(result, Report("fold", tuple(_sites(source, graph, plan, fused, kept)), error, notes))


def _choose(net: nn.Module) -> tuple[list[TorchBatchNorm], dict[nn.Module, str]]:
    """Return the layers whose evaluation is a fixed affine map, and for the others the reason to keep them."""
    layers: list[TorchBatchNorm] = []
    kept: dict[nn.Module, str] = {}
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", ""):
            kept[module] = "it is scripted; fold the network before torch.jit"
        if not isinstance(module, TorchBatchNorm):
            continue
        reason = _reason_to_keep(module)
        if reason:
            kept[module] = reason
        else:
            layers.append(module)
    return layers, kept


def _reason_to_keep(layer: TorchBatchNorm) -> str:
    ours = isinstance(layer, BatchNorm) and type(layer).forward is BatchNorm.forward and "forward" not in vars(layer)
    if not (ours or keeps_torch_forward(layer)):
        return f"{type(layer).__name__} has its own forward; fold(..., traced=True) can look into it"
    if layer.running_mean is None or layer.running_var is None:
        return "it keeps no running statistics and normalizes by the mini-batch in evaluation too"
    if has_hooks(layer):
        return "it has hooks, which would see other values"
    if not map_of(layer).is_finite:
        return "its statistics or parameters are not finite numbers"
    return ""


def _verify(
    old: nn.Module, new: nn.Module, example: Any, forward: calling.Forward | None, tolerance: float | None
) -> float:
    return verify(
        old,
        new,
        example,
        forward,
        what="the folded network",
        advice="The network's code may read modules in a way that was not observed; keep such layers out of the fold by"
        " giving them a forward hook",
        make=partial(fold, tolerance=inf, traced=isinstance(new, torch.fx.GraphModule), forward=forward),
        tolerance=tolerance,
    )


def _sites(
    net: nn.Module, graph: Graph, plan: Plan, fused: dict[nn.Module, nn.Module], kept: dict[nn.Module, str]
) -> list[Site]:
    names = {module: name for name, module in net.named_modules()}
    sites: dict[nn.Module, Site] = {}
    for layer, into in plan.gone.items():
        sites[layer] = Site(names[layer], "folded into " + ", ".join(f"'{names[m]}'" for m in into))
    for layer in plan.remaining:
        with_activation = f" with {type(fused[layer]).__name__}" if layer in fused else ""
        sites[layer] = Site(names[layer], "fixed affine map" + with_activation, plan.reasons[layer])
    for module, reason in kept.items():
        sites[module] = Site(names[module], "kept", reason)
    ordered = [sites[module] for module in names if module in sites]
    functional = graph.functions("batch_norm", "native_batch_norm")
    why = "a functional batch_norm is no module to exchange; fold(..., traced=True) can reach it"
    return [*ordered, *dict.fromkeys(Site(call.path, "kept", why) for call in functional)]
