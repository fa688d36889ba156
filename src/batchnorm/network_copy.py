"""Copy a network, replace modules in the copy, run it isolated from the original, and compare outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from . import network_call

Memo = dict[int, Any]

WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
"""The classes that wrap a user's network to compile or parallelize it, and the attribute that holds the network."""
INTERNAL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


@torch.inference_mode(False)  # a copy made in inference mode could not be trained
def private_copy(net: nn.Module) -> nn.Module:
    """Return a deep copy of the user's network, which can be changed without changing the original.

    Raises:
        TypeError: if ``net`` is not a network, or is a compiled or data-parallel wrapper around the user's network.
        ValueError: if the network cannot be copied, or has lazy layers that are not initialized.
    """
    network_call.check_network(net)
    wrapper = type(net).__name__
    if wrapper in WRAPPERS:
        raise TypeError(f"the network is wrapped in {wrapper}; pass the network inside it, net.{WRAPPERS[wrapper]}")
    lazy = [name for name, t in (*net.named_parameters(), *net.named_buffers()) if is_lazy(t)]
    if lazy:
        raise ValueError(f"{lazy[0]} is not initialized: run the network once on a batch to initialize its lazy layers")
    try:
        return copy.deepcopy(net, _new_memo(net))
    except Exception as error:
        raise ValueError(
            f"the network cannot be copied with copy.deepcopy, so nothing was changed: {error}; remove what"
            " cannot be copied, such as a lock or an open file, from the attributes of the network's modules"
        ) from error


def unwrapped(net: nn.Module) -> tuple[str, nn.Module]:
    """Return (prefix, network): the prefix that wrappers add to the layers' names, and the network inside them."""
    prefix = ""
    while (inner := WRAPPERS.get(type(net).__name__)) is not None:
        prefix, net = f"{prefix}{inner}.", getattr(net, inner)
    return prefix, net


def _new_memo(net: nn.Module) -> Memo:
    """Return a memo for copy.deepcopy with entries for the objects that deepcopy cannot, or should not, copy itself."""
    memo: Memo = {}
    for module in net.modules():
        for value in vars(module).values():
            # A process group does not belong to the network, so the copy uses the same group.
            try:
                group = getattr(value, "group", value)
            except Exception:  # a __getattr__ of the user's class may raise any error, such as KeyError
                group = value
            if type(group).__name__.startswith("ProcessGroup"):
                memo[id(group)] = group
        # A module may hold computed tensors, for example outputs that a hook stored, or the weights that old-style
        # weight_norm computes. These tensors are not leaves of the autograd graph, so deepcopy would reject them.
        for _, item in network_call.walk([*module._buffers.items(), *plain_attributes(module)]):
            if isinstance(item, Tensor) and not item.is_leaf:
                memo[id(item)] = item.detach().clone()
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule) and id(module) not in memo:
            _copy_scripted(module, memo)
    return memo


def _copy_scripted(module: nn.Module, memo: Memo) -> None:
    """Add a copy of a scripted module to a memo.

    For scripted modules, deepcopy makes the new parameters functions of the old ones, so the new module's gradients
    would go to the old module. deepcopy also ignores that other modules may share these parameters.
    """
    twin = copy.deepcopy(module)
    for old, new in zip(module.modules(), twin.modules(), strict=True):
        memo[id(old)] = new
        for name, p in old.named_parameters(recurse=False, remove_duplicate=False):
            if not p.is_leaf and id(p) not in memo:  # not a leaf if the user made `module` with deepcopy
                memo[id(p)] = p.detach().clone().requires_grad_()
            setattr(new, name, copy.deepcopy(p, memo))


