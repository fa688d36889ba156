"""Answer the questions that traced code asks about its arguments, such as ``x.dim() == 3``.

Only questions about the arguments' shapes, dtypes and devices can be answered. The answers are computed for example
arguments. Each question is also written as a Python expression. A rewritten forward evaluates this expression in each
call, to check that the answer is still the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

METHODS = frozenset("size dim ndimension numel nelement is_floating_point is_complex".split())  # noqa: SIM905
VIEWS = frozenset("transpose permute unsqueeze squeeze movedim t".split())  # noqa: SIM905
ATTRIBUTES = {Tensor: ("shape", "ndim", "dtype", "device", "is_cuda"), torch.device: ("type", "index")}
MODULES = {"_operator": "operator", "math": "math"}

Given = dict[str, tuple[str, Tensor]]
"""For each placeholder of a graph, the Python expression of a tensor, such as ``xs[0]``, and its :func:`stand_in`."""


class Unanswerable(Exception):
    """Raised if a value may depend on more than the shapes, dtypes and devices of arguments."""


def stand_in(t: Tensor) -> Tensor:
    """Return a tensor that has the shape, dtype and device of ``t`` but uses only the memory of one element."""
    return torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)


def larger_batch(given: Given) -> Given:
    """Return stand-ins whose first dimension is larger by 1; tensors without dimensions are unchanged."""
    return {
        name: (text, t.new_empty(()).expand(len(t) + 1, *t.shape[1:]) if t.dim() else t)
        for name, (text, t) in given.items()
    }


def ask(tree: Any, given: Given) -> tuple[str, Any]:
    """Return ``tree`` as a Python expression, and the value of this expression for the example arguments.

    ``tree`` is a node, a constant, or a tuple, list or slice of these.

    Raises:
        Unanswerable: if the value may depend on more than shapes, dtypes and devices, if it is a constant of an
            unsupported type, or if it is a tensor, because a stand-in does not have the argument's contents.
    """
    if isinstance(tree, fx.Node):
        text, value = follow(tree, given)
        if isinstance(value, Tensor):
            raise Unanswerable
        return text, value
    if isinstance(tree, slice):
        text, values = _ask_all((tree.start, tree.stop, tree.step), given)
        return f"_slice({text})", slice(*values)
    if isinstance(tree, tuple | list):
        text, values = _ask_all(tree, given)
        return (f"[{text}]", values) if isinstance(tree, list) else (f"({text})", tuple(values))
    if isinstance(tree, torch.dtype):
        return f"_{tree}", tree
    if tree is None or tree is ... or type(tree) in (bool, int, str) or (type(tree) is float and math.isfinite(tree)):
        return repr(tree), tree
    raise Unanswerable


def _ask_all(items: Iterable[Any], given: Given) -> tuple[str, list[Any]]:
    found = [ask(item, given) for item in items]
    return "".join(f"{text}, " for text, _ in found), [value for _, value in found]


def follow(node: Any, given: Given) -> tuple[str, Any]:
    """Do the same as :func:`ask` for a node, but allow the value to be a tensor: an argument or a view of one."""
    if node.name in given:
        return given[node.name]
    function, args = node.target, node.args
    if node.kwargs and not (function == "size" and list(node.kwargs) == ["dim"] and len(args) == 1):
        raise Unanswerable
    args = (*args, *node.kwargs.values())
    if function is getattr:
        (text, owner), name = follow(args[0], given), args[1]
        if not any(isinstance(owner, kind) and name in names for kind, names in ATTRIBUTES.items()):
            raise Unanswerable
        return f"{text}.{name}", getattr(owner, name)
    if node.op == "call_method" and (function in METHODS or function in VIEWS):
        text, owner = follow(args[0], given)
        if not isinstance(owner, Tensor):
            raise Unanswerable
        inner, values = _ask_all(args[1:], given)
        return f"{text}.{function}({inner})", getattr(owner, function)(*values)
    if function is operator.getitem and isinstance(args[0], fx.Node):
        (text, owner), (inner, index) = follow(args[0], given), ask(args[1], given)
        return f"{text}[{inner}]", owner[index]
    if node.op == "call_function" and getattr(function, "__module__", None) in MODULES:
        inner, values = _ask_all(args, given)
        return f"_{MODULES[function.__module__]}.{function.__name__}({inner})", function(*values)
    raise Unanswerable
