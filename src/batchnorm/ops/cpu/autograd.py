"""Run training calls on the CPU with as little overhead around the kernel as possible.

Most dense float32 batches use kernel.c. One call computes y and updates the running averages; another call computes all
gradients. The forward pass saves x, gamma and five numbers per channel. If the activation's derivative takes more than
two values, it also saves beta and the residual. For relu, relu6 and leaky_relu, it also saves one byte per element if
there is a residual.

Batches without a residual use torch's kernel if it is faster than kernel.c, or if kernel.c cannot run, for example in
half precision. Torch's kernel also updates the running averages. If the batch's statistics show that the output may be
inaccurate, the averages are restored and ``train_`` returns None. It also returns None if neither kernel is suitable.

On a small batch, the Python code around a kernel takes longer than the kernel. So the results of a layer's checks are
cached for later batches of the same shape, strides and dtype, and ``train_`` does not return the moments.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import composite
from ..activation import IDENTITY, NAMES, TWO_SLOPES, Activation
from ..call import Call
from ..recomputation import is_active, remember
from ..running import Kept
from ..torch_state import is_plain, is_recomputation
from . import torch_kernels
from .compiler import kernels
from .torch_kernels import flatten, stored_like, unflatten, without_gaps

_f32 = torch.float32

# A batch with fewer values than this uses one thread, because more threads would cost more time than they save.
PARALLEL = 1 << 14
LARGE = 1 << 18  # from this many values on, torch's kernel may be faster than kernel.c: see train_
# Torch's kernel is accurate if the vector mean / std (one value per channel) has a squared norm of at most this.
LIMIT = torch_kernels.CONDITION**2
ROWS_KEPT = 5  # how many numbers per channel are saved for the backward pass; equal to LINES in kernel.c

_Addresses = tuple[int | None, int | None, int | None]  # addresses of the running mean, variance and batch count
_NOWHERE = None, None, None  # with null addresses, the kernel updates no averages


class Shape(ctypes.Structure):
    """Mirror the struct Shape of kernel.c.

    The kernel views a tensor as (n, channels, length) or, if ``length`` is 0, as (n, channels). The last three fields
    are the addresses of OpenMP functions.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "channels", "length", "activation")),
        ("slope", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("parallel", "thread", "team")),
    )


class KernelForm(NamedTuple):
    """Hold values that are computed once for all calls with the same shape, strides and activation."""

    forward: Callable[..., int]
    backward: Callable[..., int]
    shape: Shape
    address: int  # the address of `shape`
    parallel: bool
    activation: Activation
    # Whether the activation's derivative takes more than two values. If so, the backward pass needs beta and the
    # residual to compute the derivative.
    is_smooth: bool
    size: torch.Size
    stride: tuple[int, ...]
    kept: Tensor  # a template: torch.empty_like(kept) allocates memory for the numbers saved per channel


def form_of(x: Tensor, activation: Activation) -> KernelForm | None:
    """Return the :class:`KernelForm` for ``x`` (N, C, ...), or None if kernel.c cannot run on ``x``."""
    if x.dtype is not _f32 or x.dim() < 2:
        return None
    channels = x.shape[1]
    if x.numel() <= channels:
        return None
    locations = prod(x.shape[2:])
    if x.is_contiguous() and locations > 1 and channels > 1:
        n, length = x.shape[0], locations
    elif x.is_contiguous() or x.movedim(1, -1).is_contiguous():
        n, length = x.numel() // channels, 0
    else:
        return None
    found = kernels()
    if found is None:
        return None
    shape = Shape(n, channels, length, NAMES.index(activation.name), activation.slope, *found.openmp)
    parallel = x.numel() >= PARALLEL and found.openmp[0] is not None
    smooth = activation.name not in ("identity", *TWO_SLOPES)
    kept = torch.empty(1, dtype=_f32, device="cpu").expand(ROWS_KEPT, channels)
    rest = (activation, smooth, x.shape, x.stride(), kept)
    return KernelForm(found.forward, found.backward, shape, ctypes.addressof(shape), parallel, *rest)