@torch.inference_mode(False)
def copy_with(net: nn.Module, replacements: Mapping[nn.Module, Callable[[Memo], nn.Module]]) -> nn.Module:
    """Return a copy of the network with some modules replaced.

    Modules and tensors that occur in several places in the network are shared in the same way in the copy.

    ``replacements`` maps each old module to a function that takes the memo of ``copy.deepcopy`` and returns the new
    module. To keep a part of the old module, the function calls ``copy.deepcopy(part, memo)``, so that parameters that
    are shared in the old network are shared in the new one too. The new modules are in the memo before the network is
    copied, so the copy refers to them everywhere: in children, in plain lists and dicts, and in bound methods.

    >>> relu = nn.ReLU(); net = nn.Sequential(relu, nn.Tanh(), relu)
    >>> copy_with(net, {relu: lambda memo: nn.Sigmoid()})
    Sequential(
      (0): Sigmoid()
      (1): Tanh()
      (2): Sigmoid()
    )
    """
    memo = _new_memo(net)
    made = {module: make(memo) for module, make in replacements.items()}
    for module, new in made.items():
        memo[id(module)] = new
    result: nn.Module = made[net] if net in made else copy.deepcopy(net, memo)
    return result


@contextmanager
def restored(net: nn.Module) -> Iterator[None]:
    """On exit, restore the modules' modes and buffers, and the momentum of batch normalizations.

    Each buffer is then the same tensor object as before.
    """
    # Modules that torch.jit.freeze returned have no mode.
    modes = {m: (m.training, getattr(m, "momentum", None)) for m in net.modules() if hasattr(m, "training")}
    # Clone all buffers. Version counters do not show which buffers change, because torch's kernels update running
    # statistics without increasing the counters.
    buffers = [(m, key, b, b.clone()) for m in net.modules() for key, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        for m, (training, momentum) in modes.items():
            m.training = training
            if isinstance(m, TorchBatchNorm):
                m.momentum = momentum
        for m, key, buffer, content in buffers:
            if not _is_expanded(buffer):
                with torch.no_grad():
                    buffer.copy_(content)
            m._buffers[key] = buffer


def _is_expanded(t: Tensor) -> bool:
    """Return whether several elements share memory; torch does not write to such tensors."""
    if t.layout != torch.strided:
        return False
    return any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True))


@contextmanager
def changed(owner: object, **attributes: Any) -> Iterator[None]:
    """Inside the block, set plain attributes of an object, such as a module of a network.

    On exit, restore the old values, and delete the attributes that the object did not have.

    >>> relu = nn.ReLU()
    >>> with changed(relu, inplace=True, note="new"): print(relu)
    ReLU(inplace=True)
    >>> relu.inplace, hasattr(relu, "note")
    (False, False)
    """
    kept = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(kept)


class SharedWithOriginalError(ValueError):
    """Report that a copy of a network uses a part of the original."""


@contextmanager
def isolated(net: nn.Module, twin: nn.Module, *, seed: int = 0) -> Iterator[Callable[[Any], None]]:
    """Disable gradients and fix random numbers while a copy runs; raise if the copy uses parts of the original.

    ``copy.deepcopy`` does not copy functions. In a copy, a lambda that refers to ``self`` still refers to the original,
    so running the copy would update the original's statistics and ignore replaced modules.

    Yields:
        A function that raises if its argument is a module or a tensor of the original. A hook calls this function with
        each module that runs; callers that know which tensors are read should call it with those tensors too.

    Raises:
        SharedWithOriginalError: if the copy used a part of the original, even if the user's code caught the exception
            that the hook raised.
    """
    copied = _held(twin)
    foreign = {key: name for key, (name, _) in _held(net).items() if key not in copied}
    used: list[str] = []

    def refuse(item: Any) -> None:
        if id(item) in foreign:
            used.append(foreign[id(item)])
            raise SharedWithOriginalError(used[0])

    handle = register_module_forward_pre_hook(lambda module, args: refuse(module))
    try:
        with torch.no_grad(), network_call.eagerly(), _fixed_random_numbers(twin, seed):
            yield refuse
    finally:
        handle.remove()
        if used:
            raise SharedWithOriginalError(
                f"a copy of the network still uses {used[0]} of the original, so nothing was changed. Replace functions"
                " that refer to the original, such as self.block = lambda x: self.bn(x), with methods or modules. If"
                " you pass forward=, make sure that it calls the network that it is given"
            ) from None


