"""Turn functional batch normalization into modules, so that it can be folded.

torch.fx traces forwards that call ``F.batch_norm``, and custom forwards of batch normalization subclasses. In the
traced graph, calls of functional batch norms, convolutions and linear layers with fixed parameters become calls of
modules.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import base_types
from torch.fx.proxy import Attribute
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..graph.generated import by_name, scope_of
from ..graph.kinds import is_affine, keeps_torch_forward, signature_of
from ..graph.symbolic import Untraceable, is_machinery, matches_sequences, refuse_texts
from ..layers import BatchNorm
from ..network_copy import changed, plain_attributes, private_copy, run_copy

aten = torch.ops.aten
CONVOLUTIONS: dict[Any, Any] = {
    **{F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d},
    **{aten.conv1d.default: nn.Conv1d, aten.conv2d.default: nn.Conv2d, aten.conv3d.default: nn.Conv3d},
}
LINEAR = (F.linear, aten.linear.default)
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: tuple(signature(F.batch_norm).parameters),
    torch.batch_norm: BATCH_NORM_ARGUMENTS,
    aten.batch_norm.default: BATCH_NORM_ARGUMENTS,
}
Arguments = dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]


class AnyBatchNorm(TorchBatchNorm):
    """The module that replaces a functional batch norm; its input may have any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class TracedForwards(NamedTuple):
    """The paths of modules that now run a traced forward, and the reasons why other modules do not."""

    layers: set[str]
    """The paths of batch normalization subclasses with a custom forward, which became plain modules."""
    modules: list[str]
    refused: dict[str, str]


NOTHING_TRACED = TracedForwards(set(), [], {})


def as_graph_module(net: nn.Module) -> fx.GraphModule:
    """Trace a whole network, and give each call of an affine layer or batch normalization its own module.

    The network must be in evaluation mode.

    Raises:
        ValueError: if torch.fx cannot trace the network.
    """
    try:
        if "forward" in vars(net):
            raise ValueError("its forward was replaced on the instance")
        with _unchecked_shapes(net):
            graph = _ForwardTracer(_keeps_its_forward).trace(net)
    except (Exception, Untraceable) as error:
        raise ValueError(
            f"torch.fx cannot trace the network ({error}); remove traced=True: without it, fold does not trace the"
            " whole network"
        ) from error
    graph._tracer_cls = None  # unpickling creates the tracer without arguments, which works only for fx.Tracer
    traced = fx.GraphModule(net, graph)
    seen: set[str] = set()
    for node in list(graph.nodes):
        if node.op == "call_module":
            _give_own_module(traced, node, seen)
    _call_modules(traced, graph, _equivalent_modules(traced, graph))
    graph.lint()
    traced.recompile()
    return traced


def trace_forwards_(
    net: nn.Module, owners: list[str], example: Any, forward: network_call.Forward | None
) -> TracedForwards:
    """Replace the forwards of the modules at the paths ``owners`` with traced forwards, in place.

    These forwards contain batch norms, which become children of the traced modules. If a forward cannot be traced, the
    forward of the module's parent is traced instead, with the module's code included, and so on up to the network.
    """
    traced = TracedForwards(set(), [], {})
    modules = dict(net.named_modules())
    calls = _observe(net, owners, example, forward)
    for path in sorted(set(owners), key=lambda p: -p.count(".")):
        at, inside = path, {modules[path]}
        while True:
            is_layer = isinstance(modules[at], TorchBatchNorm)
            try:
                with _unchecked_shapes(net):
                    _trace_forward_(modules[at], inside, calls[at])
                traced.layers.add(at) if is_layer else traced.modules.append(at)
                traced.refused.pop(path, None)
                break
            except Untraceable as error:
                traced.refused.setdefault(path, str(error))
            except Exception as error:  # the user's code runs on torch.fx's proxies, so it may raise any exception
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                traced.refused.setdefault(path, f"its forward cannot be rewritten for folding: {reason}")
            if not at:
                break
            at = at.rpartition(".")[0]
            inside.add(modules[at])
    return traced


def _observe(net: nn.Module, owners: list[str], example: Any, forward: network_call.Forward | None) -> Arguments:
    """Run the network and return the arguments of each call of the modules at ``owners`` and their ancestors."""
    calls: Arguments = defaultdict(list)
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
    run_copy(net, twin, example, forward)
    return calls


class _ForwardTracer(fx.Tracer):
    """Trace a forward; for modules that ``is_leaf`` accepts, record only the call, not the code inside.

    Raises:
        Untraceable: if the code has effects that a graph would not repeat, or uses values in ways that torch.fx does
            not record. The modules may have changed before this error is raised.
    """

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        self.texts: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _CheckedProxy(node, self)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        before = _state(root)
        with _no_assignments(root):
            graph = super().trace(root, concrete_args)
        after = _state(root)
        for path in (*before, *after):
            if path not in before or path not in after or not _is_unchanged(before[path], after[path]):
                raise Untraceable(f"its code changes '{path}'")
        refuse_texts(graph, self.texts)
        return graph


