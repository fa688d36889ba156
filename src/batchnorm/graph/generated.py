"""Generate subclasses of a module's class whose forward runs a traced graph.

Only the module's class changes; its attributes, state-dict keys and hooks stay the same. In each call, the new forward
runs the first traced graph whose conditions hold or, if there is no such graph, the original forward.
"""

from __future__ import annotations

import copyreg
import importlib
import itertools
import linecache
import math
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from inspect import Parameter, Signature
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .kinds import is_quiet, is_watched, signature_of
from .patterns import Fusion
from .questions import stand_in

LARGEST = 64  # the maximum length of a list, tuple, set or dict that a condition can compare


@dataclass(frozen=True)
class Variant:
    """One traced path through a forward: the conditions under which it applies, and its code.

    ``arguments`` are the expressions of the tensors that the code takes, such as ``xs[0]``. ``scope`` has a pair for
    each name that the conditions or the code use: the name, and ("import", module, name) or ("value", value).
    """

    conditions: tuple[str, ...]
    arguments: tuple[str, ...]
    source: str
    scope: tuple[tuple[str, tuple[Any, ...]], ...]
    fusions: tuple[Fusion, ...]


_classes: dict[tuple[type, tuple[Variant, ...]], type[nn.Module]] = {}
_numbers = itertools.count()
CONDITIONS = ("not _is_watched()", "_original.forward is _written")


def generated_class(kind: type[nn.Module], variants: tuple[Variant, ...]) -> type[nn.Module]:
    """Return a subclass of ``kind`` that runs the first valid variant or, if none is valid, the original forward."""
    known = _classes.get((kind, variants))
    if known is not None:
        return known
    given = _Signature(kind.forward)
    named: tuple[Any, ...] = (Tensor, is_quiet, is_same, is_watched, original_kind)
    named += (isinstance, type, len, int, float, list, tuple, dict, slice, hasattr, operator, math, torch)
    # Prefix all names with an underscore, even those of builtins: a parameter of the forward may be named `type`.
    scope: dict[str, Any] = {f"_{thing.__name__}": thing for thing in named}
    scope |= {"_original": kind, "_written": kind.forward, **given.defaults}
    lines = [f"def forward{given.declared}:"]
    for i, variant in enumerate(variants):
        scope[f"_run{i}"] = _compiled(variant.source, scope_of(variant.scope), kind)["run"]
        text = [
            f"def holds{given.declared}:",
            "    try:",
            "        _children = self._modules",
            "        return (",
        ]
        text += [f"            {'and ' * (j > 0)}{c}" for j, c in enumerate(CONDITIONS + variant.conditions)]
        text += ["        )", "    except Exception:", "        return False", ""]
        scope[f"_holds{i}"] = _compiled("\n".join(text), {**scope, **scope_of(variant.scope)}, kind)["holds"]
        arguments = "".join(f", {a}" for a in variant.arguments)
        lines += [f"    if _holds{i}({given.passed}):", f"        return _run{i}(self{arguments})"]
    lines += [f"    return _original.forward({given.passed})", ""]

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy like the original class, but also store the data needed to generate this class again."""
        reduced = kind.__reduce_ex__(self, protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and reduced[1][0] is made:  # type: ignore[attr-defined]
            return (_new, (kind, _Pickled(variants, _digest(kind, variants)), *reduced[1][1:]), *reduced[2:])
        return reduced

    def extra_repr(self: nn.Module) -> str:
        paths = [path for path, _ in self.named_modules(remove_duplicate=False)]
        fusions = dict.fromkeys(f for variant in variants for f in variant.fusions if f.path in paths)
        fused = [_describe(fusion) for fusion in sorted(fusions, key=lambda f: paths.index(f.path))]
        return ", ".join(filter(None, [kind.extra_repr(self), f"fused: {', '.join(fused)}"]))

    names = {
        "extra_repr": extra_repr,
        "forward": _compiled("\n".join(lines), scope, kind)["forward"],
        "__reduce_ex__": reduce_ex,
    }
    names |= {"_rewritten_from": kind, "_variants": variants}
    names |= {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(kind)
    made = _classes[kind, variants] = metaclass(kind.__name__, (kind,), names)
    return made  # type: ignore[no-any-return]


def _describe(fusion: Fusion) -> str:
    """Return a description of what is fused into a call, such as "bn3 + residual + relu"."""
    parts = [fusion.path, *["residual"] * fusion.residual, fusion.activation.name]
    return " + ".join(part for part in parts if part != "identity")


@contextmanager
def recording_variants(net: nn.Module) -> Iterator[dict[nn.Module, bool]]:
    """Yield a dict that maps each rewritten module called in the block to whether any of its calls ran a variant."""
    ran: dict[nn.Module, bool] = {}
    forwards = {type(m): type(m).forward for m in net.modules() if is_rewritten(m)}

    def recorded(forward: Any) -> Any:
        tests = [test for name, test in forward.__globals__.items() if name.startswith("_holds")]

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            ran[self] = ran.get(self, False) or any(test(self, *args, **kwargs) for test in tests)
            return forward(self, *args, **kwargs)

        return run

    for kind, forward in forwards.items():
        kind.forward = recorded(forward)
    try:
        yield ran
    finally:
        for kind, forward in forwards.items():
            kind.forward = forward


def is_rewritten(module: nn.Module) -> bool:
    """Return whether :func:`generated_class` made a module's class."""
    return "_rewritten_from" in vars(type(module))


