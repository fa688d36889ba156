"""The traced form of a network: a module for each call, so that every batch normalization can be exchanged."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph.kinds import is_affine, keeps_torch_forward
from ..layers import BatchNorm

CONVOLUTIONS: dict[Any, Any] = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


class AnyBatchNorm(TorchBatchNorm):
    """Stand in for a functional batch normalization of input with any number of dimensions."""

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
        ValueError: where torch.fx cannot trace the network.
    """
    for module in net.modules():
        if isinstance(module, TorchBatchNorm) and not keeps_torch_forward(module):
            # Its check branches on the input's dimensions, which torch.fx cannot follow.
            module._check_input_dim = lambda input: None  # type: ignore[method-assign]
    try:
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
        elif node.op == "call_function":
            stand_in = _as_module(traced, node)
            if stand_in is not None:
                _exchange(traced, node, stand_in.eval())
    graph.lint()
    traced.recompile()
    return traced


def _give_own_module(traced: fx.GraphModule, node: fx.Node, seen: set[str]) -> None:
    """Copy a module for its second and later calls, so that each can be folded by itself."""
    name = str(node.target)
    module = traced.get_submodule(name)
    if name in seen and (is_affine(module) or isinstance(module, TorchBatchNorm)):
        node.target = _add(traced, f"{name}_again", copy.deepcopy(module))
    seen.add(name)


def _as_module(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return the module that computes what a functional call computes; None where its arguments are not fixed."""
    if node.target is F.batch_norm:
        return _batch_norm(traced, signature(F.batch_norm).bind(*node.args, **node.kwargs).arguments)
    if node.target is F.linear or node.target in CONVOLUTIONS:
        return _affine(traced, node, {**dict(zip(CONVOLUTION_ARGUMENTS, node.args, strict=False)), **node.kwargs})
    return None


def _batch_norm(traced: fx.GraphModule, given: dict[str, Any]) -> nn.Module | None:
    names = {"running_mean": None, "running_var": None, "weight": None, "bias": None}
    tensors = {name: _fetch(traced, given.get(name)) for name in names}
    missing = any(given.get(name) is not None and tensors[name] is None for name in names)
    if given.get("training") or missing or tensors["running_mean"] is None or tensors["running_var"] is None:
        return None
    module = AnyBatchNorm(len(tensors["running_mean"]), eps=given.get("eps", 1e-5), affine=False)
    module.running_mean, module.running_var = tensors["running_mean"], tensors["running_var"]
    for name in ("weight", "bias"):
        tensor = tensors[name]
        setattr(module, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    return module


def _affine(traced: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> nn.Module | None:
    weight, bias = _fetch(traced, given["weight"]), _fetch(traced, given.get("bias"))
    options = {name: given[name] for name in CONVOLUTION_ARGUMENTS[3:] if name in given}
    dynamic = any(isinstance(v, fx.Node) for v in options.values())
    if weight is None or (given.get("bias") is not None and bias is None) or dynamic:
        return None
    if node.target is F.linear:
        module: Any = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    else:
        make = CONVOLUTIONS[node.target]
        inputs = weight.shape[1] * options.get("groups", 1)
        module = make(inputs, weight.shape[0], tuple(weight.shape[2:]), bias=False, **options)
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return module  # type: ignore[no-any-return]


def _fetch(traced: fx.GraphModule, node: Any) -> Tensor | None:
    """Return the parameter or buffer that a node reads; None where it is computed."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = traced
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value.detach().clone() if isinstance(value, Tensor) else None


def _exchange(traced: fx.GraphModule, node: fx.Node, module: nn.Module) -> None:
    source = node.args[0] if node.args else node.kwargs["input"]
    name = _add(traced, f"functional_{node.name}", module)
    with traced.graph.inserting_before(node):
        new = traced.graph.call_module(name, (source,))
    node.replace_all_uses_with(new)
    traced.graph.erase_node(node)


def _add(traced: fx.GraphModule, name: str, module: nn.Module) -> str:
    name = name.replace(".", "_")
    number = 0
    while hasattr(traced, f"{name}{number or ''}"):
        number += 1
    traced.add_submodule(f"{name}{number or ''}", module)
    return f"{name}{number or ''}"
