"""Find what refers to each module of a network, and which modules call their children in order."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .kinds import has_hooks, keeps_torch_forward

OPAQUE = (Tensor, type, ModuleType, str, bytes, int, float, complex)


class Holder(NamedTuple):
    """A module that refers to another module: as its child ``key`` or, if ``key`` is None, in another attribute."""

    module: nn.Module
    key: str | None


def holders(net: nn.Module) -> dict[nn.Module, list[Holder]]:
    """Return, for each module, the modules that refer to it as a child or in an attribute.

    >>> net = nn.Sequential(nn.ReLU(), nn.Tanh())
    >>> net.favorites = [net[1]]
    >>> [holder.key for holder in holders(net)[net[1]]]
    ['1', None]
    """
    found: dict[nn.Module, list[Holder]] = defaultdict(list)
    for parent in net.modules():
        for key, child in parent._modules.items():
            if child is not None:
                found[child].append(Holder(parent, key))
        seen: set[int] = set()
        for name, value in vars(parent).items():
            if name != "_modules":
                for module in _modules_in(value, seen):
                    found[module].append(Holder(parent, None))
    return found


def modules_within(module: nn.Module) -> set[nn.Module]:
    """Return a module, its submodules, and the modules that their attributes refer to."""
    seen: set[int] = set()
    found = set(module.modules())
    return found.union(*(_modules_in(vars(m), seen) for m in found))


def _modules_in(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    """Yield the modules that are reachable from a Python object, but do not search inside these modules."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, nn.Module):
            yield value
        elif value is not None and not isinstance(value, OPAQUE) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # the closure's variable has no value yet
    else:
        yield getattr(value, "__dict__", None)


def runs_in_order(module: nn.Module) -> bool:
    """Return whether the module is a Sequential with torch's own forward, which runs its children in order.

    The result is False for a subclass that defines properties, or methods other than ``__init__``.

    >>> runs_in_order(nn.Sequential()), runs_in_order(nn.ModuleList())
    (True, False)
    """
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    own = [vars(kind) for kind in type(module).__mro__ if kind not in (*nn.Sequential.__mro__,)]
    own = [names for names in own if "_spied" not in names]  # skip subclasses made by symbolic.Spies
    return not any(callable(v) or isinstance(v, property) for names in own for k, v in names.items() if k != "__init__")


def returns_a_tensor(module: nn.Module) -> bool:
    """Return whether a module is known to return a single tensor.

    >>> returns_a_tensor(nn.Sequential(nn.ReLU())), returns_a_tensor(nn.LSTM(2, 2))
    (True, False)
    """
    if runs_in_order(module):
        children = list(module.children())
        return bool(children) and returns_a_tensor(children[-1])
    other = isinstance(module, nn.RNNBase | nn.LSTMCell | nn.Identity) or hasattr(module, "return_indices")
    known = keeps_torch_forward(module) and not other and not list(module.children())
    return known or isinstance(module, TorchBatchNorm)


def runs_its_graph(module: nn.Module) -> bool:
    """Return whether the module runs a torch.fx graph, which has no branches."""
    return isinstance(module, fx.GraphModule) and "forward" not in vars(module)


def next_in_order(holder: Holder) -> nn.Module | None:
    """Return the module that a Sequential calls after its child ``holder.key``, skipping identities.

    Return None if there is no such module, or if the holder does not run its children in order.
    """
    if holder.key is None or not runs_in_order(holder.module):
        return None
    keys = list(holder.module._modules)
    for key in keys[keys.index(holder.key) + 1 :]:
        module = holder.module._modules[key]
        if module is None or not is_plain_identity(module):
            return module
    return None


def is_plain_identity(module: nn.Module | None) -> bool:
    """Return whether the module is an nn.Identity without hooks or a patched forward."""
    return type(module) is nn.Identity and "forward" not in vars(module) and not has_hooks(module)
