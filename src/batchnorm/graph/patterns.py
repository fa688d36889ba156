"""Find BN -> activation, BN -> sum and BN -> sum -> activation in a torch.fx graph.

``convert`` searches graphs that call modules; the ``torch.compile`` backend searches graphs that call functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OperatorBase, OpOverloadPacket
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..ops.activation import NAMES, TWO_SLOPES, Activation, from_module
from .kinds import IN_PLACE, has_hooks, is_affine, is_in_place, keeps_torch_forward
from .references import is_plain_identity, modules_within, runs_in_order

# Torch's functions for the activations that can be fused, such as F.relu, torch.relu_ and Tensor.relu.
FUNCTIONS: dict[Any, str] = {
    getattr(owner, spelling): name
    for name in (*NAMES, "hardtanh")
    for owner in (F, torch, Tensor)
    for spelling in (name, f"{name}_")
    if name != "identity" and hasattr(owner, spelling)
}
METHODS = {spelling: name for name in NAMES for spelling in (name, f"{name}_") if hasattr(Tensor, spelling)}
SUMS = {operator.add: False, operator.iadd: True, torch.add: False, Tensor.add: False, Tensor.add_: True}
SUM_METHODS = {"add": False, "__add__": False, "__radd__": False, "add_": True, "__iadd__": True}
# The operator signs of functions and methods that compute a sum, product or quotient.
SIGNS: dict[Any, str] = {
    **dict.fromkeys([*SUMS, *SUM_METHODS], "+"),
    **dict.fromkeys([operator.mul, operator.imul, torch.mul, "mul", "mul_", "__mul__", "__rmul__", "__imul__"], "*"),
    **dict.fromkeys(
        [operator.truediv, operator.itruediv, torch.div, "div", "div_", "__truediv__", "__itruediv__"], "/"
    ),
}
# Activations that networks also write as formulas. The formulas have the form that Matcher._formula returns, in which
# summands and factors are sorted.
FORMULAS = {
    "(sigmoid(x)*x)": "silu",
    "((relu6((3+x))/6)*x)": "hardswish",
    "((relu6((3+x))*x)/6)": "hardswish",
}
# Functions that return a new tensor, unless they are called with out=.
NEW = {operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div}
NEW |= {torch.conv1d, torch.conv2d, torch.conv3d, torch.batch_norm, F.batch_norm, F.linear}


class Fusion(NamedTuple):
    """Describe what was fused into one call of a batch normalization."""

    path: str
    """The layer's path, relative to the module whose forward was traced."""
    activation: Activation
    residual: bool


class Match(NamedTuple):
    """The nodes of one matched pattern.

    ``passed`` lists the identities in the pattern: calls of nn.Identity, and sums x + 0. If the activation is computed
    by several nodes, as in x * sigmoid(x), ``passed`` also lists these nodes except the last.
    """

    norm: fx.Node
    sum: fx.Node | None
    summand: int
    """The index (0 or 1) of the summand that comes from the batch normalization; the other summand is the residual."""
    activation: fx.Node | None
    kind: Activation
    passed: tuple[fx.Node, ...] = ()
    needs_private_input: bool = False
    """Whether the fusion relies on BN's input being a new tensor that only BN reads.

    This is the case if a call between BN and the sum may write to BN's input.
    """

    @property
    def residual(self) -> Any:
        """The summand that does not come from the batch normalization, or None if there is no sum."""
        return None if self.sum is None else self.sum.args[1 - self.summand]

    @property
    def end(self) -> fx.Node:
        """The node whose value the fused call computes."""
        return self.activation or self.sum or self.norm

    @property
    def bypassed(self) -> list[fx.Node]:
        """The calls of modules other than BN that the fused call replaces."""
        nodes = [*self.passed, *([self.activation] if self.activation is not None else [])]
        return [node for node in nodes if node.op == "call_module"]

    @property
    def depended_on(self) -> list[fx.Node]:
        """The calls of modules whose classes must not change, because the fusion relies on their code.

        The fused call runs where the sum was, so the calls between BN and the sum must not write to BN's input. If the
        sum is in place, the call whose output the sum overwrites must return a new tensor. If ``needs_private_input``,
        the call that returns BN's input must also return a new tensor.
        """
        if self.sum is None:
            return []
        nodes = [*_between(self.norm, self.sum), *([self.sum.args[0]] if writes_its_sum(self.sum) else [])]
        nodes += [self.norm.args[0]] if self.needs_private_input else []
        return [n for n in nodes if isinstance(n, fx.Node) and n.op == "call_module" and n is not self.norm]

    def replace_by(self, new: fx.Node) -> None:
        """Replace the pattern with a node, which may be the batch normalization's own node."""
        self.end.replace_all_uses_with(new)
        gone = {node for node in (self.norm, self.sum, self.activation, *self.passed) if node not in (None, new)}
        while gone:
            for node in [node for node in gone if not node.users]:
                node.graph.erase_node(node)
                gone.remove(node)


