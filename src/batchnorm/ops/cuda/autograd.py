"""The CUDA path: run the fused kernels, with gradients, in eager mode and as torch operators in compiled graphs.

There are three operators: ``fused`` normalizes a batch, ``fused_`` also updates the running averages, and
``fused_backward`` computes the gradients of either operator. The forward pass saves x, the parameters and eight numbers
per channel (the statistics). If a residual was added before an activation, the forward pass also saves one sign bit per
element (relu, relu6, leaky_relu; see sign_bits.py) or the residual itself (sigmoid, tanh, silu, hardswish).
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import composite
from ..activation import NAMES, TWO_SLOPES, Activation
from ..call import Call
from ..moments import Moments
from ..recomputation import is_active, remember
from ..running import Kept, update_
from ..torch_state import is_forward_mode, is_recomputation, is_unseen
from . import extension, inductor, launch, schedule
from .layout import as_dense, empty_dense, find_geometry, geometry_of
from .sign_bits import empty_bits, unpack

# Maps the name of an activation to two numbers: the activation's code in the kernels, and what its gradient needs if a
# residual was added (0: nothing, 1: the sign bits, 2: the residual). In autograd.cpp, the second number is the enum
# Keep.
_CODES = {name: (code, 0 if name == "identity" else 1 if name in TWO_SLOPES else 2) for code, name in enumerate(NAMES)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None


def refusal(call: Call) -> str | None:
    """Return why the kernels do not support a call, or None if they support it."""
    x = call.x
    if not is_compiling():
        with suppress(TypeError):  # symbolic sizes are not hashable, so `_refusal` cannot cache results for them
            return _refusal(x.dtype, x.shape, x.stride())
    return _find_refusal(x.dtype, x.shape, x.stride())


def _find_refusal(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
    if not HAS_TRITON:
        return "the fused kernels need Triton, which is not installed"
    if torch.version.hip is not None:
        return "the fused kernels have never been tested on ROCm"
    if dtype not in DTYPES:
        return f"the fused kernels support float32, bfloat16 and float16, not {dtype}"
    if shape[1] >= 2**16:
        return f"the fused kernels support up to 65535 channels, not {shape[1]}"
    geometry = find_geometry(shape, stride)
    if geometry is None:
        return (
            "the fused kernels support only channels-last and channels-first strides, and fewer than 2**31 - 2**16"
            " values per channel"
        )
    # A slice is a group of channels; in a channels-first tensor, each channel is a slice. Bits 16 to 30 of an int32
    # counter count the slices with non-finite moments (see triton/running.py).
    if not geometry.nhwc and shape[1] >= 2**15:
        return f"the fused kernels support up to 32767 channels if the tensor is channels first, not {shape[1]}"
    return None


_refusal = cache(_find_refusal)


def describe(call: Call) -> str:
    """Return which kernels run for a call, or just "a CUDA tensor" under torch.compile."""
    if is_compiling():
        return "a CUDA tensor"
    forward, backward = launch.paths(call)
    python = "" if extension.unavailable is None else f"; launched from Python, because {extension.unavailable}"
    return f"fused kernels: forward {forward}, backward {backward} ({schedule.MEANING}){python}"


def train_(call: Call) -> Tensor | None:
    """Return the output y and update the running averages, with as little overhead as possible.

    Returns None, without updating anything, if the fast path does not apply. The moments are not returned,
    because creating tensors for them takes time.
    """
    x, gamma, beta, eps, (name, slope), residual, mask, running, momentum = call
    # Under torch.compile, do not read `extension.module`: the compiled code would be guarded on it, and would be
    # compiled again when the extension is loaded.
    native = None if is_compiling() else extension.module
    if native is not None and running is not None and mask is None and not is_active():
        y: Tensor | None = native.train_(x, gamma, beta, residual, *running, momentum, eps, *_CODES[name], slope)
        if y is not None:
            return y
    channels = x.shape[1:2]
    if (
        running is None
        or mask is not None
        or not is_unseen(x, gamma, beta, residual, *running)
        or is_forward_mode()
        or not _moves(running, channels)
        or (gamma is not None and gamma.shape != channels)
        or (beta is not None and beta.shape != channels)
        or (residual is not None and residual.shape != x.shape)
        or x.dim() < 2
        or x.numel() <= x.shape[1]  # fewer than two values per channel
        or _refusal(x.dtype, x.shape, x.stride()) is not None
    ):
        return None
    return _normalize(call, alone=not is_active())[0]


def infer(call: Call, mean: Tensor, var: Tensor) -> Tensor | None:
    """Normalize by given statistics, without gradients; return None if the fast path does not apply."""
    x, gamma, beta, _, _, residual, mask, *_ = call
    channels = x.shape[1:2]
    if (
        mask is not None
        or not is_unseen(x, gamma, beta, residual, mean, var)
        or is_forward_mode()
        or any(v is not None and v.shape != channels for v in (gamma, beta, mean, var))
        or (residual is not None and residual.shape != x.shape)
        or (torch.is_grad_enabled() and _any_requires_grad(x, gamma, beta, residual, mean, var))
        or x.numel() == 0
        or refusal(call) is not None
    ):
        return None
    return launch.normalize(call, mean, var)


def run(call: Call) -> tuple[Tensor, Moments]:
    """Return y and the batch's moments, and update the running averages if the call has any."""
    if call.running is not None and not _moves(call.running, call.x.shape[1:2]):
        y, moments = run(call._replace(running=None))
        moments = Moments(*(v.detach() for v in moments))
        update_(call.running, moments, call.momentum)
        return y, moments
    y, stats = _normalize(call)
    mean, var, count = (stats if call.running is None else stats.detach())[:3].unbind()
    return y, Moments(count[0], mean, var)


