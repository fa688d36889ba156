"""Count the batch normalizations that feed an activation or a sum, and how many of them are fused with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph import Graph, TracedCall
from ..graph.kinds import NONLINEAR, plain_name
from ..graph.patterns import Fusion
from ..graph.references import is_plain_identity
from ..graph.rewrite import Rewritten
from ..layers import BatchNorm
from ..layers.norm_act import NormAct
from ..ops import Activation
from ..ops.activation import from_module, to_module

Fusions = dict[nn.Module, Fusion]


class Count(NamedTuple):
    """The layers that feed an activation, directly or through a sum, and those that feed only a sum."""

    activation: set[nn.Module]
    sum: set[nn.Module]


def fused_in(net: nn.Module, result: nn.Module, done: dict[str, Rewritten], training: bool) -> Fusions:
    """Return, for each fused layer of the original network, what it is fused with in one mode of the new network."""
    names = {module: name for name, module in net.named_modules()}
    rewritten = {
        result.get_submodule(path).get_submodule(fusion.path): fusion
        for path, entry in done.items()
        for fusion in entry.fusions.get(training, ())
    }
    found: Fusions = {}
    for module, name in names.items():
        if isinstance(module, TorchBatchNorm):
            new = result.get_submodule(name)
            within = _own(new)
            if within is not None:
                found[module] = Fusion(name, within, False)
            elif new in rewritten:
                found[module] = rewritten[new]
    return found


def _own(layer: nn.Module) -> Activation | None:
    """Return the activation that a layer itself applies, or None if it applies none."""
    if isinstance(layer, NormAct):
        found = from_module(layer.act) if is_plain_identity(layer.drop) else None
    else:
        found = layer.activation if isinstance(layer, BatchNorm) else None
    return found if found is not None and found.name != "identity" else None


def count(graph: Graph, fused: Fusions) -> Count:
    """Find the batch normalizations whose output is read by an activation or a sum in one forward pass."""
    found = Count({m for m, fusion in fused.items() if _has_activation(fusion)}, set())
    for call in graph.calls:
        if isinstance(call.module, TorchBatchNorm) and _applies_one(call.module):
            found.activation.add(call.module)
        elif plain_name(call.name) in NONLINEAR and call.inputs:
            producer = call.inputs[0].producer
            if producer is not None and isinstance(producer.module, TorchBatchNorm):
                found.activation.add(producer.module)
            elif producer is not None and call.inputs[0].sole_consumer is call:
                # If both summands are BN outputs, count only one of them, because the other is the residual.
                norms = list(_summands(producer))
                found.activation.update([*(m for m in norms if m in fused), *reversed(norms)][:1])
    for call in graph.calls:
        found.sum.update(m for m in _summands(call) if m not in found.activation)
    return found


def _summands(call: TracedCall) -> Iterator[nn.Module]:
    """If the call is a sum, yield the batch normalizations whose output only this sum reads."""
    if _is_sum(call) and not _adds_zero(call):
        for value in dict.fromkeys(call.inputs[:2]):
            producer, reader = value.producer, call
            while producer is not None and _adds_zero(producer) and value.sole_consumer is reader:
                value, reader = producer.inputs[0], producer
                producer = value.producer
            module = producer.module if producer is not None else None
            if isinstance(module, TorchBatchNorm) and value.sole_consumer is reader:
                yield module


def _is_sum(call: TracedCall) -> bool:
    return plain_name(call.name) == "add" and call.module is None


def _adds_zero(call: TracedCall) -> bool:
    """Return whether a call adds the number 0, as the first addition in Python's ``sum([x, y])`` does."""
    return _is_sum(call) and len(call.inputs) == 1 and any(type(a) in (int, float) and a == 0 for a in call.args)


def _applies_one(layer: nn.Module) -> bool:
    act = getattr(layer, "act", None)
    inside = isinstance(act, nn.Module) and not is_plain_identity(act)
    return inside or (isinstance(layer, BatchNorm) and layer.activation.name != "identity")


def headline(counts: list[tuple[Count, Fusions]]) -> str:
    """Say how many of the layers that feed an activation are fused with it, in every traced mode that calls them."""
    feeding = set[nn.Module]().union(*(c.activation for c, _ in counts))
    sums = set[nn.Module]().union(*(c.sum for c, _ in counts)) - feeding
    fused = {m for m in feeding if all(_has_activation(f.get(m)) for c, f in counts if m in c.activation)}
    residual = [m for m in fused if any(m in f and f[m].residual for _, f in counts)]
    text = f"{len(fused)} of {len(feeding)} BN layers that feed an activation are fused"
    if residual:
        text += f", {len(residual)} with a residual"
    if sums:
        within = [m for m in sums if all(m in f for c, f in counts if m in c.sum)]
        text += f"; {len(sums)} feed{'s' * (len(sums) == 1)} a sum" + (f" ({len(within)} fused)" if within else "")
    return text


def _has_activation(fusion: Fusion | None) -> bool:
    return fusion is not None and fusion.activation.name != "identity"


def describe(taken: list[Fusion | None]) -> str:
    """Return a phrase such as " with a residual and ReLU" for what a layer is fused with, or "" if it is not fused."""
    fusion = next((f for f in taken if f is not None), None)
    if fusion is None:
        return ""
    parts = ["a residual"] * fusion.residual
    if _has_activation(fusion):
        parts.append(type(to_module(fusion.activation)).__name__)
    only = f" in {('evaluation', 'training')[taken.index(fusion)]}" if None in taken else ""
    return f" with {' and '.join(parts)}{only}"
