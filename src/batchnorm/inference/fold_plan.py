"""Decide from the observed data flow which weights take in which batch normalization, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph import Call, Graph, Value
from ..graph.kinds import MOVING, Affine, Convolution, Transposed, has_hooks, is_affine, plain_name
from ..layers import BatchNorm
from .affine import Map, map_of
from .match import Refusal, feature_shape, match_down, match_up


@dataclass
class Plan:
    """Hold what becomes of each module: maps that affine layers take in, and maps that stay."""

    before: dict[nn.Module, Map] = field(default_factory=dict)
    after: dict[nn.Module, Map] = field(default_factory=dict)
    remaining: dict[TorchBatchNorm, Map] = field(default_factory=dict)
    gone: dict[TorchBatchNorm, list[nn.Module]] = field(default_factory=dict)
    """The layers whose map went into other modules, with these."""
    reasons: dict[TorchBatchNorm, str] = field(default_factory=dict)


def make_plan(graph: Graph, layers: list[TorchBatchNorm]) -> Plan:
    """Fold each layer into what produces its input, else into what consumes its output, else let it stay."""
    plan = Plan()
    order = {call.module: i for i, call in reversed(list(enumerate(graph.calls)))}
    for layer in sorted(layers, key=lambda m: order.get(m, -1)):
        try:
            _fold_up(graph, plan, layer)
        except Refusal as refusal:
            plan.remaining[layer] = map_of(layer)
            plan.reasons[layer] = str(refusal)
    for layer in [m for m in plan.remaining if m in order]:
        try:
            _fold_down(graph, plan, layer)
        except Refusal as refusal:
            plan.reasons[layer] += f"; {refusal}"
    return plan


def has_nonlinear_part(graph: Graph, layer: TorchBatchNorm) -> bool:
    """Say whether a layer of this library does more in its calls than scale and shift."""
    return isinstance(layer, BatchNorm) and (layer.activation.name != "identity" or has_extras(graph, layer))


def has_extras(graph: Graph, layer: TorchBatchNorm) -> bool:
    """Say whether a layer is called with a residual or a mask."""
    return any(len(call.inputs) > 1 for call in graph.calls_of(layer))


def _fold_up(graph: Graph, plan: Plan, layer: TorchBatchNorm) -> None:
    sources: dict[nn.Module, Tensor] = {}
    reached: set[Call] = set()
    if not graph.calls_of(layer):
        raise Refusal("not called on the example")
    for call in graph.calls_of(layer):
        source, moves = _source(plan, graph, call)
        assert source.module is not None
        index = match_up(source, moves, call, layer)
        if source.module in sources and not torch.equal(sources[source.module], index):
            raise Refusal(f"the calls of {source} arrange its features differently")
        sources[source.module] = index
        reached.add(source)
    for module in sources:
        _check_every_call(graph, module, reached)
        _check_free(graph, module)
    found = map_of(layer)
    for module, index in sources.items():
        target: dict[nn.Module, Map] = plan.remaining if module in plan.remaining else plan.after  # type: ignore[assignment]
        selected = Map(*(v.reshape(_features(module, v)) for v in found.select(index)))
        target[module] = target[module].then(selected) if module in target else selected
    plan.gone[layer] = list(sources)


def _fold_down(graph: Graph, plan: Plan, layer: TorchBatchNorm) -> None:
    if has_nonlinear_part(graph, layer):
        raise Refusal("it applies a nonlinearity, a residual or a mask itself")
    sinks: dict[nn.Module, Tensor] = {}
    reached: set[Call] = set()
    for call in graph.calls_of(layer):
        for writer in (c for c in call.argument(0, "input").consumers if c.writes):
            raise Refusal(f"{writer} changes its input in place, which its output would then share")
        for sink, moves in _sinks(plan, layer, call.outputs[0], []):
            assert sink.module is not None
            index = match_down(call, moves, sink, layer)
            if sink.module in sinks and not torch.equal(sinks[sink.module], index):
                raise Refusal(f"the calls of {sink} arrange its features differently")
            sinks[sink.module] = index
            reached.add(sink)
    if not sinks:
        raise Refusal("nothing reads its output")
    maps = {module: plan.remaining[layer].select(index) for module, index in sinks.items()}
    for module, before in maps.items():
        _check_every_call(graph, module, reached)
        _check_free(graph, module)
        _check_borders(module, before)
    plan.before.update(maps)
    del plan.remaining[layer]
    plan.gone[layer] = list(sinks)


def _source(plan: Plan, graph: Graph, call: Call) -> tuple[Call, list[Call]]:
    """Walk up from a layer's input to the affine call that alone makes it, through calls that only move elements."""
    value: Value = call.argument(0, "input")
    moves: list[Call] = []
    reader = call
    while True:
        producer = value.producer
        if producer is None:
            raise Refusal("its input is the network's")
        if value.sole_consumer is not reader:
            others = ", ".join(str(c) for c in value.consumers if c is not reader)
            raise Refusal(f"{producer} also feeds {others or 'the outside'}")
        module = producer.module
        linear = isinstance(module, TorchBatchNorm) and not has_nonlinear_part(graph, module)
        if is_affine(module) or (linear and module in plan.remaining):
            return producer, moves
        if linear and module in plan.gone:
            value = producer.argument(0, "input")
        elif plain_name(producer.name) in MOVING and len(producer.inputs) == 1:
            moves.insert(0, producer)
            value = producer.inputs[0]
        else:
            raise Refusal(f"its input comes from {producer}")
        reader = producer


