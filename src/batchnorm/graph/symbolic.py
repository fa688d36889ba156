"""Trace the forward of one module with torch.fx, and record what the code depended on.

torch.fx runs the code once and records only the path that the code took. This module also records most of what may
have decided the path: the attributes that were read, the children of containers, the answers to questions about the
arguments, such as ``x.dim() == 3``, and torch's state, such as ``jit.is_tracing``. Changes to Python globals are not
recorded. A trace raises Untraceable for code whose effects torch.fx would silently drop: for example, autocast around a
call, random numbers in Python, or assignments to attributes.
"""

from __future__ import annotations

import dis
import operator
import random
import sys
import warnings
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from inspect import Parameter
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode

from ..network_copy import changed
from .kinds import IN_PLACE, returns_its_input, signature_of
from .patterns import exactly
from .questions import Given, Unanswerable, ask, follow, larger_batch
from .references import returns_a_tensor

# Functions of torch that create tensors. During a trace, wrappers that record every call replace them: torch.fx does
# not record calls without a proxy, and fails for some calls with a proxy, such as torch.zeros(x.size(0), 3).
FACTORIES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros".split()  # noqa: SIM905

# Functions of torch whose results may change after the trace. The rewritten forward checks that they have not changed.
STATES = (
    "are_deterministic_algorithms_enabled",
    "get_default_dtype",
    "compiler.is_dynamo_compiling",
    "compiler.is_compiling",
    "compiler.is_exporting",
    "distributed.is_initialized",
    "distributed.get_rank",
    "distributed.get_world_size",
    "jit.is_tracing",
    "onnx.is_in_onnx_export",
)


class Untraceable(BaseException):
    """Raised if a forward cannot be traced.

    This is a BaseException, so that ``except Exception`` in the traced code does not catch it.
    """

    inside = ""
    """The path of the child whose code cannot be traced; "" if that child is unknown or no child is at fault."""


class Traced(NamedTuple):
    """A graph and what the traced code depended on."""

    graph: fx.Graph
    arguments: list[str]
    """The Python expression of each tensor that the graph takes, such as ``x`` or ``xs[0]``."""
    answers: list[str]
    """Conditions on the arguments' shapes, dtypes and devices, and on torch's state, such as ``jit.is_tracing``."""
    reads: list[tuple[str, str]]
    """The module path and name of each attribute that was read; ``_modules`` stands for the list of children."""
    opened: list[str]
    """The paths of the children that were traced into: instead of a call of such a child, the graph has its code."""
    type_checked: list[str]
    """The paths of the children whose outputs the code passed to a type check, such as ``isinstance(y, Tensor)``."""
    stacks: dict[str, tuple[str, ...]]
    """For each node's name, the paths of the opened children whose code created the node, outermost first."""


class Spies:
    """Change the classes of a network's modules to record the attributes that the user's code reads.

    The changed classes also raise Untraceable if the user's code assigns to an attribute. The network must be a
    copy made for tracing, because its modules keep the changed classes.
    """

    def __init__(self, net: nn.Module) -> None:
        self.reads: dict[nn.Module, dict[str, None]] = defaultdict(dict)
        self.problems: dict[nn.Module, str] = {}
        kinds: dict[type, type] = {}
        for module in net.modules():
            kind = type(module)
            if isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
                continue  # a trace never enters these modules
            problem = problem_with(kind)
            if problem:
                self.problems[module] = problem
                continue
            if kind not in kinds:
                kinds[kind] = self._spy(kind)
            module.__class__ = kinds[kind]

    def _spy(self, kind: Any) -> type:
        reads = self.reads

        def read(self: Any, name: str) -> Any:
            caller = _caller()
            if not is_machinery(caller):
                if name == "__dict__":
                    raise Untraceable("its code reads attributes through __dict__ or vars()")
                reads[self][name] = None
            elif name == "_modules" and (caller == "torch.nn.modules.container" or _is_asked_by_user()):
                reads[self][name] = None
            elif caller.startswith("torch.nn.modules.") and caller.rpartition(".")[2] not in ("module", "container"):
                reads[self][name] = None  # read by a forward that the class inherits from torch.nn
            elif caller == "torch.nn.modules.module" and _holds(self, name) and _is_asked_by_user():
                reads[self][name] = None  # read by get_submodule, get_parameter or get_buffer
            elif name in ("_parameters", "_buffers") and _is_asked_by_user():
                raise Untraceable("its code loops over, adds or deletes parameters or buffers")
            return kind.__getattribute__(self, name)

        def write(self: Any, name: str, value: Any) -> None:
            if not is_machinery(_caller()):
                raise Untraceable(f"its code assigns to the attribute '{name}'")
            kind.__setattr__(self, name, value)

        names = {"__getattribute__": read, "__setattr__": write, "_spied": kind, "__module__": kind.__module__}
        spied: type = type(kind)(kind.__name__, (kind,), names)
        return spied