class _CheckedProxy(fx.Proxy):
    """A proxy that must not be hashed or turned into text: the result would depend on the proxy, not on the value."""

    tracer: _ForwardTracer

    def __getattr__(self, name: str) -> Attribute:
        caller = sys._getframe(1)
        if not is_machinery(caller.f_globals.get("__name__", "")) and matches_sequences(caller.f_code):
            raise Untraceable("its code matches a sequence in a match statement")
        return _CheckedAttribute(self, name)

    def __hash__(self) -> int:
        raise Untraceable("its code uses a tensor, a shape or a dtype as a key")

    def __str__(self) -> str:
        return f"{self}"

    def __format__(self, spec: str) -> str:
        self.tracer.texts.append(repr(self))  # refuse_texts allows this text only in messages of assertions
        return repr(self)


class _CheckedAttribute(_CheckedProxy, Attribute):
    pass


def _state(net: nn.Module) -> dict[str, tuple[Any, int]]:
    """Return the objects in modules' attributes, by path, each with its version counter, or 0 if it has none."""
    found = {}
    for owner, module in net.named_modules():
        held = (*module._parameters.items(), *module._buffers.items(), *plain_attributes(module))
        for path, item in network_call.walk((f"{owner}.{name}" if owner else name, item) for name, item in held):
            if "_tensor_constant" not in path:  # torch.fx keeps constants in these attributes
                written = item._version if isinstance(item, Tensor) and not item.is_inference() else 0
                found[path] = (item, written)
    return found


