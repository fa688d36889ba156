"""Split and concatenate tensors without copies, for the branches of an Inception module.

An Inception module splits the output of one convolution among several batch normalizations, and concatenates the
outputs of its branches. A slice is a range of a tensor's channels. In the forward pass, the GPU kernels read slices of
the convolution's output and write the branches' outputs to slices of the concatenated output. In the backward pass, the
GPU kernels read slices of the concatenated output's gradient and write slices of the gradient of the convolution's
output. One call normalizes all branches whose inputs are available at the same time. The weights of several
convolutions are joined into one tensor, without a copy if the weights are adjacent in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layers import BatchNorm2d
from ...ops import composite
from ...ops.call import Call
from ...ops.cuda import grouped
from ...ops.recomputation import is_active
from ...ops.running import Kept
from ...ops.torch_state import is_forward_mode, is_recomputation, is_unseen
from .channels_last import empty, readable, takes
from .pooling import average_into, empty_maxima, empty_places, max_pool_backward, max_pool_gradient, max_pool_into


class Part(NamedTuple):
    """A batch normalization layer, its input and its output, for :func:`normalize_together`."""

    bn: BatchNorm2d
    source: int  # the layer's input is in `sources[source]` of normalize_together()
    start: int = 0  # the first channel of the layer's input in that tensor
    y: Tensor | None = None  # the tensor to write the output to; None allocates a new one
    averaged: bool = False  # whether to average 3x3 windows of the input before normalizing


def can_join(layers: Sequence[BatchNorm2d], x: Tensor) -> bool:
    """Return whether :func:`normalize_together` can run these layers on tensors of ``x``'s device, dtype and layout."""
    first = layers[0]
    trains = first.uses_batch_statistics
    if not trains and torch.is_grad_enabled():
        return False
    alike = all(
        type(bn) is BatchNorm2d
        and bn.uses_batch_statistics == trains
        and bn.training >= trains
        and (bn.track_running_stats or not trains)
        and bn.statistics is None
        and len(bn.features) == 1
        and (bn.eps, bn.momentum, bn.activation) == (first.eps, first.momentum, first.activation)
        for bn in layers
    )
    if not alike or not takes(x) or is_forward_mode() or is_active():
        return False
    # A parameter that torch.nn.utils.parametrize computes is not in `_parameters`, so it is None here.
    vectors = [v.get(k) for bn in layers for v, names in _vectors(bn) for k in names]
    channels = [bn.features for bn in layers for _ in range(4)]
    counts = [bn._buffers.get(k) for bn in layers for k in ("num_batches_tracked", "num_batches_skipped")]
    return (
        is_unseen(x, *vectors)
        and all(v is not None and v.dtype is torch.float32 and v.is_contiguous() for v in vectors)
        and all(v is not None and v.shape == c for v, c in zip(vectors, channels, strict=True))
        and all(v is not None and v.dtype is torch.int64 for v in counts)
        and all(v is not None and v.device == x.device for v in (*vectors, *counts))
    )


def _vectors(bn: BatchNorm2d) -> list[tuple[dict[str, Tensor | None], tuple[str, str]]]:
    parameters: Any = bn._parameters
    return [(parameters, ("weight", "bias")), (bn._buffers, ("running_mean", "running_var"))]


def normalize_together(parts: Sequence[Part], *sources: Tensor) -> tuple[Tensor, ...]:
    """Run the layers of all parts and return their outputs; :func:`can_join` must accept the layers and tensors.

    If the layers use running averages, each part is normalized separately. If they use batch statistics, at most four
    parts are supported. Each kernel launch processes all parts; only the forward pass of large inputs processes one
    part after the other. The running averages are updated, except when activation checkpointing recomputes the forward
    pass.
    """
    sources = tuple(s.contiguous(memory_format=torch.channels_last) for s in sources)
    if not parts[0].bn.uses_batch_statistics:
        return tuple(_inferred(part, sources[part.source]) for part in parts)
    parameters = [p for part in parts for p in (part.bn.weight, part.bn.bias)]
    ys: tuple[Tensor, ...] = _Together.apply(parts, len(sources), *sources, *parameters)  # type: ignore[no-untyped-call]
    return ys


def _inferred(part: Part, source: Tensor) -> Tensor:
    bn = part.bn
    x = source[:, part.start : part.start + bn.features[0]]
    x = _average(x) if part.averaged else x
    y = empty(x, tuple(x.shape)) if part.y is None else part.y
    _check_shapes([x], [y])
    mean, var, *_ = running_of(bn)
    grouped.infer(x, bn.weight, bn.bias, mean, var, y, bn.eps, bn.activation)
    return y