def problem_with(kind: type) -> str:
    """Return why the modules of a class cannot be traced, or "" if they can."""
    own = [k for k in kind.__mro__ if k not in (nn.Module, object)]
    if any("__init_subclass__" in vars(k) for k in own) or type(kind) not in (type, ABCMeta):
        return f"{kind.__name__} has an __init_subclass__ method or a custom metaclass"
    if any("__call__" in vars(k) for k in own):
        return f"{kind.__name__} has its own __call__"
    return ""


def trace_forward(
    module: nn.Module, spies: Spies, arguments: dict[str, Any], opened: Collection[nn.Module] = ()
) -> Traced:
    """Trace a module's forward, and the forwards of its children in ``opened``.

    ``arguments`` maps the name of each argument to its pattern; see :func:`batchnorm.graph.generated.pattern_of`.
    """
    for problem in (spies.problems[m] for m in module.modules() if m in spies.problems):
        raise Untraceable(problem)
    before = {m: _containers_of(m) for m in module.modules()}
    generators = _generators()
    spies.reads.clear()
    kind: Any = type(module)
    beneath = vars(kind).get("_spied", kind)  # the class before Spies replaced it
    kind._entry, given = _entry(beneath.forward, arguments)
    tracer = _Tracer(opened, given)
    try:
        with _Outsiders(), _recorded_factories(tracer), warnings.catch_warnings(action="ignore"):
            graph = tracer.trace(module)
    except (Untraceable, Exception) as error:
        first, *_ = (str(error).strip() or type(error).__name__).splitlines()
        refusal = Untraceable(first if isinstance(error, Untraceable) else f"torch.fx cannot trace it ({first})")
        refusal.inside = tracer.failed
        raise refusal from error
    refuse_texts(graph, tracer.texts)
    if generators != _generators():
        raise Untraceable("its code draws random numbers")
    if any(_containers_of(m) != held for m, held in before.items()):
        raise Untraceable("its code changes a list, dict or set of a module")
    reads = {m: list(names) for m, names in spies.reads.items()}
    for node in graph.nodes:
        node.type = None
    tracer.erase_questions()
    paths = {m: name for name, m in module.named_modules()}
    for m in [m for m in reads if m not in paths and _is_slice(m, paths)]:
        del reads[m]
    strangers = [type(m).__name__ for m in reads if m not in paths]
    if strangers:
        raise Untraceable(f"its code reads attributes of a {strangers[0]}, which is not one of its submodules")
    read = [(paths[m], name) for m, names in reads.items() for name in names]
    texts = [text for text, _ in given.values()]
    opened_paths = [paths[m] for m in tracer.entered]
    return Traced(graph, texts, list(tracer.answers), read, opened_paths, list(tracer.type_checked), tracer.stacks)


def _is_slice(container: nn.Module, known: Collection[nn.Module]) -> bool:
    """Return whether a module may be a slice, such as ``layers[1:3]``, of a ModuleList or Sequential in the network."""
    kind = vars(type(container)).get("_spied", type(container))
    return kind in (nn.ModuleList, nn.Sequential) and all(child in known for child in container.children())