@contextmanager
def _fixed_random_numbers(net: nn.Module, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the network's devices; on exit, restore those of the CPU and the GPUs."""
    devices = {t.device for t in (*net.parameters(), *net.buffers())}
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(gpus):
        if any(device.type not in ("cpu", "cuda") for device in devices):
            torch.manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        yield


def _held(net: nn.Module) -> dict[int, tuple[str, Any]]:
    """Return {id: (description, object)} for a network's modules and tensors, including those in lists and objects."""
    found: dict[int, tuple[str, Any]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", net)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = (f"{repr(path) if path else 'the root'} ({type(module).__name__})", module)
        registered = (module._parameters, module._buffers, module._modules)
        attributes = [item for group in registered for item in group.items()] + plain_attributes(module)
        for name, item in network_call.walk((f"{path}.{name}" if path else name, item) for name, item in attributes):
            if isinstance(item, nn.Module):
                waiting.append((name, item))
            elif isinstance(item, Tensor):
                found.setdefault(id(item), (repr(name), item))
    return found


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """List a module's attributes other than parameters, buffers, children and the attributes that every module has.

    >>> net = nn.Linear(1, 1); net.kept = "text"
    >>> plain_attributes(net)
    [('in_features', 1), ('out_features', 1), ('kept', 'text')]
    """
    return [(name, item) for name, item in vars(module).items() if name not in INTERNAL]


def outputs(
    net: nn.Module, example: Any, forward: network_call.Forward | None = None, *, training: bool | None = None
) -> Any:
    """Run a copy of the network, without gradients and with fixed random numbers, and return its outputs."""
    twin = private_copy(net)
    if training is not None:
        twin.train(training)
    return run_copy(net, twin, example, forward)


def run_copy(net: nn.Module, twin: nn.Module, example: Any, forward: network_call.Forward | None) -> Any:
    """Run ``twin``, a copy of ``net``, on a copy of the example, inside :func:`isolated`; return its outputs."""
    batch = network_call.copy_for(net, example)
    with isolated(net, twin):
        return network_call.call(twin, batch, forward)


def relative_error(new: Any, old: Any) -> float:
    """Return max |new - old| / max |old|, the largest over pairs of tensors, or inf if their number or shapes differ.

    Raises:
        ValueError: if there is nothing to compare.
    """
    news, olds = network_call.tensors_in(new), network_call.tensors_in(old)
    if [t.shape for t in news] != [t.shape for t in olds]:
        return inf
    require_numbers(olds)
    return max(relative(a, b) for a, b in zip(news, olds, strict=True))


def require_numbers(olds: list[Tensor]) -> None:
    """Raise ValueError if a comparison with these tensors would check nothing: if all are empty or NaN."""
    if not olds:
        problem = "its output has no tensors"
    elif not any(t.numel() for t in olds):
        problem = "all tensors of its output are empty"
    elif all(bool(_dense(t).isnan().all()) for t in olds):
        problem = "its output is NaN everywhere"
    else:
        return
    raise ValueError(
        f"the network cannot be checked on this example, so nothing was changed: {problem}; pass an example for which"
        " the network returns tensors that are neither empty nor NaN"
    )


def relative(new: Tensor, old: Tensor) -> float:
    """Return max |new - old| / max |old| of two tensors, or inf if their NaNs or infinities differ.

    If ``old`` has no finite value other than 0, return max |new - old|.
    """
    if old.numel() == 0:
        return 0.0
    new, old = _dense(new), _dense(old)
    same = (new == old) | (new.isnan() & old.isnan())
    difference = torch.where(same, 0.0, (new - old).abs())
    scale = float(old.abs()[old.isfinite()].max()) if old.isfinite().any() else 0.0
    worst = float(difference.max())
    if isnan(worst):
        return inf
    return worst / scale if scale > 0 else worst


def _dense(t: Tensor) -> Tensor:
    t = t.detach()
    if t.is_nested:
        t = torch.cat([part.flatten() for part in t.unbind()])
    if t.is_quantized:
        t = t.dequantize()
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def tolerance_for(net: nn.Module) -> float:
    """Return the relative error that rounding may cause in a shallow network, given the narrowest parameter dtype."""
    narrowest = min((p.dtype.itemsize for p in net.parameters() if p.is_floating_point()), default=4)
    return {8: 1e-10, 4: 1e-5}.get(narrowest, 1e-3)
