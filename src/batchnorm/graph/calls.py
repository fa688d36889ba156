"""Represent a traced forward pass: its calls, and the values that they read and return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class Value:
    """The contents of a tensor; an in-place write to the tensor starts a new Value."""

    shape: tuple[int, ...]
    producer: TracedCall | None = None
    consumers: list[TracedCall] = field(default_factory=list)
    handed_on: list[TracedCall] = field(default_factory=list)
    """The calls that returned this very tensor, as Dropout does in evaluation mode. They are not in ``consumers``."""
    escapes: bool = False
    """Whether code outside the recorded calls can read the value. It can if the value is in the network's output, if a
    hook of a non-leaf module received it, or if something still refers to its tensor after the forward pass."""

    @property
    def sole_consumer(self) -> TracedCall | None:
        """The only reader of the value, or None if it has no reader or several readers, or if it escapes."""
        return self.consumers[0] if len(self.consumers) == 1 and not self.escapes else None


@dataclass(eq=False)
class TracedCall:
    """One call of a module or function; a module that is called twice has two TracedCalls.

    ``path`` is the path of the called module or, for a function, of the module whose code calls the function.
    ``target`` is the called function, or the called module in the traced copy of the network. In ``args`` and
    ``kwargs``, each tensor is replaced with its Value.
    """

    name: str
    path: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None = None
    """The called module in the user's own network, not in the copy; None for a function."""
    caller: str | None = None
    """The path of the module whose forward made the call; None if the call was not made inside a module's forward."""
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    writes: bool = False
    """Whether the call wrote into one of its inputs."""
    passes: bool = False
    """Whether the call returned its input unchanged: for example, Identity, or Dropout in evaluation."""

    def argument(self, position: int, name: str) -> Any:
        """Return an argument passed by position or by name, or None if it was not passed."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    def replay(self, x: Tensor) -> Any:
        """Repeat the call with ``x`` instead of its only input tensor."""
        (value,) = self.inputs

        def put(tree: Any) -> Any:
            if tree is value:
                return x
            if isinstance(tree, tuple | list):
                return type(tree)(put(v) for v in tree)
            return tree

        return self.target(*put(self.args), **{k: put(v) for k, v in self.kwargs.items()})

    def __str__(self) -> str:
        where = f"'{self.path}'" if self.path else "the network"
        return f"{where} ({self.name})" if self.module is not None else f"{self.name} in {where}"


class Graph:
    """Hold the calls of one forward pass, in order."""

    def __init__(self, calls: list[TracedCall], values: dict[int, Value]) -> None:
        self.calls = calls
        self._values = values
        self._by_module: dict[nn.Module, list[TracedCall]] = defaultdict(list)
        for call in calls:
            if call.module is not None:
                self._by_module[call.module].append(call)

    def calls_of(self, module: nn.Module) -> list[TracedCall]:
        """Return the calls of a module, in order."""
        return self._by_module.get(module, [])

    def has_extra_inputs(self, module: nn.Module) -> bool:
        """Return whether any call of a module takes more than one tensor, as BN with a residual or a mask does."""
        return any(len(call.inputs) > 1 for call in self.calls_of(module))

    def functions(self, *names: str) -> list[TracedCall]:
        """Return the calls of functions with one of these names."""
        return [call for call in self.calls if call.module is None and call.name in names]

    def value_of(self, parameter: Tensor) -> Value | None:
        """Return the Value of a parameter or buffer, or None if no recorded call took it as an argument."""
        return self._values.get(id(parameter))

    def readers_of(self, parameter: Tensor) -> list[TracedCall]:
        """Return the recorded calls that take the given parameter or buffer as an argument.

        A leaf module's own use of its parameters, such as a Linear's use of its weight, is not recorded.
        """
        value = self.value_of(parameter)
        return value.consumers if value is not None else []

    def follows_input(self, value: Value) -> bool:
        """Return whether a value depends on the input or on another tensor that existed before the forward pass.

        Parameters and buffers do not count.
        """
        held = set(self._values.values())
        waiting, seen = [value], set[Value]()
        while waiting:
            value = waiting.pop()
            if value in seen or value in held:
                continue
            seen.add(value)
            if value.producer is None:
                return True
            waiting.extend(value.producer.inputs)
        return False
