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
from .running import update
from .tile import activate, channels_of, inside, load_tile, offsets, opaque, parts_at_once, store_bits, total, totals


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
    x, strides, tiles, first, last, channel, shape, FORM: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Return near, low and M2 of this part, whose mean is near + low.

    Sums are shifted by ``near``, the mean of the first tile: E[x^2] - E[x]^2 would lose all digits
    when the mean is large, and a single value of the channel may be far from the others.
    """
    R: tl.constexpr = FORM[1]
    V: tl.constexpr = FORM[2]
    EACH: tl.constexpr = 1 if FORM[0] else V
    s1 = tl.zeros([R, V], tl.float32)
    s2 = tl.zeros([R, V], tl.float32)
    if T > 0:
        near = finite_or_zero(total(tiles[0].to(tl.float32), FORM) / (tl.minimum(last - first, R) * EACH))
        for t in tl.static_range(T):
            s1, s2 = add_tile(s1, s2, opaque(tiles[t], ON_DEVICE), near, first + t * R, last, FORM)
    else:
        tile = load_tile(x, strides, first, last, channel, shape, FORM)
        near = finite_or_zero(total(tile.to(tl.float32), FORM) / (tl.minimum(last - first, R) * EACH))
        for start in tl.range(first, last, R, num_stages=STAGES):
            tile = load_tile(x, strides, start, last, channel, shape, FORM)
            s1, s2 = add_tile(s1, s2, tile, near, start, last, FORM)
    sum1, sum2 = totals(s1, s2, FORM)
    low = sum1 / ((last - first) * EACH)
    return near, low, sum2 - sum1 * low


@triton.jit
def merge(partial, parts, share, channel, shape, EACH: tl.constexpr, PARTS: tl.constexpr):
    """Merge the parts' moments in a fixed order into base, low and the biased variance of the whole.

    M2 = sum of M2_part + n_part (mean_part - mean)^2 (Chan, Golub & LeVeque), with means relative to the first's: the
    variance of K parts is at least a Kth of the square of what is subtracted at the end.
    """
    C = shape[0]
    base = tl.load(partial + channel, mask=channel < C, other=0.0)
    base += tl.load(partial + C + channel, mask=channel < C, other=0.0)
    s1 = tl.zeros_like(base)
    s2 = tl.zeros_like(base)
    for i in range(0, parts, PARTS):
        part = i + tl.arange(0, PARTS)
        exists = (part < parts)[:, None] & (channel < C)[None, :]
        at = partial + part[:, None] * (3 * C) + channel[None, :]
        near = tl.load(at, mask=exists, other=0.0)
        low = tl.load(at + C, mask=exists, other=0.0)
        m2 = tl.load(at + 2 * C, mask=exists, other=0.0)
        n = ((tl.minimum((part + 1) * share, shape[1]) - part * share) * EACH).to(tl.float32)[:, None]
        d = (near - base[None, :]) + low
        first, second = tl.split(tl.sum(tl.where(exists[:, :, None], tl.join(n * d, tl.fma(n * d, d, m2)), 0.0), 0))
        s1 += first
        s2 += second
    count = (shape[1] * EACH).to(tl.float32)
    low = s1 / count
    return base, low, s2 / count - low * low


@triton.jit
def load_or(p, channel, C, default):
    """Load a parameter [W] as float32, ``default`` where the layer has none."""
    if p is not None:
        return tl.load(p + channel, mask=channel < C, other=0.0).to(tl.float32)
    else:
        return tl.zeros_like(channel).to(tl.float32) + default


@triton.jit
def publish(stats, count, base, low, var, gamma, beta, eps, channel, C, write):
    """Write the slice's rows of ``stats``, where ``write``, and return its scale and offset."""
    invstd = 1.0 / tl.sqrt_rn(tl.maximum(var, 0.0, propagate_nan=tl.PropagateNan.ALL) + eps)
    scale = invstd * gamma
    offset = tl.fma(-low, scale, beta)
    at = stats + channel
    here = (channel < C) & write
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
    *("C", "units", "slices", "parts", "share", "beside", "x_stride", "x_plane", "y_stride", "y_plane"),
    *("width", "magic", "shift", "eps", "momentum", "slope"),
]
# Small tensors may lie anywhere, as views of one flat buffer do: that is no reason to compile again.
_SMALL = ["gamma", "beta", "words", "running_mean", "running_var", "batches", "skipped"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def forward(
    x, y, residual, bits, gamma, beta, stats, partial, words, running_mean, running_var, batches, skipped,
    C, units, slices, parts, share, beside, x_stride, x_plane, y_stride, y_plane, width, magic, shift,
    eps, momentum, slope,
    ACT: tl.constexpr, CUMULATIVE: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TICKET: tl.constexpr,
    STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Run ``slices * parts`` programs.

    ALONE says that a slice has one part; LAST, that the last part to arrive merges all and writes ``stats`` for the
    others, who otherwise each merge all themselves.
    """
    R: tl.constexpr = FORM[1]
    EACH: tl.constexpr = 1 if FORM[0] else FORM[2]
    PARTS: tl.constexpr = parts_at_once(FORM, T)
    C = C * (FORM[3] if FORM[0] else 1)
    shape = (C, units, width, magic, shift)
    x_strides = (x_stride, x_plane)
    y_strides = (y_stride, y_plane)
    running = (running_mean, running_var, batches, skipped)
    program = tl.program_id(0)
    if TICKET:
        program = meet.take_ticket(words, slices * parts)
    elif PHASE == 2:
        # Backwards: what the statistics read last is still in the cache.
        program = slices * parts - 1 - program
    piece, part = meet.place(program, slices, parts, beside)
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
        # Early, while x is on its way.
        g = load_or(gamma, channel, C, 1.0)
        b = load_or(beta, channel, C, 0.0)
        if PHASE == 3 and not ALONE:
            side = meet.side_of(word)
        base, low, m2 = moments_of(x, x_strides, tiles, first, last, channel, shape, FORM, T, STAGES, ON_DEVICE)
        if ALONE:
            scale, offset = publish(stats, count, base, low, m2 / count, g, b, eps, channel, C, True)
        else:
            at = partial + part * (3 * C) + channel
            tl.store(at, base, mask=here)
            tl.store(at + C, low, mask=here)
            tl.store(at + 2 * C, m2, mask=here)
            if LAST:
                if meet.arrive(word) == parts - 1:
                    base, low, var = merge(partial, parts, share, channel, shape, EACH, PARTS)
                    publish(stats, count, base, low, var, g, b, eps, channel, C, True)
                    meet.release(word, parts)
                    if running_mean is not None:
                        if meet.arrive(words + 1) == slices - 1:
                            update(words + 1, stats, C, count, running, momentum, CUMULATIVE)
                if PHASE == 3:
                    meet.wait(word, side)
            else:
                meet.arrive_to_turn(word, part, parts)
                meet.wait(word, side)
                base, low, var = merge(partial, parts, share, channel, shape, EACH, PARTS)
                scale, offset = publish(stats, count, base, low, var, g, b, eps, channel, C, part == 0)
        if running_mean is not None and not LAST:
            # Counted before y is written, so that its writing need not be waited for.
            finished = -1
            if part == 0:
                finished = meet.arrive(words + 1)
    if PHASE & 2:
        if LAST:
            base = tl.load(stats + 3 * C + channel, mask=here, other=0.0)
            scale = tl.load(stats + 5 * C + channel, mask=here, other=0.0)
            offset = tl.load(stats + 6 * C + channel, mask=here, other=0.0)
        if T > 0:
            first = opaque(first, ON_DEVICE)
            for t in tl.static_range(T):
                normalize_tile(
                    opaque(tiles[t], ON_DEVICE), first + t * R, last, y, residual, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
        else:
            tail = first + (last - first - 1) // R * R
            for back in tl.range(0, last - first, R, num_stages=STAGES):
                tile = load_tile(x, x_strides, tail - back, last, channel, shape, FORM)
                normalize_tile(
                    tile, tail - back, last, y, residual, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
        if running_mean is not None and not LAST:
            if finished == slices - 1:
                update(words + 1, stats, C, count, running, momentum, CUMULATIVE)
