"""Check that a changed network computes what the original computes, up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import network_call
from .network_copy import (
    SharedWithOriginalError,
    isolated,
    plain_attributes,
    private_copy,
    relative,
    require_numbers,
    tolerance_for,
)

Make = Callable[[nn.Module, Any], nn.Module]

AMPLIFICATION = 20.0
"""The new network's errors are accepted up to this many times the error caused by rounding the original's weights."""
TRIALS = 3
"""The maximum number of times that the effect of rounding the weights is measured; once is usually enough."""
EXACT = 1e-6
"""The largest relative error accepted in float64 without measuring how much the network amplifies rounding."""
TINY = 1e-12
"""The relative change of float64 weights that simulates rounding; it is larger than float64's rounding errors."""


class DifferenceError(ValueError):
    """Raised if two networks compute different results; the message says how the results differ."""


def verify(
    old: nn.Module,
    new: nn.Module,
    example: Any,
    forward: network_call.Forward | None = None,
    *,
    what: str,
    advice: str = "",
    training: bool = False,
    same_weights: bool = False,
    make: Make | None = None,
    tolerance: float | None = None,
) -> float:
    """Return the relative error of a changed network on an example, or raise ValueError if the error is too large.

    A forward pass may also create or change buffers, and tensors in other attributes of modules. These tensors are
    compared like the outputs, but the returned error does not include the errors of buffers.

    If ``tolerance`` is None, the error is first compared with the error that rounding causes in a shallow network. Deep
    networks can amplify rounding, so if the error is larger but finite, the networks are compared again in float64. In
    float64, only the rounding of the new network's weights matters. There is no such rounding if ``same_weights`` is
    true, or if ``make`` can build the network with float64 weights. If the error in float64 is still too large, the
    function measures how much rounding can change the output: it changes the weights and buffers of a copy of the
    original by as much as rounding would. A network that does not run in float64 is compared in its own precision.

    Args:
        old, new, example: the original network, the changed network and a batch.
        forward: function that calls the network, as ``forward(net, batch)``; see :func:`batchnorm.network_call.call`.
        what: the name of the new network in error messages.
        advice: a sentence that says what to do about a difference. The error message ends with this sentence, unless
            the original's own results vary from run to run.
        training: whether to compare in training mode.
        same_weights: whether the new network has exactly the original's weights; if so, it has not rounded any.
        make: a function that makes the new network from an original and an example.
        tolerance: the largest relative error to accept; by default, the error that rounding can cause.

    Raises:
        ValueError: if the error is too large, if the outputs differ in structure, type or shape, if there is nothing
            to compare, if a network cannot be copied, or if a copy still uses a part of the original.
        TypeError: if a network is a compiled or data-parallel wrapper, or cannot be called on the example.
    """
    run = _CopyRunner(example, forward, training)
    was = run(old)
    require_numbers([*_numbers(was.output), *was.kept.values()])
    limit = tolerance_for(old) if tolerance is None else tolerance
    try:
        errors = _errors(run(new), was)
        worst = max(errors, key=lambda path: errors[path])
        rounded = tolerance is None and errors[worst] < inf
        if errors[worst] <= limit or (rounded and _is_rounding(old, new, run, same_weights, make, limit)):
            return max(error for path, error in errors.items() if path not in was.buffers)
        explained = "rounding explains" if tolerance is None else f"the tolerance of {tolerance:.0e}"
        raise DifferenceError(
            f"{worst} differs from the original's by {errors[worst]:.2e} (relative), more than {explained}"
        )
    except DifferenceError as difference:
        reason = _restlessness(run, old, was) or advice
        message = f"{what} computes different results: {difference}; the original was not changed"
        raise ValueError(f"{message}. {reason}" if reason else message) from None


def roundings(net: nn.Module, example: Any) -> list[float]:
    """Return the relative error that rounding can cause in each of this network's outputs, in its own precision."""
    run = _CopyRunner(example, None, training=False)
    was = network_call.tensors_in(run(net).output)
    noise = [0.0] * len(was)
    for seed in range(TRIALS):
        now = network_call.tensors_in(run(net, seed=seed).output)
        # An output whose shape or NaNs depend on rounding cannot be compared, so no error in it is excused.
        found = [relative(a, b) if a.shape == b.shape else inf for a, b in zip(now, was, strict=True)]
        noise = [max(n, e) if e < inf else n for n, e in zip(noise, found, strict=True)]
    return [max(tolerance_for(net), AMPLIFICATION * n) for n in noise]


