"""Rewrite a module's forward so that BN, a sum and an activation become a single call.

:mod:`batchnorm.graph.generated` makes the class that runs the new forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import Parameter, getattr_static, signature
from keyword import iskeyword
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..network_copy import isolated, private_copy
from ..ops.activation import from_module
from .generated import (
    Unwatchable,
    Variant,
    by_name,
    freeze,
    generated_class,
    is_rewritten,
    original_kind,
    pattern_of,
    recording,
)
from .kinds import despite_global_hooks, has_hooks, returns_its_input
from .patterns import Fusion, Match, Matcher, fuse_modules_, may_write_its_input
from .references import runs_in_order
from .symbolic import Spies, Traced, Untraceable, trace_forward

IsNorm = Callable[[nn.Module], bool]


class Rewritten(NamedTuple):
    """The result of rewriting a module's forward, by mode (training or not): what was fused, or why nothing was."""

    fusions: dict[bool, tuple[Fusion, ...]]
    reasons: dict[bool, str]


def rewrite_(net: nn.Module, calls: dict[bool, dict[str, Any]], is_norm: IsNorm) -> dict[str, Rewritten]:
    """Rewrite the forwards of a network's modules, in place, and return the results by path.

    Args:
        net: the network; call :func:`restore_` first if it has rewritten modules.
        calls: for each mode (training or not), the result of :func:`arguments_in`.
        is_norm: whether a module is a batch normalization that currently accepts ``residual=`` and ``activation=``.
            Rewritten modules call this function before every forward, so it must be importable.
    """
    found: dict[str, dict[bool, Variant]] = {}
    done: dict[str, Rewritten] = {}
    for training, patterns in calls.items():
        worker = _Worker(net, training, patterns, is_norm)
        for path, module in reversed([*net.named_modules()]):
            if not _has_code(module):
                continue
            if not any(is_norm(m) for m in module.modules()):
                worker.note_end(path, module)
                continue
            entry = done.setdefault(path, Rewritten({}, {}))
            try:
                variant = worker.variant(path, module)
            except Untraceable as error:
                entry.reasons[training] = str(error)
                continue
            if variant is not None:
                found.setdefault(path, {})[training] = variant
                entry.fusions[training] = variant.fusions
    for path, variants in found.items():
        module = net.get_submodule(path)
        module.__class__ = generated_class(type(module), tuple(dict.fromkeys(variants.values())))
    return done


def restore_unused_(
    net: nn.Module, example: Any, forward: network_call.Forward | None, done: dict[str, Rewritten]
) -> None:
    """Restore, in place, the modules whose rewritten code does not run on the example, and correct the results."""
    for training in {mode for entry in done.values() for mode in entry.fusions}:
        twin = private_copy(net).train(training)
        batch = network_call.to_device(example, network_call.device_of(net), copy=True)
        with despite_global_hooks(), recording(twin) as ran, isolated(net, twin):
            network_call.call(twin, batch, forward)
        for path, module in twin.named_modules():
            if not ran.get(module, True):
                done[path].fusions.pop(training, None)
                done[path].reasons[training] = "what it depends on cannot be checked before each call"
    for path, entry in done.items():
        module = net.get_submodule(path)
        if not entry.fusions and is_rewritten(module):
            module.__class__ = original_kind(module)


def restore_(net: nn.Module) -> list[str]:
    """Restore the original class of each rewritten module, in place, and return the paths of those modules."""
    paths = []
    for path, module in net.named_modules():
        if is_rewritten(module):
            module.__class__ = original_kind(module)
            paths.append(path)
    return paths


def restore_wrong_(net: nn.Module, check: Callable[[], Any]) -> dict[str, str]:
    """Restore, in place, the rewritten modules that make ``check`` fail; return the reasons by path.

    Raises:
        Exception: the exception that ``check`` raises, if it fails even without rewritten modules.
    """
    kinds = {path: type(module) for path, module in net.named_modules() if is_rewritten(module)}
    wrong: dict[str, str] = {}
    restore_(net)
    check()

    def rewrite_again(paths: list[str]) -> None:
        modules = {path: net.get_submodule(path) for path in paths}
        for path, module in modules.items():
            module.__class__ = kinds[path]
        try:
            check()
        except Exception as problem:
            for module in modules.values():
                module.__class__ = original_kind(module)
            if len(paths) == 1:
                wrong[paths[0]] = str(problem)
                return
            middle = len(paths) // 2
            rewrite_again(paths[:middle])
            rewrite_again(paths[middle:])

    if kinds:
        rewrite_again([*kinds])
    return wrong