def normalize_and_add(
    norm: Callable[..., Tensor], x: Tensor, residual: Tensor, activation: str | Activation, first: bool, in_place: bool
) -> Tensor:
    """Return g(BN(x) + residual), in one fused call if the residual has the dtype, shape and strides of ``x``.

    g is the activation. ``first`` is True if BN(x) is the first summand. ``in_place`` is True if the user's code
    overwrites the first summand with the sum.
    """
    if residual.dtype is x.dtype and residual.shape == x.shape and residual.stride() == x.stride():
        return norm(x, residual, activation=activation)
    y = norm(x)
    a, b = (y, residual) if first else (residual, y)
    g = Activation(activation) if isinstance(activation, str) else activation
    return g(a.add_(b) if in_place else a + b)


def exactly(values: Any, count: int) -> Any:
    """Return ``values`` if there are ``count`` of them; otherwise, raise the ValueError that unpacking would raise."""
    if len(values) > count:
        raise ValueError(f"too many values to unpack (expected {count})")
    if len(values) < count:
        raise ValueError(f"not enough values to unpack (expected {count}, got {len(values)})")
    return values


def fuse_modules_(graph: fx.Graph, matches: list[Match]) -> list[Fusion]:
    """Replace each pattern in a graph with a single call, in place, and return what was fused."""
    for match in matches:
        kind: str | Activation = match.kind if match.kind.name == "leaky_relu" else match.kind.name
        new = match.norm
        if match.sum is None:
            new.kwargs = {"activation": kind}
        else:
            with graph.inserting_before(match.sum):
                norm = graph.get_attr(str(match.norm.target))
                order = (match.summand == 0, bool(writes_its_sum(match.sum)))
                new = graph.call_function(normalize_and_add, (norm, match.norm.args[0], match.residual, kind, *order))
        match.replace_by(new)
    return [Fusion(str(match.norm.target), match.kind, match.sum is not None) for match in matches]


