"""Use the observed data flow to find the weights into which each batch normalization can be folded exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph import Graph, TracedCall, Value
from ..graph.kinds import (
    MOVING,
    Affine,
    Convolution,
    Transposed,
    has_hooks,
    is_affine,
    is_scripted_norm,
    keeps_torch_forward,
    plain_name,
)
from ..layers import BatchNorm
from .affine import Map, map_of

FUNCTIONS = ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
OWN_FORWARD = "has its own forward"
LARGER = (
    "if that dimension were larger, values of different features might be mixed: pass an example in which that"
    " dimension is larger than 1"
)
BY_MINI_BATCH = "even in evaluation mode, it normalizes by mini-batch statistics, not by running statistics"


class Refusal(Exception):
    """Report why a batch normalization cannot be folded into adjacent weights."""


@dataclass
class FoldPlan:
    """Hold the affine maps that are folded into weights, and the maps that remain separate modules.

    ``before`` has the maps applied to the inputs of affine layers, and ``after`` the maps applied to their outputs.
    """

    before: dict[nn.Module, Map] = field(default_factory=dict)
    after: dict[nn.Module, Map] = field(default_factory=dict)
    remaining: dict[TorchBatchNorm, Map] = field(default_factory=dict)
    gone: dict[TorchBatchNorm, list[nn.Module]] = field(default_factory=dict)
    """The layers that are folded, with the modules that they are folded into."""
    reasons: dict[TorchBatchNorm, str] = field(default_factory=dict)
    """Why a layer could not be folded into its producer and, if it is not folded at all, into its consumers."""


def make_plan(graph: Graph, layers: list[TorchBatchNorm]) -> FoldPlan:
    """Plan how to fold each layer: into the producer of its input or, if that fails, into its consumers."""
    plan = FoldPlan()
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


def reason_to_keep(module: nn.Module, graph: Graph) -> str:
    """Return why a batch normalization cannot become a fixed affine map, or "" if it can.

    For any other module, return "".
    """
    if is_scripted_norm(module):
        return "it is scripted; call fold before scripting the network"
    if not isinstance(module, TorchBatchNorm):
        return ""
    if has_hooks(module):
        return "it has hooks, which would see other values after folding"
    ours = isinstance(module, BatchNorm) and type(module).forward is BatchNorm.forward and "forward" not in vars(module)
    if not (ours or keeps_torch_forward(module)):
        return f"{type(module).__name__} {OWN_FORWARD}"
    if module.running_mean is None or module.running_var is None:
        return BY_MINI_BATCH
    if not all(bool(v.isfinite().all()) for v in map_of(module)):
        return "its statistics and parameters give a scale or shift that is not finite"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        for reader in graph.readers_of(tensor):
            return f"its {name} is also read by {reader}"
    return ""


def functional_norms(graph: Graph) -> list[TracedCall]:
    """Return the calls of functional batch norms on data, not on weights: one for each module and set of parameters."""
    calls = [call for call in graph.functions(*FUNCTIONS) if graph.follows_input(call.inputs[0])]
    return list({(call.path, *call.inputs[1:]): call for call in calls}.values())


def modules_that_normalize(net: nn.Module, graph: Graph) -> list[str]:
    """Return the paths of the modules whose own forward contains a batch normalization."""
    layers = [name for name, module in net.named_modules() if OWN_FORWARD in reason_to_keep(module, graph)]
    return [*layers, *(call.path for call in functional_norms(graph))]


def has_nonlinear_part(graph: Graph, layer: TorchBatchNorm) -> bool:
    """Return whether a layer of this library also applies an activation, a residual or a mask."""
    return isinstance(layer, BatchNorm) and (layer.activation.name != "identity" or graph.has_extra_inputs(layer))


def _fold_up(graph: Graph, plan: FoldPlan, layer: TorchBatchNorm) -> None:
    sources: dict[nn.Module, Tensor] = {}
    reached: set[TracedCall] = set()
    if not graph.calls_of(layer):
        raise Refusal("not called on the example")
    for call in graph.calls_of(layer):
        source, moves = _source(plan, graph, call)
        shapes = source.outputs[0].shape, call.argument(0, "input").shape
        _note(sources, source, _match(source.module, layer, *shapes, moves, up=True))
        reached.add(source)
    for module in sources:
        _check_free(graph, module, reached)
    found = map_of(layer)
    for module, index in sources.items():
        target: dict[nn.Module, Map] = plan.remaining if module in plan.remaining else plan.after  # type: ignore[assignment]
        selected = found.select(index)
        if not isinstance(module, Affine):
            selected = Map(*(v.reshape(_feature_shape(module)) for v in selected))
        target[module] = target[module].then(selected) if module in target else selected
    plan.gone[layer] = list(sources)


def _fold_down(graph: Graph, plan: FoldPlan, layer: TorchBatchNorm) -> None:
    if has_nonlinear_part(graph, layer):
        raise Refusal("it applies a nonlinearity, a residual or a mask itself")
    sinks: dict[nn.Module, Tensor] = {}
    reached: set[TracedCall] = set()
    for call in graph.calls_of(layer):
        for writer in (c for c in call.argument(0, "input").consumers if c.writes):
            raise Refusal(
                f"{writer} changes this layer's input in place; if the layer were removed, the layers after"
                " it would see that change"
            )
        for sink, moves in _sinks(plan, layer, call.outputs[0], []):
            shapes = call.outputs[0].shape, sink.inputs[0].shape
            _note(sinks, sink, _match(layer, sink.module, *shapes, moves, up=False))
            reached.add(sink)
    if not sinks:
        raise Refusal("nothing reads its output")
    maps = {module: plan.remaining[layer].select(index) for module, index in sinks.items()}
    for module, before in maps.items():
        _check_free(graph, module, reached)
        _check_borders(module, before)
    plan.before.update(maps)
    del plan.remaining[layer]
    plan.gone[layer] = list(sinks)


def _note(indices: dict[nn.Module, Tensor], neighbor: TracedCall, index: Tensor) -> None:
    """Note which features of a layer and of a neighbor correspond; this must not differ between calls."""
    assert neighbor.module is not None
    if not torch.equal(indices.setdefault(neighbor.module, index), index):
        raise Refusal(
            f"{neighbor} is called several times, and one of its features belongs to different features of this layer"
            " in two calls"
        )


def _source(plan: FoldPlan, graph: Graph, call: TracedCall) -> tuple[TracedCall, list[TracedCall]]:
    """Return the affine call that produces a layer's input, and the calls in between, which only move elements.

    Folded batch norms are skipped. A call of a batch norm that is not folded also counts as an affine call.
    """
    value: Value = call.argument(0, "input")
    moves: list[TracedCall] = []
    reader = call
    while True:
        producer = value.producer
        if producer is None:
            raise Refusal("no layer or function computes its input")
        if value.sole_consumer is not reader:
            others = ", ".join(str(c) for c in value.consumers if c is not reader)
            unseen = "an output of the network or untraced code, or feeds this layer twice"
            raise Refusal(f"{producer} also feeds {others or unseen}")
        _check_hooks(value.handed_on)
        module = producer.module
        linear = isinstance(module, TorchBatchNorm) and not has_nonlinear_part(graph, module)
        if is_affine(module) or (linear and module in plan.remaining):
            return producer, moves
        if linear and module in plan.gone:
            value = producer.argument(0, "input")
        elif plain_name(producer.name) in MOVING and len(producer.inputs) == 1:
            _check_hooks([producer])
            moves.insert(0, producer)
            value = producer.inputs[0]
        else:
            raise Refusal(f"its input comes from {producer}")
        reader = producer


def _sinks(
    plan: FoldPlan, layer: TorchBatchNorm, value: Value, moves: list[TracedCall]
) -> Iterator[tuple[TracedCall, list[TracedCall]]]:
    """Yield each affine call that consumes a layer's output, and the calls in between.

    Raises:
        Refusal: if anything else consumes the output.
    """
    if value.escapes:
        raise Refusal("its output is an output of the network or is read by untraced code")
    _check_hooks(value.handed_on)
    for reader in value.consumers:
        if is_affine(reader.module) and reader.inputs == [value]:
            yield reader, moves
        elif isinstance(reader.module, TorchBatchNorm) and layer in plan.gone.get(reader.module, []):
            yield from _sinks(plan, layer, reader.outputs[0], moves)
        elif plain_name(reader.name) in MOVING and reader.inputs == [value]:
            _check_hooks([reader])
            yield from _sinks(plan, layer, reader.outputs[0], [*moves, reader])
        else:
            raise Refusal(f"its output goes to {reader}")


def _check_hooks(calls: Iterable[TracedCall]) -> None:
    for call in calls:
        if call.module is not None and has_hooks(call.module):
            raise Refusal(f"{call} has hooks, which would see other values after folding")


def _check_free(graph: Graph, module: nn.Module, reached: set[TracedCall]) -> None:
    """Refuse a neighbor that is called without this layer, or whose weights must not change."""
    (call, *_) = calls = graph.calls_of(module)
    for other in calls:
        if other not in reached:
            raise Refusal(f"{other} is also called without this layer next to it")
    _check_hooks([call])
    for tensor in module.parameters():
        for reader in graph.readers_of(tensor):
            raise Refusal(f"the weights of {call} are also read by {reader}")
        if not tensor.is_floating_point():
            raise Refusal(f"the weights of {call} are {tensor.dtype}, not floating-point")


def _check_borders(module: nn.Module, before: Map) -> None:
    """Refuse a nonzero shift that would add different amounts to different output positions: a bias cannot do that.

    Zero padding causes such differences at the borders, and a transposed convolution causes them in general. The few
    transposed convolutions that do not, such as those with a kernel size of 1 and a stride of 1, are also refused.
    """
    if not bool(before.shift.any()):
        return
    name = type(module).__name__
    if isinstance(module, Transposed):
        raise Refusal(
            f"its shift would, in general, become a different offset at each output position of the {name} that"
            " follows, which a bias cannot express"
        )
    if isinstance(module, Convolution) and module.padding_mode == "zeros":
        padding = module.padding
        padded = padding == "same" and prod(module.kernel_size) > 1 if isinstance(padding, str) else any(padding)
        if padded:
            raise Refusal(f"the {name} after it pads with zeros, and a folded shift would also apply to the padding")


# Between a batch normalization and the adjacent affine layer there may be calls that only move elements. Replaying
# these calls on tensors of feature indices shows where each feature goes.


def _match(
    above: nn.Module | None,
    below: nn.Module | None,
    origin: tuple[int, ...],
    target: tuple[int, ...],
    moves: list[TracedCall],
    *,
    up: bool,
) -> Tensor:
    """Return, for each feature of ``above`` (``below`` if not ``up``), the index of the feature in the other module."""
    dims, kept = _feature_dims(above, len(origin)), _feature_dims(below, len(target))
    if not moves and dims == kept:
        return torch.arange(prod(origin[d] for d in dims), device="cpu")
    pairs = _feature_pairs(origin, dims, moves, target, kept)
    if up:
        return _function_of(pairs, prod(origin[d] for d in dims))
    return _function_of(((after, before) for before, after in pairs), prod(target[d] for d in kept))


def _feature_pairs(
    origin: tuple[int, ...], dims: list[int], moves: list[TracedCall], target: tuple[int, ...], kept: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors: for each element after the moves, its feature's index before and after them.

    The first pair is for the example's shape. In each other pair, one dimension that has size 1 in the example has size
    2. If the moves fail on such a larger shape, or change the number of features or dimensions, that shape has no pair.
    """
    yield _replayed(_numbered(origin, dims), moves), _numbered(target, kept)
    for larger in (d for d, n in enumerate(origin) if n == 1 and d not in dims):
        shape = tuple(2 if d == larger else n for d, n in enumerate(origin))
        with suppress(Refusal):
            found = _replayed(_numbered(shape, dims), moves)
            if found.dim() == len(target) and all(found.shape[d] == target[d] for d in kept):
                yield found, _numbered(tuple(found.shape), kept)


