"""Where a network has batch normalization, what became of each, and why some is left."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph import Call, Graph
from ..graph.kinds import has_hooks, keeps_torch_forward
from ..layers import BatchNorm
from ..verb_report import Site
from .affine import map_of
from .fold_plan import Plan
from .functional_to_module import Opened

OWN_FORWARD = "has its own forward"
BY_MINI_BATCH = "it keeps no running statistics and normalizes by the mini-batch in evaluation too"
FUNCTIONS = ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


def owners(net: nn.Module, graph: Graph) -> list[str]:
    """Return the paths of the modules whose own forward holds a batch normalization."""
    layers = [name for name, module in net.named_modules() if OWN_FORWARD in reason_to_keep(module, graph)]
    return [*layers, *(call.path for call in _functions(graph))]


def reason_to_keep(module: nn.Module, graph: Graph) -> str:
    """Say why a batch normalization cannot become a fixed affine map; "" if it can, or the module is none."""
    if _is_scripted_norm(module):
        return "it is scripted; fold the network before torch.jit"
    if not isinstance(module, TorchBatchNorm):
        return ""
    if has_hooks(module):
        return "it has hooks, which would see other values"
    ours = isinstance(module, BatchNorm) and type(module).forward is BatchNorm.forward and "forward" not in vars(module)
    if not (ours or keeps_torch_forward(module)):
        return f"{type(module).__name__} {OWN_FORWARD}"
    if module.running_mean is None or module.running_var is None:
        return BY_MINI_BATCH
    if not map_of(module).is_finite:
        return "its statistics or parameters are not finite numbers"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        for reader in graph.readers_of(tensor):
            return f"its {name} is also read by {reader}"
    return ""


def sites_of(
    net: nn.Module, plan: Plan, fused: dict[nn.Module, nn.Module], kept: dict[nn.Module, str], opened: Opened
) -> Iterator[Site]:
    """Yield what became of each layer, in the order of the modules."""
    names = {module: name for name, module in net.named_modules()}
    for module, name in names.items():
        # The layer that was opened is the user's, not the batch normalization in it.
        parent = name.rpartition(".")[0]
        path = parent if parent in opened.layers and isinstance(module, TorchBatchNorm) else name
        if module in kept and isinstance(module, TorchBatchNorm | torch.jit.ScriptModule):
            why = kept[module] + (f"; {opened.refused[name]}" if name in opened.refused else "")
            yield Site(path, "kept", why)
        elif module in plan.gone:
            yield Site(path, "folded into " + ", ".join(f"'{names[m]}'" for m in plan.gone[module]))
        elif module in plan.remaining:
            with_activation = f" with {type(fused[module]).__name__}" if module in fused else ""
            yield Site(path, "fixed affine map" + with_activation, plan.reasons[module])


def functions_left(graph: Graph, kept: dict[nn.Module, str], opened: Opened) -> Iterator[Site]:
    """Yield the functional batch normalizations that the folded network calls."""
    scripted = any(_is_scripted_norm(module) for module in kept)
    for call in _functions(graph):
        if scripted and isinstance(call.target, torch._ops.OpOverload):
            continue  # inside a scripted module that is in the report itself
        why = opened.refused.get(call.path, "a functional batch_norm is no module to replace")
        yield Site(call.path, "kept", BY_MINI_BATCH if call.argument(5, "training") else why)


def _functions(graph: Graph) -> list[Call]:
    """Return the functional calls that normalize data (not weights), each set of parameters of a module once."""
    calls = [call for call in graph.functions(*FUNCTIONS) if graph.follows_input(call.inputs[0])]
    return list({(call.path, *call.inputs[1:]): call for call in calls}.values())


def _is_scripted_norm(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", "")
