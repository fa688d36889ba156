"""Gradients of weights, computed concurrently with the rest of the backward pass."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.torch_state import is_forward_mode, is_unseen

_A = TypeVar("_A")


class WeightGradients:
    """Compute the gradients of weights on separate streams, concurrently with the backward pass.

    Use the object in a ``with`` statement around the forward pass. Then iterate over :meth:`backward`, which computes
    the gradients, and call :meth:`wait`. The gradients of weights that :func:`convolve` and :func:`linear` use are
    computed alternately on two separate streams. If any parameter is used more than once, all gradients are computed on
    the current stream, because autograd would add up the gradients of that parameter without waiting for other streams.

    A cut is a tensor at which the backward pass is divided into segments, so that some weights can be updated before
    the whole pass ends; see :func:`note_cut`.
    """

    # If more than AHEAD gradients are pending and their inputs take more than BYTES bytes, the backward pass waits for
    # the oldest gradient, so that the inputs of this gradient can be freed.
    AHEAD, BYTES = 2, 2**29

    def __init__(self) -> None:
        # With two streams instead of one, a step at batch size 32 is about 1% faster, because a long kernel on one
        # stream does not delay the gradients on the other. A third stream saves no time.
        self.streams = deque([torch.cuda.Stream(), torch.cuda.Stream()])
        self.update_stream = torch.cuda.Stream()
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.others: set[torch.cuda.Stream] = set()  # streams that wait() must join
        self.cuts: list[Tensor] = []
        self.defers = False  # whether the gradients of weights are computed on `streams`

    def __enter__(self) -> None:
        _local.gradients = self
        self.cuts.clear()

    def __exit__(self, *_: object) -> None:
        _local.gradients = None

    def backward(self, y: Tensor, dy: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Compute the gradients of ``weights``, given the gradient ``dy`` of the output ``y``.

        The backward pass is divided at the cuts, from the last cut to the first. After each segment, yield the indices
        of the weights whose gradients the segment computes, and these gradients. Read the gradients only inside
        :meth:`updating`, or after :meth:`wait`.
        """
        parts = divide(y, self.cuts)
        self.cuts.clear()
        uses = [_uses(edges) for _, edges in parts]
        self.defers = all(count == 1 for part in uses for count in part.values())
        left = list(range(len(weights)))
        try:
            for (cut, _), used in zip(parts, uses, strict=True):
                done = left if cut is None else [k for k in left if id(weights[k]) in used]
                wanted = [*(weights[k] for k in done), *([] if cut is None else [cut])]
                grads = list(torch.autograd.grad(y, wanted, dy)) if wanted else []
                if cut is not None:
                    y, dy = cut, grads.pop()
                left = [k for k in left if k not in done]
                yield done, grads
        finally:
            self.defers = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the ``with`` block on one of ``self.streams``.

        Until :meth:`wait` is called, the caller must keep references to the tensors that the block reads.
        """
        current, stream = torch.cuda.current_stream(), self.streams[0]
        self.streams.rotate()
        self.others |= {current, stream}
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Run the ``with`` block on ``self.update_stream``, after all gradient computations launched so far.

        Until :meth:`wait` is called, the caller must keep references to the tensors that the block reads.
        """
        for stream in self.others | {torch.cuda.current_stream()}:
            self.update_stream.wait_stream(stream)
        self.others.add(self.update_stream)
        with torch.cuda.stream(self.update_stream):
            yield

    def compute(self, function: Callable[..., _A], *inputs: Tensor) -> _A:
        """Return ``function(*inputs)``, computed on one of ``self.streams``.

        Read the result only inside :meth:`updating`, or after :meth:`wait`.
        """
        with self.beside():
            found = function(*inputs)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((event, inputs))
        while len(self.pending) > self.AHEAD and self._pending_bytes() > self.BYTES:
            done, _ = self.pending.popleft()
            # The inputs are no longer in `pending`, so other streams may reuse their memory. Make those streams wait
            # until this gradient has been computed.
            for stream in self.others - {*self.streams, self.update_stream}:
                stream.wait_event(done)
        return found

    def _pending_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, inputs in self.pending for t in inputs)

    def wait(self) -> None:
        """Make the current stream wait for all gradients and for the blocks of :meth:`beside` and :meth:`updating`."""
        for stream in self.others:  # a CUDA graph capture must join the streams that it used, and no others
            torch.cuda.current_stream().wait_stream(stream)
        self.pending.clear()
        self.others.clear()


class _Local(threading.local):
    gradients: WeightGradients | None = None


_local = _Local()


def is_aside() -> bool:
    """Return whether this thread is inside a :class:`WeightGradients` block."""
    return _local.gradients is not None


def note_cut(x: Tensor) -> None:
    """Divide the backward pass at ``x``, if this thread is inside a :class:`WeightGradients` block.

    :meth:`WeightGradients.backward` then first yields the gradients of the weights that were used after ``x``, and
    later those of the weights that were used to compute ``x``. If ``x`` does not require a gradient, do nothing.
    """
    if _local.gradients is not None and x.requires_grad:
        _local.gradients.cuts.append(x)


