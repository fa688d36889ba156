"""Find the layers after which batch normalization can be inserted: affine layers, or nonlinearities that they feed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..change_report import Site
from ..graph import Graph, TracedCall, Value
from ..graph.kinds import HANDING_ON, MOVING, NONLINEAR, Affine, Convolution, Transposed, is_affine, plain_name

FUNCTIONAL = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
# In evaluation mode, these modules may pass their children's weights to a fused function instead of calling the
# children.
BYPASSING = (nn.TransformerEncoderLayer,)
SCALING = frozenset({"mul", "div", "truediv", "multiply", "divide"})
# Calls that are replayed to find out which dimension of their outputs holds the features. Pixel and channel shuffles
# are not replayed: they keep the features in dimension 1.
REARRANGING = frozenset({"mean", "stack", "chunk", "split", "unbind", "narrow", "select", "getitem"}) | MOVING
REARRANGING -= {"pixelshuffle", "pixelunshuffle", "channelshuffle"}


@dataclass(eq=False)
class Place:
    """A module whose output is a candidate for normalization.

    Paper: Alg. 2, "subset of activations"
    """

    path: str
    module: nn.Module
    affine: nn.Module
    """The module itself if it is an affine layer; otherwise, an affine layer that feeds the module."""
    shape: tuple[int, ...]
    features_last: bool
    calls: int = 1
    bias: Tensor | None = None
    """The bias that is dropped from the affine layer, or None."""

    @property
    def problem(self) -> str:
        """The reason why the output cannot be normalized, or "" if it can be normalized."""
        dims = len(self.shape)
        fits = dims >= 2 if self.features_last else 2 <= dims <= 5
        if isinstance(self.module, Convolution | Transposed):
            fits = dims == len(self.module.kernel_size) + 2
        problem = "more than 5 dimensions" if dims > 5 else "no batch dimension"
        return "" if fits else f"its output of shape {self.shape} has {problem}"

    def features(self, per_activation: bool) -> tuple[int, ...]:
        """Return the shape of the statistics: (C,) or, with ``per_activation``, a shape such as (C, H, W).

        If the features are in the last dimension, ``per_activation`` has no effect.
        """
        if self.features_last:
            return (self.shape[-1],)
        return self.shape[1:] if per_activation else self.shape[1:2]


class Candidate(NamedTuple):
    """An output that ``insert`` considers for normalization."""

    place: Place | None  # None if the output can never be chosen
    site: Site  # the entry in the report if the output is not chosen
    default: bool = False  # whether the output is chosen if `where` is None


class Reach(NamedTuple):
    """The calls that :func:`reach` finds: nonlinearities, normalizations and other calls."""

    nonlinear: list[TracedCall]
    normalized: list[TracedCall]
    elsewhere: list[TracedCall]


def reach(values: list[Value]) -> Reach:
    """Follow values through calls such as sums, concatenations, pools and reshapes to the first calls of another kind.

    >>> import torch
    >>> from batchnorm.graph import trace
    >>> linear, pool, relu = trace(nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2), nn.ReLU()), torch.zeros(2, 4)).calls
    >>> reach(linear.outputs).nonlinear == [relu]
    True

    Paper: Sec. 3.2, z = g(Wu + b)
    """
    found = Reach([], [], [])
    seen: set[Value] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for call in value.consumers:
            name = plain_name(call.name)
            if name in NONLINEAR:
                found.nonlinear.append(call)
            elif "norm" in name:
                found.normalized.append(call)
            elif _hands_on(call):
                waiting.extend(call.outputs)
            else:
                found.elsewhere.append(call)
    return found


def _hands_on(call: TracedCall) -> bool:
    name = plain_name(call.name)
    return name in HANDING_ON or (name in SCALING and len(call.inputs) == 1)


def affine_places(net: nn.Module, graphs: list[Graph]) -> Iterator[Candidate]:
    """Yield each affine layer, in the order of calls; layers that feed a nonlinearity are chosen by default.

    Also yield candidates whose ``place`` is None, for the functions and layers that ``insert`` always skips.
    """
    names = {module: name for name, module in net.named_modules()}
    graph = graphs[-1]  # of training mode, if there is one, because auxiliary heads may run only in training
    bypassing = [m for m in names if isinstance(m, BYPASSING)]
    seen: set[nn.Module] = set()
    for call in graph.calls:
        module = call.module
        if module is None and call.name in FUNCTIONAL:
            owner = net.get_submodule(call.path)
            own = f"{type(owner).__name__} has its own forward"
            reason = own if isinstance(owner, Affine) else f"{call.name} is called as a function, not as a module"
            yield Candidate(None, Site(call.path, "skipped", reason))
        if module is None or module in seen or not is_affine(module):
            continue
        seen.add(module)
        calls = graph.calls_of(module)
        readers = [str(reader) for g in graphs for p in module.parameters() for reader in g.readers_of(p)]
        readers += [
            f"{names[owner] or 'the network'} ({type(owner).__name__}) in evaluation mode"
            for owner in bypassing
            if module in owner.children()
        ]
        if readers:
            yield Candidate(None, Site(names[module], "skipped", f"its weights are also read by {readers[0]}"))
            continue
        reason = _reason_to_skip(calls)
        last = isinstance(module, nn.Linear)
        shape, bias = call.outputs[0].shape, _absorbed_bias(module)
        place = Place(names[module], module, module, shape, last, len(calls), bias)
        yield Candidate(place, Site(place.path, "skipped", reason), not reason)
    for module, name in names.items():
        if is_affine(module) and module not in seen:
            yield Candidate(None, Site(name, "skipped", "not called on the example"))
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
            yield Candidate(None, Site(name, "skipped", "a recurrent layer applies its nonlinearities internally"))


def activation_places(net: nn.Module, graphs: list[Graph]) -> Iterator[Candidate]:
    """Yield each nonlinearity that an affine layer feeds, as a candidate for batch normalization after it."""
    graph = graphs[-1]
    fed: dict[TracedCall, list[tuple[nn.Module, int | None]]] = {}
    for call in graph.calls:
        if call.module is not None and is_affine(call.module):
            for reached, dim in _nonlinearities_fed_by(call):
                fed.setdefault(reached, []).append((call.module, dim))
    for call in (call for call in graph.calls if call in fed):
        if call.module is None:
            yield Candidate(None, Site(call.path, "skipped", f"{call.name} is called as a function, not as a module"))
        elif len(graph.calls_of(call.module)) > 1:
            yield Candidate(None, Site(call.path, "skipped", "it is called more than once"))
        else:
            shape = call.outputs[0].shape
            dims = {dim for _, dim in fed[call]}
            last = dims == {len(shape) - 1}
            place = Place(call.path, call.module, fed[call][0][0], shape, last)
            if last or dims == {1} or place.problem:
                yield Candidate(place, Site(call.path, "skipped"), default=True)
            else:
                reason = (
                    f"cannot find the features in dimension 1 or the last dimension of its output, of shape {shape}"
                )
                yield Candidate(None, Site(call.path, "skipped", reason))


def _nonlinearities_fed_by(affine: TracedCall) -> Iterator[tuple[TracedCall, int | None]]:
    """Yield the nonlinearities that an affine layer feeds, each with the input dimension that holds the features.

    The dimension is None if it is unknown, for example because the features were split over two dimensions.
    """
    (value,) = affine.outputs
    kernel = getattr(affine.module, "kernel_size", ())
    waiting: list[tuple[Value, int | None]] = [(value, len(value.shape) - 1 - len(kernel))]
    seen: set[tuple[Value, int | None]] = set()
    while waiting:
        value, dim = waiting.pop()
        if (value, dim) in seen:
            continue
        seen.add((value, dim))
        for call in value.consumers:
            if plain_name(call.name) in NONLINEAR:
                yield call, dim
            elif _hands_on(call):
                waiting.extend(zip(call.outputs, _dims_after(call, value, dim), strict=True))


def _dims_after(call: TracedCall, value: Value, dim: int | None) -> list[int | None]:
    """Return, for each output of a call, the dimension that holds the features, or None if it is unknown."""
    unknown: list[int | None] = [None] * len(call.outputs)
    if dim is None:
        return unknown
    if plain_name(call.name) not in REARRANGING:
        return [dim if len(output.shape) == len(value.shape) else None for output in call.outputs]
    if call.inputs != [value]:
        return unknown
    # Replay the call on a tensor in which each element is the index of its feature. If the result varies along only one
    # dimension, that dimension holds the features.
    index = torch.arange(float(value.shape[dim]), device="cpu").reshape(-1, *[1] * (len(value.shape) - 1 - dim))
    result = call.replay(index.expand(value.shape).contiguous())
    outputs = [result] if isinstance(result, Tensor) else list(result)
    return [_only_varying_dim(output) for output in outputs] if len(outputs) == len(unknown) else unknown


def _only_varying_dim(index: Tensor) -> int | None:
    dims = [d for d, size in enumerate(index.shape) if size > 1 and (index != index.narrow(d, 0, 1)).any()]
    return dims[0] if len(dims) == 1 else None


def _reason_to_skip(calls: list[TracedCall]) -> str:
    found = reach([value for call in calls for value in call.outputs])
    if found.nonlinear:
        return ""
    if found.normalized:
        return f"already normalized by {found.normalized[0]}"
    return f"feeds {found.elsewhere[0]}, not a nonlinearity" if found.elsewhere else "feeds no nonlinearity"


def _absorbed_bias(module: nn.Module) -> Tensor | None:
    assert isinstance(module, Affine)
    return None if parametrize.is_parametrized(module, "bias") else module.bias