def _entry(forward: Callable[..., Any], arguments: dict[str, Any]) -> tuple[FunctionType, Given]:
    """Make a function that calls ``forward`` and has one parameter for each tensor in the arguments.

    Also return, for each of these parameters, the Python expression of the tensor and a stand-in for it.
    """
    given: Given = {}
    scope: dict[str, Any] = {"call": _call, "forward": forward}

    def spell(pattern: Any, name: str, text: str) -> str:
        while name in given or name in scope:
            name += "_"
        if isinstance(pattern, Tensor):
            given[name] = text, pattern
        elif pattern[0] is dict:
            inner = [
                f"{key!r}: {spell(p, f'{name}_{i}', f'{text}[{key!r}]')}, " for i, (key, p) in enumerate(pattern[1:])
            ]
            return f"{{{''.join(inner)}}}"
        elif pattern[0] in (list, tuple):
            items = "".join(f"{spell(p, f'{name}_{i}', f'{text}[{i}]')}, " for i, p in enumerate(pattern[1:]))
            return f"[{items}]" if pattern[0] is list else f"({items})"
        else:
            scope[name] = pattern[1]
        return name

    args = kwargs = ""
    for p in signature_of(forward).parameters.values():
        if p.name in arguments:
            text = spell(arguments[p.name], f"a_{p.name}", p.name)
            if p.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
                kwargs += f"{p.name!r}: {text}, " if p.kind is Parameter.KEYWORD_ONLY else f"**{text}, "
            else:
                args += f"*{text}, " if p.kind is Parameter.VAR_POSITIONAL else f"{text}, "
    exec(f"def entry({', '.join(['self', *given])}):\n    return call(forward, (self, {args}), {{{kwargs}}})\n", scope)
    return scope["entry"], given


def _call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = _ids((args, kwargs))
    out = forward(*args, **kwargs)
    if _ids((args, kwargs)) != before:
        raise Untraceable("its code modifies a list or dict that is passed to it")
    if {id(t) for t in _containers_in(out)} & {id(t) for t in _containers_in((*args[1:], *kwargs.values()))}:
        raise Untraceable("its code returns a list or dict that is passed to it")
    return out


def _containers_in(tree: Any) -> Iterator[list[Any] | dict[Any, Any]]:
    if type(tree) in (list, dict):
        yield tree
    if type(tree) in (list, tuple, dict):
        for item in tree.values() if type(tree) is dict else tree:
            yield from _containers_in(item)


def _ids(tree: Any) -> Any:
    if isinstance(tree, dict):
        return [(k, _ids(v)) for k, v in tree.items()]
    if isinstance(tree, set):
        return {id(v) for v in tree}
    return [_ids(v) for v in tree] if type(tree) in (list, tuple) else id(tree)


