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

from . import launch, plan
from .activation import Activation
from .composite import per_channel
from .context import is_recomputation
from .geometry import empty_dense, geometry_of
from .moments import Moments, batch_moments
from .running import Running
from .saving import remember

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


def choice(x: Tensor, residual: Tensor | None) -> tuple[str, str]:
    """Return the path of a CUDA tensor, and the reason."""
    refused = refusal(x)
    if refused is not None:
        return "composite", refused
    if torch.compiler.is_compiling():
        return "cuda", "a CUDA tensor"
    forward, backward = (launch.plan_of(x, b, residual is not None) for b in (False, True))
    return "cuda", f"fused kernels, forward {forward.path}, backward {backward.path} ({plan.MEANING})"


def batch_norm(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, activation: Activation, residual: Tensor | None
) -> tuple[Tensor, Moments]:
    """Normalize a tensor that :func:`refusal` has nothing against by its own statistics."""
    y, stats, _ = torch.ops.batchnorm.fused(x, gamma, beta, residual, eps, *activation, False)
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
    """Do the same and move the running averages, which are float32, inside the kernels."""
    args = (x, gamma, beta, residual, *running, momentum, eps, *activation, False)
    y, stats, _ = torch.ops.batchnorm.fused_(*args)
    _remember(y, x, residual, stats, activation)
    return y, _moments(stats.detach())


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
) -> tuple[Tensor, Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor, Tensor]:
    running = (running_mean, running_var, num_batches, num_skipped)
    if is_recomputation():
        return _fused(x, gamma, beta, residual, eps, activation, slope, keep_bits)
    torch.autograd.graph.increment_version(running)
    return launch.forward(x, gamma, beta, residual, running, momentum, eps, activation, slope, keep_bits)


def _fused_backward(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bits: Tensor,
    stats: Tensor,
    activation: str,
    slope: float,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = bits if bits.numel() else None
    dx, dgamma, dbeta, dr = launch.backward(dy, x, residual, kept, stats, activation, slope, residual_dtype)
    return dx, dgamma, dbeta, stats.new_empty(0) if dr is None else dr


def _fake_forward(x: Tensor, keep_bits: bool) -> tuple[Tensor, Tensor, Tensor]:
    g = geometry_of(x)
    assert g is not None
    stats = x.new_empty((launch.STATS, x.shape[1]), dtype=torch.float32)
    return (
        empty_dense(x, g, x.dtype),
        stats,
        x.new_empty(launch.bytes_of_bits(g) if keep_bits else 0, dtype=torch.uint8),
    )


def _fake_fused(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_forward(x, args[-1])


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bits: Tensor,
    stats: Tensor,
    activation: str,
    slope: float,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = geometry_of(x)
    assert g is not None
    dr = stats.new_empty(0) if residual_dtype is None else empty_dense(x, g, residual_dtype)
    return empty_dense(x, g, x.dtype), stats.new_empty(x.shape[1]), stats.new_empty(x.shape[1]), dr


class _Fused(torch.autograd.Function):
    """The gradient of both forms; ``args`` are the operator's."""

    @staticmethod
    def forward(ctx: Any, op: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, gamma, beta, residual = args[:4]
        eps, activation, slope, _ = args[-4:]
        hidden = residual is not None and activation != "identity"
        signed = activation in ("relu", "leaky_relu")
        with torch._C._AutoDispatchBelowAutograd():
            y, stats, bits = op(*args[:-1], hidden and signed)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(bits)
        ctx.save_for_backward(x, gamma, beta, residual if hidden and not signed else None, stats, bits)
        ctx.options = (eps, Activation(activation, slope), None if residual is None else residual.dtype, len(args))
        return y, stats, bits

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstats: Tensor | None, _: None) -> tuple[Any, ...]:
        x, gamma, beta, residual, stats, bits = ctx.saved_tensors
        eps, activation, residual_dtype, arguments = ctx.options
        wants_residual = ctx.needs_input_grad[4] and residual_dtype is not None
        given = (x, gamma, beta, residual, bits, eps, activation)
        dx = dgamma = dbeta = dresidual = None
        if torch.is_grad_enabled() and dy is not None:
            dx, dgamma, dbeta, dresidual = _plain_backward(dy, *given)
        elif dy is not None:
            # With nothing after the sum, the residual's gradient is dy itself.
            written = residual_dtype if wants_residual and activation.name != "identity" else None
            dx, dgamma, dbeta, dresidual = torch.ops.batchnorm.fused_backward(
                dy, x, residual, bits, stats, *activation, written
            )
            if written is None:
                dresidual = dy
        if dstats is not None:
            extra = _moments_backward(dstats, x)
            dx = extra if dx is None else dx + extra
        grads = (
            dx,
            None if gamma is None or dgamma is None else dgamma.to(gamma.dtype),
            None if beta is None or dbeta is None else dbeta.to(beta.dtype),
            dresidual.to(residual_dtype) if wants_residual and dresidual is not None else None,
        )
        return None, *grads, *[None] * (arguments - 4)


def _plain_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    bits: Tensor,
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
    if bits.numel():
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


def unpack(bits: Tensor, x: Tensor) -> Tensor:
    """Return the bits that a forward pass kept as a bool tensor of x's shape."""
    g = geometry_of(x)
    assert g is not None
    lines, length = (g.rows, g.channels) if g.nhwc else (g.channels, g.rows)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = (bits.reshape(lines, -1, 1) >> shifts & 1).reshape(lines, -1)[:, :length].bool()
    if g.nhwc:
        return flat.reshape(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)
    return flat.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def _differentiable(op: Any) -> Any:
    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[:4]):
            return _Fused.apply(op, *args)  # type: ignore[no-untyped-call]
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


_library = torch.library.Library("batchnorm", "FRAGMENT")
_INPUTS = "Tensor x, Tensor? gamma, Tensor? beta, Tensor? residual"
_OPTIONS = "float eps, str activation, float slope, bool keep_bits"
_RUNNING = "Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) num_batches, Tensor(d!) num_skipped"
_library.define(f"fused({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_library.define(f"fused_({_INPUTS}, {_RUNNING}, float? momentum, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    "fused_backward(Tensor dy, Tensor x, Tensor? residual, Tensor bits, Tensor stats, str activation, float slope,"
    " ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _name, _kernel, _fake in (
    ("fused", _fused, _fake_fused),
    ("fused_", _fused_, _fake_fused),
    ("fused_backward", _fused_backward, _fake_backward),
):
    # For every backend, though only CUDA's tensors are sent here: interpreted, the kernels run on CPU tensors.
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"batchnorm::{_name}", _fake, lib=_library)
_library.impl("fused", _differentiable(torch.ops.batchnorm.fused.default), "Autograd")
_library.impl("fused_", _differentiable(torch.ops.batchnorm.fused_.default), "Autograd")