class Matcher:
    """Find the patterns in a graph that can be fused.

    Args:
        root: the module that was traced; paths of modules in the graph are relative to this module.
        graph: the graph.
        is_norm: returns whether a node is a batch normalization that supports fusion. The first argument of such a node
            must be BN's input.
        fits: returns whether a residual can be fused into a batch normalization. By default, every residual fits, and
            the fused call checks the residual each time it runs.
        depth: returns how many levels of child modules the trace entered to reach a batch normalization. If both
            summands are batch normalizations, the summand with the smaller depth is usually fused.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: fx.Graph,
        is_norm: Callable[[fx.Node], bool],
        *,
        fits: Callable[[fx.Node, fx.Node], bool] = lambda norm, residual: True,
        depth: Callable[[fx.Node], int] = lambda norm: 0,
    ) -> None:
        self.graph = graph
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._is_norm = is_norm
        self._fits = fits
        self._depth = depth
        self._order = {node: i for i, node in enumerate(graph.nodes)}

    def matches(self) -> list[Match]:
        """Return the patterns; each batch normalization is in at most one pattern."""
        found: dict[fx.Node, Match] = {}
        for node in self.graph.nodes:
            if writes_its_sum(node) is not None:
                match = self._match_sum(node)
                if match is not None:
                    found[match.norm] = match
        for node in self.graph.nodes:
            if self._is_norm(node) and node not in found:
                user, kind, passed = self._activation_after(node)
                if user is not None:
                    found[node] = Match(node, None, 0, user, kind, passed)
        return list(found.values())

    def ends_in_norm(self) -> bool:
        """Return whether the graph returns the output of a batch normalization, and nothing else reads that output.

        There may be identities between the batch normalization and the graph's output.
        """
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        node = output.args[0]
        while isinstance(node, fx.Node) and len(node.users) == 1:
            if self._is_norm(node):
                return True
            node = self._handed_on(node)
        return False

    def returns_new_tensor(self) -> bool:
        """Return whether the graph returns a new tensor that nothing else reads."""
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        node = output.args[0]
        return isinstance(node, fx.Node) and len(node.users) == 1 and self._is_new(node)

    def is_activation(self) -> bool:
        """Return whether the graph takes one tensor and only applies an activation that can be fused."""
        given = [node for node in self.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        return len(given) == 1 and output.args[0] is self._activation_after(given[0])[0]

    def _match_sum(self, node: fx.Node) -> Match | None:
        candidates = []
        for mine in (0, 1):
            norm, passed = self._lead_back(node.args[mine])
            if norm is not None:
                needs_private_input = self._moves_past_a_write(norm, node, passed)
                candidates.append((needs_private_input, self._depth(norm), -self._order[norm], norm, passed, mine))
        # Fusing moves BN to the sum, past the calls between them. If each summand comes from a BN, prefer the BN that
        # moves past no call that may write to its input. Next, prefer the smaller depth, so that fewer children are
        # traced into. If the depths are equal, prefer the later BN, which moves past fewer calls.
        for needs_private_input, _, _, norm, passed, mine in sorted(candidates, key=lambda c: c[:3]):
            residual = node.args[1 - mine]
            assert isinstance(residual, fx.Node)
            if not self._fits(norm, residual):
                continue
            # If the sum is written into the residual, the residual must be a new tensor that nothing else reads,
            # because the fused call does not overwrite the residual.
            if writes_its_sum(node) and mine and not (self._is_fresh(residual) and _only_user(residual) is node):
                continue
            x = norm.args[0]
            if needs_private_input and not (isinstance(x, fx.Node) and self._is_new(x) and _only_user(x) is norm):
                continue
            if self._cannot_move(norm, node):
                continue
            user, kind, after = self._activation_after(node)
            if kind.name not in ("identity", *TWO_SLOPES) and self._is_written_after(node, residual):
                # For this activation, the fused call would save the residual for its backward pass.
                user, kind, after = None, Activation(), ()
            return Match(norm, node, mine, user, kind, (*passed, *after), needs_private_input)
        return None

    def _is_written_after(self, node: fx.Node, x: fx.Node) -> bool:
        later = (n for n in self.graph.nodes if self._order[n] > self._order[node] and self._may_write(n))
        owner = self._owner(x)
        return any(self._owner(given) is owner for n in later for given in n.all_input_nodes)

    def _owner(self, node: fx.Node) -> fx.Node:
        """Return the node that created the memory of ``node``, which may be a view of that node's tensor."""
        while True:
            same: object = self._same_tensor(node)
            views = node.op in ("call_function", "call_method") and not self._is_new(node)
            if same is None and views and node.target not in {*SUMS, *SUM_METHODS, *FUNCTIONS, *METHODS}:
                same = node.args[0] if node.args else None
            if not isinstance(same, fx.Node):
                return node
            node = same

    def _activation_after(self, node: fx.Node) -> tuple[fx.Node | None, Activation, tuple[fx.Node, ...]]:
        """Find the activation after a node, if nothing else reads the node's value.

        Return the activation's last node, its kind, and the nodes between ``node`` and the last node. If there is no
        activation, return None, the identity activation and ().
        """
        last, passed = self._follow(node)
        user = _only_user(last)
        kind = self._activation(user)
        if kind is None:
            user, kind, steps = self._steps_after(last)
            passed += steps
        if user is None or kind is None or any(map(_switches_a_mode, _between(node, user))):
            return None, Activation(), ()
        return user, kind, passed

    def _steps_after(self, x: fx.Node) -> tuple[fx.Node | None, Activation | None, tuple[fx.Node, ...]]:
        """Find an activation that is computed in steps, such as x * sigmoid(x).

        Return its last node, its kind and its other nodes. If there is no such activation, return None, None and ().
        """
        for first in x.users:
            steps = [first]
            while len(steps) < 5:
                name = FORMULAS.get(self._formula(steps[-1], x, steps))
                if name is not None and all(user in steps for user in x.users):
                    return steps[-1], Activation(name), tuple(steps[:-1])
                user = _only_user(steps[-1])
                if user is None:
                    break
                steps.append(user)
        return None, None, ()

    def _formula(self, node: Any, x: fx.Node, steps: list[fx.Node]) -> str:
        """Return a node's value as a formula of ``x`` and numbers, with sorted summands and factors.

        "?" stands for any other value.
        """
        if node is x:
            return "x"
        if isinstance(node, int | float):
            return f"{node:g}"
        if node not in steps:
            return "?"
        sign = SIGNS.get(node.target) if node.op != "call_module" else None
        if sign is not None and len(node.args) == 2 and not node.kwargs:
            terms = [self._formula(a, x, steps) for a in node.args]
            return f"({sign.join(terms if sign == '/' else sorted(terms))})"
        kind = self._activation(node)
        return "?" if kind is None else f"{kind.name}({self._formula(node.args[0], x, steps)})"

    def _module(self, node: fx.Node | None) -> nn.Module | None:
        return self._modules[str(node.target)] if node is not None and node.op == "call_module" else None

    def _handed_on(self, node: fx.Node) -> fx.Node | None:
        """Return the node of x if ``node`` applies an identity module to x or computes x + 0; return None otherwise."""
        first, *others = node.args or (None,)
        if isinstance(first, fx.Node) and not others and not node.kwargs and is_plain_identity(self._module(node)):
            return first
        values = [a for a in node.args if isinstance(a, fx.Node)]
        zeros = [a for a in node.args if type(a) in (int, float) and a == 0]
        is_sum = _sums(node.op).get(node.target) is not None and not node.kwargs
        return values[0] if is_sum and len(node.args) == 2 and len(values) == len(zeros) == 1 else None

    def _follow(self, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """Follow a node's value through identities; return the last node and the identities on the way."""
        passed = []
        while (user := _only_user(node)) is not None and self._handed_on(user) is node:
            passed.append(user)
            node = user
        return node, tuple(passed)

    def _lead_back(self, node: Any) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
        """Follow a summand back through identities to a batch normalization whose output nothing else uses.

        Return the batch normalization (None if there is none) and the identities.
        """
        passed: list[fx.Node] = []
        while isinstance(node, fx.Node) and [_uses_of(user, node) for user in node.users] == [1]:
            if self._is_norm(node):
                return node, tuple(passed)
            passed.append(node)
            node = self._handed_on(node)
        return None, ()

    def _activation(self, node: fx.Node | None) -> Activation | None:
        if node is None or not node.args or _uses_of(node, node.args[0]) != 1:
            return None
        if node.op == "call_module":
            module = self._module(node)
            if module is None or has_hooks(module) or "forward" in vars(module) or len(node.args) > 1 or node.kwargs:
                return None
            found = from_module(module)
            return found if found is not None and found.name != "identity" else None
        if node.op not in ("call_function", "call_method"):
            return None
        name = FUNCTIONS.get(node.target) if node.op == "call_function" else METHODS.get(str(node.target))
        if name is None:
            return None
        rest = {**dict(zip(_PARAMETERS.get(name, ("inplace",)), node.args[1:], strict=False)), **node.kwargs}
        if name == "hardtanh":  # nn.ReLU6 calls F.hardtanh with the limits 0 and 6
            name = "relu6" if (rest.pop("min_val", -1), rest.pop("max_val", 1)) == (0, 6) else ""
        slope = rest.pop("negative_slope", 0.01)
        rest.pop("inplace", None)
        if rest or name not in NAMES or not isinstance(slope, float | int):
            return None
        return Activation(name, float(slope)) if name == "leaky_relu" else Activation(name)

    def _is_fresh(self, node: fx.Node) -> bool:
        """Return whether a node creates a new tensor, or passes on a new tensor that nothing else uses."""
        same = self._same_tensor(node)
        if same is not None:
            return _only_user(same) is node and self._is_fresh(same)
        return self._is_new(node)

    def _is_new(self, node: fx.Node) -> bool:
        module = self._module(node)
        if module is not None:
            return _makes_a_new_tensor(module)
        new = node.op == "call_function" and node.target in NEW and "out" not in node.kwargs
        return new and any(isinstance(a, fx.Node) for a in node.args)

    def _same_tensor(self, node: fx.Node) -> fx.Node | None:
        """Return the node of x if ``node`` computes x += y or passes x on unchanged; return None for other nodes."""
        same = node.args[0] if writes_its_sum(node) else self._handed_on(node)
        return same if isinstance(same, fx.Node) else None

    def _is_apart(self, written: Any, x: Any) -> bool:
        """Return whether a written tensor was created after ``x``, so that it cannot share memory with ``x``."""
        root = self._root(written)
        return self._is_new(root) and self._order[root] > self._order[x]

    def _root(self, node: fx.Node) -> fx.Node:
        """Return the node that created the tensor that ``node`` returns."""
        while (same := self._same_tensor(node)) is not None:
            node = same
        return node

    def origins(self, match: Match) -> Iterator[fx.Node]:
        """Yield the nodes that a match relies on.

        These are BN, BN's input if ``needs_private_input``, and the nodes that created the tensors that in-place sums
        overwrite. Only the match's own sum and the sums between BN and that sum are considered.
        """
        yield match.norm
        if match.needs_private_input:
            yield match.norm.args[0]  # type: ignore[misc]
        if match.sum is not None:
            for node in (*_between(match.norm, match.sum), match.sum):
                if writes_its_sum(node):
                    yield self._root(node)

    def _moves_past_a_write(self, norm: fx.Node, end: fx.Node, passed: tuple[fx.Node, ...]) -> bool:
        """Return whether a call between BN and the sum may write to a tensor that may share memory with BN's input."""
        for node in _between(norm, end):
            apart = writes_its_sum(node) and self._is_apart(node.args[0], norm.args[0])
            if node not in passed and not apart and self._may_write(node):
                return True
        return False

    def _cannot_move(self, norm: fx.Node, end: fx.Node) -> bool:
        """Return whether BN must not move to the sum: another call may use BN or its tensors, or switch a mode."""
        layer = self._module(norm)
        between = [(node, self._module(node)) for node in _between(norm, end)]
        if any(_switches_a_mode(node) or (m is not None and layer in modules_within(m)) for node, m in between):
            return True
        if layer is None:
            return False
        own = {id(t) for t in (*layer.parameters(), *layer.buffers())}
        shared = (t for _, m in between if m is not None for t in (*m.parameters(), *m.buffers()))
        read = (self._held(node) for node in self.graph.nodes if node.op == "get_attr")
        return any(id(t) in own for t in (*shared, *read))

    def _held(self, node: fx.Node) -> Any:
        path, _, name = str(node.target).rpartition(".")
        return getattr(self._modules[path], name, None)

    def _may_write(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._module(node)
            return module is None or may_write_its_input(module)
        if node.op == "call_method":
            name = str(node.target)
            if _is_count(node.args[0]):
                return False  # the call writes to a counter, such as num_batches_tracked, not to BN's input
            return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
        if node.op != "call_function" or node.target is exactly or (node.target in NEW and not node.kwargs):
            return False
        name = getattr(node.target, "__name__", "_")
        home = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
        known = home in ("torch", "_operator", "builtins")
        in_place = bool(node.kwargs.get("inplace")) or any(a is True for a in node.args) or "out" in node.kwargs
        known = known and not isinstance(node.target, OperatorBase | OpOverloadPacket)
        return not known or node.target in IN_PLACE or name.endswith("_") or name == "setitem" or in_place


_PARAMETERS = {
    "leaky_relu": ("negative_slope", "inplace"),
    "hardtanh": ("min_val", "max_val", "inplace"),
    "sigmoid": (),
    "tanh": (),
}


def writes_its_sum(node: fx.Node) -> bool | None:
    """Return whether a sum overwrites its first summand, or None if ``node`` is not a sum of two different nodes."""
    table = _sums(node.op)
    if node.target not in table or len(node.args) != 2 or node.kwargs or node.args[0] is node.args[1]:
        return None
    return table[node.target] if all(isinstance(a, fx.Node) for a in node.args) else None


def _sums(op: str) -> dict[Any, bool]:
    tables: dict[str, dict[Any, bool]] = {"call_function": SUMS, "call_method": SUM_METHODS}
    return tables.get(op, {})


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _switches_a_mode(node: fx.Node) -> bool:
    """Return whether a node may switch the gradient mode or autocast, or enter or leave a functorch transform.

    The names of functions that do so, such as ``_set_grad_enabled``, start with an underscore.
    """
    return node.op == "call_function" and getattr(node.target, "__name__", "_").startswith("_")


def _is_count(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and not value.is_floating_point()


def _only_user(node: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" and _uses_of(users[0], node) == 1 else None


def _uses_of(user: fx.Node, node: Any) -> int:
    """Return how often ``node`` is an argument of ``user``, including nested arguments."""
    seen: list[fx.Node] = []

    def see(argument: fx.Node) -> fx.Node:
        seen.append(argument)
        return argument

    fx.node.map_arg((user.args, user.kwargs), see)
    return seen.count(node)


def _makes_a_new_tensor(module: nn.Module) -> bool:
    if runs_in_order(module):
        return len(module) > 0 and _makes_a_new_tensor(list(module.children())[-1])  # type: ignore[arg-type]
    return isinstance(module, TorchBatchNorm) or is_affine(module)


def may_write_its_input(module: nn.Module) -> bool:
    """Return whether a module may write to its input; False only for modules that are known not to write."""
    if isinstance(module, nn.Sequential) and runs_in_order(module):
        for child in module:
            if may_write_its_input(child) or _makes_a_new_tensor(child):
                return may_write_its_input(child)
        return False
    known = isinstance(module, TorchBatchNorm) or (keeps_torch_forward(module) and not list(module.children()))
    return not known or is_in_place(module)