def train_(call: Call) -> Tensor | None:
    """Return y and update the running mean, variance and batch count.

    Returns None, without updating anything, if the fast path does not apply. A forward pass that runs again
    inside a backward pass (activation checkpointing) updates nothing.
    """
    x, gamma, beta, eps, activation, residual, mask, running, momentum = call
    if (
        running is None
        or mask is not None
        or not is_plain(x)
        or not ((gamma is None or gamma.dtype is _f32) and (beta is None or beta.dtype is _f32))
    ):
        return None
    mean, var, num_batches, _ = running
    memory = _memories.get(id(mean))
    key = (
        x.shape, x.stride(), x.dtype, None if gamma is None else gamma.shape, None if beta is None else beta.shape,
        mean.shape, mean.stride(), var.shape, var.stride(), activation, residual is None,
    )  # fmt: skip
    addresses = mean.data_ptr(), var.data_ptr(), num_batches.data_ptr()
    if memory is None or memory.key != key or memory.addresses != addresses:
        if not _have_shapes_and_types(call, running):
            return None
        dense = mean.is_contiguous() and var.is_contiguous() and num_batches.dtype is torch.int64
        form = form_of(x, activation) if dense else None
        if residual is None and torch_kernels.is_fast(x):
            # Without an activation, and with the channels adjacent in memory, kernel.c has no advantage: it moves as
            # many bytes as torch's kernel, which is faster for large batches.
            alone = activation.name == "identity"
            if form is not None and alone and form.shape.length == 0 and x.numel() >= LARGE:
                form = None
        elif form is None:
            return None
        activate = None if form is not None else torch_kernels.for_fresh(activation, x.numel(), x.dtype)
        memory = _remember(key, addresses, running, form, activate)
    _, _, means, variances, count, form, activate, _ = memory
    if form is not None:
        if not (_has_memory(x) and _fits(gamma) and _fits(beta)) or _is_unsavable(x):
            return None
        if residual is not None:
            if not _can_be_added(residual, x):
                return None
            residual = stored_like(residual, x)
        try:
            # If activation checkpointing runs this forward pass again, do not update the averages a second time.
            y = _apply(x, gamma, beta, residual, call, _NOWHERE if is_recomputation() else addresses, form)
        except _NotFinite:
            return None
        if is_active():
            remember(y, _again_by_kernel(eps, form), x, gamma, beta, residual)
        return y
    factor = momentum if momentum is not None else 1 / (count[0] + 1)
    moved = 1
    if is_recomputation():
        # Activation checkpointing runs this forward pass again, so the averages have already been updated; let the
        # kernel update copies. Use the kernel of the first run, because checkpointing expects the same saved tensors.
        mean, var, moved = mean.clone(), var.clone(), 0
    before = bytes(means), bytes(variances)
    y, mu, invstd = torch.native_batch_norm(flatten(x, x), without_gaps(gamma), beta, mean, var, True, factor, eps)
    if activate is not None:
        # Apply the activation before checking the statistics, while y is in the CPU's cache and before torch's worker
        # threads go to sleep.
        y = activate(y)
    # If a variance of the batch is infinite, the updated running variance (`var`) is not finite. Then `finite` is NaN,
    # because inf * 0 is NaN. Usually, `finite` is 0.
    finite = var.dot(invstd).item() * 0.0
    # The norm of mean / std is at most the norm of mean times the norm of 1 / std. Compute the norm itself only if
    # this bound exceeds the limit.
    if not (mu.dot(mu).item() * invstd.dot(invstd).item() + finite <= LIMIT or _norm2(mu * invstd) + finite <= LIMIT):
        means[:], variances[:] = (memoryview(old).cast("f") for old in before)
        return None
    count[0] += moved
    y = unflatten(y, x)
    if is_active():
        remember(y, _again(eps, activate), x, gamma, beta)
    return y


def _norm2(v: Tensor) -> float:
    return v.dot(v).item()


