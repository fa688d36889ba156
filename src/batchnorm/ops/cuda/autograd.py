"""Register the fused kernels with torch, so that autograd and torch.compile know them; the one place that does.

``fused`` is pure, ``fused_`` also moves running averages in its kernels, ``fused_backward`` is the gradient of both.
What is kept for the backward pass: x, eight numbers per channel, and with a residual one bit per element (relu,
leaky_relu) or the residual itself (sigmoid, tanh, silu).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..activation import Activation
from ..composite import per_channel
from ..moments import Moments, batch_moments
from ..recomputation import remember
from ..running import Kept, Running
from ..torch_state import is_forward_mode, is_recomputation, is_unseen
from . import launch, schedule
from .layout import as_dense, empty_dense, geometry_of
from .sign_bits import empty_bits, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None


def refusal(x: Tensor) -> str | None:
    """Say why the kernels cannot take ``x``; None where they can."""
    if not HAS_TRITON:
        return "Triton, which compiles the fused kernels, is not installed"
    if x.dtype not in DTYPES:
        return f"the fused kernels take float32, bfloat16 and float16, not {x.dtype}"
    if x.shape[1] >= 2**16:
        return f"the fused kernels count up to 65535 channels, not {x.shape[1]}"
    if geometry_of(x) is None:
        return "the strides are neither channels last nor channels first, so the fused kernels cannot take them"
    return None


def moves(running: Kept, x: Tensor) -> bool:
    """Say whether the kernels can move these averages: dense, float32, one per channel of ``x``, with 64-bit counts."""
    mean, var, batches, skipped = running
    channels = x.shape[1:2]
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


def describe(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, activation: Activation
) -> str:
    """Say how the kernels take ``x``."""
    if torch.compiler.is_compiling():
        return "a CUDA tensor"
    forward, backward = launch.paths(x, gamma, beta, residual, activation.name)
    return f"fused kernels, forward {forward}, backward {backward} ({schedule.MEANING})"


def batch_norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, activation: Activation, residual: Tensor | None
) -> tuple[Tensor, Moments]:
    """Normalize a tensor that :func:`refusal` has nothing against by its own statistics."""
    call = _direct if is_unseen(x, gamma, beta, residual) else torch.ops.batchnorm.fused
    y, stats, _ = call(x, gamma, beta, residual, eps, *activation, False)
    _remember(y, x, residual, stats, activation)
    return y, _moments(stats)


def batch_norm_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: Running,
    momentum: float | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> tuple[Tensor, Moments]:
    """Do the same and move the running averages, where :func:`moves` says so, inside the kernels."""
    call = _direct_ if is_unseen(x, gamma, beta, residual, *running) else torch.ops.batchnorm.fused_
    y, stats, _ = call(x, gamma, beta, residual, *running, momentum, eps, *activation, False)
    _remember(y, x, residual, stats, activation)
    return y, _moments(stats.detach())


def normalize_batch_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: Kept,
    momentum: float | None,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor | None:
    """Return y and move the running averages, in as few steps as there are; None where something is special.

    No moments are returned: to make tensors of them takes as long as a launch.
    """
    channels = x.shape[1:2]
    if not (
        is_unseen(x, gamma, beta, residual, *running)
        and not is_forward_mode()
        and moves(running, x)
        and (gamma is None or gamma.shape == channels)
        and (beta is None or beta.shape == channels)
        and (residual is None or residual.shape == x.shape)
        and x.dim() > 1
        and x.numel() > x.shape[1]  # more than one value per channel
        and refusal(x) is None
    ):
        return None
    y, stats, _ = _direct_(x, gamma, beta, residual, *running, momentum, eps, *activation, False)
    _remember(y, x, residual, stats, activation)
    return y  # type: ignore[no-any-return]


def _remember(y: Tensor, x: Tensor, residual: Tensor | None, stats: Tensor, activation: Activation) -> None:
    stats = stats.detach()  # a recipe must not hold the graph that holds it
    remember(y, lambda x, residual: launch.normalize(x, residual, stats, *activation), x, residual)


def _moments(stats: Tensor) -> Moments:
    mean, var, count = stats[:3].unbind()
    return Moments(count[0], mean, var)


def _fused(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    eps: float,
    activation: str,
    slope: float,
    keep_bits: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return launch.forward(x, gamma, beta, residual, None, 0.0, eps, activation, slope, keep_bits)


def _fused_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches: Tensor,
    num_skipped: Tensor,
    momentum: float | None,
    eps: float,
    activation: str,
    slope: float,
    keep_bits: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    if is_recomputation():
        return _fused(x, gamma, beta, residual, eps, activation, slope, keep_bits)
    running = (running_mean, running_var, num_batches, num_skipped)
    torch.autograd.graph.increment_version(running)
    return launch.forward(x, gamma, beta, residual, running, momentum, eps, activation, slope, keep_bits)


def _fake_fused(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    g = geometry_of(x)
    assert g is not None
    keep_bits = rest[-1]
    stats = x.new_empty((launch.STATS, x.shape[1]), dtype=torch.float32)
    bits = empty_bits(x, g, launch.weaves_bits(x, gamma, beta, residual, g)) if keep_bits else None
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


class _Fused(torch.autograd.Function):
    """The gradient of both forms: ``run`` takes the four tensors, ``rest`` and whether to keep bits."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, rest: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        eps, activation, slope = rest[-3:]
        hidden = residual is not None and activation != "identity"
        keep_bits = hidden and activation in ("relu", "leaky_relu")
        y, stats, bits = run(x, gamma, beta, residual, *rest, keep_bits)
        ctx.set_materialize_grads(False)
        kept = (residual, None) if hidden else (None, None)
        if keep_bits:
            ctx.mark_non_differentiable(bits)
            kept = (None, bits)
        ctx.save_for_backward(x, gamma, beta, *kept, stats)
        ctx.options = (eps, activation, slope, None if residual is None else residual.dtype)
        ctx.strides = (x.stride(), y.stride())
        return y, stats, bits

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstats: Tensor | None, _: None) -> tuple[Any, ...]:
        x, gamma, beta, residual, bits, stats = ctx.saved_tensors
        eps, activation, slope, residual_dtype = ctx.options
        if x.stride() != ctx.strides[0]:
            # Hooks such as save_on_cpu's may lose the layout, in which the bits lie.
            x = as_dense(x, ctx.strides[1])
        wants_residual = ctx.needs_input_grad[4] and residual_dtype is not None
        dx = dgamma = dbeta = dresidual = None
        if torch.is_grad_enabled() and dy is not None:
            kept = (x, gamma, beta, residual, bits)
            dx, dgamma, dbeta, dresidual = _plain_backward(dy, *kept, eps, Activation(activation, slope))
        elif dy is not None:
            # With nothing after the sum, the residual's gradient is dy itself.
            written = residual_dtype if wants_residual and activation != "identity" else None
            run = launch.backward if is_unseen(dy, x, residual, bits, stats) else torch.ops.batchnorm.fused_backward
            dx, dgamma, dbeta, dresidual = run(dy, x, residual, bits, stats, activation, slope, written)
            if written is None:
                dresidual = dy
        if dstats is not None:
            extra = _moments_backward(dstats, x)
            dx = extra if dx is None else dx + extra
        return (
            None,
            dx,
            None if gamma is None or dgamma is None else dgamma.to(gamma.dtype),
            None if beta is None or dbeta is None else dbeta.to(beta.dtype),
            dresidual.to(residual_dtype) if wants_residual and dresidual is not None else None,
            None,
        )


