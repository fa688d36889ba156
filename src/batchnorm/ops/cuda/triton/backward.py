"""The backward pass: two sums per channel, then dx and the residual's gradient.

Let g be the activation, z its input, dz = g'(z) dy, std = sqrt(var + eps) and x_hat = (x - mean) / std. For m values
per channel, the gradients of the paper's Section 3 are
dbeta = sum(dz), dgamma = sum(dz x_hat), dx = gamma / std * (dz - dbeta / m - x_hat dgamma / m).

The two sums are s1 = sum(dz), which is dbeta, and s2 = sum(dz (x - base)). With mean = base + low as in forward.py,
dgamma = (s2 - low s1) / std.

PHASE 1 computes the sums, dgamma and dbeta; PHASE 2 computes dx and the residual's gradient; PHASE 3 does both. T and
the arguments ``slices``, ``parts``, ``share``, ``partial`` and ``words`` are described in forward.py. ALONE, LAST and
TREE are described in ``normalize_part`` of forward.py; here, the programs merge sums instead of moments. For FORM,
``piece``, ``channel``, ``first``, ``last`` and ``shape``, see tile.py.

If g is the identity, dz is dy. Otherwise, if a residual was added, the forward pass may have saved one bit per element,
which determines g'(z). Without such bits, z is recomputed from x, and from the residual if there is one, by the same
multiply-add as in the forward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import barrier
from .forward import place
from .tile import (
    IDENTITY,
    LEAKY_RELU,
    RELU,
    RELU6,
    activate_backward,
    channels_of,
    inside,
    load_bits,
    load_tile,
    offsets,
    opaque,
    totals,
)


@triton.jit
def dz_of(
    dy, tile, first, last, residual, bits, strides, base, scale, offset, slope, piece, channel, shape,
    ACT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return a tile of dz = g'(z) dy in float32, given the tile ``dy`` of dy and the tile ``tile`` of x."""
    dy = dy.to(tl.float32)
    if ACT == IDENTITY:
        return dy
    elif bits is not None:
        below = dy * slope if ACT == LEAKY_RELU else 0.0
        return tl.where(load_bits(bits, first, last, piece, shape, FORM), dy, below)
    else:
        z = tl.fma(tile.to(tl.float32) - base[None, :], scale[None, :], offset[None, :])
        if residual is not None:
            z += load_tile(residual, strides, first, last, channel, shape, FORM).to(tl.float32)
        return activate_backward(dy, z, slope, ACT)


@triton.jit
def add_parts(partial, first, last, channel, C):
    """Return the sums s1 and s2, added up over the parts ``first`` to ``last - 1`` in a fixed order."""
    PARTS: tl.constexpr = 32
    s1 = tl.zeros_like(channel).to(tl.float32)
    s2 = tl.zeros_like(s1)
    for i in range(first, last, PARTS):
        part = i + tl.arange(0, PARTS)
        at = partial + part[:, None] * (2 * C) + channel[None, :]
        exists = (part < last)[:, None] & (channel < C)[None, :]
        both = tl.join(tl.load(at, mask=exists, other=0.0), tl.load(at + C, mask=exists, other=0.0))
        add1, add2 = tl.split(tl.sum(both, 0))
        s1 += add1
        s2 += add2
    return s1, s2


@triton.jit
def store_part(partial, part, s1, s2, channel, C):
    """Write a part's sums s1 and s2 to ``partial``, which has 2 C floats per part."""
    at = partial + part * (2 * C) + channel
    tl.store(at, s1, mask=channel < C)
    tl.store(at + C, s2, mask=channel < C)


@triton.jit
def publish(stats, dgamma, dbeta, s1, s2, channel, C, write):
    """Return the gradients of gamma and beta, given the sums s1 and s2; store the gradients if ``write`` is true."""
    low = tl.load(stats + 4 * C + channel, mask=channel < C, other=0.0)
    invstd = tl.load(stats + 7 * C + channel, mask=channel < C, other=0.0)
    dg = (s2 - low * s1) * invstd
    tl.store(dbeta + channel, s1, mask=(channel < C) & write)
    tl.store(dgamma + channel, dg, mask=(channel < C) & write)
    return dg, s1


