"""Write, as Python expressions, the conditions under which a rewritten forward is valid.

A traced graph contains only the path that the code took during the trace. The graph is valid only while everything that
decided this path is unchanged: attributes, hooks, the classes of children, the arguments that are not tensors, and the
results of checks such as ``x.dim() == 3``. If a condition fails, the rewritten forward does not run that graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import Parameter, getattr_static
from itertools import combinations
from keyword import iskeyword
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from ..ops.activation import from_module
from .generated import Unwatchable, Variant, by_name, freeze
from .kinds import returns_its_input
from .patterns import Fusion, Match
from .references import runs_in_order
from .symbolic import Traced, Untraceable

IsNorm = Callable[[nn.Module], bool]


class ConditionBuilder:
    """Collect the conditions of a variant (a traced path through a forward) and the names that its code uses.

    ``twin`` is the copy of ``module`` that was traced. The methods ``expect_...`` add conditions.
    """

    def __init__(self, module: nn.Module, twin: nn.Module, traced: Traced) -> None:
        self.module, self.twin, self.traced = module, twin, traced
        self.conditions: dict[str, None] = {}
        self.scope: dict[str, tuple[Any, ...]] = {}

    def expect_arguments(self, patterns: dict[str, Any]) -> None:
        """Expect tensors where the example's arguments are tensors, and equal values elsewhere.

        If the code checks shapes, dtypes, devices or torch's state, the checks must give the same results as in the
        trace.

        The trace does not notice if a helper function that makes no torch call compares two arguments with ``is``.
        During the trace, the result is False, because each argument is an object of its own. So arguments that are
        different tensors in the example must be different tensors in each call. Arguments that are the same tensor in
        the example need no condition: if the wrong result of ``is`` changes the outputs, ``convert`` detects this when
        it compares the new network with the original on the example.
        """
        tensors: dict[str, Tensor] = {}
        for name, pattern in patterns.items():
            self._expect_pattern(name, pattern, tensors)
        for (first, a), (second, b) in combinations(tensors.items(), 2):
            if a is not b:
                self._expect(f"{first} is not {second}")
        for condition in self.traced.answers:
            self._expect(condition)

    def _expect_pattern(self, text: str, pattern: Any, tensors: dict[str, Tensor]) -> None:
        if isinstance(pattern, Tensor):
            tensors[text] = pattern
            self._expect(f"_isinstance({text}, _Tensor)")
        elif pattern[0] is dict:
            self._expect(f"_type({text}) is _dict and [*{text}] == {[key for key, _ in pattern[1:]]!r}")
            for key, inner in pattern[1:]:
                self._expect_pattern(f"{text}[{key!r}]", inner, tensors)
        elif pattern[0] in (list, tuple):
            self._expect(f"_type({text}) is _{pattern[0].__name__} and _len({text}) == {len(pattern) - 1}")
            for i, inner in enumerate(pattern[1:]):
                self._expect_pattern(f"{text}[{i}]", inner, tensors)
        else:
            self._expect_value(text, pattern[1])

    def expect_reads(self) -> None:
        """Expect that the attributes that the code read are unchanged.

        A tensor may be replaced with another tensor, and a child with another instance of its class. Some children must
        also have no hooks and keep their exact class: those that were traced into, and those whose output's type the
        code checked.
        """
        for path, name in self.traced.reads:
            # Read the values from the traced copy, because the module itself may be in another mode.
            owner = self.twin.get_submodule(path)
            try:
                self._expect_read(owner, path, name)
            except Unwatchable as error:
                raise Untraceable(f"its code reads '{name}' ({error}), whose changes cannot be detected") from error
        for path in (*self.traced.type_checked, *self.traced.opened):
            self._expect_same_class(path)
            self._expect(f"_is_quiet({_spell(path)})")

    def expect_leaves(self) -> None:
        """Expect that called modules keep their ``inplace`` settings.

        Identities and in-place modules must also keep their class and have no hooks.
        """
        for node in self.traced.graph.nodes:
            if node.op == "call_module":
                self._expect_in_place(str(node.target))
                if returns_its_input(self.module.get_submodule(str(node.target))):
                    self._expect_unchanged(str(node.target))

    def expect_shared(self) -> None:
        """If several attributes refer to one object, expect that they still do: the graph reads only one of them."""
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
        """Yield the owner's path and the name of each attribute that the traced code read or that the graph uses."""
        for path, name in self.traced.reads:
            names = [*self.module.get_submodule(path)._modules] if name == "_modules" else [name]
            yield from ((path, n) for n in names)
        for node in self.traced.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                path, _, name = str(node.target).rpartition(".")
                yield path, name

    def _expect_read(self, owner: nn.Module, path: str, name: str) -> None:
        text = _spell(path)
        if name == "_modules":
            self._expect(f"[*{text}._modules] == {list(owner._modules)!r}")
            # Code that iterates over the children may check their classes, but torch's own Sequential.forward does not.
            if path or not runs_in_order(self.module):
                for child in owner._modules:
                    self._expect_instance(path, child)
        elif name == "__class__":  # the code checked the class: isinstance() reads __class__ if type() does not match
            self._expect_same_class(path)
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
                self._expect_instance(path, name)
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
        """Expect that the modules of a match can still be fused."""
        self._expect(f"{self._name(is_norm)}({_spell(str(match.norm.target))})")
        for node in match.bypassed:
            text = _spell(str(node.target))
            module = self.module.get_submodule(str(node.target))
            self._expect_unchanged(str(node.target))
            if isinstance(module, nn.LeakyReLU | nn.Hardtanh):
                self._expect(f"{self._name(from_module)}({text}) == {tuple(from_module(module) or ())!r}")
        for node in match.depended_on:
            self._expect_same_class(str(node.target))
            if match.needs_private_input and node is match.norm.args[0]:
                self._expect(f"_is_quiet({_spell(str(node.target))})")

    def _expect_instance(self, path: str, name: str) -> None:
        """Expect that a child is still an instance of its present class, because the code may check this class."""
        child = self.module.get_submodule(path)._modules[name]
        if child is not None:
            self._expect(f"_isinstance({_spell(_join(path, name))}, {self._name(type(child))})")

    def _expect_same_class(self, path: str) -> None:
        """Expect that a module and, in a Sequential, its children keep their class and ``inplace`` setting."""
        module = self.module.get_submodule(path)
        text, kind = _spell(path), self._name(type(module))
        # Compare the class itself first. If it matches, `original_kind` is not called; torch.compile would add slow
        # guards for that call.
        self._expect(f"(_type({text}) is {kind} or _original_kind({text}) is {kind})")
        self._expect_in_place(path)
        if runs_in_order(module):
            self._expect(f"[*{text}._modules] == {list(module._modules)!r}")
            for name in module._modules:
                self._expect_same_class(_join(path, name))

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
        name = "_n_" + re.sub(r"\W", "_", thing.__name__)
        while self.scope.get(name, ("value", thing))[1] is not thing:
            name += "_"
        self.scope[name] = ("value", thing)
        return name

    def variant(self, fusions: tuple[Fusion, ...]) -> Variant:
        """Return the variant with the collected conditions and the code of the rewritten graph."""
        for node in reversed(list(self.traced.graph.nodes)):
            if node.op == "get_attr" and not node.users:
                self.traced.graph.erase_node(node)
        code = self.traced.graph.python_code("self")
        source = code.src[code.src.index("def forward(") :].replace("def forward(", "def run(", 1)
        used = _names_in(compile(source, "", "exec"))
        self.scope.update({name: ("value", thing) for name, thing in code.globals.items() if name in used})
        scope = tuple((name, by_name(*held)) for name, held in self.scope.items())
        return Variant(tuple(self.conditions), tuple(self.traced.arguments), source, scope, fusions)


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
    # Avoid __dict__ if possible, because reading it would slow down torch.compile's guards on the module. A name that
    # is not ASCII needs __dict__, because Python normalizes identifiers in code: `module.name` might read an attribute
    # with another name.
    plain = name.isidentifier() and name.isascii() and not iskeyword(name)
    plain = plain and not isinstance(getattr_static(type(owner), name, None), property)
    return f"{_spell(path)}.{name}" if plain else f"{_spell(path)}.__dict__[{name!r}]"