def _have_shapes_and_types(call: Call, running: Kept) -> bool:
    """Return whether the kernels support the shapes, dtypes and devices of the tensors in ``call`` and ``running``."""
    x = call.x
    mean, var, num_batches, _ = running
    return (
        mean.dtype is _f32
        and var.dtype is _f32
        and x.dtype in (_f32, torch.bfloat16, torch.float16)
        and x.dim() > 1
        and all(v is None or v.shape == x.shape[1:2] for v in (call.gamma, call.beta, mean, var))
        and all(v.is_cpu for v in (mean, var, num_batches))
    )


def _again_by_kernel(eps: float, form: KernelForm) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> Tensor:
        return _apply(x, gamma, beta, residual, Call(x, gamma, beta, eps, form.activation, residual), _NOWHERE, form)

    return again


def _again(eps: float, activate: Callable[[Tensor], Tensor] | None) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        # Pass float32 averages: without averages, torch's kernel would round the statistics to the dtype of x.
        mean, var = x.new_zeros(2, x.shape[1], dtype=_f32).unbind()
        y, _, _ = torch.native_batch_norm(flatten(x, x), gamma, beta, mean, var, True, 0.0, eps)
        return unflatten(y if activate is None else activate(y), x)

    return again


class _Memory(NamedTuple):
    """Hold the results of the checks in a layer's last call, and views of the layer's running averages.

    Most calls of a layer have the same key as the previous call, so they skip these checks. The views keep the
    averages' memory alive, so no other tensor can have the same address.
    """

    key: tuple[object, ...]
    addresses: tuple[int, int, int]
    mean: memoryview
    var: memoryview
    num_batches: memoryview
    form: KernelForm | None  # None if torch's kernel is used instead of kernel.c
    activate: Callable[[Tensor], Tensor] | None  # the activation to apply to the output of torch's kernel
    lifetime: weakref.ref[Tensor]


# Keyed by the id() of the running mean; an entry is removed when that tensor is freed.
_memories: dict[int, _Memory] = {}


def forget(mean: Tensor) -> None:
    """Drop the cache entry of the layer with this running mean, including the weak reference to the tensor."""
    _memories.pop(id(mean), None)


def _remember(key: Any, addresses: Any, running: Kept, form: KernelForm | None, activate: Any) -> _Memory:
    owner = id(running[0])
    lifetime = weakref.ref(running[0], lambda _: _memories.pop(owner, None))
    arrays: list[Any] = [t.detach().view(-1).numpy() for t in running[:3]]
    mean, var, count = (memoryview(array) for array in arrays)
    _memories[owner] = memory = _Memory(key, addresses, mean, var, count, form, activate, lifetime)
    return memory


def _can_be_added(residual: Tensor, x: Tensor) -> bool:
    return (
        residual.shape == x.shape
        and (type(residual) is Tensor or type(residual) is nn.Parameter)
        and residual.is_cpu
        and _has_memory(residual)
        and not _is_unsavable(residual)
    )


def _is_unsavable(v: Tensor) -> bool:
    """Return whether autograd might refuse to save ``v``. This would raise an error after the averages are updated."""
    return v.is_inference() and torch.is_grad_enabled()


def _fits(v: Tensor | None) -> bool:
    # For speed, this is one expression: each call of a layer evaluates it twice.
    return v is None or (
        v.is_contiguous()
        and v.is_cpu
        and not (_is_batched(v) or v._is_zerotensor() or v.is_neg() or _is_unsavable(v))
        and (type(v) is Tensor or type(v) is nn.Parameter)
    )


def _has_memory(t: Tensor) -> bool:
    """Return whether a tensor's memory holds its values.

    The result is False for batched gradients (is_grads_batched=True), zeros without memory (ZeroTensor) and lazy
    negations.
    """
    return not (_is_batched(t) or t._is_zerotensor() or t.is_neg())


_is_batched = torch._C._functorch.is_legacy_batchedtensor
_function_modes = torch._C._len_torch_function_stack


class _NotFinite(Exception):
    pass