@dataclass(frozen=True)
class _Seen:
    """Hold the output of a forward pass, and two dicts of the tensors that the pass created or changed, by path.

    ``kept`` has the tensors in plain attributes of modules, and ``buffers`` has the buffers.
    """

    output: Any
    kept: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class _CopyRunner:
    example: Any
    forward: network_call.Forward | None
    training: bool

    def __call__(
        self, net: nn.Module, *, double: bool = False, seed: int | None = None, change: float | None = None
    ) -> _Seen:
        """Run a copy of the network, in float64 if ``double``, and return its results.

        With a ``seed``, the copy's weights and buffers are first changed at random. The relative size of these changes
        is ``change`` or, by default, one rounding step of each tensor's original dtype.
        """
        twin = private_copy(net).train(self.training)
        steps = {name: change or _step(t) for name, t in _floating(twin)}
        if double:
            _to_double_(twin)
        if seed is not None:
            _nudge_(twin, steps, seed)
        dtype = torch.float64 if double else None
        batch = network_call.copy_for(net, self.example, dtype)
        before = {id(item): (item, copy.deepcopy(item)) for item in (*_attributes(twin).values(), *twin.buffers())}
        with isolated(net, twin), _default_dtype(dtype):
            output = network_call.call(twin, batch, self.forward)
        return _Seen(output, _changed(_attributes(twin), before), _changed(dict(twin.named_buffers()), before))


def _is_rounding(
    old: nn.Module, new: nn.Module, run: _CopyRunner, same_weights: bool, make: Make | None, limit: float
) -> bool:
    """Return whether rounding can explain the difference between the results of two networks."""
    wide = _made_in_double(old, new, run.example, make) if make is not None else None
    try:
        was, now = run(old, double=True), run(new if wide is None else wide, double=True)
        double, limit = True, min(limit, EXACT)
        change = TINY if same_weights or wide is not None else None
    except SharedWithOriginalError:
        raise
    except Exception:
        # The networks do not run in float64: their code may check dtypes, the device may lack float64, or memory may
        # have run out. Compare them in their own precision.
        was, now = run(old), run(new)
        double, change = False, None
    errors = _errors(now, was)
    if max(errors.values()) <= limit:
        return True
    if max(_errors(run(old, double=double), was).values()) > limit:
        return False  # the original's results vary from run to run, which would be mistaken for rounding
    noise = dict.fromkeys(errors, 0.0)
    for seed in range(TRIALS):
        changed = _errors(run(old, double=double, seed=seed, change=change), was)
        noise = {path: max(noise[path], changed.get(path, 0.0)) for path in noise}
        if all(error <= max(limit, AMPLIFICATION * noise[path]) for path, error in errors.items()):
            return True
    return False


def _made_in_double(old: nn.Module, new: nn.Module, example: Any, make: Make) -> nn.Module | None:
    """Return a float64 version of ``new`` that ``make`` builds from a float64 copy of ``old``.

    Return None if ``make`` fails, or if the weights of the two versions differ by more than rounding.
    """
    try:
        twin = private_copy(old)
        _to_double_(twin)
        with _default_dtype(torch.float64):
            wide = make(twin, network_call.copy_for(old, example, torch.float64))
    except SharedWithOriginalError:
        raise
    except Exception:
        return None
    ours, theirs = new.state_dict(), wide.state_dict()
    alike = ours.keys() == theirs.keys() and all(
        t.shape == theirs[key].shape and relative(t, theirs[key]) <= 4 * _step(t) for key, t in ours.items()
    )
    return wide if alike else None


def _step(t: Tensor) -> float:
    return torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0


def _restlessness(run: _CopyRunner, net: nn.Module, was: _Seen) -> str:
    """Return an explanation if the original's own results vary from run to run, else an empty string."""
    try:
        error = max(_errors(run(net), was).values())
    except DifferenceError:
        error = inf
    if error <= tolerance_for(net):
        return ""
    return (
        f"The original network's own results differ by {error:.2e} (relative) from one run to the next, although random"
        " numbers are fixed: make the network deterministic"
    )


def _errors(new: _Seen, old: _Seen) -> dict[str, float]:
    """Return the relative errors of the new results, by path.

    Raises:
        DifferenceError: if the outputs differ in structure, type or shape, or if a tensor that the old network stores
            in an attribute is missing in the new network, or has another shape or dtype there.
    """
    found = {path: _error(path, a, b) for path, a, b in _pairs(new.output, old.output)}
    for path, t in old.kept.items():
        if path not in new.kept:
            raise DifferenceError(f"its forward pass no longer stores a tensor in the attribute '{path}'")
        found[path] = _error(path, new.kept[path], t)
    for path, t in old.buffers.items():
        if path in new.buffers:  # if the layer was replaced, the new layer may not have this buffer
            found[path] = relative(new.buffers[path], t)
    return found