def _plain_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    bits: Tensor | None,
    eps: float,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients in plain operations, so that they have gradients themselves."""
    dims = [0, *range(2, x.dim())]
    moments, centred = batch_moments(x, dims)
    invstd = torch.rsqrt(moments.var + eps)
    x_hat = centred * invstd
    scale = invstd if gamma is None else invstd * per_channel(gamma.to(invstd.dtype), x)
    dz = dy.to(x_hat.dtype)
    if bits is not None:
        dz = torch.where(unpack(bits, x), dz, dz * (activation.slope if activation.name == "leaky_relu" else 0.0))
    elif activation.name != "identity":
        z = centred * scale
        z = z if beta is None else z + per_channel(beta.to(z.dtype), x)
        z = z if residual is None else z + residual.to(z.dtype)
        (dz,) = torch.autograd.grad(activation(z), z, dz, create_graph=True)
    weighted = dz * x_hat
    dx = scale * (dz - dz.mean(dims, keepdim=True) - x_hat * weighted.mean(dims, keepdim=True))
    return dx.to(x.dtype), weighted.sum(dims), dz.sum(dims), dz


def _moments_backward(dstats: Tensor, x: Tensor) -> Tensor:
    """Return the gradient through the mean and the variance that were handed out."""
    dims = [0, *range(2, x.dim())]
    moments, centred = batch_moments(x, dims)
    dmean, dvar = per_channel(dstats[0], x), per_channel(dstats[1], x)
    return ((dmean + 2 * dvar * centred) / moments.count).to(x.dtype)


def _differentiable(run: Any) -> Any:
    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:4]):
            return _Fused.apply(run, *args[:4], args[4:-1])  # type: ignore[no-untyped-call]
        return run(*args)

    return call


def _below_autograd(op: Any) -> Any:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return run


def _whole(kernel: Any) -> Any:
    """Give torch's dispatcher, to which no result may be absent, an empty tensor for the last one."""

    def call(*args: Any) -> Any:
        *results, last = kernel(*args)
        return *results, args[0].new_empty(0, dtype=torch.uint8) if last is None else last

    return call


# Past the dispatcher, which takes as long as all the rest of a call, where only autograd has to see it.
_direct, _direct_ = _differentiable(_fused), _differentiable(_fused_)

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
    ("fused_", _fused_, _fake_fused),
    ("fused_backward", launch.backward, _fake_backward),
):
    # For every backend, though only CUDA's tensors are sent here: interpreted, the kernels run on CPU tensors.
    _library.impl(_name, _whole(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"batchnorm::{_name}", _whole(_fake), lib=_library)
for _op in (torch.ops.batchnorm.fused.default, torch.ops.batchnorm.fused_.default):
    _library.impl(_op, _differentiable(_below_autograd(_op)), "Autograd")