class CompiledFunction(torch.autograd.Function):
    """Compute y from (x, gamma, beta, residual) with kernel.c."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        call: Call,
        averages: _Addresses,
        form: KernelForm,
    ) -> Tensor:
        """Return y, and save what the backward pass needs."""
        y, kept, passed, hidden = torch.empty_like(x), torch.empty_like(form.kept), None, form.is_smooth
        if residual is not None and not hidden and form.shape.activation and any(ctx.needs_input_grad):
            passed = torch.empty_like(x, dtype=torch.bool)
            hidden = True
        failed = form.forward(
            form.address, torch.get_num_threads() if form.parallel else 1,
            call.eps, nan if call.momentum is None else call.momentum,
            x.data_ptr(), None if gamma is None else gamma.data_ptr(), None if beta is None else beta.data_ptr(),
            None if residual is None else residual.data_ptr(), *averages,
            y.data_ptr(), None if passed is None else passed.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError if failed < 0 else _NotFinite
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.rest = kept, (form, call.eps, hidden)
        if hidden:
            ctx.save_for_backward(x, gamma, *((beta, residual) if form.is_smooth else (None, None)), passed)
        else:
            ctx.save_for_backward(x, gamma)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs; use plain operations for double backward and if the kernel cannot run."""
        if dy is None:
            return (None,) * 7
        kept, (form, eps, hidden) = ctx.kept, ctx.rest
        if hidden:
            x, gamma, beta, residual, passed = ctx.saved_tensors
        else:
            x, gamma = ctx.saved_tensors
            beta = residual = passed = None
        of_x, of_gamma, of_beta, of_residual = ctx.needs_input_grad[:4]
        dx: Tensor | None
        if (
            torch.is_grad_enabled()
            or not is_plain(x)
            or not (type(dy) is Tensor or type(dy) is nn.Parameter)
            or _function_modes() > 0
            or _is_batched(dy)
            or dy._is_zerotensor()
            or dy.is_neg()
            or not _has_memory(x)
        ):
            g = form.activation
            if not hidden:
                center, scale, offset = (composite.per_channel(v, x) for v in kept[:3])
                # Compute z from the numbers that the kernel saved, by the same formula as the kernel.
                dy, g = g.backward(dy, (x - center) * scale + offset), IDENTITY
            dx, dgamma, dbeta, dz = composite.backward(Call(x, gamma, beta, eps, g, residual), dy, passed)
        else:
            if x.dtype is not _f32 or x.stride() != form.stride or x.shape != form.size:
                # Saved-tensor hooks have changed the dtype, strides or shape of x, so restore them.
                x = kept.new_empty_strided(form.size, form.stride).copy_(x)
            dz = dy = stored_like(dy, x)
            dx = torch.empty_like(x) if of_x else None
            if hidden:
                dz = dx if dx is not None and not of_residual else torch.empty_like(x)
                residual = None if residual is None else stored_like(residual, x)
                if passed is not None and (passed.dtype is not torch.bool or passed.stride() != form.stride):
                    passed = torch.empty_like(x, dtype=torch.bool).copy_(passed)
            if gamma is not None and gamma.dtype is _f32 and gamma.is_contiguous():
                dgamma, dbeta = torch.empty_like(gamma), torch.empty_like(gamma)
            else:
                dgamma, dbeta = kept.new_empty(x.shape[1]), kept.new_empty(x.shape[1])
            if form.backward(
                form.address, torch.get_num_threads() if form.parallel else 1, x.data_ptr(), dy.data_ptr(),
                None if residual is None else residual.data_ptr(), None if passed is None else passed.data_ptr(),
                kept.data_ptr(), None if dx is None else dx.data_ptr(), None if dz is dy else dz.data_ptr(),
                dgamma.data_ptr(), dbeta.data_ptr(),
            ):  # fmt: skip
                raise MemoryError
        grads = dx if of_x else None, dgamma if of_gamma else None, dbeta if of_beta else None
        return *grads, dz if of_residual else None, None, None, None


# Call the apply of Function's base class: Function.apply would check again whether a torch.func transform is active.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, CompiledFunction).apply