def _error(path: str, new: Tensor, old: Tensor) -> float:
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        is_, was = (f"{t.dtype} of shape {tuple(t.shape)}".removeprefix("torch.") for t in (new, old))
        raise DifferenceError(f"{path} is {is_}, but was {was}")
    return relative(new, old)


def _pairs(new: Any, old: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the corresponding tensors and numbers in two outputs, with their paths."""
    entered = set()
    waiting = [("the output", new, old)]
    while waiting:
        path, a, b = waiting.pop()
        x, y = _as_tensor(a), _as_tensor(b)
        if x is not None and y is not None:
            yield path, x, y
        elif _kind(a) != _kind(b):
            raise DifferenceError(f"{path} is {_kind(a)}, but was {_kind(b)}")
        elif (id(a), id(b)) not in entered:
            entered.add((id(a), id(b)))
            ours, theirs = _parts(a), _parts(b)
            if [label for label, _ in ours] != [label for label, _ in theirs]:
                if len(ours) == len(theirs):
                    raise DifferenceError(f"the items of {path} have different names or a different order")
                raise DifferenceError(f"{path} has length {len(ours)}, but had length {len(theirs)}")
            pairs = [(path + label, part, other) for (label, part), (_, other) in zip(ours, theirs, strict=True)]
            waiting.extend(reversed(pairs))


def _kind(item: Any) -> str:
    # Compare types by name, because a forward pass may define a new class each time that it runs.
    return f"{type(item).__module__}.{type(item).__qualname__}".removeprefix("builtins.")


def _parts(item: Any) -> list[tuple[str, Any]]:
    found = network_call.parts(item)
    if isinstance(item, Set):
        in_order = sorted((part for _, part in found), key=_sort_key)
        found = [(label, part) for (label, _), part in zip(found, in_order, strict=False)]
    return found


def _sort_key(item: Any) -> tuple[str, str, float]:
    t = _as_tensor(item)
    return _kind(item), "" if t is None else str(tuple(t.shape)), 0.0 if t is None else float(t.double().sum())


def _as_tensor(item: Any) -> Tensor | None:
    """Return a tensor, an array or a number as a tensor, or None for anything else."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "fiubc":
        return torch.from_numpy(np.array(item))
    if isinstance(item, bool | int | float | complex):
        dtype = torch.complex128 if isinstance(item, complex) else torch.float64
        return torch.tensor(item, dtype=dtype, device="cpu")
    return None


def _numbers(output: Any) -> list[Tensor]:
    # Ignore Python integers: they are usually lengths and counts, not results.
    found = (_as_tensor(item) for _, item in network_call.walk([("", output)]) if not isinstance(item, int))
    return [t for t in found if t is not None]


def _attributes(net: nn.Module) -> dict[str, Any]:
    """Return the tensors and arrays in modules' attributes other than parameters and buffers, by path."""
    roots = [
        (f"{path}.{name}" if path else name, item)
        for path, module in net.named_modules()
        # Skip torch's modules, whose attributes are not results: weight_norm, for example, stores weights in them.
        if not type(module).__module__.startswith("torch.")
        for name, item in plain_attributes(module)
    ]
    found = ((path, item) for path, item in network_call.walk(roots) if isinstance(item, Tensor | np.ndarray))
    return {path: item for path, item in found if not isinstance(item, nn.Parameter) and _as_tensor(item) is not None}


def _changed(after: dict[str, Any], before: dict[int, tuple[Any, Any]]) -> dict[str, Tensor]:
    """Return the tensors that a forward pass created or changed, by path."""
    found = {}
    for path, item in after.items():
        now, was = _as_tensor(item), _as_tensor(before.get(id(item), (item, None))[1])
        # Compare contents, because torch's kernels update running statistics without increasing version counters.
        if now is not None and (was is None or was.shape != now.shape or relative(now, was) > 0):
            found[path] = now
    return found


def _floating(net: nn.Module) -> list[tuple[str, Tensor]]:
    named = (*net.named_parameters(), *net.named_buffers())
    return [(name, t) for name, t in named if t.is_floating_point()]


def _to_double_(net: nn.Module) -> None:
    net.double()
    for module in net.modules():
        for name, item in plain_attributes(module):
            if isinstance(item, Tensor) and item.is_floating_point():
                vars(module)[name] = item.double()


def _nudge_(net: nn.Module, steps: dict[str, float], seed: int) -> None:
    """Multiply each number in the floating-point weights and buffers by 1 + step or 1 - step, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in _floating(net):
            coins = torch.randint(2, t.shape, generator=generator, dtype=torch.int8, device="cpu")
            signs = coins.to(t) * 2 - 1
            t.data = t + t * signs * steps[name]  # not in place, because expanded tensors do not support that


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype inside the block, unless ``dtype`` is None.

    This affects network code that calls functions such as torch.zeros without a dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
