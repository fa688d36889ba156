"""Find activation modules that can be fused into the batch normalization before them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..graph import Graph, TracedCall
from ..graph.kinds import has_hooks, is_quiet, plain_name
from ..graph.references import Holder, holders, is_plain_identity, next_in_order, runs_in_order, runs_its_graph
from ..ops.activation import NAMES, from_module
from .batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from .norm_act import NormAct

# These functions can be fused, but only by rewriting the code that calls them (see graph/rewrite.py).
_FUNCTIONS = {"add", *map(plain_name, NAMES)}


class Fused(nn.Module):
    """A placeholder for an activation module that is now fused into a batch normalization.

    The placeholder refers to the activation module, so that ``revert`` can restore it, and to the layers that now
    apply the activation.

    >>> Fused(nn.ReLU(), [])
    Fused(was ReLU())
    """

    activation: nn.Module
    layers: list[nn.Module]

    def __init__(self, activation: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        # Bypass nn.Module's registration: these modules are not children and must not appear in the state dict.
        self.__dict__.update(activation=activation, layers=layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input

    def extra_repr(self) -> str:
        """Return a description of the fused module."""
        return f"was {self.activation}"


def takes_activation(layer: nn.Module) -> bool:
    """Return whether a residual and an activation can be fused into a layer.

    The layer must be one of this library's layers with its original forward, no hooks, and no activation yet.

    >>> from batchnorm import BatchNorm1d
    >>> takes_activation(BatchNorm1d(2)), takes_activation(BatchNorm1d(2, activation="relu"))
    (True, False)
    """
    if not isinstance(layer, BatchNorm) or layer.activation.name != "identity" or not is_quiet(layer):
        return False
    if type(layer) in (BatchNorm1d, BatchNorm2d, BatchNorm3d):
        # Do not read `forward` from the class here: in compiled code, that would make Dynamo guard on the class.
        return True
    forward = type(layer).forward
    if forward is NormAct.forward and isinstance(layer, NormAct):
        return is_plain_identity(layer.drop) and is_plain_identity(layer.act)
    return forward is BatchNorm.forward


def activations_after(
    net: nn.Module, graphs: list[Graph], layers: Iterable[nn.Module]
) -> tuple[dict[nn.Module, nn.Module], dict[nn.Module, str]]:
    """Return the activation module that can be fused into each layer, and why the other layers have none.

    In every traced forward pass, the activation must be the only consumer of each of the layer's outputs. A Sequential
    must call the layer and then the activation (identities may come between them), or the network must be a
    torch.fx.GraphModule. Nothing else in the network may refer to the layer or the activation. A user's own forward
    method must not call the layer or the activation, because the method may take another path on other inputs.

    >>> from batchnorm.graph import trace
    >>> import torch
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()).eval()
    >>> activations_after(net, [trace(net, torch.zeros(1, 2))], [net[0]])[0] == {net[0]: net[1]}
    True
    """
    held = holders(net)
    found: dict[nn.Module, nn.Module] = {}
    refused: dict[nn.Module, str] = {}
    for layer in layers:
        calls = [call for graph in graphs for call in graph.calls_of(layer)]
        activation, reason = _only_activation(layer, calls)
        if activation is not None:
            reason = _other_code(net, calls) or _other_use(net, layer, activation, held)
        if activation is None or reason:
            refused[layer] = reason
        else:
            found[layer] = activation
    for activation in set(found.values()):
        takers = [layer for layer, a in found.items() if a is activation]
        reason = _other_input(net, activation, graphs, takers, held)
        if reason:
            for layer in takers:
                del found[layer]
                refused[layer] = f"its activation module is also {reason}"
    return found, refused


def _only_activation(layer: nn.Module, calls: list[TracedCall]) -> tuple[nn.Module | None, str]:
    if not calls:
        return None, "the layer is not called on the example"
    if has_hooks(layer):
        return None, "its hooks would see the activation's output"
    modules = set()
    for call in calls:
        output = call.outputs[0]
        consumer = output.sole_consumer
        if consumer is None:
            readers = list(map(str, output.consumers))
            if output.escapes:
                readers.append("untraced code (the caller, a hook or a stored reference)")
            return None, f"its output is read by {' and '.join(readers) or 'nothing'}"
        # Modules that return their input unchanged, such as dropout in evaluation mode, are not consumers. Their calls
        # are in `handed_on`.
        between = [c for c in output.handed_on if not is_plain_identity(c.module)]
        if between:
            return None, f"its output goes to {between[0]}, which cannot be fused"
        if consumer.module is None:
            why = (
                "which cannot be fused without rewriting the code that calls it"
                if plain_name(consumer.name) in _FUNCTIONS
                else "which cannot be fused"
            )
            return None, f"its output goes to the function {consumer}, {why}"
        modules.add(consumer.module)
        activation = from_module(consumer.module)
        if activation is None or activation.name == "identity":
            return None, f"its output goes to {consumer}, which cannot be fused"
    if len(modules) > 1:
        return None, "its calls are followed by different modules"
    (module,) = modules
    if has_hooks(module):
        return None, "the activation module has hooks"
    return module, ""


def _other_code(net: nn.Module, calls: list[TracedCall]) -> str:
    """Describe code that may call the layer without its activation, or return "" if there is none."""
    for call in calls:
        consumer = call.outputs[0].sole_consumer
        for caller in (call.caller, consumer.caller if consumer is not None else None):
            owner = None if caller is None else net.get_submodule(caller)
            if owner is None or not (runs_in_order(owner) or (owner is net and runs_its_graph(net))):
                name = (
                    "forward=" if owner is None else f"'{caller}' ({type(owner).__name__})" if caller else "the network"
                )
                return f"the code of {name} calls it and its activation, and may call either without the other"
    return ""


def _other_use(net: nn.Module, layer: nn.Module, activation: nn.Module, held: dict[nn.Module, list[Holder]]) -> str:
    """Describe a module that may use the layer without its activation, or return "" if there is none."""
    for holder in held[layer]:
        if next_in_order(holder) is not activation and not _is_in_graph(net, holder):
            return f"{type(holder.module).__name__} also refers to it, and may use it without its activation"
    return ""


def _other_input(
    net: nn.Module,
    activation: nn.Module,
    graphs: list[Graph],
    takers: list[nn.Module],
    held: dict[nn.Module, list[Holder]],
) -> str:
    """Describe a use of the activation other than on the outputs of ``takers``, or return "" if there is none."""
    for call in (call for graph in graphs for call in graph.calls_of(activation)):
        producer = call.inputs[0].producer
        if producer is None or producer.module not in takers:
            return f"called on {f'the output of {producer}' if producer is not None else 'an input or a parameter'}"
    followed = [next_in_order(holder) for layer in takers for holder in held[layer]]
    if len([holder for holder in held[activation] if not _is_in_graph(net, holder)]) > followed.count(activation):
        return "used elsewhere"
    return ""


def _is_in_graph(net: nn.Module, holder: Holder) -> bool:
    # In a GraphModule, the parent of a submodule is the GraphModule itself or, for a nested name such as `block.bn`, a
    # plain nn.Module. The GraphModule only runs its graph, and the plain nn.Module has no code of its own.
    return runs_its_graph(net) and holder.key is not None and (holder.module is net or type(holder.module) is nn.Module)
