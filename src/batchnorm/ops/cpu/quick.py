"""The shortest way from a batch to its normalized output and moved running averages, for the layers in training.

On a small batch what stands around torch's kernel costs more than the kernel: every further function, of torch, numpy
or Python, is code that the backward pass has pushed out of the cache. So this is one call of the kernel, which moves
the running averages as well, and one look at the statistics it returns. Where they forbid it the averages are put back
and the caller takes another way. No moments are returned: to make tensors of them would take as long again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation import Activation
from ..context import is_plain
from ..running import Running
from . import native, nonlinear

_f32 = torch.float32
_kernel = torch.native_batch_norm

LIMIT = native.CONDITION**2


def normalize_batch_(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, running: Running, momentum: float | None, eps: float,
    activation: Activation,
) -> Tensor | None:  # fmt: skip
    """Return y and move the running averages; None, and nothing moved, where that would be inaccurate or slow."""
    mean, var, num_batches, _ = running
    dtype, features = x.dtype, mean.shape
    if not (
        is_plain(x)
        and (dtype is _f32 or dtype is torch.bfloat16 or dtype is torch.float16)
        and mean.dtype is _f32
        and var.dtype is _f32
        and (gamma is None or (gamma.dtype is _f32 and gamma.shape == features))
        and (beta is None or (beta.dtype is _f32 and beta.shape == features))
        and x.dim() > 1
        and native.is_fast(x)
    ):
        return None
    memory = _memories.get(id(mean))
    if memory is None or memory.addresses != (mean.data_ptr(), var.data_ptr(), num_batches.data_ptr()):
        memory = _remember(mean, var, num_batches)
    _, means, variances, count, _ = memory
    kept = bytes(means), bytes(variances)
    factor = momentum if momentum is not None else 1 / (count[0] + 1)
    y, mu, invstd = _kernel(x, gamma, beta, mean, var, True, factor, eps)
    # Times zero: NaN where a variance is infinite, for the inverse of its root is 0 and inf * 0 is NaN.
    finite = var.dot(invstd).item() * 0.0
    # No |mean / std| is larger than the product of the norms. Only where that is too large, look closer.
    if not (mu.dot(mu).item() * invstd.dot(invstd).item() + finite <= LIMIT or _norm2(mu * invstd) + finite <= LIMIT):
        means[:], variances[:] = (memoryview(old).cast("f") for old in kept)
        return None
    count[0] += 1
    return y if activation.name == "identity" else nonlinear.apply_to_fresh(activation, y)


def _norm2(v: Tensor) -> float:
    return v.dot(v).item()


class _Memory(NamedTuple):
    """The memory of running averages as Python sees it, and the addresses that say whether it still is."""

    addresses: tuple[int, int, int]
    mean: memoryview
    var: memoryview
    num_batches: memoryview
    lifetime: weakref.ref[Tensor]


# By the identity of the running mean, for as long as that lives.
_memories: dict[int, _Memory] = {}


def _remember(mean: Tensor, var: Tensor, num_batches: Tensor) -> _Memory:
    key, tensors = id(mean), (mean, var, num_batches)
    views = (memoryview(t.detach().view(-1).numpy()) for t in tensors)
    addresses = mean.data_ptr(), var.data_ptr(), num_batches.data_ptr()
    memory = _Memory(addresses, *views, weakref.ref(mean, lambda _: _memories.pop(key, None)))
    _memories[key] = memory
    return memory