Edges = Counter[Any]  # for each node of a backward graph, the number of edges that lead to it


def divide(y: Tensor, cuts: Sequence[Tensor]) -> list[tuple[Tensor | None, Edges]]:
    """Divide the backward graph of ``y`` at ``cuts``, which are in the order of the forward pass.

    Return the segments of the graph, from ``y`` to the leaves. Each segment is a pair: the cut at its end (None for the
    last segment), and the number of edges that lead to each node. If a path bypasses a cut, or no path leads to a cut,
    the graph is returned as one segment.

    >>> x = torch.ones((), requires_grad=True)
    >>> h = 2 * x
    >>> [cut is h for cut, _ in divide(h * h, [h])], len(divide(h * x, [h]))
    ([True, False], 1)
    """
    parts: list[tuple[Tensor | None, Edges]] = []
    start, known = y, set[Any]()
    for cut in (*reversed(cuts), None):
        edges = _edges(start, cut)
        if edges is None or known & edges.keys():
            return [(None, _edges(y, None) or Counter())]
        known |= edges.keys()
        parts.append((cut, edges))
        start = start if cut is None else cut
    return parts


def _edges(start: Tensor, cut: Tensor | None) -> Edges | None:
    """Count the edges to each node of the backward graph of ``start``, without going past ``cut`` if it is given.

    Return None if ``cut`` is given, but no path leads to it.
    """
    edges: Edges = Counter([start.grad_fn])
    nodes, reached = [start.grad_fn], cut is None
    while nodes:
        for node, output in getattr(nodes.pop(), "next_functions", ()):
            if cut is not None and node is cut.grad_fn and output == cut.output_nr:
                reached = True
            elif node is not None:
                edges[node] += 1
                if edges[node] == 1:
                    nodes.append(node)
    return edges if reached else None


def _uses(edges: Edges) -> dict[int, int]:
    """Return how often each leaf is used; the keys are the ids of the leaves."""
    return {id(node.variable): n for node, n in edges.items() if type(node).__name__ == "AccumulateGrad"}


def _is_direct(weight: Tensor) -> bool:
    """Return whether autograd passes the gradient of ``weight`` on to parameters without reading the gradient's values.

    If autograd reads the gradient's values, the gradient must be computed on the current stream.
    """
    return weight.is_leaf or type(weight.grad_fn).__name__ == "_JoinedKernelsBackward"


def convolve(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> Tensor:
    """Convolve ``x`` with ``weight``.

    In a :class:`WeightGradients` block, the weight's gradient is computed on a separate stream if possible.
    """
    gradients = _local.gradients
    if gradients is None or x.dtype != weight.dtype or not is_unseen(x, weight) or is_forward_mode():
        return F.conv2d(x, weight, None, stride, padding)
    if not _is_direct(weight) or weight._backward_hooks:
        return F.conv2d(x, weight, None, stride, padding)
    y: Tensor = _Convolution.apply(x, weight, stride, padding, gradients)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Any, padding: Any, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (stride, padding)
        ctx.gradients = gradients
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or not ctx.gradients.defers:
            return *_convolution_gradients(dy, x, weight, ctx.options, (True, True)), None, None, None
        dweight = ctx.gradients.compute(
            lambda dy, x: _convolution_gradients(dy, x, weight, ctx.options, (False, True))[1], dy, x
        )
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _ = _convolution_gradients(dy, x, weight, ctx.options, (True, False))
        return dx, dweight, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer.

    In a :class:`WeightGradients` block, the gradients of the weight and the bias are computed on a separate stream if
    possible.
    """
    gradients = _local.gradients
    if gradients is None or bias is None or x.dim() != 2 or x.dtype != weight.dtype or not x.requires_grad:
        return F.linear(x, weight, bias)
    if not is_unseen(x, weight, bias) or is_forward_mode() or weight._backward_hooks or bias._backward_hooks:
        return F.linear(x, weight, bias)
    if not _is_direct(weight) or not _is_direct(bias):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, gradients)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gradients: WeightGradients) -> Tensor:
        # Save what F.linear saves: torch.utils.checkpoint may recompute this call outside the WeightGradients block,
        # with F.linear, and requires that the recomputation saves tensors of the same shapes.
        ctx.save_for_backward(x, weight.t())
        ctx.gradients, ctx.dtype = gradients, bias.dtype
        return F.linear(x, weight, bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, transposed = ctx.saved_tensors

        def parameters(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return dy.t() @ x, dy.sum(0, dtype=ctx.dtype)

        with torch.autocast(dy.device.type, enabled=False):
            if torch.is_grad_enabled() or not ctx.gradients.defers:
                return dy @ transposed.t(), *parameters(dy, x), None
            dweight, dbias = ctx.gradients.compute(parameters, dy, x)
            return dy @ transposed.t(), dweight, dbias, None


def _convolution_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, Any], wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    rest = (*options, (1, 1), False, (0, 0), 1, (*wanted, False))
    dx, dweight, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *rest)
    return dx, dweight