def normalize(call: Call, mean: Tensor, var: Tensor) -> Tensor:
    """Normalize by given statistics.

    Paper: Alg. 2, l. 11
    """
    x, gamma, beta, eps, activation, residual, *_ = call
    if not torch.is_grad_enabled() or not _any_requires_grad(x, gamma, beta, residual, mean, var):
        y = launch.normalize(call, mean, var)
        return composite.normalize(call, mean, var) if y is None else y
    # Whether torch.batch_norm would round BN(x) to 16 bits before the residual is added.
    rounds = residual is not None and x.dtype.itemsize < 4
    if rounds or mean.requires_grad or var.requires_grad:
        return composite.normalize(call, mean, var)
    gamma, beta = (None if v is None else v.float() for v in (gamma, beta))
    # Do not use F.batch_norm: in torch 2.11, it raises an error if eps is 0.
    cudnn = torch.backends.cudnn.enabled
    y = torch.batch_norm(x, gamma, beta, mean.float(), var.float(), False, 0.0, eps, cudnn)
    return activation(y if residual is None else y + residual.to(y.dtype))


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _moves(running: Kept, channels: torch.Size) -> bool:
    """Return whether the kernels can update the running averages."""
    mean, var, batches, skipped = running
    return (
        mean.dtype is torch.float32
        and var.dtype is torch.float32
        and mean.shape == channels
        and var.shape == channels
        and mean.is_contiguous()
        and var.is_contiguous()
        and batches.dtype is torch.int64
        and skipped.dtype is torch.int64
    )


def _normalize(call: Call, *, alone: bool = False) -> tuple[Tensor, Tensor]:
    """Return y and the statistics.

    With ``alone``, the second result is unspecified. The caller may pass ``alone`` only if :func:`is_unseen` is true
    and :func:`is_active` is false.
    """
    x, gamma, beta, eps, activation, residual, _, running, momentum = call
    if alone or is_unseen(x, gamma, beta, residual, *(running or ())):
        # Call the kernels directly, to avoid the overhead of torch's dispatcher.
        if torch.is_grad_enabled() and _any_requires_grad(x, gamma, beta, residual):
            if alone:
                y = _apply(x, gamma, beta, residual, call, _launch, True)
                return y, y
            y, stats, _ = _Fused.apply(x, gamma, beta, residual, call, _launch, False)  # type: ignore[no-untyped-call]
        else:
            y, stats, _ = _launch(call, False)
    elif running is None:
        y, stats, _ = torch.ops.batchnorm.fused(x, gamma, beta, residual, eps, *activation, False)
    else:
        rest = (*running, momentum, eps, *activation, False)
        y, stats, _ = torch.ops.batchnorm.fused_(x, gamma, beta, residual, *rest)
    if is_active():
        # Autograd's graph will refer to the lambda below, and `stats` refers to the graph. If the lambda referred to
        # `stats`, there would be a reference cycle.
        kept = stats.detach()
        remember(y, lambda x, residual: launch.recompute(x, residual, kept, activation), x, residual)
    return y, stats