def original_kind(module: nn.Module) -> type[nn.Module]:
    """Return a module's class or, if that class was generated, the class that it was generated from."""
    kind = type(module)
    return vars(kind).get("_rewritten_from", kind)  # type: ignore[no-any-return]


def is_same(value: Any, frozen: Any) -> bool:
    """Return whether a value is unchanged since :func:`freeze` returned ``frozen`` for it."""
    try:
        return bool(freeze(value) == frozen)
    except Unwatchable:
        return False


class _Name(str):
    """A string whose repr has no quotes, so that ``str(Signature)`` writes a parameter's default as a variable name."""

    __repr__ = str.__str__


class _Signature:
    """A forward's parameters as source code: how they are declared, and how they are passed on."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        (first, *parameters) = signature_of(forward).parameters.values()
        self.defaults = {f"_default_{p.name}": p.default for p in parameters if p.default is not Parameter.empty}
        declared = [first.replace(name="self", annotation=Parameter.empty)]
        self.passed = "self"
        for p in parameters:
            default = Parameter.empty if p.default is Parameter.empty else _Name(f"_default_{p.name}")
            declared.append(p.replace(annotation=Parameter.empty, default=default))
            star = "*" * (p.kind is Parameter.VAR_POSITIONAL) + "**" * (p.kind is Parameter.VAR_KEYWORD)
            self.passed += f", {p.name}={p.name}" if p.kind is Parameter.KEYWORD_ONLY else f", {star}{p.name}"
        self.declared = str(Signature(declared))


def scope_of(names: Iterable[tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Return a namespace, given pairs of a name and a reference from :func:`by_name`."""
    return {name: _import(*held[1:]) if held[0] == "import" else held[1] for name, held in names}


def _compiled(source: str, scope: dict[str, Any], kind: type) -> dict[str, Any]:
    file = f"<batchnorm: {kind.__qualname__} rewritten {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return scope


class _Pickled:
    """Variants, with a digest of the code that they were traced from.

    If one variant cannot be pickled, pickling drops all of them.
    """

    def __init__(self, variants: tuple[Variant, ...], written: str) -> None:
        self.variants, self.written = variants, written

    def __deepcopy__(self, memo: Any) -> _Pickled:
        return self

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self.variants)
        except Exception:
            return _Pickled, ((), "")
        return _Pickled, (self.variants, self.written)


def _new(kind: type[nn.Module], pickled: _Pickled, *args: Any) -> nn.Module:
    # Use the original class if the traced code has changed since pickling, if the variants were not pickled, or if an
    # object that a variant uses cannot be imported.
    with suppress(ImportError, AttributeError):
        if pickled.variants and pickled.written == _digest(kind, pickled.variants):
            kind = generated_class(kind, pickled.variants)
    return kind.__new__(kind, *args)