def arguments_in(
    net: nn.Module, example: Any, forward: network_call.Forward | None, *, training: bool
) -> dict[str, dict[str, Any] | str]:
    """Run a copy of a network; return the patterns of each module's arguments, or why the module has no patterns."""
    twin = private_copy(net).train(training)
    found: dict[str, dict[str, Any] | str] = {}

    def note(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            bound = signature(type(module).forward).bind(module, *args, **kwargs)
            bound.apply_defaults()
            (_, *given) = bound.arguments.items()
            found.setdefault(path, {name: pattern_of(value) for name, value in given if name not in _rest(module)})
        except Unwatchable as error:
            found.setdefault(path, f"it is called with {error}, which cannot be compared before each call")
        except TypeError as error:
            found.setdefault(path, str(error))

    for path, module in twin.named_modules():
        if _has_code(module):
            hook = lambda m, args, kwargs, path=path: note(path, m, args, kwargs)  # noqa: E731
            module.register_forward_pre_hook(hook, with_kwargs=True)
    batch = network_call.to_device(example, network_call.device_of(net), copy=True)
    with isolated(net, twin):
        network_call.call(twin, batch, forward)
    return found


def _rest(module: nn.Module) -> list[str]:
    """Return the names of the forward's *args and **kwargs."""
    parameters = signature(type(module).forward).parameters.values()
    return [p.name for p in parameters if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]


def _has_code(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule | fx.GraphModule | TorchBatchNorm) or "forward" in vars(module):
        return False
    return bool(module._modules) and isinstance(type(module).forward, FunctionType)


class _Worker:
    """Trace and match a network's modules in one mode, children before their parents."""

    def __init__(self, net: nn.Module, training: bool, calls: dict[str, Any], is_norm: IsNorm) -> None:
        self.net, self.calls, self.is_norm = net, calls, is_norm
        self.twin = private_copy(net).train(training)
        self.spies = Spies(self.twin)
        self.ending: set[str] = set()

    def variant(self, path: str, module: nn.Module) -> Variant | None:
        """Return the variant for a module's forward in this mode, or None if there is nothing to fuse."""
        patterns = self.calls.get(path, "not called on the example")
        if isinstance(patterns, str):
            raise Untraceable(patterns)
        opened = {p for p in self.ending if not path or p.startswith(f"{path}.")}
        while True:
            with torch.enable_grad():
                traced = self._trace(path, patterns, opened)
            depth = lambda node, traced=traced: len(traced.stacks[node.name])  # noqa: E731
            matcher = Matcher(module, traced.graph, partial(self._is_norm, module), depth=depth)
            matches = matcher.matches()
            if matcher.ends_in_norm() and not has_hooks(module):
                self.ending.add(path)
            # Open (trace into) only the children that the matches need; see _crossed.
            needed = {p for match in matches for p in _crossed(module, matcher, traced, match)}
            needed = {f"{path}.{p}".lstrip(".") for p in needed}
            if needed == {f"{path}.{p}".lstrip(".") for p in traced.opened}:
                break
            opened = needed
        if not matches:
            return None
        with torch.inference_mode(), _autocast_everywhere():
            if str(self._trace(path, patterns, opened).graph) != str(traced.graph):
                raise Untraceable("its code depends on the gradient mode or on autocast")
        builder = _Builder(module, self.twin.get_submodule(path), traced)
        builder.expect_arguments(patterns)
        builder.expect_reads()
        builder.expect_leaves()
        builder.expect_shared()
        for match in matches:
            builder.expect_match(match, self.is_norm)
        return builder.variant(tuple(fuse_modules_(traced.graph, matches)))

    def note_end(self, path: str, module: nn.Module) -> None:
        """Remember a module without batch normalization that returns a new tensor, so that it can be traced into."""
        patterns = self.calls.get(path, "")
        if isinstance(patterns, str) or has_hooks(module):
            return
        with suppress(Untraceable):
            traced = self._trace(path, patterns, set())
            if Matcher(module, traced.graph, lambda node: False).ends_in_new():
                self.ending.add(path)

    def _is_norm(self, module: nn.Module, node: fx.Node) -> bool:
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        return self.is_norm(module.get_submodule(str(node.target)))

    def _trace(self, path: str, patterns: dict[str, Any], opened: set[str]) -> Traced:
        children = [self.twin.get_submodule(p) for p in opened]
        return trace_forward(self.twin.get_submodule(path), self.spies, patterns, children)


@contextmanager
def _autocast_everywhere() -> Iterator[None]:
    """Make ``torch.is_autocast_enabled`` True for the CPU and for CUDA, even on a machine without a GPU."""
    before = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    for device in before:
        torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        for device, enabled in before.items():
            torch.set_autocast_enabled(device, enabled)


def _crossed(module: nn.Module, matcher: Matcher, traced: Traced, match: Match) -> Iterator[str]:
    """Yield the children to trace into: those whose code the match relies on, and those between BN and the sum that may
    write to their input.
    """
    outer = traced.stacks[match.end.name]
    yield from (p for node in matcher.origins(match) for p in traced.stacks[node.name] if p not in outer)
    node = match.norm
    while match.sum is not None and node is not match.sum:
        passed = (p for p in traced.stacks[node.name] if p not in outer)
        yield from (p for p in passed if may_write_its_input(module.get_submodule(p)))
        node = node.next


class _Builder:
    """Collect the conditions of a variant and the names that its code uses."""

    def __init__(self, module: nn.Module, twin: nn.Module, traced: Traced) -> None:
        self.module, self.twin, self.traced = module, twin, traced
        self.conditions: dict[str, None] = {}
        self.arguments: list[str] = []
        self.scope: dict[str, tuple[Any, ...]] = {}

    def expect_arguments(self, patterns: dict[str, Any]) -> None:
        for name in _rest(self.module):
            self._expect(f"not {name}")
        for name, pattern in patterns.items():
            self._expect_pattern(name, pattern)

    def _expect_pattern(self, text: str, pattern: Any) -> None:
        if pattern is Tensor:
            self._expect(f"_isinstance({text}, _Tensor)")
            self.arguments.append(text)
        elif pattern[0] in (list, tuple):
            self._expect(f"_type({text}) is _{pattern[0].__name__} and _len({text}) == {len(pattern) - 1}")
            for i, inner in enumerate(pattern[1:]):
                self._expect_pattern(f"{text}[{i}]", inner)
        else:
            self._expect_value(text, pattern[1])

    def expect_reads(self) -> None:
        for path, name in self.traced.reads:
            owner = self.twin.get_submodule(path)  # in the mode that was traced
            try:
                self._expect_read(owner, path, name)
            except Unwatchable as error:
                raise Untraceable(f"its code reads '{name}' ({error}), whose changes cannot be detected") from error
        for path in self.traced.asked:
            self._expect_kind(path)
        for path in self.traced.opened:
            self._expect_kind(path)
            self._expect(f"_is_quiet({_spell(path)})")

    def expect_leaves(self) -> None:
        """Expect that the same modules return their input tensor: identities, and modules that work in place."""
        for node in self.traced.graph.nodes:
            module = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if module is None:
                continue
            self._expect_in_place(str(node.target))
            if returns_its_input(module):
                self._expect_unchanged(str(node.target))

    def expect_shared(self) -> None:
        """Expect that one object still has all its names: torch.fx refers to it by the first of them."""
        names: dict[int, dict[str, None]] = {}
        for path, name in self._places():
            owner = self.module.get_submodule(path)
            for held in (vars(owner), owner._modules, owner._parameters, owner._buffers):
                if isinstance(held.get(name), nn.Module | Tensor):
                    names.setdefault(id(held[name]), {})[_spell_member(owner, path, name)] = None
        for first, *others in names.values():
            for text in others:
                self._expect(f"{first} is {text}")

    def _places(self) -> Iterator[tuple[str, str]]:
        """Yield the owner's path and the name of everything that the traced code reads or the graph refers to."""
        for path, name in self.traced.reads:
            yield from (
                (path, n) for n in ([*self.module.get_submodule(path)._modules] if name == "_modules" else [name])
            )
        for node in self.traced.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                path, _, name = str(node.target).rpartition(".")
                yield path, name

    def _expect_read(self, owner: nn.Module, path: str, name: str) -> None:
        text = _spell(path)
        if name == "_modules":
            self._expect(f"[*{text}._modules] == {list(owner._modules)!r}")
            if path or not runs_in_order(self.module):  # the code of a Sequential does not ask for classes
                for child in owner._modules:
                    self._expect_class(path, child)
        elif name.startswith("__") and name.endswith("__"):
            return
        elif name in vars(owner):
            held = _spell_member(owner, path, name)
            if isinstance(vars(owner)[name], Tensor):
                self._expect(f"_isinstance({held}, _Tensor)")
            else:
                self._expect_value(held, vars(owner)[name])
        elif any(name in held for held in (owner._modules, owner._parameters, owner._buffers)):
            (value,) = (h[name] for h in (owner._modules, owner._parameters, owner._buffers) if name in h)
            self._expect(f"{_spell_member(owner, path, name)} is {'None' if value is None else 'not None'}")
            if name in owner._modules:
                self._expect_class(path, name)
        else:
            found = getattr_static(type(owner), name, Parameter.empty)
            if found is Parameter.empty:
                self._expect(f"not _hasattr({text}, {name!r})")
            elif isinstance(found, FunctionType | property | classmethod | staticmethod):
                self._expect(f"{name!r} not in {text}.__dict__")
            else:
                self._expect_value(f"{text}.{name}", getattr(owner, name))

    def _expect_value(self, text: str, value: Any) -> None:
        if value is None or value is True or value is False:
            self._expect(f"{text} is {value}")
        else:
            name = f"_c{len(self.scope)}"
            self.scope[name] = ("value", freeze(value))
            self._expect(f"_is_same({text}, {name})")

    def expect_match(self, match: Match, is_norm: IsNorm) -> None:
        self._expect(f"{self._name(is_norm)}({_spell(str(match.norm.target))})")
        for node in match.bypassed:
            text = _spell(str(node.target))
            module = self.module.get_submodule(str(node.target))
            self._expect_unchanged(str(node.target))
            if isinstance(module, nn.LeakyReLU | nn.Hardtanh):
                self._expect(f"{self._name(from_module)}({text}) == {tuple(from_module(module) or ())!r}")
        for node in match.depended_on:
            self._expect_kind(str(node.target))

    def _expect_class(self, path: str, name: str) -> None:
        """Expect that a child is still an instance of its class, because the code may ask for its class."""
        child = self.module.get_submodule(path)._modules[name]
        if child is not None:
            self._expect(f"_isinstance({_spell(_join(path, name))}, {self._name(type(child))})")

    def _expect_kind(self, path: str) -> None:
        """Expect that a module, and the children of a Sequential, have the same classes and work in place as before."""
        module = self.module.get_submodule(path)
        text, kind = _spell(path), self._name(type(module))
        # Compare the class itself first: torch.compile's guards on original_kind are slow.
        self._expect(f"(_type({text}) is {kind} or _original_kind({text}) is {kind})")
        self._expect_in_place(path)
        if runs_in_order(module):
            self._expect(f"[*{text}._modules] == {list(module._modules)!r}")
            for name in module._modules:
                self._expect_kind(_join(path, name))

    def _expect_in_place(self, path: str) -> None:
        setting = vars(self.module.get_submodule(path)).get("inplace")
        if isinstance(setting, bool):
            self._expect(f"{_spell(path)}.inplace is {setting}")

    def _expect_unchanged(self, path: str) -> None:
        text, kind = _spell(path), self._name(type(self.module.get_submodule(path)))
        self._expect(f"_type({text}) is {kind} and _is_quiet({text})")

    def _expect(self, condition: str) -> None:
        self.conditions[condition] = None

    def _name(self, thing: Any) -> str:
        name = f"_n_{thing.__name__}"
        while self.scope.get(name, ("value", thing))[1] is not thing:
            name += "_"
        self.scope[name] = ("value", thing)
        return name

    def variant(self, fusions: tuple[Fusion, ...]) -> Variant:
        for node in reversed(list(self.traced.graph.nodes)):
            if node.op == "get_attr" and not node.users:
                self.traced.graph.erase_node(node)
        code = self.traced.graph.python_code("self")
        source = code.src[code.src.index("def forward(") :].replace("def forward(", "def run(", 1)
        used = _names_in(compile(source, "", "exec"))
        self.scope.update({name: ("value", thing) for name, thing in code.globals.items() if name in used})
        scope = tuple((name, by_name(*held)) for name, held in self.scope.items())
        return Variant(tuple(self.conditions), tuple(self.arguments), source, scope, fusions)


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _spell(path: str) -> str:
    return "_children" + "._modules".join(f"[{key!r}]" for key in path.split(".")) if path else "self"


def _spell_member(owner: nn.Module, path: str, name: str) -> str:
    """Return code that reads a child, parameter, buffer or other attribute of the module at ``path``."""
    if name in owner._modules:
        return _spell(_join(path, name))
    for held in ("_parameters", "_buffers"):
        if name in vars(owner)[held]:
            return f"{_spell(path)}.{held}[{name!r}]"
    # Avoid __dict__ if possible, because reading it would slow down torch.compile's guards on the module. Python
    # normalizes identifiers that are not ASCII, so they may name another attribute.
    plain = name.isidentifier() and name.isascii() and not iskeyword(name)
    plain = plain and not isinstance(getattr_static(type(owner), name, None), property)
    return f"{_spell(path)}.{name}" if plain else f"{_spell(path)}.__dict__[{name!r}]"