@triton.jit
def settle(
    partial, part, parts, word, words, piece, slices, stats, dgamma, dbeta, s1, s2, channel, C,
    TREE: tl.constexpr,
):  # fmt: skip
    """Store a part's sums; the last program to arrive adds up all sums and stores the gradients of gamma and beta.

    That program then releases the programs that wait for the gradients. With TREE, the sums of each group of up to 32
    parts are added up first. ``word`` counts the parts or, with TREE, the groups whose sums have been stored.
    """
    store_part(partial, part, s1, s2, channel, C)
    if TREE:
        twig = part // 32
        final = tl.minimum((twig + 1) * 32, parts)
        leaf = words + 2 + slices + piece * 32 + twig
        if barrier.arrive(leaf, 1) == final - twig * 32 - 1:
            tl.store(leaf, 0)
            s1, s2 = add_parts(partial, twig * 32, final, channel, C)
            upper = partial + parts * (2 * C)
            twigs = (parts + 31) // 32
            store_part(upper, twig, s1, s2, channel, C)
            if barrier.arrive(word, 1) == twigs - 1:
                s1, s2 = add_parts(upper, 0, twigs, channel, C)
                publish(stats, dgamma, dbeta, s1, s2, channel, C, True)
                barrier.release(word, twigs)
    elif barrier.arrive(word, 1) == parts - 1:
        s1, s2 = add_parts(partial, 0, parts, channel, C)
        publish(stats, dgamma, dbeta, s1, s2, channel, C, True)
        barrier.release(word, parts)


@triton.jit
def write_tile(dz, tile, first, last, dx, dresidual, strides, base, scale, k2, k0, channel, shape, FORM: tl.constexpr):
    """Write a tile of dx = scale dz - (k2 (x - base) + k0); if ``dresidual`` is given, write a tile of dz to it."""
    at = offsets(first + tl.arange(0, FORM[1]), strides, channel, shape, FORM)
    exists = inside(first, last, channel, shape, FORM)
    mean_terms = tl.fma(tile.to(tl.float32) - base[None, :], k2[None, :], k0[None, :])
    tl.store(dx + at, tl.fma(dz, scale[None, :], -mean_terms).to(dx.dtype.element_ty), mask=exists)
    if dresidual is not None:
        tl.store(dresidual + at, dz.to(dresidual.dtype.element_ty), mask=exists)


