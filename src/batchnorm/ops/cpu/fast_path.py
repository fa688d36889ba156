"""The shortest way from a batch to its normalized output and moved running averages, for the layers in training.

Where kernel.c could be compiled and is faster, that is one call of it. Elsewhere it is a call of torch's kernel, which
moves the running averages too, and a look at the statistics it returns: where they forbid it the averages are put
back and the caller takes another way. On a small batch what stands around a kernel costs more than the kernel: every
further function, of torch, numpy or Python, is code that the backward pass has pushed out of the cache. So nothing is
asked twice of a layer's batches that are alike, and no moments are returned: to make tensors of them would take as long
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation import Activation
from ..recomputation import is_active, remember
from ..running import Kept
from ..torch_state import is_plain, is_recomputation
from . import autograd, nonlinear, torch_kernels
from .layout import flatten, unflatten

_f32 = torch.float32

LIMIT = torch_kernels.CONDITION**2  # of the squared norm of mean / std
LARGE = 1 << 18  # values


def normalize_batch_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: Kept,
    momentum: float | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None = None,
) -> Tensor | None:
    """Return y and move the running mean, variance and count; None, and nothing moved, if another way is due."""
    mean, var, num_batches, _ = running
    if not (is_plain(x) and (gamma is None or gamma.dtype is _f32) and (beta is None or beta.dtype is _f32)):
        return None
    # Nearly every call is like the last one with the same running averages.
    memory = _memories.get(id(mean))
    gamma_shape, beta_shape = None if gamma is None else gamma.shape, None if beta is None else beta.shape
    averages = mean.shape, mean.stride(), var.shape, var.stride()
    key = x.shape, x.stride(), x.dtype, gamma_shape, beta_shape, averages, activation, residual is None
    addresses = mean.data_ptr(), var.data_ptr(), num_batches.data_ptr()
    if memory is None or memory.key != key or memory.addresses != addresses:
        if not _fits(x, gamma, beta, running):
            return None
        dense = mean.is_contiguous() and var.is_contiguous() and num_batches.dtype is torch.int64
        kernel = autograd.form_of(x, activation) if dense else None
        if residual is None and torch_kernels.is_fast(x):
            # BN alone: our kernel moves as many bytes as torch's where many channels lie side by side, and has Python
            # around it, which a large batch pushes out of the cache.
            alone = activation.name == "identity"
            if kernel is not None and alone and kernel.shape.length == 0 and x.numel() >= LARGE:
                kernel = None
        elif kernel is None:
            return None
        activate = None if kernel is not None else nonlinear.for_fresh(activation, x.numel(), x.dtype)
        memory = _remember(key, addresses, running, kernel, activate)
    _, _, means, variances, count, kernel, activate, _ = memory
    if kernel is not None:
        # In a checkpoint's recomputation the averages have moved already.
        where = _NOWHERE if is_recomputation() else addresses
        y = autograd.normalize_batch_(x, gamma, beta, residual, where, momentum, eps, kernel)
        if is_active() and y is not None:
            remember(y, _again_by_kernel(eps, kernel), x, gamma, beta, residual)
        return y
    factor = momentum if momentum is not None else 1 / (count[0] + 1)
    moved = 1
    if is_recomputation():
        # The same way again, for checkpointing counts what a pass saves; the averages have moved already.
        mean, var, moved = mean.clone(), var.clone(), 0
    before = bytes(means), bytes(variances)
    y, mu, invstd = torch.native_batch_norm(flatten(x, x), gamma, beta, mean, var, True, factor, eps)
    if activate is not None:
        # Before the look at the statistics: now the output is in the cache and torch's threads are awake.
        y = activate(y)
    # Times zero: NaN where a variance is infinite, for the inverse of its root is 0 and inf * 0 is NaN.
    finite = var.dot(invstd).item() * 0.0
    # No |mean / std| is larger than the product of the norms. Only where that is too large, look closer.
    if not (mu.dot(mu).item() * invstd.dot(invstd).item() + finite <= LIMIT or _norm2(mu * invstd) + finite <= LIMIT):
        means[:], variances[:] = (memoryview(old).cast("f") for old in before)
        return None
    count[0] += moved
    y = unflatten(y, x)
    if is_active():
        remember(y, _again(eps, activate), x, gamma, beta)
    return y


_NOWHERE = None, None, None


def _again_by_kernel(eps: float, form: autograd.Form) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> Tensor:
        y = autograd.normalize_batch_(x, gamma, beta, residual, _NOWHERE, None, eps, form)
        assert y is not None  # as it was not the first time
        return y

    return again


def _again(eps: float, activate: Callable[[Tensor], Tensor] | None) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        # Without averages in float32 the kernel would round the statistics to half precision.
        mean, var = torch.zeros(2, x.shape[1], dtype=_f32).unbind()
        y, _, _ = torch.native_batch_norm(flatten(x, x), gamma, beta, mean, var, True, 0.0, eps)
        return unflatten(y if activate is None else activate(y), x)

    return again


def _norm2(v: Tensor) -> float:
    return v.dot(v).item()


def _fits(x: Tensor, gamma: Tensor | None, beta: Tensor | None, running: Kept) -> bool:
    """Say whether torch's kernels take these shapes and types."""
    mean, var, num_batches, _ = running
    return (
        mean.dtype is _f32
        and var.dtype is _f32
        and x.dtype in (_f32, torch.bfloat16, torch.float16)
        and x.dim() > 1
        and all(v is None or v.shape == x.shape[1:2] for v in (gamma, beta, mean, var))
        and all(v.is_cpu for v in (mean, var, num_batches))
    )


class _Memory(NamedTuple):
    """What the last call found out: that its like fits, and the running averages' memory as Python sees it.

    The views keep that memory alive: an average found at the same address has the same memory.
    """

    key: tuple[object, ...]
    addresses: tuple[int, int, int]
    mean: memoryview
    var: memoryview
    num_batches: memoryview
    kernel: autograd.Form | None  # where the compiled one takes it
    activate: Callable[[Tensor], Tensor] | None
    lifetime: weakref.ref[Tensor]


# By the identity of the running mean, for as long as that lives.
_memories: dict[int, _Memory] = {}


def forget(mean: Tensor) -> None:
    """Drop what was remembered of the layer with this running mean, and the weak reference to it."""
    _memories.pop(id(mean), None)


def _remember(
    key: tuple[object, ...],
    addresses: tuple[int, int, int],
    running: Kept,
    kernel: autograd.Form | None,
    activate: Callable[[Tensor], Tensor] | None,
) -> _Memory:
    mean, var, num_batches, _ = running
    owner = id(mean)
    lifetime = weakref.ref(mean, lambda _: _memories.pop(owner, None))
    views = _view(mean), _view(var), _view(num_batches)
    _memories[owner] = memory = _Memory(key, addresses, *views, kernel, activate, lifetime)
    return memory


def _view(t: Tensor) -> memoryview:
    return memoryview(t.detach().view(-1).numpy())  # type: ignore[arg-type]
