"""Batch normalization that is no module of its own: torch.fx traces the code, and each call becomes a module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph.kinds import is_affine, keeps_torch_forward
from ..layers import BatchNorm

aten = torch.ops.aten
CONVOLUTIONS: dict[Any, Any] = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
CONVOLUTIONS |= {
    aten.conv1d.default: nn.Conv1d,
    aten.conv2d.default: nn.Conv2d,
    aten.conv3d.default: nn.Conv3d,
}
LINEAR = (F.linear, aten.linear.default)
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: tuple(signature(F.batch_norm).parameters),
    torch.batch_norm: BATCH_NORM_ARGUMENTS,
    aten.batch_norm.default: BATCH_NORM_ARGUMENTS,
}


class AnyBatchNorm(TorchBatchNorm):
    """Replace a functional batch normalization of input with any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class _Tracer(fx.Tracer):
    """Look into every module whose forward is not ``torch.nn``'s own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, BatchNorm):
            return type(m).forward is BatchNorm.forward
        if isinstance(m, TorchBatchNorm):
            return keeps_torch_forward(m)
        return super().is_leaf_module(m, module_qualified_name)


def as_graph_module(net: nn.Module) -> fx.GraphModule:
    """Trace a network in evaluation mode; functional batch_norm, conv and linear become modules, each call its own.

    Raises:
        ValueError: if torch.fx cannot trace the network.
    """
    try:
        if "forward" in vars(net):
            raise ValueError("its forward is patched")
        with traceable(net):
            graph = _Tracer().trace(net)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace the network ({error}); fold it without traced=True, which runs any Python"
        ) from error
    traced = fx.GraphModule(net, graph)
    seen: set[str] = set()
    for node in list(graph.nodes):
        if node.op == "call_module":
            _give_own_module(traced, node, seen)
    exchange_calls(traced, graph, stand_ins(traced, graph))
    graph.lint()
    traced.recompile()
    return traced


@contextmanager
def traceable(net: nn.Module) -> Iterator[None]:
    """Switch off the layers' checks of their input's shape, whose branches torch.fx cannot follow."""
    checks = ("_check_input_dim", "_check_non_zero_input_channels")
    layers = [m for m in net.modules() if isinstance(m, TorchBatchNorm)]
    before = [(vars(m), check, vars(m).get(check)) for m in layers for check in checks]
    for attributes, check, _ in before:
        attributes[check] = lambda input: None
    try:
        yield
    finally:
        for attributes, check, own in before:
            if own is None:
                del attributes[check]
            else:
                attributes[check] = own


def stand_ins(root: nn.Module, graph: fx.Graph) -> dict[fx.Node, nn.Module]:
    """Return the modules that compute what functional calls compute, for those whose parameters are fixed."""
    found: dict[fx.Node, nn.Module] = {}
    for node in graph.nodes:
        module = None
        if node.op == "call_function" and node.target in BATCH_NORMS:
            module = _batch_norm(root, _arguments(node, BATCH_NORMS[node.target]))
        elif node.op == "call_function" and (node.target in LINEAR or node.target in CONVOLUTIONS):
            module = _affine(root, node, _arguments(node, CONVOLUTION_ARGUMENTS))
        if module is not None:
            found[node] = module.eval()
    return found


def exchange_calls(root: nn.Module, graph: fx.Graph, found: dict[fx.Node, nn.Module]) -> None:
    """Call modules, added to ``root``, in place of functions."""
    for node, module in found.items():
        source = node.args[0] if node.args else node.kwargs["input"]
        name = _add(root, f"functional_{node.name}", module)
        with graph.inserting_before(node):
            new = graph.call_module(name, (source,))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _give_own_module(traced: fx.GraphModule, node: fx.Node, seen: set[str]) -> None:
    """Copy a module for its second and later calls, so that each can be folded by itself."""
    name = str(node.target)
    module = traced.get_submodule(name)
    if name in seen and (is_affine(module) or isinstance(module, TorchBatchNorm)):
        node.target = _add(traced, f"{name}_again", copy.deepcopy(module))
    seen.add(name)


def _batch_norm(root: nn.Module, given: dict[str, Any]) -> nn.Module | None:
    names = ("running_mean", "running_var", "weight", "bias")
    tensors = {name: fetch(root, given.get(name)) for name in names}
    missing = any(given.get(name) is not None and tensors[name] is None for name in names)
    mean, var = tensors["running_mean"], tensors["running_var"]
    if given.get("training") or missing or mean is None or var is None:
        return None
    module = AnyBatchNorm(len(mean), eps=given.get("eps", 1e-5), affine=False)
    module.running_mean, module.running_var = mean, var
    for name in ("weight", "bias"):
        tensor = tensors[name]
        setattr(module, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    return module


def _affine(root: nn.Module, node: fx.Node, given: dict[str, Any]) -> nn.Module | None:
    weight, bias = fetch(root, given["weight"]), fetch(root, given.get("bias"))
    options = {name: given[name] for name in CONVOLUTION_ARGUMENTS[3:] if name in given}
    dynamic = any(isinstance(v, fx.Node) for v in options.values())
    if weight is None or (given.get("bias") is not None and bias is None) or dynamic:
        return None
    if node.target in LINEAR:
        module: Any = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    else:
        make = CONVOLUTIONS[node.target]
        inputs = weight.shape[1] * options.get("groups", 1)
        module = make(inputs, weight.shape[0], tuple(weight.shape[2:]), bias=False, **options)
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return module  # type: ignore[no-any-return]


def fetch(root: nn.Module, node: Any) -> Tensor | None:
    """Return a copy of the parameter or buffer that a node reads; None if it is computed."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = root
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value.detach().clone() if isinstance(value, Tensor) else None


def _add(root: nn.Module, name: str, module: nn.Module) -> str:
    name = name.replace(".", "_")
    number = 0
    while hasattr(root, f"{name}{number or ''}"):
        number += 1
    root.add_module(f"{name}{number or ''}", module)
    return f"{name}{number or ''}"
