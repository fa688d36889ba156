"""Batch normalization in a module's own forward: that forward alone is traced, and the rest stays the user's Python."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import lru_cache
from importlib import import_module
from inspect import Parameter, signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..network_copy import private_copy
from .traced_network import AnyBatchNorm, exchange_calls, stand_ins, traceable

Calls = dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]


class Opened(NamedTuple):
    """Hold the paths of modules that run a traced forward now, and the reasons why others do not."""

    layers: set[str]
    """Batch normalizations that had a forward of their own, and are plain modules now."""
    modules: list[str]
    refused: dict[str, str]


UNOPENED = Opened(set(), [], {})


def open_(net: nn.Module, owners: list[str], example: Any, forward: network_call.Forward | None) -> Opened:
    """Trace the forward of each module that owns a batch normalization, so that this becomes a child of the module.

    A module whose own forward cannot be traced is traced as part of its parent's, and so on up to the network. The
    network is one that nobody else uses.
    """
    opened = Opened(set(), [], {})
    modules = dict(net.named_modules())
    calls = _observe(net, owners, example, forward)
    for path in sorted(set(owners), key=lambda p: -p.count(".")):
        at, inside = path, {modules[path]}
        while True:
            is_layer = isinstance(modules[at], TorchBatchNorm)
            try:
                with traceable(net):
                    _open(modules[at], inside, calls[at])
                opened.layers.add(at) if is_layer else opened.modules.append(at)
                opened.refused.pop(path, None)
                break
            except Exception as error:  # torch.fx runs the user's code on its own objects
                opened.refused.setdefault(path, f"torch.fx cannot trace it: {_first_line(error)}")
            if not at:
                break
            at = at.rpartition(".")[0]
            inside.add(modules[at])
    return opened


def _observe(net: nn.Module, owners: list[str], example: Any, forward: network_call.Forward | None) -> Calls:
    """Run the network and return the arguments of each owner and of the modules around it."""
    calls: Calls = defaultdict(list)
    twin = private_copy(net)
    around = {"", *owners}
    for path in owners:
        while path := path.rpartition(".")[0]:
            around.add(path)

    def note(path: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls[path].append((args, kwargs))

        module.register_forward_pre_hook(hook, with_kwargs=True)

    for path, module in twin.named_modules():
        if path in around and not isinstance(module, torch.jit.ScriptModule):
            note(path, module)
    with torch.no_grad(), network_call.eagerly(), torch.random.fork_rng():
        network_call.call(twin, network_call.to_device(example, network_call.device_of(net), copy=True), forward)
    return calls


class _Tracer(fx.Tracer):
    """Follow the code of the given modules only."""

    def __init__(self, inside: set[nn.Module]) -> None:
        super().__init__()
        self._inside = inside

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._inside


def _open(module: nn.Module, inside: set[nn.Module], calls: list[Any]) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError("it is scripted")
    if isinstance(module, fx.GraphModule):
        graph = module.graph
    elif "forward" in vars(module):
        raise ValueError("its forward is patched")
    else:
        fixed = _fixed_arguments(module, calls)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that it cannot check at run time
            graph = _Tracer(inside).trace(module, fixed or None)
        for node in graph.nodes:
            if node.op == "placeholder" and node.target.removesuffix("_1") in fixed:
                node.target = node.target.removesuffix("_1")  # torch.fx renames what is fixed
    found = stand_ins(module, graph)
    if not any(isinstance(new, AnyBatchNorm) for new in found.values()):
        raise ValueError("it has no batch_norm with fixed statistics and parameters")
    before = _reads(graph)
    exchange_calls(module, graph, found)
    _drop_layers(module, graph, inside)
    graph.lint()
    if isinstance(module, fx.GraphModule):
        module.recompile()
    else:
        _adopt(module, graph, before)


def _fixed_arguments(module: nn.Module, calls: list[Any]) -> dict[str, Any]:
    """Return the arguments without tensors, which must be the same in every call: tracing makes them constants."""
    parameters = signature(type(module).forward).parameters
    single = {k for k, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    found: list[dict[str, Any]] = []
    for args, kwargs in calls:
        bound = signature(type(module).forward).bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = list(bound.arguments.items())[1:]
        found.append({k: v for k, v in given if k in single and not network_call.tensors_in(v)})
    if any(fixed != found[0] for fixed in found):
        raise ValueError("its calls differ in arguments that are no tensors")
    return found[0] if found else {}


def _reads(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}


def _drop_layers(module: nn.Module, graph: fx.Graph, inside: set[nn.Module]) -> None:
    """Remove the batch normalizations whose code is the module's now, unless the module still refers to them."""
    targets = [f"{node.target}." for node in graph.nodes if node.op in ("call_module", "get_attr")]
    for path, child in list(module.named_modules()):
        unused = not any(target.startswith(f"{path}.") for target in targets)
        if child is not module and child in inside and isinstance(child, TorchBatchNorm) and unused:
            parent, _, name = path.rpartition(".")
            del module.get_submodule(parent)._modules[name]


def _adopt(module: nn.Module, graph: fx.Graph, before: set[str]) -> None:
    """Make the module an instance of a subclass whose forward is the graph; a batch normalization stops being one."""
    norm = isinstance(module, TorchBatchNorm)
    after = _reads(graph)
    for name in [*module._parameters, *module._buffers]:
        if name not in after and (norm or name in before):
            delattr(module, name)
    for name in after:
        if isinstance(vars(module).get(name), Tensor):  # a constant that torch.fx found
            module.register_buffer(name, vars(module).pop(name), persistent=False)
    code = graph.python_code("self")
    names = tuple((k, _Import(v.__name__) if isinstance(v, ModuleType) else v) for k, v in code.globals.items())
    kind = type(module)
    base = nn.Module if norm else getattr(kind, "_traced_from", kind)
    module.__class__ = _traced_class(base, kind.__name__, code.src, names)


class _Import(NamedTuple):
    """Name a Python module, which cannot be pickled itself."""

    name: str


@lru_cache(maxsize=1024)
def _traced_class(base: type[nn.Module], name: str, source: str, names: tuple[tuple[str, Any], ...]) -> Any:
    scope = {k: import_module(v.name) if isinstance(v, _Import) else v for k, v in names}
    exec(compile(source, f"<traced forward of {name}>", "exec"), scope)  # what torch.fx wrote

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _blank, (base, name, source, names), self.__getstate__()

    members = {"forward": scope["forward"], "__reduce_ex__": reduce, "_traced_from": base, "__doc__": base.__doc__}
    return type(name, (base,), {**members, "__module__": base.__module__})


def _blank(base: type[nn.Module], name: str, source: str, names: tuple[tuple[str, Any], ...]) -> nn.Module:
    kind = _traced_class(base, name, source, names)  # type: ignore[arg-type]
    module: nn.Module = kind.__new__(kind)
    return module


def _first_line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0] or type(error).__name__
