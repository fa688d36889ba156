"""The inference network: batch normalization folded into the weights, the rest a fixed affine map."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.utils import parametrize

from .. import calling
from ..exchange import Memo, exchange, private_copy, relative_error, tolerance_for
from ..graph import Graph, trace
from ..graph.kinds import Affine, base_type, has_hooks, keeps_torch_forward
from ..layers import BatchNorm
from ..layers.fusion import Fused, activations_after
from ..layers.normalized import Normalized
from ..ops import Activation
from ..ops.activation import from_module, to_module
from ..sites import Report, Site, attach
from .affine import fold_after, fold_before, map_of, weights_of
from .fixed import FixedAffine
from .plan import Plan, has_extras, make_plan

Makers = dict[nn.Module, Callable[[Memo], nn.Module]]


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
    original = private_copy(net).eval()
    notes: list[str] = []
    source = original
    if traced:
        from .traced import as_graph_module

        source = as_graph_module(private_copy(original))
    graph = trace(source, example, forward)
    layers, kept = _choose(source)
    plan = make_plan(graph, layers)
    fused, _ = activations_after([graph], [m for m in plan.remaining if not _nonlinear(graph, m)])
    result = exchange(source, _makers(source, graph, plan, fused)).eval()
    error = _verify(original, result, example, forward, tolerance)
    sites = _sites(source, graph, plan, fused, kept)
    reads = graph.functions("item", "__bool__", "__int__", "__float__", "tolist")
    if reads:
        notes.append(f"Python code reads values ({reads[0]}): an input that takes another path was not looked at")
    return attach(result, Report("fold", tuple(sites), error, tuple(notes)))


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


def _nonlinear(graph: Graph, layer: TorchBatchNorm) -> bool:
    return _activation_of(layer).name != "identity" or has_extras(graph, layer)


def _activation_of(layer: nn.Module) -> Activation:
    return layer.activation if isinstance(layer, BatchNorm) else Activation()


def _makers(net: nn.Module, graph: Graph, plan: Plan, fused: dict[nn.Module, nn.Module]) -> Makers:
    makers: Makers = {module: _folded_affine(module, plan) for module in {**plan.before, **plan.after}}
    for layer in plan.gone:
        makers[layer] = _constant(_rest_of(layer, graph))
    for layer, left in plan.remaining.items():
        activation = (from_module(fused[layer]) if layer in fused else None) or _activation_of(layer)
        makers[layer] = _constant(FixedAffine(_narrow(left.scale, layer), _narrow(left.shift, layer), activation))
    for module in set(fused.values()):
        makers[module] = _constant(nn.Identity())
    for module in net.modules():
        # What insert() added goes where nothing is left of it.
        if isinstance(module, Normalized) and module.norm in plan.gone and _is_dispensable(module, makers):
            makers[module] = _same_as(module.affine)
        if isinstance(module, Fused):
            makers[module] = _constant(nn.Identity())
    return makers


def _is_dispensable(container: Normalized, makers: Makers) -> bool:
    identity = _activation_of(container.norm).name == "identity"
    return identity and container.affine in makers and not has_hooks(container)


def _folded_affine(module: nn.Module, plan: Plan) -> Callable[[Memo], nn.Module]:
    def make(memo: Memo) -> nn.Module:
        affine = copy.deepcopy(module, memo)
        assert isinstance(affine, Affine)
        weights = weights_of(affine)
        if module in plan.before:
            weights = fold_before(affine, weights, plan.before[module])
        if module in plan.after:
            weights = fold_after(affine, weights, plan.after[module])
        trained, like = affine.weight.requires_grad, affine.weight.detach()
        if parametrize.is_parametrized(affine):
            # remove_parametrizations would take the property from a class that the user's module shares.
            affine.__class__ = base_type(affine)
            del affine._modules["parametrizations"]
        affine.weight = nn.Parameter(weights.weight.to(like), requires_grad=trained)
        affine.bias = nn.Parameter(weights.bias.to(like), requires_grad=trained)
        return affine

    return make


def _rest_of(layer: TorchBatchNorm, graph: Graph) -> nn.Module:
    activation = _activation_of(layer)
    if has_extras(graph, layer):
        return FixedAffine(None, None, activation)
    return to_module(activation)


def _constant(module: nn.Module) -> Callable[[Memo], nn.Module]:
    return lambda memo: module


def _same_as(module: nn.Module) -> Callable[[Memo], nn.Module]:
    return lambda memo: memo[id(module)]


def _narrow(v: Tensor, layer: TorchBatchNorm) -> Tensor:
    assert layer.running_mean is not None
    return v.to(layer.running_mean)


def _verify(
    old: nn.Module, new: nn.Module, example: Any, forward: calling.Forward | None, tolerance: float | None
) -> float:
    limit = tolerance_for(old) if tolerance is None else tolerance
    error = relative_error(calling.evaluate(new, example, forward), calling.evaluate(old, example, forward))
    if not error <= limit:
        raise ValueError(
            f"the folded network's output differs from the original's by {error:.2e} (relative), more than {limit:.0e};"
            " nothing was changed. Either the network computes something else each time it is called, or its code reads"
            " modules in a way that could not be observed; keep such layers out by giving them a forward hook"
        )
    return error


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