class _Tracer(fx.Tracer):
    traced_func_name = "_entry"
    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[nn.Module], given: Given) -> None:
        super().__init__()
        self._opened = set(opened)
        self._given = given
        self._thread = get_ident()
        self._asked: list[fx.Node] = []
        self.answers: dict[str, None] = {}
        self._stack: list[str] = []
        self._modes = _modes()
        self.entered: dict[nn.Module, None] = {}
        self.failed = ""
        self.stacks: dict[str, tuple[str, ...]] = {}
        self.texts: list[str] = []
        self.type_checked: dict[str, None] = {}

    def is_tensor(self, node: fx.Node) -> bool:
        """Return whether the value of a node is known to be a tensor."""
        if node.op != "call_module":
            return node.op in ("placeholder", "get_attr")
        self.type_checked[str(node.target)] = None
        return returns_a_tensor(self.root.get_submodule(str(node.target)))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._opened

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if get_ident() != self._thread:  # torch.fx's patches affect all threads, but only one is traced
            return forward(*args, **kwargs)
        if m is self.root:
            raise Untraceable("its code calls its own module recursively")
        if m not in self._opened:
            return super().call_module(m, forward, args, kwargs)
        self.entered[m] = None
        self._stack.append(self.path_of_module(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        except BaseException:
            self.failed = self.failed or self._stack[-1]
            raise
        finally:
            self._stack.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise Untraceable(
                "its code runs some operations in another gradient mode, with other autocast settings or with"
                " saved-tensor hooks"
            )
        _refuse_unrecorded()
        node = super().create_node(*args, **kwargs)
        if node.op == "get_attr" and str(node.target).startswith(("_tensor_constant", "_torchbind_obj", "_opaque_obj")):
            raise Untraceable(
                "its code uses a tensor that is not computed from its arguments and is not an attribute of a module,"
                " for example a global variable or an item of a list"
            )
        self.stacks[node.name] = tuple(self._stack)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Proxy:
        proxy: fx.Proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        first = args[0] if args else None
        if isinstance(first, _Value) and self._returns_its_input(kind, target, kwargs):
            first.node = proxy.node  # so that all references to this proxy see the new contents
            return first
        return proxy

    def _returns_its_input(self, kind: str, target: Any, kwargs: Any) -> bool:
        if kind == "call_module":
            return returns_its_input(self.root.get_submodule(target))
        name = target if kind == "call_method" else getattr(target, "__name__", "")
        if kind == "call_function" and target in IN_PLACE:
            return True
        return (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True

    def to_bool(self, obj: fx.Proxy) -> bool:
        known = self.known(obj)
        if known is None:
            raise Untraceable("its control flow may depend on more than its arguments' shapes, dtypes and devices")
        text, value = known
        self._expect(obj, text if value else f"not {text}")
        return bool(value)

    def number(self, obj: fx.Proxy, function: Callable[[Any], Any]) -> Any:
        """Apply ``function`` (len, int or float) to a proxy's example value, and add a condition on the result."""
        results = {}
        # Compute the result for two batch sizes. If the results differ, the rewritten forward would be valid for the
        # example's batch size only, so refuse the code.
        for given in (self._given, larger_batch(self._given)):
            known = self.known(obj, given, follow if function is len else ask)
            if known is None:
                raise Untraceable(
                    f"its code calls {function.__name__}() on a value that depends on more than its arguments' shapes"
                )
            results[function(known[1])] = known[0]
        if len(results) > 1:
            raise Untraceable("its code reads the batch size as a number, for example with len(x)")
        (result, text), *_ = results.items()
        self._expect(obj, f"_{function.__name__}({text}) == {result!r}")
        return result

    def _expect(self, obj: fx.Proxy, condition: str) -> None:
        self._asked.append(obj.node)
        self.answers[condition] = None

    def known(
        self, obj: fx.Proxy, given: Given | None = None, ask: Callable[[fx.Node, Given], tuple[str, Any]] = ask
    ) -> tuple[str, Any] | None:
        """Return a proxy's Python expression and value, or None if ``ask`` raises Unanswerable."""
        try:
            return ask(obj.node, given or self._given)
        except Unanswerable:
            return None

    def erase_questions(self) -> None:
        """Erase the nodes that only computed the answers to questions, because the conditions compute these answers."""
        waiting = self._asked
        while waiting:
            node = waiting.pop()
            if not node.users and node.op in ("call_function", "call_method") and node in node.graph.nodes:
                waiting.extend(node.all_input_nodes)
                node.graph.erase_node(node)

    def keys(self, obj: fx.Proxy) -> Any:
        raise Untraceable("its code unpacks a dict that another module returns, or reads its keys")


class _Typed:
    """Make a proxy behave like a tensor in the user's code; raise Untraceable where that is impossible."""

    node: fx.Node
    tracer: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance(x, nn.Parameter) reads __class__ in torch.nn.parameter, not in the user's code.
        checks = sys._getframe(1).f_code is torch.is_tensor.__code__ or (
            _caller() == "torch.nn.parameter" and not is_machinery(sys._getframe(2).f_globals.get("__name__", ""))
        )
        if is_machinery(_caller()) and not checks:
            return type(self)
        if not isinstance(self, Attribute) and self.tracer.is_tensor(self.node):
            # A subclass of Tensor could give another answer, and computed tensors inherit the subclass.
            self.tracer.answers.update(
                dict.fromkeys(f"_type({text}) is _Tensor" for text, _ in self.tracer._given.values())
            )
            return Tensor
        # Only type checks and C++ functions of torch read __class__. So if the calling code has no type check, it calls
        # a C++ function. isinstance() with an abstract class reads __class__ in abc.py, not in the user's code.
        if _caller() != "abc" and not _asks_for_types(sys._getframe(1).f_code):
            return type(self)
        raise Untraceable("its code checks the type of a value")

    def __iter__(self) -> Iterator[Any]:
        if self.tracer.known(self) is not None:
            return iter([self[i] for i in range(len(self))])  # type: ignore[index]
        count = _unpacked(sys._getframe(1))
        if count is None:
            raise Untraceable(
                "its code loops over a tensor, over what a module or function returns, or over the shape of a computed"
                " tensor"
            )
        items = self.tracer.create_proxy("call_function", exactly, (self, count), {})
        return iter([items[i] for i in range(count)])

    def __len__(self) -> int:
        return self.tracer.number(self, len)  # type: ignore[no-any-return]

    def __int__(self) -> int:
        return self.tracer.number(self, int)  # type: ignore[no-any-return]

    __index__ = __int__

    def __float__(self) -> float:
        return self.tracer.number(self, float)  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        if not is_machinery(_caller()):
            raise Untraceable(f"its code assigns to the attribute '{name}' of a tensor")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        if not is_machinery(_caller()):
            raise Untraceable("its code uses a tensor, a shape or a dtype as a key")
        return id(self)

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({self.node.name})"
        if not is_machinery(_caller()):
            self.tracer.texts.append(text)
        return text


def _unpacked(frame: FrameType) -> int | None:
    """Return the number of names if the frame runs an assignment such as ``a, b = x``, else None."""
    now = (i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti)
    return next((i.argval for i in now if i.opname == "UNPACK_SEQUENCE"), None)


def refuse_texts(graph: fx.Graph, texts: list[str]) -> None:
    """Raise Untraceable if the code turned a proxy into text, unless the text is the message of an assertion."""
    asserted = "".join(f"{node.args}{node.kwargs}" for node in graph.nodes if node.target is torch._assert)
    if any(texts.count(text) > asserted.count(text) for text in texts):
        raise Untraceable("its code turns a tensor, a shape or a dtype into text")


@cache
def _asks_for_types(code: CodeType) -> bool:
    asking = {"isinstance", "issubclass", "type", "__class__"}
    return bool(asking & {*code.co_names}) or any(i.opname == "MATCH_CLASS" for i in dis.get_instructions(code))


class _Value(_Typed, fx.Proxy):
    def __getattr__(self, name: str) -> Attribute:
        if hasattr(Tensor, name):
            # Call this here too, not only in create_node, because `x.dtype is torch.half` creates no node.
            _refuse_unrecorded()
            return _Attribute(self, name)
        if name.startswith("__") or is_machinery(_caller()):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        if self.node.op == "get_attr":
            raise Untraceable(f"its code reads the attribute '{name}' of a parameter or buffer")
        if self.tracer.is_tensor(self.node):
            if self.node.name in self.tracer._given:
                self.tracer.answers[f"not _hasattr({self.tracer._given[self.node.name][0]}, {name!r})"] = None
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        raise Untraceable(f"its code reads the attribute '{name}' of what a function or another module returned")


class _Attribute(_Typed, Attribute):
    def __getattr__(self, name: str) -> Attribute:
        return _Attribute(self, name)


def _not_in_place(function: Any) -> Any:
    name = function.__name__[1:]
    return getattr(operator, name, None) or getattr(operator, f"{name}_")  # for example, operator.and_


def _in_place(function: Any) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        # Numbers are immutable: after n = x.size(0), n += 1 must not change other variables that share the proxy.
        changed = function if self.tracer.known(self) is None else _not_in_place(function)
        return self.tracer.create_proxy("call_function", changed, (self, other), {})

    return apply


# Define __iadd__ and the like, because torch.fx would record x += y as x = x + y, which creates a new tensor.
for _function in IN_PLACE - {operator.iconcat}:
    for _kind in (_Value, _Attribute):
        setattr(_kind, f"__{_function.__name__}__", _in_place(_function))


class _Outsiders(TorchFunctionMode):
    """Refuse torch calls that do not depend on the arguments of forward: they would run only once, during tracing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not _has_proxy((args, kwargs)) and not is_machinery(_caller()):
            raise Untraceable(
                f"its code calls {name or func} without an argument that depends on forward's inputs, so a trace would"
                " keep the result as a constant"
            )
        return func(*args, **kwargs)


@contextmanager
def _recorded_factories(tracer: _Tracer) -> Iterator[None]:
    """Inside the block, record calls of FACTORIES in the graph, and results of STATES as conditions."""
    thread = get_ident()

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread or is_machinery(_caller()):
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return create

    def asked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if get_ident() == thread and not is_machinery(_caller()):
                if args or kwargs:
                    raise Untraceable(f"its code calls torch.{name} with arguments")
                tracer.answers[f"_torch.{name}() == {'_' * isinstance(value, torch.dtype)}{value!r}"] = None
            return value

        return answer

    with ExitStack() as stack:
        stack.enter_context(changed(torch, **{name: recorded(getattr(torch, name)) for name in FACTORIES}))
        for path in STATES:
            home, _, name = path.rpartition(".")
            owner = getattr(torch, home) if home else torch
            if hasattr(owner, name):  # a torch build may lack the functions of torch.distributed
                stack.enter_context(changed(owner, **{name: asked(getattr(owner, name), path)}))
        yield


def _has_proxy(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_proxy, tree.values()))
    if type(tree) in (list, tuple):
        return any(map(_has_proxy, tree))
    return isinstance(tree, fx.Proxy)


def _caller() -> str:
    """Return the name of the Python module whose code called the caller of this function."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name


def _holds(module: nn.Module, name: str) -> bool:
    state = object.__getattribute__(module, "__dict__")
    return any(name in state.get(kind, ()) for kind in ("_modules", "_parameters", "_buffers"))


def _is_asked_by_user() -> bool:
    """Return whether the running method of nn.Module, such as ``children``, was called by the user's code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.modules.module":
        frame = frame.f_back
    return frame is not None and not is_machinery(frame.f_globals.get("__name__", ""))


def is_machinery(name: str) -> bool:
    """Return whether a Python module is part of torch or of ``batchnorm.graph``, and not the user's code."""
    return name.partition(".")[0] == "torch" or name.rpartition(".")[0] == __package__


@cache
def matches_sequences(code: CodeType) -> bool:
    """Return whether ``code`` has a match statement with a sequence pattern, which no proxy matches."""
    return any(i.opname == "MATCH_SEQUENCE" for i in dis.get_instructions(code))


@cache
def _unrecorded(code: CodeType) -> str:
    """Name a construct in ``code`` that torch.fx does not record, as in "has a try statement"; "" if there is none."""
    if matches_sequences(code):
        return "matches a sequence in a match statement"
    before = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("BEFORE_WITH", "LOAD_SPECIAL"):
            return "has a with statement"
        if instruction.opname == "PUSH_EXC_INFO":
            return "has a try statement"
        if instruction.opname == "IS_OP" and before != "LOAD_CONST":
            return "compares objects with 'is'"
        before = instruction.opname
    return ""


def _refuse_unrecorded() -> None:
    """Raise Untraceable if a user's function on the call stack has a construct that torch.fx does not record."""
    frame: FrameType | None = sys._getframe(2)
    found = ""
    while frame is not None:
        if frame.f_code is _call.__code__:
            if found:
                raise Untraceable(f"its code {found}, which torch.fx does not record")
            return
        if not is_machinery(frame.f_globals.get("__name__", "")):
            found = found or _unrecorded(frame.f_code)
        frame = frame.f_back


def _modes() -> tuple[Any, ...]:
    """Return the state of modes, such as autocast, whose changes between calls are not recorded in a graph."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, saving


def _generators() -> tuple[Any, ...]:
    """Return the states of the global random number generators of Python, NumPy and torch on the CPU."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:], torch.get_rng_state().numpy().tobytes()


def _containers_of(module: nn.Module) -> dict[str, Any]:
    return {name: _ids(value) for name, value in vars(module).items() if isinstance(value, list | dict | set)}
