"""Classify modules and calls: affine layers, nonlinearities, calls that only move elements, modules with hooks."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Affine = nn.Linear | Convolution | Transposed

# The in-place operators, such as operator.iadd for x += y.
IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name[:1] == "i" and (hasattr(operator, name[1:]) or hasattr(operator, f"{name[1:]}_"))
)
# Nonlinearities, by their plain_name(): "leakyrelu" stands for F.leaky_relu and for nn.LeakyReLU.
NONLINEAR = frozenset(
    """relu relu6 leakyrelu prelu rrelu elu selu celu gelu silu mish sigmoid tanh hardtanh hardsigmoid hardswish
    softplus softsign logsigmoid threshold tanhshrink softshrink hardshrink clamp clampmin clip sin""".split()  # noqa: SIM905
)
# Calls that move or copy elements but do not change their values.
MOVING = frozenset(
    """view reshape flatten unflatten permute transpose swapaxes swapdims t mt movedim moveaxis squeeze unsqueeze
    contiguous clone detach pixelshuffle pixelunshuffle channelshuffle viewas reshapeas""".split()  # noqa: SIM905
)
# Calls that may come between an affine layer and the nonlinearity that it feeds, such as sums and pooling.
HANDING_ON = MOVING | frozenset(
    """add sub rsub cat concat concatenate stack hstack vstack mean chunk split unbind narrow select getitem pad
    interpolate upsample upsamplingnearest2d upsamplingbilinear2d dropout dropout1d dropout2d dropout3d alphadropout
    featurealphadropout identity maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d lppool1d lppool2d
    adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d adaptivemaxpool1d adaptivemaxpool2d adaptivemaxpool3d
    maxpool1dwithindices maxpool2dwithindices maxpool3dwithindices zeropad1d zeropad2d zeropad3d reflectionpad1d
    reflectionpad2d replicationpad1d replicationpad2d constantpad1d constantpad2d""".split()  # noqa: SIM905
)


def plain_name(name: str) -> str:
    """Return the same name for a function and its module: leaky_relu and LeakyReLU both become leakyrelu."""
    return name.lower().replace("_", "")


def base_type(module: nn.Module) -> type[nn.Module]:
    """Return the module's class, or the original class if ``torch.nn.utils.parametrize`` generated a subclass."""
    kind: type[nn.Module] = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def keeps_torch_forward(module: nn.Module) -> bool:
    """Return whether the module runs ``torch.nn``'s own forward, not an overridden, patched, scripted or traced one."""
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return False
    if isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
        return False
    kind = base_type(module)
    methods = [kind.forward, getattr(kind, "_conv_forward", kind.forward)]
    return all(getattr(m, "__module__", "").startswith("torch.nn.") for m in methods)


def is_scripted_norm(module: nn.Module, *, that_updates: bool = False) -> bool:
    """Return whether a module is a batch normalization that torch.jit compiled.

    If ``that_updates`` is True, the module must also have running averages that training updates.
    """
    if not isinstance(module, torch.jit.ScriptModule) or "BatchNorm" not in getattr(module, "original_name", ""):
        return False
    # torchvision's FrozenBatchNorm2d, for example, does not count batches.
    return not that_updates or "num_batches_tracked" in dict(module.named_buffers(recurse=False))


def is_leaf(module: nn.Module) -> bool:
    """Return whether a trace records each call of the module as a single call, without the calls inside it."""
    if isinstance(module, TorchBatchNorm | torch.jit.ScriptModule):
        return True
    children = [name for name, _ in module.named_children() if name != "parametrizations"]
    return not children and keeps_torch_forward(module)


def is_affine(module: nn.Module | None) -> bool:
    """Return whether the module is a Linear, convolution or transposed convolution that runs ``torch.nn``'s forward."""
    return isinstance(module, Affine) and keeps_torch_forward(module)


def is_in_place(module: nn.Module) -> bool:
    """Return whether a ``torch.nn`` module has ``inplace=True``, so that it writes into its input and returns it."""
    return bool(getattr(module, "inplace", False))


def returns_its_input(module: nn.Module) -> bool:
    """Return whether a module is known to return its input tensor: an identity, or a module that works in place."""
    return keeps_torch_forward(module) and (isinstance(module, nn.Identity) or is_in_place(module))


def has_initial_statistics(layer: TorchBatchNorm) -> bool:
    """Return whether a batch normalization layer's running averages still have their initial values."""
    count, mean, var = layer.num_batches_tracked, layer.running_mean, layer.running_var
    initial = mean is not None and var is not None and bool((mean == 0).all() and (var == 1).all())
    return initial and (count is None or not int(count))


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has forward or backward hooks; they may read or change values or gradients."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def is_quiet(module: nn.Module) -> bool:
    """Return whether a module has no forward or backward hooks and no patched forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


_unwatched = False


def is_watched() -> bool:
    """Return whether global module hooks are registered; always False inside :func:`despite_global_hooks`."""
    return not _unwatched and _has_any_global_hook()


@contextmanager
def despite_global_hooks() -> Iterator[None]:
    """Inside the block, run rewritten forwards even if global module hooks are registered."""
    global _unwatched
    before, _unwatched = _unwatched, True
    try:
        yield
    finally:
        _unwatched = before


def signature_of(forward: Any) -> Signature:
    """Return the signature of a forward, or of the function that it wraps if its own is ``(*args, **kwargs)``."""
    own = signature(forward, follow_wrapped=False)
    passes_all_on = [p.kind for p in own.parameters.values()] == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
    wrapped = getattr(forward, "__wrapped__", None)
    return signature_of(wrapped) if passes_all_on and wrapped is not None else own
