"""The CPU path: a compiled kernel, torch's kernel or, if neither is suitable, a series of torch operations.

A forward pass has to read x twice and write y, so memory bandwidth limits its speed. Torch is slower than this limit
for three reasons. First, it computes the statistics of contiguous images in a scalar loop, and it vectorizes loops over
channels_last images only along the channels, which is slow with few channels. Second, a separate ReLU adds a pass over
memory to both the forward and the backward pass. Third, on small batches, calling operators from Python takes most of
the time.

So there are three implementations:

- ``autograd.py`` is the fast path for layers in training. If compiler.py finds a C compiler, most dense float32 batches
  use kernel.c: one call for the forward pass, and one for the backward pass. Most half-precision batches, and float32
  batches on which torch's kernel is faster, use torch's kernel.
- ``torch_kernels.py`` uses torch's kernel if that is faster than passes.py, for example on small batches and in half
  precision.
- ``passes.py`` handles other dense batches in separate passes for the statistics, the transform and the activation. Its
  backward pass uses torch's kernel if that is fast and accurate enough.

Batches that are neither contiguous nor channels_last in memory, even after a copy, are left to ``composite.py``.

``batchnorm bench cpu`` compares this path with torch; the results are in results/cpu.json.

Torch's kernels compute BN(x) as a*x + b. If the mean is many standard deviations from zero, this is a difference of
large numbers, which loses precision. So before using the output of torch's kernel, autograd.py and torch_kernels.py
check the mean, and leave a batch with such a mean to passes.py. That module normalizes x - s instead of x, where s is
close to the mean. The result is the same, because BN(x - s) = BN(x). The code in kernel.c needs no check, because it
always subtracts the mean, rounded to float32, from x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import composite
from ..activation import Activation
from ..call import Call
from ..moments import Moments, statistics_dtype
from ..recomputation import remember
from ..running import update_
from . import autograd, compiler, torch_kernels
from .autograd import forget, train_
from .passes import BatchNormFunction, layout_of
from .torch_kernels import apply_, flatten, unflatten

__all__ = ["describe", "forget", "normalize", "refusal", "run", "train_"]


def refusal(call: Call) -> str | None:
    """Return None: this path supports every CPU tensor."""
    return None


def describe(call: Call) -> str:
    """Return which kernels run on a CPU tensor."""
    missing = compiler.unavailable()
    if missing is not None:
        return f"a CPU tensor, computed by torch's kernels because {missing}"
    if autograd.form_of(call.x, call.activation) is None:
        return (
            "a CPU tensor, computed by torch's kernels: the compiled kernel needs a contiguous or channels_last float32"
            " batch with more than one value per channel"
        )
    reason = "a CPU tensor; layers in training use the compiled kernel, or torch's kernel if that is faster"
    found = compiler.kernels()
    if found is not None and found.uncached is not None:
        reason += f"; the compiled kernel could not be cached: {found.uncached}"
    return reason


def run(call: Call) -> tuple[Tensor, Moments]:
    """Normalize a non-empty CPU tensor by its own statistics, and update the running averages if there are any."""
    y, moments = _run(call)
    if call.running is not None:
        moments = Moments(*(v.detach() for v in moments))
        update_(call.running, moments, call.momentum)
    return y, moments


def _run(call: Call) -> tuple[Tensor, Moments]:
    x, gamma, beta, eps, activation, residual, *_ = call
    # In half precision, torch's kernel rounds BN(x) before the residual is added, so the sum may get the wrong sign.
    if torch_kernels.is_fast(x) and (residual is None or x.dtype.itemsize > 2):
        constant = call.running is not None  # with running averages, `run` detaches the moments
        found = torch_kernels.run(call, constant)
        if found is not None:
            remember(found[0], _again(eps, activation), x, gamma, beta, residual)
            return found
    layout = layout_of(x)
    if layout is None:
        # x may be a view with gaps in its memory. A copy has no gaps, so its layout may be supported.
        x = x.clone(memory_format=torch.preserve_format)
        layout = layout_of(x)
        if layout is None:
            return composite.run(call._replace(running=None))
    rest = (eps, activation, layout)
    y, mean, var = BatchNormFunction.apply(x, gamma, beta, residual, *rest)  # type: ignore[no-untyped-call]
    remember(y, lambda *v: BatchNormFunction.apply(*v, *rest)[0], x, gamma, beta, residual)  # type: ignore[no-untyped-call]
    return y, Moments(x.new_full((), x.numel() // x.shape[1], dtype=statistics_dtype(x)), mean, var)


def _again(eps: float, activation: Activation) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> Tensor:
        found = torch_kernels.run(Call(x, gamma, beta, eps, activation, residual), constant_moments=True)
        assert found is not None  # the forward pass had the same input, and its result was not None
        return found[0]

    return again


def normalize(call: Call, mean: Tensor, var: Tensor) -> Tensor:
    """Normalize a non-empty CPU tensor by given statistics, with torch's kernel if it is accurate enough."""
    x, gamma, beta, eps, activation, residual, *_ = call
    dtype = statistics_dtype(x)
    mean, var = mean.to(dtype).contiguous(), var.to(dtype).contiguous()
    wanted = mean.requires_grad or var.requires_grad  # torch's kernel cannot compute these gradients
    rounds = residual is not None and x.dtype.itemsize == 2  # see `_run`
    if wanted or rounds or not bool((mean.square() <= torch_kernels.CONDITION**2 * (var + eps)).all()):
        return composite.normalize(call, mean, var)
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in (x, gamma, beta)):
        # Autograd saves the statistics; a later training call may change them in place before the backward pass.
        mean, var = mean.clone(), var.clone()
    gamma, beta = (None if v is None else v.to(dtype).contiguous() for v in (gamma, beta))
    # Do not use F.batch_norm: in torch 2.11, it raises an error if eps is 0.
    y = torch.batch_norm(flatten(x, x), gamma, beta, mean, var, False, 0.0, eps, False)
    if residual is not None:
        y = y.add_(flatten(residual, x))
    return unflatten(activation(y) if y.requires_grad else apply_(activation, y), x)