def _function_of(pairs: Iterator[tuple[Tensor, Tensor]], size: int) -> Tensor:
    """Return a tensor f with f[inner] == outer for every pair (inner, outer); raise Refusal if there is no such f."""
    inner, outer = next(pairs)
    if inner.shape != outer.shape:
        raise Refusal("the shapes between it and the adjacent affine layer do not match")
    index = torch.zeros(size, dtype=torch.long, device="cpu")
    index[inner.flatten()] = outer.flatten()
    if not torch.equal(index[inner], outer):
        raise Refusal("the dimension that it normalizes is not the feature dimension of the adjacent affine layer")
    if not all(torch.equal(index[inner], outer) for inner, outer in pairs):
        raise Refusal(f"the example has a dimension of size 1; {LARGER}")
    return index


def _replayed(x: Tensor, moves: list[TracedCall]) -> Tensor:
    for move in moves:
        before = x
        try:
            x = move.replay(x.contiguous())
        except Exception as error:
            raise Refusal(f"cannot find out where {move} moves each feature ({error})") from error
        if not isinstance(x, Tensor):
            raise Refusal(f"{move} does not return a single tensor")
        if plain_name(move.name) in ("view", "reshape"):
            changes = [new - old for new, old in zip(_ones_around(x), _ones_around(before), strict=True)]
            if prod(changes) < 0:
                raise Refusal(f"{move} moves a dimension of size 1 past the features; {LARGER}")
    return x


