"""The CPU path: a kernel of our own, torch's where they are fast, passes over memory elsewhere; accurate everywhere.

What there is to gain: a forward pass has to read x twice and write y, at the speed of memory. Torch's statistics of
contiguous images are a scalar loop, far from it; in channels_last with few channels its vectors are as wide as there
are channels. ReLU as a second call takes new memory forward and backward. And on a small batch all of this is less than
what surrounds it: calls of operators, and of Python. Hence

autograd.py       layers in training: one call of kernel.c for dense float32, if compiler.py finds a C compiler; of
                  torch's kernel otherwise, and if that is as fast.
torch_kernels.py  torch's kernel and its derivative, for small batches, for channels_last with channels enough, and for
                  half precision. The activation is applied in place.
passes.py         everything else: statistics by sums that run at the speed of memory, the transform, the activation in
                  place, torch's kernel for the backward pass if it knows the layout.

``batchnorm bench cpu`` measures all of it against torch; results/cpu.json holds the numbers.

What torch's kernels compute does not keep its digits when the mean is many standard deviations from zero, for then
a*x + b is a difference of large numbers. All three check this on the statistics, and such a batch is first shifted by
its mean: BN(x) = BN(x - s). kernel.c always shifts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
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
    """Refuse nothing that is on the CPU."""
    return None


def describe(call: Call) -> str:
    """Say what runs on a CPU tensor."""
    missing = compiler.unavailable()
    if missing is not None:
        return f"a CPU tensor, and torch's kernels, for {missing}"
    if autograd.form_of(call.x, call.activation) is None:
        return "a CPU tensor, and torch's kernels: the compiled one takes dense float32 batches"
    reason = "a CPU tensor; layers in training take the compiled kernel, or torch's if that is as fast"
    found = compiler.kernels()
    if found is not None and found.uncached is not None:
        reason += f"; compiled for this process alone, for {found.uncached}"
    return reason


def run(call: Call) -> tuple[Tensor, Moments]:
    """Normalize a non-empty CPU tensor by its own statistics, and move the running averages if there are any."""
    y, moments = _run(call)
    if call.running is not None:
        moments = Moments(*(v.detach() for v in moments))
        update_(call.running, moments, call.momentum, plain=True)
    return y, moments


def _run(call: Call) -> tuple[Tensor, Moments]:
    x, gamma, beta, eps, activation, residual, *_ = call
    # A half-precision sum with the residual would round z before the activation looks at its sign.
    if torch_kernels.is_fast(x) and (residual is None or x.dtype.itemsize > 2):
        constant = call.running is not None  # nobody differentiates the moments, which spares autograd a step
        found = torch_kernels.run(call, constant)
        if found is not None:
            remember(found[0], _again(eps, activation), x, gamma, beta, residual)
            return found
    layout = layout_of(x)
    if layout is None:
        # Elements between those of x: a copy of it in the same order costs one pass of the six that follow.
        x = x.clone(memory_format=torch.preserve_format)
        layout = layout_of(x)
        if layout is None:  # dimensions stored in an order that no network produces
            return composite.run(call._replace(running=None))
    rest = (eps, activation, layout)
    y, mean, var = BatchNormFunction.apply(x, gamma, beta, residual, *rest)  # type: ignore[no-untyped-call]
    remember(y, lambda *v: BatchNormFunction.apply(*v, *rest)[0], x, gamma, beta, residual)  # type: ignore[no-untyped-call]
    return y, Moments(torch.full((), x.numel() // x.shape[1], dtype=statistics_dtype(x)), mean, var)


def _again(eps: float, activation: Activation) -> Callable[..., Tensor]:
    def again(x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None) -> Tensor:
        found = torch_kernels.run(Call(x, gamma, beta, eps, activation, residual), constant_moments=True)
        assert found is not None  # as it was not the first time
        return found[0]

    return again


def normalize(call: Call, mean: Tensor, var: Tensor) -> Tensor:
    """Normalize a non-empty CPU tensor by given statistics: torch's kernel, the activation in place."""
    x, gamma, beta, eps, activation, residual, *_ = call
    dtype = statistics_dtype(x)
    mean, var = mean.to(dtype), var.to(dtype)
    wanted = mean.requires_grad or var.requires_grad  # the kernel takes them for constants
    if wanted or not bool((mean.square() <= torch_kernels.CONDITION**2 * (var + eps)).all()):
        return composite.normalize(call, mean, var)
    gamma, beta = (None if v is None else v.to(dtype) for v in (gamma, beta))
    y = F.batch_norm(flatten(x, x), mean, var, gamma, beta, training=False, eps=eps)
    if residual is not None:
        y = y.add_(flatten(residual, x))
    return unflatten(activation(y) if y.requires_grad else apply_(activation, y), x)
