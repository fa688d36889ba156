"""The forward pass: statistics of a slice of channels over the batch, then g(BN(x) + residual).

The same code is run three ways, by PHASE: 1 only finds the statistics, 2 only normalizes (two launches, streaming),
3 does both, the programs of a slice meeting in between. With T > 0 a program holds its T tiles in registers and reads
x once; with T = 0 it reads them again, from the L2 cache where they fit.

``stats`` has the rows mean, var, count, base, low, scale, offset, invstd. The mean is base + low, base being exact in
x's neighbourhood, so that nothing is lost when the mean is a million standard deviations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import meet
from .running import finish_slice
from .tile import activate, channels_of, inside, load_tile, offsets, opaque, store_bits, total


@triton.jit
def finite_or_zero(v):
    """Return v, or 0 where it is no number to subtract."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def add_tile(s1, s2, tile, near, first, last, FORM: tl.constexpr):
    """Add a tile's d = x - near to s1 and d^2 to s2."""
    exists = (first + tl.arange(0, FORM[1]) < last)[:, None]
    d = tl.where(exists, tile.to(tl.float32) - near[None, :], 0.0)
    return s1 + d, tl.fma(d, d, s2)


@triton.jit
def moments_of(
    x, strides, tiles, first, last, channel, shape, FORM: tl.constexpr, T: tl.constexpr, ON_DEVICE: tl.constexpr
):
    """Return near, low and M2 of this part, whose mean is near + low.

    Sums are shifted by ``near``, the mean of what is held or of the first tile: E[x^2] - E[x]^2 would lose all digits
    when the mean is large, and a single value of the channel may be far from the others.
    """
    R: tl.constexpr = FORM[1]
    V: tl.constexpr = FORM[2]
    EACH: tl.constexpr = 1 if FORM[0] else V
    s1 = tl.zeros([R, V], tl.float32)
    s2 = tl.zeros([R, V], tl.float32)
    if T > 0:
        sums = tl.zeros([R, V], tl.float32)
        for t in tl.static_range(T):
            sums += tiles[t].to(tl.float32)
        near = finite_or_zero(total(sums, FORM) / ((last - first) * EACH))
        for t in tl.static_range(T):
            s1, s2 = add_tile(s1, s2, opaque(tiles[t], ON_DEVICE), near, first + t * R, last, FORM)
    else:
        tile = load_tile(x, strides, first, last, channel, shape, FORM)
        near = finite_or_zero(total(tile.to(tl.float32), FORM) / (tl.minimum(last - first, R) * EACH))
        for start in range(first, last, R):
            tile = load_tile(x, strides, start, last, channel, shape, FORM)
            s1, s2 = add_tile(s1, s2, tile, near, start, last, FORM)
    sum1 = total(s1, FORM)
    low = sum1 / ((last - first) * EACH)
    return near, low, total(s2, FORM) - sum1 * low


@triton.jit
def load_parts(partial, base, parts_from, parts, share, channel, shape, EACH: tl.constexpr, PARTS: tl.constexpr):
    """Return of PARTS parts their means relative to ``base``, M2, counts, and which of them exist."""
    C = shape[0]
    part = parts_from + tl.arange(0, PARTS)
    count = (tl.minimum((part + 1) * share, shape[1]) - part * share) * EACH
    exists = (part < parts)[:, None] & (channel < C)[None, :]
    at = partial + part[:, None] * (3 * C) + channel[None, :]
    near = tl.load(at, mask=exists, other=0.0)
    low = tl.load(at + C, mask=exists, other=0.0)
    m2 = tl.load(at + 2 * C, mask=exists, other=0.0)
    return (near - base[None, :]) + low, m2, count.to(tl.float32)[:, None], exists


@triton.jit
def merge(partial, parts, share, channel, shape, EACH: tl.constexpr):
    """Merge the parts' moments in a fixed order into base, low and the biased variance of the whole.

    M2 = sum of M2_part + n_part (mean_part - mean)^2 (Chan, Golub & LeVeque), with means relative to the first's.
    """
    PARTS: tl.constexpr = 32
    base = tl.load(partial + channel, mask=channel < shape[0], other=0.0)
    all_count = (shape[1] * EACH).to(tl.float32)
    low = tl.zeros_like(base)
    for i in range(0, parts, PARTS):
        d, m2, count, exists = load_parts(partial, base, i, parts, share, channel, shape, EACH, PARTS)
        low += tl.sum(tl.where(exists, d * (count / all_count), 0.0), 0)
    both = tl.zeros_like(base)
    for i in range(0, parts, PARTS):
        d, m2, count, exists = load_parts(partial, base, i, parts, share, channel, shape, EACH, PARTS)
        d -= low[None, :]
        both += tl.sum(tl.where(exists, tl.fma(d * d, count, m2), 0.0), 0)
    return base, low, both / all_count