def _digest(kind: type[nn.Module], variants: tuple[Variant, ...]) -> str:
    """Return a digest of the methods of ``kind`` and of the classes in the variants' scopes, except torch's methods."""
    things = [kind, *(t for variant in variants for t in scope_of(variant.scope).values() if isinstance(t, type))]
    methods = [f for t in things for k in t.__mro__ for f in vars(k).values() if not k.__module__.startswith("torch.")]
    texts = sorted(_text_of(f.__code__) for f in methods if isinstance(f, FunctionType))
    return sha256("".join(texts).encode()).hexdigest()


def _text_of(constant: Any) -> str:
    """Return a string for code or for a constant in it; the string is the same in every process."""
    if isinstance(constant, CodeType):
        return repr((constant.co_code, constant.co_names, constant.co_varnames, _text_of(constant.co_consts)))
    if isinstance(constant, tuple):
        return repr([_text_of(item) for item in constant])
    if isinstance(constant, frozenset):  # the order of its items depends on the process
        return repr(sorted(_text_of(item) for item in constant))
    return repr(constant)


def by_name(kind: str, thing: Any) -> tuple[Any, ...]:
    """Return a reference to an object for pickling: ("import", module, name) if possible, else (kind, thing)."""
    if isinstance(thing, ModuleType):
        return "import", thing.__name__, ""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if module and name and callable(thing):
        try:
            if _import(module, name) is thing:
                return "import", module, name
        except (ImportError, AttributeError):
            pass
    return kind, thing


def _import(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


class Unwatchable(Exception):
    """Raised for a value if no condition can check whether it has changed."""


def pattern_of(value: Any, seen: dict[int, Tensor]) -> Any:
    """Return the pattern of an argument: a stand-in for each tensor, and the value of everything else.

    A stand-in has the tensor's shape, dtype and device, but not its contents.

    Args:
        value: the argument.
        seen: the stand-in of each tensor found so far, by the tensor's ``id``; new stand-ins are added.

    Raises:
        Unwatchable: for NaN, a nested tensor, a container with more than LARGEST entries, or an unsupported type.

    >>> kind, x, rest = pattern_of([torch.zeros(2, 3), None], {})
    >>> kind, x.shape, rest
    (<class 'list'>, torch.Size([2, 3]), ('value', None))
    """
    if isinstance(value, Tensor):
        try:
            return seen.setdefault(id(value), stand_in(value))
        except RuntimeError:  # raised for a nested tensor
            raise Unwatchable(f"a {type(value).__name__} without a regular shape") from None
    if type(value) in (list, tuple) and len(value) <= LARGEST:
        return (type(value), *(pattern_of(v, seen) for v in value))
    if type(value) is dict and len(value) <= LARGEST and all(type(key) in (str, int) for key in value):
        return (dict, *((key, pattern_of(v, seen)) for key, v in value.items()))
    if value is None or isinstance(value, bool | int | float | str | Enum | torch.dtype | torch.device):
        freeze(value)  # raises an error for NaN
        return ("value", value)
    raise Unwatchable(f"a {type(value).__name__}")


def freeze(value: Any) -> Any:
    """Return a hashable representation of a value, to check later whether the value has changed.

    Raises:
        Unwatchable: for NaN, a container with more than LARGEST entries, or an unsupported type.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Enum):
        if value != value:
            raise Unwatchable("NaN")
        return type(value), value
    if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout):
        return value
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value
    if type(value) is partial:
        return partial, freeze(value.func), freeze(value.args), freeze(value.keywords)
    if type(value) in (list, tuple, torch.Size, set, frozenset) and len(value) <= LARGEST:
        items = [freeze(v) for v in value]
        return type(value), frozenset(items) if isinstance(value, set | frozenset) else tuple(items)
    if type(value) is dict and len(value) <= LARGEST:
        return dict, tuple((freeze(k), freeze(v)) for k, v in value.items())
    raise Unwatchable(f"a {type(value).__name__}")