@triton.jit
def differentiate_part(
    dy, x, residual, bits, stats, dx, dresidual, dgamma, dbeta, partial, words, piece, part,
    shape, slices, parts, share, x_strides, y_strides, dy_strides, slope,
    ACT: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr,
    STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Do the work of one program, which processes one part of a slice."""
    R: tl.constexpr = FORM[1]
    V: tl.constexpr = FORM[2]
    EACH: tl.constexpr = 1 if FORM[0] else V  # number of values per channel in a unit
    # With relu and relu6, dz is dy or 0, so rounding dz to the dtype of dy changes nothing. PHASE 3 therefore holds dz
    # in registers instead of dy. With other activations, it holds dy and computes dz twice.
    HOLDS_DZ: tl.constexpr = PHASE == 3 and (ACT == RELU or ACT == RELU6)  # noqa: SIM109
    C = shape[0]
    units = shape[1]
    word = words + 2 + piece
    channel = channels_of(piece, FORM)
    here = channel < C
    first = part * share
    last = tl.minimum(first + share, units)
    count = units * EACH

    xs = ()
    dys = ()
    if T > 0:
        for t in tl.static_range(T):
            xs = xs + (load_tile(x, x_strides, first + t * R, last, channel, shape, FORM),)  # noqa: RUF005
            dys = dys + (load_tile(dy, dy_strides, first + t * R, last, channel, shape, FORM),)  # noqa: RUF005
    base = tl.load(stats + 3 * C + channel, mask=here, other=0.0)
    scale = tl.load(stats + 5 * C + channel, mask=here, other=0.0)
    offset = tl.load(stats + 6 * C + channel, mask=here, other=0.0)
    dzs = ()
    if PHASE & 1:
        if PHASE == 3 and not ALONE:
            side = barrier.side_of(word)
        t1 = tl.zeros([R, V], tl.float32)
        t2 = tl.zeros([R, V], tl.float32)
        if T > 0:
            for t in tl.static_range(T):
                dz = dz_of(
                    dys[t], xs[t], first + t * R, last, residual, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
                t1 += dz
                t2 = tl.fma(dz, xs[t].to(tl.float32) - base[None, :], t2)
                dzs = dzs + (dz.to(dy.dtype.element_ty) if HOLDS_DZ else dys[t],)  # noqa: RUF005
        else:
            for start in tl.range(first, last, R, num_stages=STAGES):
                tile = load_tile(x, x_strides, start, last, channel, shape, FORM)
                dz = dz_of(
                    load_tile(dy, dy_strides, start, last, channel, shape, FORM), tile, start, last, residual, bits,
                    y_strides, base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
                t1 += dz
                t2 = tl.fma(dz, tile.to(tl.float32) - base[None, :], t2)
        s1, s2 = totals(t1, t2, FORM)
        if LAST:
            settle(partial, part, parts, word, words, piece, slices, stats, dgamma, dbeta, s1, s2, channel, C, TREE)
        elif not ALONE:
            store_part(partial, part, s1, s2, channel, C)
            barrier.arrive_to_turn(word, part, parts)
        if PHASE == 3 and not ALONE:
            barrier.wait(word, side)
        if not LAST:
            if not ALONE:
                s1, s2 = add_parts(partial, 0, parts, channel, C)
            dg, db = publish(stats, dgamma, dbeta, s1, s2, channel, C, part == 0)
    if PHASE & 2:
        if LAST:
            db = tl.load(dbeta + channel, mask=here, other=0.0)
            dg = tl.load(dgamma + channel, mask=here, other=0.0)
        # Load `low` and `invstd` as late as possible, because the tiles occupy most of the registers.
        low = tl.load(stats + 4 * C + channel, mask=here, other=0.0)
        invstd = tl.load(stats + 7 * C + channel, mask=here, other=0.0)
        k2 = scale * (dg * invstd / count)
        k0 = scale * (db / count) - low * k2
        if T > 0:
            first = opaque(first, ON_DEVICE)
            for t in tl.static_range(T):
                tile = opaque(xs[t], ON_DEVICE)
                if HOLDS_DZ:
                    dz = opaque(dzs[t], ON_DEVICE).to(tl.float32)
                else:
                    dz = dz_of(
                        opaque(dys[t], ON_DEVICE), tile, first + t * R, last, residual, bits, y_strides,
                        base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                    )  # fmt: skip
                write_tile(
                    dz, tile, first + t * R, last, dx, dresidual, y_strides, base, scale, k2, k0, channel, shape, FORM
                )
        else:
            tail = first + (last - first - 1) // R * R
            for back in tl.range(0, last - first, R, num_stages=STAGES):
                start = tail - back
                tile = load_tile(x, x_strides, start, last, channel, shape, FORM)
                dz = dz_of(
                    load_tile(dy, dy_strides, start, last, channel, shape, FORM), tile, start, last, residual, bits,
                    y_strides, base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
                write_tile(dz, tile, start, last, dx, dresidual, y_strides, base, scale, k2, k0, channel, shape, FORM)


_NUMBERS = [
    *("C", "units", "slices", "parts", "share", "beside", "x_stride", "x_plane", "y_stride", "y_plane"),
    *("width", "magic", "shift", "slope", "dy_stride"),
]
# See _SMALL in forward.py.
_SMALL = ["dgamma", "dbeta", "words"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def backward(
    dy, x, residual, bits, stats, dx, dresidual, dgamma, dbeta, partial, words,
    C, units, slices, parts, share, beside, x_stride, x_plane, y_stride, y_plane, width, magic, shift,
    slope, dy_stride,
    ACT: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr,
    TICKET: tl.constexpr, STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Run the backward pass, or the phase that PHASE selects, with ``slices * parts`` programs.

    x has the strides ``x_stride`` and ``x_plane``; dx, the residual and its gradient have ``y_stride`` and ``y_plane``;
    dy has ``dy_stride`` and ``y_plane``. ``x_plane`` and ``y_plane`` are the strides of a channel. For channels last,
    the caller divides C by A (see tile.py).
    """
    shape = (C * (FORM[3] if FORM[0] else 1), units, width, magic, shift)
    piece, part = place(words, slices, parts, beside, PHASE, TICKET)
    differentiate_part(
        dy, x, residual, bits, stats, dx, dresidual, dgamma, dbeta, partial, words, piece, part,
        shape, slices, parts, share, (x_stride, x_plane), (y_stride, y_plane), (dy_stride, y_plane), slope,
        ACT, FORM, T, PHASE, ALONE, LAST, TREE, STAGES, ON_DEVICE,
    )  # fmt: skip
