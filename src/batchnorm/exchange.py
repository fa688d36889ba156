"""Exchange modules in a copy of a network: every reference follows, wherever the user's Python keeps one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.parameter import is_lazy

from . import calling

Memo = dict[int, Any]


def private_copy(net: nn.Module) -> nn.Module:
    """Return a deep copy, whose running and changing cannot reach the user's network.

    Raises:
        TypeError: where the network is a wrapper (compiled, parallel) around the one to work on.
        ValueError: where it cannot be copied, or has lazy layers that never ran.
    """
    for wrapper, inner in (
        ("OptimizedModule", "_orig_mod"),
        ("DistributedDataParallel", "module"),
        ("DataParallel", "module"),
    ):
        if type(net).__name__ == wrapper:
            raise TypeError(f"the network is wrapped in {wrapper}; pass the network inside it, net.{inner}")
    lazy = [name for name, p in net.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet: run the network on a batch once, to settle its lazy layers")
    memo = _uncopied(net)
    try:
        return copy.deepcopy(net, memo)
    except Exception as error:
        raise ValueError(f"the network cannot be copied with copy.deepcopy, so nothing was changed: {error}") from error


def _uncopied(net: nn.Module) -> Memo:
    """Start a copy's memo with what copy.deepcopy cannot or should not copy."""
    memo: Memo = {}
    for module in net.modules():
        for value in vars(module).values():
            # Results that old-style weight_norm and spectral_norm keep as attributes.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
            # A group of ranks is not the network's; the copy talks to the same one.
            group = getattr(value, "group", value)
            if type(group).__name__.startswith("ProcessGroup"):
                memo[id(group)] = group
    return memo


def exchange(net: nn.Module, replacements: Mapping[nn.Module, Callable[[Memo], nn.Module]]) -> nn.Module:
    """Return a copy of the network in which each given module is another; sharing of modules and tensors is kept.

    A replacement is made by a function of the copy's memo, so that ``copy.deepcopy(part, memo)`` inside it gives parts
    that share parameters with the rest of the copy. Copying with the replacements already in the memo exchanges every
    reference: children, and also modules kept in plain lists, closures over ``self``, bound methods.

    >>> relu = nn.ReLU(); net = nn.Sequential(relu, nn.Tanh(), relu)
    >>> exchange(net, {relu: lambda memo: nn.Sigmoid()})
    Sequential(
      (0): Sigmoid()
      (1): Tanh()
      (2): Sigmoid()
    )

    Beyond the paper: Alg. 2, l. 4 and 11, without a line of the user's code changed.
    """
    memo = _uncopied(net)
    made = {module: make(memo) for module, make in replacements.items()}
    for module, new in made.items():
        memo[id(module)] = new
    result: nn.Module = made[net] if net in made else copy.deepcopy(net, memo)
    return result


@contextmanager
def restored(net: nn.Module) -> Iterator[None]:
    """Put modes, momentum and buffers back as they were, and the very same buffers, whatever happens inside."""
    modes = {m: (m.training, getattr(m, "momentum", None)) for m in net.modules()}
    # Contents, not versions: torch's kernels move running statistics without counting it as a change.
    buffers = [(m, key, b, b.clone()) for m in modes for key, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        for m, (training, momentum) in modes.items():
            m.training = training
            if isinstance(m, TorchBatchNorm):
                m.momentum = momentum
        for m, key, buffer, content in buffers:
            with torch.no_grad():
                buffer.copy_(content)
            m._buffers[key] = buffer


def outputs(
    net: nn.Module, example: Any, forward: calling.Forward | None = None, *, training: bool | None = None
) -> Any:
    """Return what the network computes, run as a copy: no gradients, fixed random numbers, nothing left behind."""
    twin = private_copy(net)
    if training is not None:
        twin.train(training)
    batch = calling.to_device(example, calling.device_of(net), copy=True)
    with torch.no_grad(), calling.eagerly(), torch.random.fork_rng():
        torch.manual_seed(0)
        return calling.call(twin, batch, forward)


def relative_error(new: Any, old: Any) -> float:
    """Return max |new - old| / max |old| over all tensors of two outputs; inf where their structure differs."""
    news, olds = calling.tensors_in(new), calling.tensors_in(old)
    if [t.shape for t in news] != [t.shape for t in olds]:
        return inf
    return max((_relative(a, b) for a, b in zip(news, olds, strict=True)), default=0.0)


def _relative(new: Tensor, old: Tensor) -> float:
    if old.numel() == 0:
        return 0.0
    new, old = new.detach().double(), old.detach().double()
    same = (new == old) | (new.isnan() & old.isnan())
    difference = torch.where(same, 0.0, (new - old).abs())
    scale = float(old.abs()[old.isfinite()].max()) if old.isfinite().any() else 0.0
    worst = float(difference.max())
    if isnan(worst):
        return inf  # a NaN or an infinity where the other has none
    return worst / scale if scale > 0 else worst


def tolerance_for(net: nn.Module) -> float:
    """Return the relative error that rounding may make in a network of this precision."""
    narrowest = min((p.dtype.itemsize for p in net.parameters() if p.is_floating_point()), default=4)
    return {8: 1e-10, 4: 1e-4}.get(narrowest, 5e-2)