def _launch(call: Call, keep_bits: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the forward kernels, and update the averages unless this call is a recomputation in a backward pass."""
    running = call.running
    if running is not None:
        if is_recomputation():
            call = call._replace(running=None)
        else:
            torch.autograd.graph.increment_version(running)
    if call.x.is_cuda:
        extension.start(_configure)
        extension.register()
    return launch.forward(call, keep_bits)


class _Fused(torch.autograd.Function):
    """Compute y, the statistics and the sign bits from (x, gamma, beta, residual); return only y if ``alone``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        call: Call,
        run: Any,
        alone: bool,
    ) -> Any:
        activation = call.activation
        hidden = residual is not None and activation.name != "identity"
        keep_bits = hidden and activation.name in TWO_SLOPES
        y, stats, bits = run(call, keep_bits)
        kept = (None, bits) if keep_bits else (residual, None) if hidden else (None, None)
        ctx.save_for_backward(x, gamma, beta, *kept, stats)
        ctx.options = (call.eps, activation, None if residual is None else residual.dtype, x.stride(), y.stride())
        ctx.set_materialize_grads(False)
        if alone:
            return y
        if keep_bits:
            ctx.mark_non_differentiable(bits)
        return y, stats, bits

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstats: Tensor | None = None, _: None = None) -> tuple[Any, ...]:
        x, gamma, beta, residual, bits, stats = ctx.saved_tensors
        eps, activation, residual_dtype, x_stride, y_stride = ctx.options
        wants_residual = residual_dtype is not None and ctx.needs_input_grad[3]
        dx = dgamma = dbeta = dresidual = None
        if dy is not None:
            rest = (eps, *activation, residual_dtype, wants_residual, x_stride, y_stride)
            dx, dgamma, dbeta, dresidual = _gradients(dy, x, gamma, beta, residual, bits, stats, *rest)
        if dstats is not None:
            through = composite.moments_backward(x, dstats[0], dstats[1])
            dx = through if dx is None or through is None else dx + through
        return dx, dgamma, dbeta, dresidual, None, None, None