@triton.jit
def publish(stats, count, base, low, var, gamma, beta, eps, channel, C, write):
    """Write the slice's rows of ``stats``, where ``write``, and return its scale and offset."""
    here = channel < C
    invstd = 1.0 / tl.sqrt_rn(var + eps)
    scale = invstd
    if gamma is not None:
        scale = invstd * tl.load(gamma + channel, mask=here, other=0.0).to(tl.float32)
    offset = -low * scale
    if beta is not None:
        offset += tl.load(beta + channel, mask=here, other=0.0).to(tl.float32)
    at = stats + channel
    here = here & write
    tl.store(at, base + low, mask=here)
    tl.store(at + C, var, mask=here)
    tl.store(at + 2 * C, tl.zeros_like(base) + count, mask=here)
    tl.store(at + 3 * C, base, mask=here)
    tl.store(at + 4 * C, low, mask=here)
    tl.store(at + 5 * C, scale, mask=here)
    tl.store(at + 6 * C, offset, mask=here)
    tl.store(at + 7 * C, invstd, mask=here)
    return scale, offset


@triton.jit
def normalize_tile(
    tile, first, last, y, residual, bits, strides, base, scale, offset, slope, piece, channel, shape,
    ACT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write one tile of y, and the bits of z > 0 where the backward pass cannot find z again."""
    exists = inside(first, last, channel, shape, FORM)
    at = offsets(first + tl.arange(0, FORM[1]), strides, channel, shape, FORM)
    z = tl.fma(tile.to(tl.float32) - base[None, :], scale[None, :], offset[None, :])
    if residual is not None:
        z += tl.load(residual + at, mask=exists, other=0.0).to(tl.float32)
    if bits is not None:
        store_bits(bits, (z > 0) & exists, first, last, piece, shape, FORM)
    tl.store(y + at, activate(z, slope, ACT).to(y.dtype.element_ty), mask=exists)


_NUMBERS = [
    *("C", "units", "slices", "parts", "share", "x_stride", "x_plane", "y_stride", "y_plane"),
    *("width", "magic", "shift", "eps", "momentum", "slope"),
]


@triton.jit(do_not_specialize=_NUMBERS)
def forward(
    x, y, residual, bits, gamma, beta, stats, partial, words, running_mean, running_var, batches, skipped,
    C, units, slices, parts, share, x_stride, x_plane, y_stride, y_plane, width, magic, shift, eps, momentum, slope,
    ACT: tl.constexpr, CUMULATIVE: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Run ``slices * parts`` programs.

    ALONE says that a slice has one part; LAST, that the last part to arrive merges all and writes ``stats`` for the
    others, who otherwise each merge all themselves.
    """
    R: tl.constexpr = FORM[1]
    EACH: tl.constexpr = 1 if FORM[0] else FORM[2]
    C = C * (FORM[3] if FORM[0] else 1)
    shape = (C, units, width, magic, shift)
    x_strides = (x_stride, x_plane)
    y_strides = (y_stride, y_plane)
    running = (running_mean, running_var, batches, skipped)
    program = tl.program_id(0)
    if PHASE == 3 and not ALONE:
        program = meet.take_ticket(words, slices * parts)
    elif PHASE == 2:
        # Backwards: what the statistics read last is still in the cache.
        program = slices * parts - 1 - program
    piece = program // parts
    part = program % parts
    word = words + 2 + piece
    channel = channels_of(piece, FORM)
    here = channel < C
    first = part * share
    last = tl.minimum(first + share, units)
    count = units * EACH

    tiles = ()
    if T > 0:
        for t in tl.static_range(T):
            tiles = tiles + (load_tile(x, x_strides, first + t * R, last, channel, shape, FORM),)  # noqa: RUF005
    if PHASE & 1:
        if PHASE == 3 and not ALONE:
            side = meet.side_of(word)
        base, low, m2 = moments_of(x, x_strides, tiles, first, last, channel, shape, FORM, T, ON_DEVICE)
        if ALONE:
            scale, offset = publish(stats, count, base, low, m2 / count, gamma, beta, eps, channel, C, True)
        else:
            at = partial + part * (3 * C) + channel
            tl.store(at, base, mask=here)
            tl.store(at + C, low, mask=here)
            tl.store(at + 2 * C, m2, mask=here)
            if LAST:
                if meet.arrive(word) == parts - 1:
                    base, low, var = merge(partial, parts, share, channel, shape, EACH)
                    publish(stats, count, base, low, var, gamma, beta, eps, channel, C, True)
                    meet.release(word, parts)
                    finish_slice(words + 1, slices, stats, C, count, running, momentum, CUMULATIVE)
                if PHASE == 3:
                    meet.wait(word, side)
            else:
                meet.arrive_to_turn(word, part, parts)
                meet.wait(word, side)
                base, low, var = merge(partial, parts, share, channel, shape, EACH)
                scale, offset = publish(stats, count, base, low, var, gamma, beta, eps, channel, C, part == 0)
    if PHASE & 2:
        if LAST:
            base = tl.load(stats + 3 * C + channel, mask=here, other=0.0)
            scale = tl.load(stats + 5 * C + channel, mask=here, other=0.0)
            offset = tl.load(stats + 6 * C + channel, mask=here, other=0.0)
        if T > 0:
            for t in tl.static_range(T):
                normalize_tile(
                    opaque(tiles[t], ON_DEVICE), first + t * R, last, y, residual, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
        else:
            tail = first + (last - first - 1) // R * R
            for back in range(0, last - first, R):
                tile = load_tile(x, x_strides, tail - back, last, channel, shape, FORM)
                normalize_tile(
                    tile, tail - back, last, y, residual, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
        if not LAST:
            if part == 0:
                finish_slice(words + 1, slices, stats, C, count, running, momentum, CUMULATIVE)
