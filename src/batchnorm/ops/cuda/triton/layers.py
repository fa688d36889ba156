"""Kernels for up to four layers in one launch, on channels-last tensors with the same number of rows.

A row has the values of all channels at one location of one example. A slice is a group of neighboring channels of one
layer. Slices are numbered across all layers: layer 0 starts at slice 0, layer 1 at slice ``first1``, and so on. If
there are fewer than four layers, the absent layers start at slice ``slices``, the total number of slices, so that no
slice belongs to them. ``stats``, ``dgamma``, ``dbeta``, ``partial`` and ``words`` hold the values of all layers, one
layer after the other. The argument ``piece`` of a function is the index of a slice, and ``firsts`` has the first slices
of layers 1 to 3. The caller divides the numbers of channels and the strides by A. For A and the other arguments, see
tile.py, forward.py, backward.py and barrier.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import differentiate_part
from .forward import normalize_part, place


@triton.jit
def pick(piece, firsts, values):
    """Return the element of ``values`` for the layer that a slice belongs to; elements of absent layers may be None."""
    found = values[0]
    if values[1] is not None:
        found = tl.where(piece >= firsts[0], values[1], found)
    if values[2] is not None:
        found = tl.where(piece >= firsts[1], values[2], found)
    if values[3] is not None:
        found = tl.where(piece >= firsts[2], values[3], found)
    return found


@triton.jit
def find_layer(piece, firsts, channels, slices, A: tl.constexpr):
    """Return five numbers for the layer that a slice belongs to.

    The numbers are the layer's first slice, its number of slices, its number of channels, the total number of channels
    of all earlier layers, and the number of earlier layers.
    """
    first = pick(piece, firsts, (0, firsts[0], firsts[1], firsts[2]))
    end = pick(piece, firsts, (firsts[0], firsts[1], firsts[2], slices))
    two = channels[0] + channels[1]
    before = pick(piece, firsts, (0, channels[0], two, two + channels[2]))
    return first, end - first, pick(piece, firsts, channels) * A, before * A, pick(piece, firsts, (0, 1, 2, 3))


_NUMBERS = [
    *("units", "slices", "parts", "share", "beside", "room", "first1", "first2", "first3", "C0", "C1", "C2", "C3"),
    *(f"{name}_stride{k}" for name in ("x", "y", "dy") for k in range(4)),
    *("eps", "momentum", "slope"),
]
# See _SMALL in forward.py.
_SMALL = [
    f"{name}{k}" for name in ("gamma", "beta", "running_mean", "running_var", "batches", "skipped") for k in range(4)
]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=[*_SMALL, "words"])
def forward_layers(
    x0, x1, x2, x3, y0, y1, y2, y3, gamma0, gamma1, gamma2, gamma3, beta0, beta1, beta2, beta3,
    running_mean0, running_mean1, running_mean2, running_mean3, running_var0, running_var1, running_var2, running_var3,
    batches0, batches1, batches2, batches3, skipped0, skipped1, skipped2, skipped3, stats, partial, words,
    units, slices, parts, share, beside, room, first1, first2, first3, C0, C1, C2, C3,
    x_stride0, x_stride1, x_stride2, x_stride3, y_stride0, y_stride1, y_stride2, y_stride3,
    eps, momentum, slope,
    ACT: tl.constexpr, CUMULATIVE: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr,
    TICKET: tl.constexpr, STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Run the forward pass with ``slices * parts`` programs; ``partial`` has ``room`` floats per channel."""
    piece, part = place(words, slices, parts, beside, PHASE, TICKET)
    f = (first1, first2, first3)
    first, own_slices, C, before, layer = find_layer(piece, f, (C0, C1, C2, C3), slices, FORM[3])
    running = (None, None, None, None)
    if running_mean0 is not None:
        running = (
            pick(piece, f, (running_mean0, running_mean1, running_mean2, running_mean3)),
            pick(piece, f, (running_var0, running_var1, running_var2, running_var3)),
            pick(piece, f, (batches0, batches1, batches2, batches3)),
            pick(piece, f, (skipped0, skipped1, skipped2, skipped3)),
        )
    normalize_part(
        pick(piece, f, (x0, x1, x2, x3)), pick(piece, f, (y0, y1, y2, y3)), None, None,
        pick(piece, f, (gamma0, gamma1, gamma2, gamma3)), pick(piece, f, (beta0, beta1, beta2, beta3)),
        stats + before * 8, partial + before * room, words + layer * 2 + first * (33 if TREE else 1), running,
        piece - first, part, (C, units, 0, 0, 0), own_slices, parts, share,
        (pick(piece, f, (x_stride0, x_stride1, x_stride2, x_stride3)), 0),
        (pick(piece, f, (y_stride0, y_stride1, y_stride2, y_stride3)), 0),
        eps, momentum, slope, ACT, CUMULATIVE, FORM, T, PHASE, ALONE, LAST, TREE, STAGES, ON_DEVICE,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["dgamma", "dbeta", "words"])
def backward_layers(
    x0, x1, x2, x3, dx0, dx1, dx2, dx3, dy0, dy1, dy2, dy3, stats, dgamma, dbeta, partial, words,
    units, slices, parts, share, beside, room, first1, first2, first3, C0, C1, C2, C3,
    x_stride0, x_stride1, x_stride2, x_stride3, y_stride0, y_stride1, y_stride2, y_stride3,
    dy_stride0, dy_stride1, dy_stride2, dy_stride3, slope,
    ACT: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr,
    TICKET: tl.constexpr, STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Run the backward pass with ``slices * parts`` programs; dx has the row strides ``y_stride0`` to ``y_stride3``."""
    piece, part = place(words, slices, parts, beside, PHASE, TICKET)
    f = (first1, first2, first3)
    first, own_slices, C, before, layer = find_layer(piece, f, (C0, C1, C2, C3), slices, FORM[3])
    differentiate_part(
        pick(piece, f, (dy0, dy1, dy2, dy3)), pick(piece, f, (x0, x1, x2, x3)), None, None,
        stats + before * 8, pick(piece, f, (dx0, dx1, dx2, dx3)), None, dgamma + before, dbeta + before,
        partial + before * room, words + layer * 2 + first * (33 if TREE else 1),
        piece - first, part, (C, units, 0, 0, 0), own_slices, parts, share,
        (pick(piece, f, (x_stride0, x_stride1, x_stride2, x_stride3)), 0),
        (pick(piece, f, (y_stride0, y_stride1, y_stride2, y_stride3)), 0),
        (pick(piece, f, (dy_stride0, dy_stride1, dy_stride2, dy_stride3)), 0),
        slope, ACT, FORM, T, PHASE, ALONE, LAST, TREE, STAGES, ON_DEVICE,
    )  # fmt: skip
