"""Which activation module alone consumes a layer's output, so that the layer can apply it itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..graph import Call, Graph
from ..graph.kinds import has_hooks, plain_name
from ..ops.activation import from_module


class Fused(nn.Module):
    """Stand, doing nothing, where an activation module was that a batch normalization now applies itself.

    It remembers that module and those layers, so that ``revert`` can put it back.

    >>> Fused(nn.ReLU(), [])
    Fused(was ReLU())

    Beyond the paper: z = g(BN(Wu)) as one call.
    """

    activation: nn.Module
    layers: list[nn.Module]

    def __init__(self, activation: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        # Past nn.Module's registration: these are not children, and nothing of them belongs in the state dict.
        self.__dict__.update(activation=activation, layers=layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input

    def extra_repr(self) -> str:
        """Say what was here."""
        return f"was {self.activation}"


def activations_after(
    graphs: list[Graph], layers: Iterable[nn.Module]
) -> tuple[dict[nn.Module, nn.Module], dict[nn.Module, str]]:
    """Return the activation module that each layer can take in, and for the others the reason why not.

    It must be the only consumer of every output of the layer, in each of the forward passes given; and where it is
    called elsewhere too, on layers that can all take it in.

    >>> from batchnorm.graph import trace
    >>> import torch
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()).eval()
    >>> activations_after([trace(net, torch.zeros(1, 2))], [net[0]])[0] == {net[0]: net[1]}
    True

    Beyond the paper: z = g(BN(Wu)) as one call.
    """
    found: dict[nn.Module, nn.Module] = {}
    refused: dict[nn.Module, str] = {}
    for layer in layers:
        calls = [call for graph in graphs for call in graph.calls_of(layer)]
        activation, reason = _only_activation(layer, calls)
        if activation is None:
            refused[layer] = reason
        else:
            found[layer] = activation
    for activation in set(found.values()):
        stranger = _other_use(activation, graphs, found)
        if stranger is not None:
            for layer in [layer for layer, a in found.items() if a is activation]:
                del found[layer]
                refused[layer] = f"its activation module is also called on the output of {stranger}"
    return found, refused


def _only_activation(layer: nn.Module, calls: list[Call]) -> tuple[nn.Module | None, str]:
    if not calls:
        return None, "not called on the example"
    if has_hooks(layer):
        return None, "it has hooks, which would see the activation's output"
    modules = set()
    for call in calls:
        output = call.outputs[0]
        consumer = output.sole_consumer
        if consumer is None:
            readers = [*map(str, output.consumers), *["the outside"] * output.escapes]
            return None, f"its output is read by {', '.join(readers) or 'nothing'}"
        if consumer.module is None:
            return None, f"its output goes to the function {consumer}, not to a module"
        between = [c for c in output.handed_on if "dropout" in plain_name(c.name)]
        if between:
            return None, f"{between[0]} lies between it and its activation"
        modules.add(consumer.module)
        activation = from_module(consumer.module)
        if activation is None or activation.name == "identity":
            return None, f"its output goes to {consumer}, which is no activation it can apply"
    if len(modules) > 1:
        return None, "its calls are followed by different modules"
    (module,) = modules
    if has_hooks(module):
        return None, "the activation module has hooks"
    return module, ""


def _other_use(activation: nn.Module, graphs: list[Graph], found: dict[nn.Module, nn.Module]) -> str | None:
    for call in (call for graph in graphs for call in graph.calls_of(activation)):
        producer = call.inputs[0].producer
        if producer is None:
            return "the network's input"
        if producer.module is None or found.get(producer.module) is not activation:
            return str(producer)
    return None