def _sinks(plan: Plan, layer: TorchBatchNorm, value: Value, moves: list[Call]) -> Iterator[tuple[Call, list[Call]]]:
    """Walk down from a layer's output to the affine calls that are all that reads it."""
    if value.escapes:
        raise Refusal("its output leaves the network")
    for reader in value.consumers:
        if is_affine(reader.module) and reader.inputs == [value]:
            yield reader, moves
        elif isinstance(reader.module, TorchBatchNorm) and layer in plan.gone.get(reader.module, []):
            yield from _sinks(plan, layer, reader.outputs[0], moves)
        elif plain_name(reader.name) in MOVING and reader.inputs == [value]:
            yield from _sinks(plan, layer, reader.outputs[0], [*moves, reader])
        else:
            raise Refusal(f"its output goes to {reader}")


def _check_every_call(graph: Graph, module: nn.Module, reached: set[Call]) -> None:
    for call in graph.calls_of(module):
        if call not in reached:
            raise Refusal(f"{call} is also called where this layer has no part")


def _check_free(graph: Graph, module: nn.Module) -> None:
    (call, *_) = graph.calls_of(module)
    if has_hooks(module):
        raise Refusal(f"{call} has hooks, which would see other values")
    for tensor in module.parameters():
        for reader in graph.readers_of(tensor):
            raise Refusal(f"the weights of {call} are also read by {reader}")
        if not tensor.is_floating_point():
            raise Refusal(f"the weights of {call} are {tensor.dtype}")


def _check_borders(module: nn.Module, before: Map) -> None:
    """A shift reaches every output alike only where no kernel looks over the border of its input."""
    if not bool(before.shift.any()):
        return
    name = type(module).__name__
    if isinstance(module, Transposed):
        raise Refusal(f"the {name} after it would spread the shift unevenly")
    if isinstance(module, Convolution) and module.padding_mode == "zeros":
        padding = module.padding
        padded = padding == "same" and prod(module.kernel_size) > 1 if isinstance(padding, str) else any(padding)
        if padded:
            raise Refusal(f"the {name} after it pads with zeros, which the layer would have shifted")


def _features(module: nn.Module, v: Tensor) -> tuple[int, ...]:
    return tuple(v.shape) if isinstance(module, Affine) else feature_shape(module)