def _ones_around(features: Tensor) -> tuple[int, int]:
    """Count the dimensions of size 1 before the first and after the last dimension along which the indices vary."""
    firsts = (features.narrow(d, 0, min(n, 1)).expand_as(features) for d, n in enumerate(features.shape))
    varied = [d for d, first in enumerate(firsts) if not torch.equal(features, first)]
    if not varied:
        return 0, 0
    return features.shape[: varied[0]].count(1), features.shape[varied[-1] + 1 :].count(1)


def _numbered(shape: tuple[int, ...], dims: list[int]) -> Tensor:
    """Return a tensor in which each element is the index of the feature that it belongs to."""
    sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
    return torch.arange(prod(sizes), device="cpu").reshape(sizes).expand(shape)


def _feature_dims(module: nn.Module | None, rank: int) -> list[int]:
    if isinstance(module, nn.Linear):
        return [rank - 1]
    if isinstance(module, Convolution | Transposed):
        return [rank - 1 - len(module.kernel_size)]
    return [1 + d for d in range(len(_feature_shape(module)))]


def _feature_shape(layer: nn.Module | None) -> tuple[int, ...]:
    """Return the shape of the layer's running mean, such as (C,) or (C, H, W)."""
    assert isinstance(layer, TorchBatchNorm)
    assert layer.running_mean is not None
    return tuple(layer.running_mean.shape)
