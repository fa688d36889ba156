"""Let torch.compile recompute the output of the fused kernels in a backward pass, instead of keeping it.

The partitioner of AOTAutograd decides which tensors a compiled forward pass keeps for the backward pass. The
partitioner recomputes elementwise operations where that saves memory, but it knows nothing about this library's
operators. For example, if the output y of a fused kernel is multiplied by a gate, as in squeeze-and-excitation, the
gate's gradient needs y. The forward pass keeps the kernel's input x and the statistics anyway, so this module makes the
backward pass recompute y from them.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from ..activation import Activation, apply

_FUSED = ("batchnorm.fused.default", "batchnorm.fused_.default")
BASE, SCALE, OFFSET = 3, 5, 6  # row indices in the statistics tensor; triton/forward.py lists the rows


def register() -> None:
    """Add this module's pass to Inductor's passes over joint forward-backward graphs, if Inductor is loaded."""
    joint_graph = sys.modules.get("torch._inductor.fx_passes.joint_graph")
    passes = getattr(joint_graph, "pass_patterns", None)
    if passes is not None and _PASS not in passes:
        passes.append(_PASS)


class _Recompute:
    """A graph pass in the form that Inductor expects: an object with a method ``apply``."""

    def apply(self, graph: fx.Graph) -> int:
        """Make the backward pass recompute outputs of the fused kernels where possible, and return how many."""
        backward = _after_tangents(graph)
        return sum(_recompute(graph, node, backward) for node in list(graph.nodes) if backward and _is_plain(node))


_PASS = _Recompute()


def _after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the backward pass: those that depend on the gradients of the outputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_plain(node: fx.Node) -> bool:
    """Return whether a node is a fused forward pass without a residual, outside of checkpointed regions."""
    given = _arguments(node)
    return bool(given) and given["residual"] is None and "recompute" not in node.meta


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a fused forward pass by name, or an empty dict for other nodes."""
    if node.op != "call_function" or not node.args:
        return {}
    if str(node.target) in _FUSED:
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        return dict(zip(names, node.args, strict=True))
    # Operators that change arguments in place are wrapped in auto_functionalized_v2, which takes keyword arguments.
    wrapped = isinstance(node.args[0], OpOverload) and str(node.args[0]) in _FUSED
    return dict(node.kwargs) if wrapped else {}


def _recompute(graph: fx.Graph, fused: fx.Node, backward: set[fx.Node]) -> bool:
    """Make the backward pass recompute y, the first output of ``fused``, if possible; return whether it now does so.

    This is possible if the graph uses the statistics, and if the backward pass reads y, but only in elementwise
    operations.
    """
    parts = {user.args[1]: user for user in fused.users if user.target is operator.getitem}
    if 0 not in parts or 1 not in parts:
        return False
    y, stats = parts[0], parts[1]
    readers = [user for user in y.users if user in backward]
    if not readers or not all(_is_elementwise(user) for user in readers):
        return False  # Operations that are not elementwise, such as convolutions, need y in memory anyway.
    given = _arguments(fused)
    x, activation = given["x"], Activation(given["activation"], given["slope"])
    with graph.inserting_before(readers[0]):
        again = _insert(graph, lambda x, stats: renormalize(x, stats, activation), x, stats)
    for user in readers:
        user.replace_input_with(y, again)
    return True


def renormalize(x: Tensor, stats: Tensor, activation: Activation) -> Tensor:
    """Recompute y = activation(BN(x)) from x and the statistics of a forward pass that added no residual."""
    base, scale, offset = (stats[i].reshape(-1, *[1] * (x.dim() - 2)) for i in (BASE, SCALE, OFFSET))
    return apply(activation, (x.float() - base) * scale + offset).to(x.dtype)


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _insert(graph: fx.Graph, function: Any, *inputs: fx.Node) -> fx.Node:
    """Add the operations of ``function(*inputs)``, decomposed for Inductor, to the graph; return the output node."""
    from torch._inductor.decomposition import select_decomp_table

    traced = make_fx(function, select_decomp_table())(*(node.meta["val"] for node in inputs))
    values: dict[fx.Node, fx.Node] = {}
    given = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return values[node.args[0]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    raise AssertionError
