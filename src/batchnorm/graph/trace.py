"""Record the data flow of a real forward pass.

Hooks record module calls, and a ``TorchFunctionMode`` records functions and operators, so the user's Python runs
unchanged. Tensors are tracked by identity. After a call that writes to a tensor in place, the tensor and each of its
views get a new :class:`~batchnorm.graph.calls.Value`.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import network_call
from ..network_copy import SharedWithOriginalError, isolated, private_copy
from .calls import Graph, TracedCall, Value
from .kinds import has_hooks, is_leaf

# Functions that return a tensor's elements, or a result that depends on them, to Python code.
READS = frozenset(
    "item tolist numpy __bool__ __float__ __int__ __index__ __array__ __contains__ is_nonzero equal".split()  # noqa: SIM905
)


def trace(
    net: nn.Module, example: Any, forward: network_call.Forward | None = None, *, training: bool | None = None
) -> Graph:
    """Run a copy of the network on an example and return the data flow between the original network's modules.

    Args:
        net: any network.
        example: a batch; :mod:`batchnorm.network_call` describes how a network is called on a batch. The batch is
            copied, so in-place code cannot change it.
        forward: function that calls the network on a batch, as ``forward(net, batch)``; needed, for example, if the
            network takes several positional inputs.
        training: the mode to run in; None means the network's current mode.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> linear, relu = trace(net, torch.zeros(1, 2)).calls
    >>> linear.outputs[0].sole_consumer is relu
    True
    """
    twin = private_copy(net)
    originals: dict[nn.Module, nn.Module] = dict(zip(twin.modules(), net.modules(), strict=True))
    tensors = dict(zip(map(id, _held(twin)), map(id, _held(net)), strict=True))
    if training is not None:
        twin.train(training)
    example = network_call.copy_for(net, example)
    with isolated(net, twin) as refuse:
        recorder = _Recorder(twin, refuse)
        with recorder.watch(twin), recorder, _Resurface():  # type: ignore[no-untyped-call]
            out = _call(twin, example, forward)
    del example
    recorder.mark_escaped(out)
    for call in recorder.calls:
        call.module = originals.get(call.target) if isinstance(call.target, nn.Module) else None
    return Graph(recorder.calls, {tensors[k]: v for k, v in recorder.values.items() if k in tensors})


def trace_modes(
    net: nn.Module, example: Any, forward: network_call.Forward | None
) -> tuple[list[Graph], tuple[str, ...]]:
    """Trace the network in evaluation mode, and also in training mode if that works on the example.

    Return the graphs and, if training mode fails, a note for the report with the reason.

    Raises:
        SharedWithOriginalError: if the copy that is traced uses a part of the original network.
    """
    evaluation = trace(net, example, forward, training=False)
    try:
        return [evaluation, trace(net, example, forward, training=True)], ()
    except SharedWithOriginalError:
        raise
    except Exception as error:
        # For example, BN gets only one value per feature, SyncBatchNorm lacks a GPU, or the network needs targets.
        why = str(error).partition("\n")[0] or type(error).__name__
        return [evaluation], (f"only evaluation mode was traced, because training mode fails on this example: {why}",)


def _call(net: nn.Module, example: Any, forward: network_call.Forward | None) -> Any:
    try:
        return network_call.call(net, example, forward)
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError):
            raise
        shapes = ", ".join(str(tuple(t.shape)) for t in network_call.tensors_in(example))
        why = str(error).partition("\n")[0]
        raise type(error)(f"the network raised an error on the example of shape {shapes}: {why}") from error


def _held(net: nn.Module) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]


class _Resurface(TorchDispatchMode):
    """Call each operator from Python, so that ``_Recorder`` also sees operators that scripted functions call in C++."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    """Record calls. While ``_inside`` is not 0, calls are not recorded, because they are part of a recorded call."""

    def __init__(self, net: nn.Module, refuse: Callable[[Any], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self.calls: list[TracedCall] = []
        self.values: dict[int, Value] = {}
        # For each storage, the tensors that use it. These references keep the tensors alive, so that no id() is reused.
        self._aliases: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self._names = {m: name for name, m in net.named_modules()}
        self._hooked = {m for m in net.modules() if has_hooks(m)}
        self._scopes: list[str] = []
        self._open: list[tuple[TracedCall, list[tuple[Tensor, int]]]] = []
        self._inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for item in (*args, *kwargs.values()):
            for t in item if isinstance(item, tuple | list) else (item,):
                self._refuse(t)
        if self._inside:
            return func(*args, **kwargs)
        with self._quietly():
            before = self._start(_name_of(func), self._scopes[-1] if self._scopes else "", func, args, kwargs)
            out = func(*args, **kwargs)
            self._finish(*before, out)
        return out

    def mark_escaped(self, out: Any) -> None:
        """Set ``escapes`` on the values in the network's output, and on computed values whose tensors are still in use.

        If a tensor is still alive after this recorder drops its reference, something else refers to the tensor, such
        as a module, a global list or a closure.
        """
        shown = {id(t) for t in network_call.tensors_in(out)}
        kept = [(weakref.ref(t), self.values[id(t)]) for aliases in self._aliases.values() for t in aliases.values()]
        computed = [(ref, value) for ref, value in kept if value.producer is not None]
        self._aliases.clear()
        if any(t is not None and id(t) not in shown for t in (ref() for ref, _ in computed)):
            gc.collect()  # otherwise, unreachable tensors in reference cycles would seem to escape
        for ref, value in kept:
            t = ref()
            if t is not None and (value.producer is not None or id(t) in shown):
                value.escapes = True

    @contextmanager
    def watch(self, net: nn.Module) -> Iterator[None]:
        """Record the calls of all modules of a network through hooks.

        The hooks must not outlive the trace: ``TracedCall.replay`` calls the modules again after the traced tensors are
        gone, when their ids may belong to other tensors.
        """
        with ExitStack() as hooks:
            for module in net.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # scripted modules do not support hooks; the functions that they call are recorded instead
                hooks.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if is_leaf(module):
            if self._inside == 1:
                self._open.append(self._start(type(module).__name__, self._names[module], module, args, kwargs))
            return  # _leave decrements _inside
        self._inside -= 1
        if not self._inside:
            self._scopes.append(self._names[module])
            self._show_to_hooks(module, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if is_leaf(module):
            if self._inside == 1:
                self._finish(*self._open.pop(), out)
            self._inside -= 1
        elif not self._inside:
            self._scopes.pop()
            self._show_to_hooks(module, out)

    def _show_to_hooks(self, module: nn.Module, tree: Any) -> None:
        if module in self._hooked:
            with self._quietly():
                for t in network_call.tensors_in(tree):
                    self.value(t).escapes = True

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def value(self, t: Tensor) -> Value:
        return self.values.get(id(t)) or self._bind(t, None)

    def _bind(self, t: Tensor, producer: TracedCall | None) -> Value:
        value = self.values[id(t)] = Value(tuple(t.shape), producer)
        self._aliases[_storage(t)][id(t)] = t
        return value

    def _start(
        self, name: str, path: str, target: Any, args: Any, kwargs: Any
    ) -> tuple[TracedCall, list[tuple[Tensor, int]]]:
        replaced = (network_call.map_tensors(tree, self.value, _without_tensors) for tree in (args, kwargs))
        call = TracedCall(name, path, target, *replaced)
        call.caller = self._scopes[-1] if self._scopes else None
        given = network_call.tensors_in((args, kwargs))
        call.inputs = [self.value(t) for t in given]
        return call, [(t, _version(t)) for t in given]

    def _finish(self, call: TracedCall, before: list[tuple[Tensor, int]], out: Any) -> None:
        written = [t for t, version in before if _version(t) != version]
        for alias in (alias for t in written for alias in self._aliases[_storage(t)].values()):
            old = self.values[id(alias)]
            if old.producer is not call:
                if old not in call.inputs:
                    call.inputs.append(old)
                call.outputs.append(self._bind(alias, call))
        call.writes = bool(written)
        results = network_call.tensors_in(out)
        call.passes = bool(results) and not written and all(id(t) in self.values for t in results)
        call.outputs = list(
            dict.fromkeys([*(self.values.get(id(t)) or self._bind(t, call) for t in results), *call.outputs])
        )
        if results or written or call.name in READS:
            self.calls.append(call)
            for value in call.inputs:
                (value.handed_on if call.passes else value.consumers).append(call)


def _without_tensors(item: Any) -> Any:
    """Return an argument, or None if it contains tensors, because recording it would keep the tensors alive."""
    return None if network_call.tensors_in(item) else item


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":  # a property such as x.T
        name = func.__self__.__name__
    name = name.split(".")[0]  # drop the overload: relu.default becomes relu
    return name if name.startswith("__") else name.rstrip("_")


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)
