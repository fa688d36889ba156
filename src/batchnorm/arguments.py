"""Parse the command line for a typed function: with tyro, or with argparse if tyro is not installed."""

from __future__ import annotations

import io
import re
import sys
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

try:
    import tyro
    from tyro.conf import OmitArgPrefixes, Positional, Suppress, arg

    TYRO: Any = tyro
except ImportError:  # use argparse, with the same annotations
    TYRO = None

    class OmitArgPrefixes:  # type: ignore[no-redef]
        """Stand in for tyro's marker; with argparse, options have no prefix, so there is nothing to do."""

    class Suppress:  # type: ignore[no-redef]
        """Mark an argument that the command line does not offer; it keeps its default."""

    class Positional:  # type: ignore[no-redef]
        """Mark a positional argument."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind, cls]

    class arg:  # type: ignore[no-redef]
        """Set an argument's name, its placeholder in the help, and its aliases."""

        def __init__(
            self, name: str | None = None, metavar: str | None = None, aliases: Sequence[str] = (), **_: str
        ) -> None:
            self.name, self.metavar, self.aliases = name, metavar, aliases


__all__ = ["OmitArgPrefixes", "Positional", "Suppress", "arg", "call_with"]


def call_with(words: Sequence[str], function: Callable[..., Any], prog: str, description: str) -> Any:
    """Call a function, or build a dataclass, with arguments parsed from a command line, and return the result.

    The function's annotations give the arguments' types; ``prog`` and ``description`` appear in the help.

    >>> def shout(word: str, /, times: int = 1) -> str: return word.upper() * times
    >>> call_with(["ha", "--times", "2"], shout, "shout", "")
    'HAHA'
    """
    if TYRO is not None:
        config = (OmitArgPrefixes, TYRO.conf.PositionalMetavarFromFieldName)
        registry = TYRO.constructors.ConstructorRegistry()
        registry.primitive_rule(_optional)
        # Redirect output only while tyro parses; the function, which is called later, prints as usual.
        bound = function if is_dataclass(function) else wraps(function)(partial(partial, function))
        errors, output = io.StringIO(), _Output()
        written = function.__doc__
        try:
            # Remove markup and line breaks from the arguments' descriptions, because tyro would show them.
            function.__doc__ = re.sub(r"\n {12}(?=\S)", " ", (written or "").replace("``", ""))
            with redirect_stderr(errors), redirect_stdout(output):
                made = TYRO.cli(bound, prog=prog, description=description, config=config, args=words, registry=registry)
        except SystemExit:
            print(_without_none(output.getvalue()), end="")
            print(_without_box(errors.getvalue(), prog), end="", file=sys.stderr)
            raise
        finally:
            function.__doc__ = written
        return made if bound is function else made()
    parser = ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    make = _add_arguments(parser, function)
    return make(vars(parser.parse_args(words)))


class _Output(io.StringIO):
    """Collect printed text, but report the ``encoding`` and the ``isatty()`` of the real standard output."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def _without_box(text: str, prog: str) -> str:
    """Return tyro's error message without the box around it, so that it is easy to copy.

    >>> print(_without_box("+- Value error -----+\\n| --steps: no int   |\\n+-------------------+", "train"), end="")
    train: value error
    --steps: no int
    """
    lines = []
    for row in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        if row[:1] in ("╭", "+"):
            title = row.strip("╭╮+─- ")
            lines.append(f"{prog}: {title[:1].lower()}{title[1:]}" if title else "")
        else:
            lines.append((row[1:-1].removeprefix(" ") if row[:1] in ("│", "|") else row).rstrip())
    # For an error in a dataclass, tyro names the dataclass. Remove this name, because users do not know it.
    lines = [re.sub(r"^ *Error parsing (?!-)[^:]*: ", "", line) for line in lines]
    return dedent("".join(f"{line}\n" for line in lines if line.strip("╰╯─- ")))


def _without_none(text: str) -> str:
    """Return tyro's help with spaces in place of "(default: None)", so that the box around it keeps its shape.

    >>> _without_none("│ a folder (default: None) │")
    '│ a folder                 │'
    """
    unset = r"\(default:\s+│?\n?│?\s*(?:None)?\)"
    return re.sub(unset, lambda hint: re.sub(r"[^\s│]", " ", hint[0]), text)


def _optional(info: Any) -> Any:
    """Tell tyro not to offer None as a value of an optional bool, int, float, str, Path or Literal.

    For all other types, return None; tyro then applies its own rules.
    """
    if get_origin(info.type) not in (Union, UnionType):
        return None
    kind, *others = (one for one in get_args(info.type) if one is not NoneType)
    if others or not (kind in (bool, int, float, str, Path) or get_origin(kind) is Literal):
        return None
    words = (True, False) if kind is bool else get_args(kind)
    choices = {str(value): value for value in words}
    return TYRO.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(choices)}}}" if choices else kind.__name__.upper(),
        instance_from_str=lambda given: choices[given[0]] if choices else kind(given[0]),
        is_instance=lambda value: value is None or (value in choices.values() if choices else isinstance(value, kind)),
        str_from_instance=lambda value: [str(value)],
        choices=tuple(choices) or None,
    )


def _add_arguments(parser: ArgumentParser, function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Add a function's arguments to the parser; return a callable that passes the parsed values to the function."""
    hints, nested, unnamed = get_type_hints(function, include_extras=True), {}, []
    parameters = signature(function).parameters
    for name, parameter in parameters.items():
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if Suppress in marks:
            parser.set_defaults(**{name: parameter.default})
            continue
        if is_dataclass(kind):
            nested[name] = _add_arguments(parser, kind)  # type: ignore[arg-type]
            continue
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            unnamed.append(name)
        shown: Any = next((mark for mark in marks if hasattr(mark, "aliases")), arg())
        options = _options(kind, parameter.default)
        if name in unnamed or Positional in marks:
            if parameter.default is not Parameter.empty:
                options.setdefault("nargs", "?")
            parser.add_argument(name, metavar=shown.metavar or name.upper(), **options)
        else:
            aliases = shown.aliases
            options["required"] = parameter.default is Parameter.empty
            parser.add_argument(f"--{(shown.name or name).replace('_', '-')}", *aliases, dest=name, **options)

    def make(values: dict[str, Any]) -> Any:
        found = {name: nested[name](values) if name in nested else values[name] for name in parameters}
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        first = [found.pop(name) for name in unnamed]
        return function(*first, **found)

    return make


def _options(kind: Any, default: Any) -> dict[str, Any]:
    """Return the options of ``add_argument`` for a type.

    The type is str, int, float, Path, bool or Literal, or an optional or a sequence of one of these.
    """
    options: dict[str, Any] = {} if default is Parameter.empty else {"default": default}
    optional = get_origin(kind) in (Union, UnionType)
    if optional:
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    if kind is bool and not optional:
        return {**options, "action": BooleanOptionalAction}
    if get_origin(kind) in (tuple, Sequence):
        kind, options["nargs"] = get_args(kind)[0], "+" if default is Parameter.empty else "*"
    if get_origin(kind) is Literal:
        return {**options, "type": type(get_args(kind)[0]), "choices": get_args(kind)}
    return {**options, "type": _truth if kind is bool else kind}


def _truth(word: str) -> bool:
    return ("False", "True").index(word) == 1