def _check_shapes(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    for x, y in zip(xs, ys, strict=True):
        if x.shape != y.shape:
            raise ValueError(
                "cannot concatenate the branches of an Inception module: a branch has the output shape"
                f" {tuple(x.shape)} instead of {tuple(y.shape)}; check the strides and paddings of its convolutions"
            )


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Sequence[Part], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        sources, parameters = tensors[:count], tensors[count:]
        # Do not save `parts` itself: `parts` refers to output tensors, which the autograd graph would keep in memory.
        ctx.places = [(p.source, p.start, p.bn.features[0], p.averaged) for p in parts]
        ctx.options = (parts[0].bn.eps, parts[0].bn.activation)
        averaged = [_average(sources[s][:, a : a + c]) for s, a, c, pooled in ctx.places if pooled]
        xs = _inputs(ctx.places, sources, averaged)
        ys = [empty(x, tuple(x.shape)) if p.y is None else p.y for x, p in zip(xs, parts, strict=True)]
        _check_shapes(xs, ys)
        running = None
        if not is_recomputation():
            running = [running_of(part.bn) for part in parts]
            torch.autograd.graph.increment_version([t for kept in running for t in kept])
        gammas, betas = parameters[::2], parameters[1::2]
        options = (parts[0].bn.eps, parts[0].bn.momentum, parts[0].bn.activation)
        stats = grouped.forward(xs, gammas, betas, running, ys, *options)
        ctx.counts = (len(sources), len(averaged))
        ctx.save_for_backward(*sources, *averaged, *parameters, stats)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        a, b = ctx.counts
        *tensors, stats = ctx.saved_tensors
        parameters = tensors[a + b :]
        # Saved-tensor hooks such as save_on_cpu may have changed the layout, but the kernels need channels last.
        tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors[: a + b]]
        sources, averaged = tensors[:a], tensors[a:]
        if torch.is_grad_enabled():
            return None, None, *_differentiable(ctx, dys, sources, parameters)
        dsources = [torch.empty_like(source) for source in sources]
        daveraged = [torch.empty_like(t) for t in averaged]
        xs, dxs = _inputs(ctx.places, sources, averaged), _inputs(ctx.places, dsources, daveraged)
        dgammas, dbetas = grouped.backward(dys, xs, stats, dxs, ctx.options[1])
        pooled = iter(daveraged)
        for source, start, channels, is_averaged in ctx.places:
            if is_averaged:
                average_into(next(pooled), dsources[source][:, start : start + channels], True)
        return None, None, *dsources, *(d for both in zip(dgammas, dbetas, strict=True) for d in both)


def _inputs(
    places: Sequence[tuple[int, int, int, bool]], sources: Sequence[Tensor], averaged: Sequence[Tensor]
) -> list[Tensor]:
    """Return each part's input: the next tensor of ``averaged`` if the part is averaged, else a slice of its source.

    Nothing is copied. Called with buffers for the gradients of ``sources`` and ``averaged``, this function returns the
    buffer for the gradient of each part's input.
    """
    pooled = iter(averaged)
    return [next(pooled) if is_averaged else sources[s][:, a : a + c] for s, a, c, is_averaged in places]


def _average(x: Tensor) -> Tensor:
    y = empty(x, tuple(x.shape))
    average_into(x, y, False)
    return y


def running_of(bn: BatchNorm2d) -> Kept:
    """Return the running averages and batch counts of a layer that :func:`can_join` accepts."""
    b: Any = bn._buffers
    return (b["running_mean"], b["running_var"], b["num_batches_tracked"], b["num_batches_skipped"])


def _differentiable(
    ctx: Any, dys: Sequence[Tensor], sources: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the sources and of the parameters, computed with differentiable operations."""
    eps, activation = ctx.options
    parts: list[list[Tensor]] = [[] for _ in sources]
    gradients = []
    for (s, a, c, pooled), dy, gamma, beta in zip(ctx.places, dys, parameters[::2], parameters[1::2], strict=True):
        x = sources[s][:, a : a + c]
        x = torch.ops.batchnorm.average_pool(x, False) if pooled else x
        dx, dgamma, dbeta, _ = composite.backward(Call(x, gamma, beta, eps, activation), dy)
        parts[s].append(torch.ops.batchnorm.average_pool(dx, True) if pooled else dx)
        gradients += [dgamma.to(gamma.dtype), dbeta.to(beta.dtype)]
    return [*(torch.cat(slices, 1) for slices in parts), *gradients]


def max_pool_beside(x: Tensor, stride: int, to: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x`` and the maxima of its 3x3 windows, which are written to ``to`` if it is given.

    Other layers should read the returned ``x`` instead of the original. Then, in the backward pass, the pool's kernel
    adds the gradient from these layers to the gradient from the pool, without another pass over the tensor.
    """
    both: tuple[Tensor, Tensor] = _PoolBeside.apply(x, stride, [to])  # type: ignore[no-untyped-call]
    return both


class _PoolBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int, to: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        y = empty_maxima(x, stride) if to[0] is None else to[0]
        where = empty_places(y)
        max_pool_into(x, y, where, stride)
        ctx.save_for_backward(where)
        ctx.options = (stride, *x.shape[2:])
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor, None, None]:
        (where,) = ctx.saved_tensors
        stride, h, w = ctx.options
        if torch.is_grad_enabled():
            return dx + max_pool_backward(dy, where, stride, h, w), None, None
        return max_pool_gradient(dy, where, stride, h, w, dx), None, None


