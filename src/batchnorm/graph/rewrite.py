"""Rewrite a module's forward to fuse BN with the operations after it: a sum, an activation, or both.

:mod:`batchnorm.graph.conditions` writes the conditions under which the new forward is valid, and
:mod:`batchnorm.graph.generated` generates the class with this forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import Parameter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.utils import parametrize

from .. import network_call
from ..network_copy import private_copy, run_copy
from .conditions import ConditionBuilder, IsNorm
from .generated import (
    Unwatchable,
    Variant,
    generated_class,
    is_rewritten,
    original_kind,
    pattern_of,
    recording_variants,
)
from .kinds import despite_global_hooks, has_hooks, keeps_torch_forward, signature_of
from .patterns import Fusion, Match, Matcher, fuse_modules_, may_write_its_input
from .symbolic import Spies, Traced, Untraceable, trace_forward


class Rewritten(NamedTuple):
    """For each mode (True is training), what was fused in a module's forward, or why the forward was not rewritten."""

    fusions: dict[bool, tuple[Fusion, ...]]
    reasons: dict[bool, str]


def rewrite_(net: nn.Module, calls: dict[bool, dict[str, Any]], is_norm: IsNorm) -> dict[str, Rewritten]:
    """Rewrite the forwards of a network's modules, in place, and return the results by path.

    Args:
        net: the network; call :func:`restore_` first if the network has rewritten modules.
        calls: for each mode (True is training), the result of :func:`arguments_in`.
        is_norm: returns whether a module is a batch normalization that currently accepts ``residual=`` and
            ``activation=``. Rewritten modules call this function before every forward. If the function cannot be
            imported by name, pickling a rewritten module drops the fusions.
    """
    found: dict[str, dict[bool, Variant]] = {}
    done: dict[str, Rewritten] = {}
    for training, patterns in calls.items():
        worker = _Worker(net, training, patterns, is_norm)
        with_code = [(path, module) for path, module in net.named_modules() if _has_code(module)]
        with_norms = [(path, module) for path, module in with_code if any(map(is_norm, module.modules()))]
        for path, module in reversed([pair for pair in with_code if pair not in with_norms]):
            worker.note_openable(path, module)
        for path, module in reversed(with_norms):
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
    """Drop from ``done`` the fusions that do not run on the example, and restore modules that have no fusion left."""
    for training in {mode for entry in done.values() for mode in entry.fusions}:
        for path in unused(net, example, forward, training):
            if training in done[path].fusions:
                del done[path].fusions[training]
                done[path].reasons[training] = "the conditions of its rewritten code do not hold on the example"
    for path, entry in done.items():
        module = net.get_submodule(path)
        if not entry.fusions and is_rewritten(module):
            module.__class__ = original_kind(module)