def _is_unchanged(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    return before[0] is after[0] and before[1] == after[1]


def _keeps_its_forward(module: nn.Module) -> bool:
    """Return whether a module runs the forward of a ``torch.nn`` class or of this library's ``BatchNorm``.

    For ``nn.Sequential``, the result is False, so that its children are traced.
    """
    if isinstance(module, BatchNorm):
        return type(module).forward is BatchNorm.forward
    if isinstance(module, TorchBatchNorm):
        return keeps_torch_forward(module)
    return fx.Tracer().is_leaf_module(module, "")


@contextmanager
def _unchecked_shapes(net: nn.Module) -> Iterator[None]:
    """Disable the layers' checks of their input's shape, because torch.fx cannot trace the branches in these checks."""
    checks = dict.fromkeys(("_check_input_dim", "_check_non_zero_input_channels"), lambda input: None)
    with ExitStack() as stack:
        for module in net.modules():
            if isinstance(module, TorchBatchNorm):
                stack.enter_context(changed(module, **checks))
        yield


@contextmanager
def _no_assignments(net: nn.Module) -> Iterator[None]:
    """Raise Untraceable if the user's code assigns to a module's attribute: a graph would not repeat the assignment."""
    assign, modules = nn.Module.__setattr__, set(net.modules())

    def refuse(module: nn.Module, name: str, value: Any) -> None:
        if module in modules and not is_machinery(sys._getframe(1).f_globals.get("__name__", "")):
            raise Untraceable(f"its code assigns to the attribute '{name}'")
        assign(module, name, value)

    nn.Module.__setattr__ = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


def _trace_forward_(module: nn.Module, inside: set[nn.Module], calls: list[Any]) -> None:
    """Change a module so that it runs a traced form of its forward.

    If an exception is raised, the module stays as it was, unless it is a GraphModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError("it is scripted")
    if isinstance(module, fx.GraphModule):
        _call_modules(module, module.graph, _modules_with_norm(module, module.graph))
        _drop_layers(module, module.graph, inside)
        module.graph.lint()
        module.recompile()
        return
    if "forward" in vars(module):
        raise ValueError("its forward was replaced on the instance")
    if signature(type(module).forward) != signature_of(type(module).forward):
        raise ValueError("its forward is decorated with a function that takes other arguments")
    fixed = _fixed_arguments(module, calls)
    twin = private_copy(module)
    opened = {new for old, new in zip(module.modules(), twin.modules(), strict=True) if old in inside}
    graph = _ForwardTracer(lambda m: m not in opened).trace(twin, fixed or None)
    for node in graph.nodes:
        if node.op == "placeholder" and node.target.removesuffix("_1") in fixed:
            node.target = node.target.removesuffix("_1")  # torch.fx appends _1 to the names of fixed arguments
    found = _modules_with_norm(twin, graph)
    before = _attributes_read(graph)
    _call_modules(twin, graph, found)
    graph.lint()
    _adopt(module, graph, before, twin)
    _drop_layers(module, graph, inside)


def _fixed_arguments(module: nn.Module, calls: list[Any]) -> dict[str, Any]:
    """Return the arguments that contain no tensors; they become constants, so they must be equal in all calls."""
    parameters = signature(type(module).forward).parameters
    single = {k for k, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    found: list[dict[str, Any]] = []
    for args, kwargs in calls:
        bound = signature(type(module).forward).bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = list(bound.arguments.items())[1:]
        found.append({k: v for k, v in given if k in single and not network_call.tensors_in(v)})
    for name, value in (item for fixed in found for item in fixed.items()):
        if type(value) not in (*base_types, type(None)):
            raise ValueError(
                f"its argument '{name}' is a {type(value).__name__}, and traced code cannot check that"
                " other calls pass the same value"
            )
    if any(fixed != found[0] for fixed in found):
        raise ValueError("its calls differ in arguments that are not tensors")
    return found[0] if found else {}


def _modules_with_norm(root: nn.Module, graph: fx.Graph) -> dict[fx.Node, nn.Module]:
    """Return what :func:`_equivalent_modules` returns; raise ValueError if it contains no batch normalization."""
    found = _equivalent_modules(root, graph)
    if not any(isinstance(new, AnyBatchNorm) for new in found.values()):
        raise ValueError("it has no batch_norm with fixed statistics and parameters")
    return found


def _attributes_read(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}


def _drop_layers(module: nn.Module, graph: fx.Graph, inside: set[nn.Module]) -> None:
    """Remove the batch normalizations whose code is now in the module's forward, unless the forward still uses them."""
    targets = [f"{node.target}." for node in graph.nodes if node.op in ("call_module", "get_attr")]
    for path, child in list(module.named_modules()):
        unused = not any(target.startswith(f"{path}.") for target in targets)
        if child is not module and child in inside and isinstance(child, TorchBatchNorm) and unused:
            parent, _, name = path.rpartition(".")
            del module.get_submodule(parent)._modules[name]


def _adopt(module: nn.Module, graph: fx.Graph, before: set[str], twin: nn.Module) -> None:
    """Give the module a class that runs the graph; for a batch normalization, this class derives only from nn.Module.

    ``twin`` is a copy of the module. The graph was traced on this copy, which has the new children and constants.
    """
    norm = isinstance(module, TorchBatchNorm)
    after = _attributes_read(graph)
    code = graph.python_code("self")
    names = tuple((name, by_name("value", thing)) for name, thing in code.globals.items())
    kind = type(module)
    base = nn.Module if norm else getattr(kind, "_traced_from", kind)
    traced = _traced_class(base, kind.__name__, code.src, names)  # may raise, so call it before changing the module
    for name in [*module._parameters, *module._buffers]:
        if name not in after and (norm or name in before):
            delattr(module, name)
    for name, child in twin.named_children():
        if name not in module._modules:
            module.add_module(name, child)
    for name in after:
        if isinstance(vars(twin).get(name), Tensor):  # a tensor attribute or a constant that the graph reads
            module.register_buffer(name, vars(module).pop(name, vars(twin)[name]), persistent=False)
    module.__class__ = traced


@lru_cache(maxsize=1024)
def _traced_class(base: type[nn.Module], name: str, source: str, names: tuple[tuple[str, Any], ...]) -> Any:
    scope = scope_of(names)
    exec(compile(source, f"<traced forward of {name}>", "exec"), scope)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _blank, (base, name, source, names), self.__getstate__()

    members = {"forward": scope["forward"], "__reduce_ex__": reduce, "_traced_from": base, "__doc__": base.__doc__}
    return type(name, (base,), {**members, "__module__": base.__module__})


def _blank(base: type[nn.Module], name: str, source: str, names: tuple[tuple[str, Any], ...]) -> nn.Module:
    kind = _traced_class(base, name, source, names)  # type: ignore[arg-type]
    module: nn.Module = kind.__new__(kind)
    return module


def _equivalent_modules(root: nn.Module, graph: fx.Graph) -> dict[fx.Node, nn.Module]:
    """Return an equivalent module for each functional batch norm, convolution or linear layer with fixed parameters."""
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


def _call_modules(root: nn.Module, graph: fx.Graph, found: dict[fx.Node, nn.Module]) -> None:
    """Replace functional calls with calls of modules, which are added to ``root``."""
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
    """Copy a module for its second and later calls, so that each call can be folded separately."""
    name = str(node.target)
    module = traced.get_submodule(name)
    if name in seen and (is_affine(module) or isinstance(module, TorchBatchNorm)):
        node.target = _add(traced, f"{name}_again", copy.deepcopy(module))
    seen.add(name)


def _batch_norm(root: nn.Module, given: dict[str, Any]) -> nn.Module | None:
    names = ("running_mean", "running_var", "weight", "bias")
    tensors = {name: _fetch(root, given.get(name)) for name in names}
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
    weight, bias = _fetch(root, given["weight"]), _fetch(root, given.get("bias"))
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


def _fetch(root: nn.Module, node: Any) -> Tensor | None:
    """Return a copy of the tensor attribute that a node reads, or None if ``node`` does not read one."""
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