class Concatenation:
    """A channels-last tensor whose channels are written in parts; autograd treats it as the concatenation of the parts.

    >>> parts = Concatenation(torch.zeros(2, 3, 4, 4), (1, 2), (4, 4))
    >>> y = parts.join([part.fill_(k) for k, part in enumerate(parts.parts)])
    >>> y[0, :, 0, 0]
    tensor([0., 1., 1.])
    """

    def __init__(self, like: Tensor, channels: Sequence[int], size: tuple[int, ...]) -> None:
        self.channels = list(channels)
        self.whole = empty(like, (len(like), sum(channels), *size))
        starts = accumulate(channels, initial=0)
        self.parts = [_lying_in(self.whole, a, c) for a, c in zip(starts, channels, strict=False)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor; its gradient is split among ``parts``.

        ``parts`` are the outputs of the functions that wrote the tensors in ``self.parts``.
        """
        y: Tensor = _Join.apply(self, *parts)  # type: ignore[no-untyped-call]
        return y


def _lying_in(whole: Tensor, start: int, channels: int) -> Tensor:
    """Return a slice of ``whole`` that shares its memory, but that autograd does not treat as a view."""
    shape = (whole.shape[0], channels, *whole.shape[2:])
    part = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return part.set_(whole.untyped_storage(), whole.storage_offset() + start, shape, whole.stride())


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, concatenation: Concatenation, *parts: Tensor) -> Tensor:
        ctx.channels = concatenation.channels
        return concatenation.whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *readable(dy)[0].split(ctx.channels, 1)


def join_kernels(kernels: Sequence[Tensor]) -> Tensor:
    """Concatenate 1x1 convolution kernels along the output channels, without a copy if they are adjacent in memory.

    The kernels are always copied if one of them is a tensor subclass, or if a compiler, a ``torch.func`` transform,
    forward-mode differentiation, a tracer, a torch-function mode or a torch-dispatch mode is active.
    """
    if not is_unseen(*kernels) or is_forward_mode():
        return torch.cat(list(kernels))
    joined: Tensor = _JoinedKernels.apply(*kernels)  # type: ignore[no-untyped-call]
    return joined


class _JoinedKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *kernels: Tensor) -> Tensor:
        # Save the kernels, so that autograd detects in-place changes of them before the backward pass. The joined
        # tensor has its own version counter, which does not count these changes.
        ctx.save_for_backward(*kernels)
        return joined_view(kernels) if are_neighbors(kernels) else torch.cat(kernels)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(dy.split([len(kernel) for kernel in ctx.saved_tensors]))


def are_neighbors(kernels: Sequence[Tensor]) -> bool:
    """Return whether 1x1 convolution kernels have the same dtype and lie one after the other in one storage."""
    first, rows = kernels[0], kernels[0].shape[1]
    return all(k.stride(0) == rows and k[0].numel() == rows and k.dtype == first.dtype for k in kernels) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in pairwise(kernels)
    )


def joined_view(kernels: Sequence[Tensor]) -> Tensor:
    """Return kernels that are adjacent in memory as one tensor, which autograd does not treat as a view."""
    first, rows = kernels[0], kernels[0].shape[1]
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    shape, stride = (sum(map(len, kernels)), rows, 1, 1), (rows, 1, rows, rows)
    return whole.set_(first.untyped_storage(), first.storage_offset(), shape, stride)


def as_neighbors(kernels: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of 1x1 convolution kernels in the given dtype, one after the other in memory."""
    whole = torch.empty(sum(k.numel() for k in kernels), dtype=dtype, device=kernels[0].device)
    pieces = whole.split([k.numel() for k in kernels])
    shaped = [p.as_strided(k.shape, k.stride(), p.storage_offset()) for p, k in zip(pieces, kernels, strict=True)]
    return [s.copy_(k.detach()) for s, k in zip(shaped, kernels, strict=True)]