def unused(net: nn.Module, example: Any, forward: network_call.Forward | None, training: bool) -> list[str]:
    """Return the paths of rewritten modules that run only their original code on the example in the given mode."""
    if not any(map(is_rewritten, net.modules())):
        return []
    twin = private_copy(net).train(training)
    # Ignore errors, because `restore_wrong_` finds the modules that raise them.
    with suppress(Exception), despite_global_hooks(), recording_variants(twin) as ran:
        run_copy(net, twin, example, forward)
    return [path for path, module in twin.named_modules() if not ran.get(module, True)]


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
    """Run a copy of a network and return, by module path, the patterns of the arguments in each module's first call.

    :func:`~batchnorm.graph.generated.pattern_of` describes patterns. For a module whose arguments have no pattern, the
    value is a string with the reason.
    """
    twin = private_copy(net).train(training)
    found: dict[str, dict[str, Any] | str] = {}

    def note(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            bound = signature_of(type(module).forward).bind(module, *args, **kwargs)
            bound.apply_defaults()
            (_, *given) = bound.arguments.items()
            seen: dict[int, torch.Tensor] = {}
            found.setdefault(path, {name: pattern_of(value, seen) for name, value in given})
        except Unwatchable as error:
            found.setdefault(path, f"it is called with {error}, and rewritten code cannot detect whether that changes")
        except TypeError as error:
            found.setdefault(path, str(error))

    for path, module in twin.named_modules():
        if _has_code(module):
            hook = lambda m, args, kwargs, path=path: note(path, m, args, kwargs)  # noqa: E731
            module.register_forward_pre_hook(hook, with_kwargs=True)
    run_copy(net, twin, example, forward)
    return found


def _has_code(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule | fx.GraphModule | TorchBatchNorm) or "forward" in vars(module):
        return False
    if parametrize.is_parametrized(module):
        return False  # remove_parametrizations deletes a property of the module's class, which must not be a subclass
    own = bool(module._modules) or not keeps_torch_forward(module)
    forward = type(module).forward
    if not (own and isinstance(forward, FunctionType)):
        return False
    first = next(iter(signature_of(forward).parameters.values()), None)
    return first is not None and first.kind is not Parameter.VAR_POSITIONAL


class _Worker:
    """Trace a network's modules in one mode, and find what can be fused.

    The trace of a module can open a child, that is, include the calls that the child's forward makes. Whether a child
    may be opened is known only after the child has been traced, so children must be processed before their parents.
    """

    def __init__(self, net: nn.Module, training: bool, calls: dict[str, Any], is_norm: IsNorm) -> None:
        self.net, self.calls, self.is_norm = net, calls, is_norm
        self.twin = private_copy(net).train(training)
        self.spies = Spies(self.twin)
        self.openable: set[nn.Module] = set()

    def variant(self, path: str, module: nn.Module) -> Variant | None:
        """Return the rewritten forward of a module for this mode, or None if there is nothing to fuse."""
        patterns = self.calls.get(path, "in one of the modes, training or evaluation, it is not called on the example")
        if isinstance(patterns, str):
            raise Untraceable(patterns)
        opened = self._openable_in(path)
        while True:
            try:
                return self._variant(path, module, patterns, opened)
            except Untraceable as error:
                if not opened:
                    raise
                # Try again without tracing into the child that failed. If that child is unknown, trace into no child.
                inside = f"{path}.{error.inside}".lstrip(".")
                opened = opened - {inside} if inside in opened else set()

    def _variant(self, path: str, module: nn.Module, patterns: dict[str, Any], opened: set[str]) -> Variant | None:
        while True:
            with torch.enable_grad():
                traced = self._trace(path, patterns, opened)
            depth = lambda node, traced=traced: len(traced.stacks[node.name])  # noqa: E731
            matcher = Matcher(module, traced.graph, partial(self._is_norm, module), depth=depth)
            matches = matcher.matches()
            if matcher.ends_in_norm() and not has_hooks(module):
                self.openable.add(module)
            # Trace again until the trace opens exactly the children that the matches need (see `_crossed`).
            needed = {p for match in matches for p in _crossed(module, matcher, traced, match)}
            needed = {f"{path}.{p}".lstrip(".") for p in needed}
            if needed == {f"{path}.{p}".lstrip(".") for p in traced.opened}:
                break
            opened = needed
        if not matches:
            return None
        for inference, dtype in ((True, torch.bfloat16), (False, torch.float16)):
            with torch.inference_mode(inference), _autocast_everywhere(dtype):
                if str(self._trace(path, patterns, opened).graph) != str(traced.graph):
                    raise Untraceable("its code depends on the gradient mode or on autocast")
        builder = ConditionBuilder(module, self.twin.get_submodule(path), traced)
        builder.expect_arguments(patterns)
        builder.expect_reads()
        builder.expect_leaves()
        builder.expect_shared()
        for match in matches:
            builder.expect_match(match, self.is_norm)
        return builder.variant(tuple(fuse_modules_(traced.graph, matches)))

    def note_openable(self, path: str, module: nn.Module) -> None:
        """Allow tracing into a module without batch normalization if it is an activation or returns a new tensor."""
        patterns = self.calls.get(path, "")
        if isinstance(patterns, str) or has_hooks(module):
            return
        with suppress(Untraceable):
            traced = self._trace(path, patterns, self._openable_in(path))
            matcher = Matcher(module, traced.graph, lambda node: False)
            if matcher.returns_new_tensor() or matcher.is_activation():
                self.openable.add(module)

    def _openable_in(self, path: str) -> set[str]:
        inside = self.net.get_submodule(path).named_modules(prefix=path)
        return {p for p, module in inside if module in self.openable}

    def _is_norm(self, module: nn.Module, node: fx.Node) -> bool:
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        return self.is_norm(module.get_submodule(str(node.target)))

    def _trace(self, path: str, patterns: dict[str, Any], opened: set[str]) -> Traced:
        children = [self.twin.get_submodule(p) for p in opened]
        return trace_forward(self.twin.get_submodule(path), self.spies, patterns, children)


@contextmanager
def _autocast_everywhere(dtype: torch.dtype) -> Iterator[None]:
    """Make ``torch.is_autocast_enabled`` return True for the CPU and for CUDA, even on a machine without a GPU."""
    before = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
    for device in before:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        for device, (enabled, old) in before.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, old)


def _crossed(module: nn.Module, matcher: Matcher, traced: Traced, match: Match) -> Iterator[str]:
    """Yield the paths of the children that must be traced into for a match.

    These are the children whose code the match relies on, and also any child that is called between BN and the sum and
    may write to its own input.
    """
    norm, end = (traced.stacks[node.name] for node in (match.norm, match.end))
    outer = {p for p in norm if p in end}
    needed = (*matcher.origins(match), match.end, *match.passed)
    yield from (p for node in needed for p in traced.stacks[node.name] if p not in outer)
    node = match.norm
    while match.sum is not None and node is not match.sum:
        passed = (p for p in traced.stacks[node.name] if p not in outer)
        yield from (p for p in passed if may_write_its_input(module.get_submodule(p)))
        node = node.next