def _gradients(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    bits: Tensor | None,
    stats: Tensor,
    eps: float,
    activation: str | int,
    slope: float,
    residual_dtype: torch.dtype | None,
    wants_residual: bool,
    x_stride: tuple[int, ...],
    y_stride: tuple[int, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, gamma, beta and the residual from what the forward pass saved."""
    g = Activation(activation if isinstance(activation, str) else NAMES[activation], slope)
    if x.stride() != x_stride:
        # Saved-tensor hooks, such as those of save_on_cpu, may change the layout of x. Restore the original layout,
        # channels last or channels first, because the order of the sign bits depends on the layout.
        x = as_dense(x, y_stride)
    dgamma: Tensor | None
    dbeta: Tensor | None
    # Use torch operations in two cases that the kernels do not support: create_graph=True, for which autograd calls
    # this function in gradient mode, and is_grads_batched=True.
    if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy):
        passes = None if bits is None else unpack(bits, x)
        call = Call(x, gamma, beta, eps, g, residual)
        dx, dgamma, dbeta, dresidual = composite.backward(call, dy, passes)
    else:
        # Without an activation, the residual's gradient is dy itself, so the kernels need not write it.
        written = residual_dtype if wants_residual and g.name != "identity" else None
        run: Any = launch.backward if is_unseen(dy, x, residual, bits, stats) else torch.ops.batchnorm.fused_backward
        dx, dgamma, dbeta, dresidual = run(dy, x, residual, bits, stats, *g, written)
        if written is None:
            dresidual = dy
    dgamma = None if gamma is None or dgamma is None else dgamma.to(gamma.dtype)
    dbeta = None if beta is None or dbeta is None else dbeta.to(beta.dtype)
    return dx, dgamma, dbeta, dresidual.to(residual_dtype) if wants_residual and dresidual is not None else None


# Function.apply checks whether a torch.func transform is active. If not, it calls `apply` of its base class. The
# callers of `_apply` have already made this check, so `_apply` is the base class's method, which is faster.
_apply: Any = super(torch.autograd.Function, _Fused).apply


def _call_of(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, *rest: Any
) -> tuple[Call, bool]:
    """Convert the arguments of the operators ``fused`` and ``fused_`` to a Call and ``keep_bits``."""
    *moved, eps, activation, slope, keep_bits = rest
    running, momentum = (tuple(moved[:4]), moved[4]) if moved else (None, None)
    return Call(x, gamma, beta, eps, Activation(activation, slope), residual, None, running, momentum), keep_bits


def _fused(*args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return _launch(*_call_of(*args))


def _fake_fused(*args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    inductor.register()
    call, keep_bits = _call_of(*args)
    x, g = call.x, geometry_of(call.x)
    assert g is not None
    stats = x.new_empty((launch.STATS, x.shape[1]), dtype=torch.float32)
    bits = empty_bits(x, g, launch.weaves_bits(call, g)) if keep_bits else None
    return empty_dense(x, g, x.dtype), stats, bits


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bits: Tensor | None,
    stats: Tensor,
    activation: str,
    slope: float,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    g = geometry_of(x)
    assert g is not None
    dr = None if residual_dtype is None else empty_dense(x, g, residual_dtype)
    return empty_dense(x, g, x.dtype), stats.new_empty(x.shape[1]), stats.new_empty(x.shape[1]), dr


def _differentiable(op: Any, kernel: Any) -> Any:
    """Return the autograd implementation of an operator."""

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def run(*args: Any) -> Any:
        if not (torch.is_grad_enabled() and _any_requires_grad(*args[:4])):
            # If possible, call the kernel directly: calling `op` through torch's dispatcher takes longer.
            return kernel(*args) if is_unseen(*args[:4]) else below(*args)
        rest = args[4:-1]
        again = lambda call, keep_bits: below(*args[:4], *rest, keep_bits)  # noqa: E731
        return _Fused.apply(*args[:4], _call_of(*args)[0], again, False)  # type: ignore[no-untyped-call]

    return run


def _whole(kernel: Any) -> Any:
    """Wrap a kernel so that its last result, if None, becomes an empty tensor: custom ops cannot return None."""

    def call(*args: Any) -> Any:
        *results, last = kernel(*args)
        return *results, args[0].new_empty(0, dtype=torch.uint8) if last is None else last

    return call


_library = torch.library.Library("batchnorm", "FRAGMENT")
_INPUTS = "Tensor x, Tensor? gamma, Tensor? beta, Tensor? residual"
_OPTIONS = "float eps, str activation, float slope, bool keep_bits"
_RUNNING = "Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) num_batches, Tensor(d!) num_skipped"
_library.define(f"fused({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_library.define(f"fused_({_INPUTS}, {_RUNNING}, float? momentum, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    "fused_backward(Tensor dy, Tensor x, Tensor? residual, Tensor? bits, Tensor stats, str activation, float slope,"
    " ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _name, _kernel, _fake in (
    ("fused", _fused, _fake_fused),
    ("fused_", _fused, _fake_fused),
    ("fused_backward", launch.backward, _fake_backward),
):
    # Register for every backend, not just CUDA, because Triton's interpreter runs the kernels on CPU tensors.
    _library.impl(_name, _whole(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"batchnorm::{_name}", _whole(_fake), lib=_library)
_autograd = [
    _differentiable(op, _whole(_fused))
    for op in (torch.ops.batchnorm.fused.default, torch.ops.batchnorm.fused_.default)
]
for _name, _function in zip(("fused", "fused_"), _autograd, strict=True):
    _library.impl(_name, _function, "Autograd")


def _configure(module: Any) -> None:
    kernels = (_whole(_fused), _whole(_fused), _whole(launch.backward))
    module.configure(*extension.addresses(), NAMES, torch.nn.Parameter, _gradients, *kernels, *_autograd)
