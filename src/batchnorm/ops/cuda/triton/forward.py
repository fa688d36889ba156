"""The forward pass: the statistics of each slice of channels, then y = g(BN(x) + residual), where g is the activation.

The terms slice, part, unit and tile are defined in tile.py. The constant PHASE selects what a launch does: 1 computes
the statistics and updates the running averages, 2 normalizes, and 3 does both. The constant T is the number of tiles
that a program holds in registers. The "stream" path has two launches, PHASE 1 and then PHASE 2, with T = 0: each launch
reads x. The "once" path has one launch, PHASE 3, with T > 0: it reads x once. In PHASE 3, if a slice has several
programs, they wait for each other at a barrier. Triton's interpreter runs programs one after the other, so it cannot
run a launch with a barrier. It runs PHASE 1 and then PHASE 2 instead.

Many functions take these arguments:

- ``slices``: the number of slices.
- ``parts``: the number of parts of each slice.
- ``share``: the number of units of a part; the last part may have fewer.
- ``partial``: float32 memory for the parts' moments and the old running averages; in the backward pass, for the parts'
  sums.
- ``words``: int32 counters. The first one numbers the programs (see ``take_ticket`` in barrier.py), and the second one
  counts finished slices. They are followed by one barrier word for each slice and, with TREE (see
  :func:`normalize_part`), by 32 counters for each slice.

``stats`` has the rows mean, var, count, base, low, scale, offset and invstd. BN(x) is (x - base) * scale + offset. The
mean is base + low, where base is close to the mean. For values x near base, x - base is exact, so no precision is lost
even if the mean is a million standard deviations from zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import barrier
from .running import load_old, move
from .tile import activate, channels_of, inside, load_tile, offsets, opaque, passes, sample, store_bits, totals


@triton.jit
def add_tile(s1, s2, tile, near, first, last, FORM: tl.constexpr):
    """Return s1 + d and s2 + d^2, where d is x - near for the values x of a tile, and 0 outside the part."""
    exists = (first + tl.arange(0, FORM[1]) < last)[:, None]
    d = tl.where(exists, tile.to(tl.float32) - near[None, :], 0.0)
    return s1 + d, tl.fma(d, d, s2)


@triton.jit
def moments_of(
    x, strides, tiles, near, first, last, channel, shape,
    FORM: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return low and M2 of a part: its mean is near + low, and M2 is its sum of squared deviations from that mean.

    ``near`` is subtracted from the values x before they are summed, because E[x^2] - E[x]^2 loses all precision if the
    mean is much larger than the standard deviation. Each of n values is at most sqrt(n) standard deviations from their
    mean. ``near`` is one of the values or the mean of a few of them, so low^2 is at most M2, which is n times the
    variance. Thus the computed sum of (x - near)^2, which is M2 + n low^2, is at most (n + 1) M2. Subtracting n low^2
    therefore multiplies the relative rounding error by at most about n.
    """
    R: tl.constexpr = FORM[1]
    V: tl.constexpr = FORM[2]
    s1 = tl.zeros([R, V], tl.float32)
    s2 = tl.zeros([R, V], tl.float32)
    if T > 0:
        for t in tl.static_range(T):
            s1, s2 = add_tile(s1, s2, tiles[t], near, first + t * R, last, FORM)
    else:
        for start in tl.range(first, last, R, num_stages=STAGES):
            tile = load_tile(x, strides, start, last, channel, shape, FORM)
            s1, s2 = add_tile(s1, s2, tile, near, start, last, FORM)
    sum1, sum2 = totals(s1, s2, FORM)
    low = sum1 / ((last - first) * (1 if FORM[0] else V))
    return low, sum2 - sum1 * low


@triton.jit
def merge(partial, first, last, share, channel, shape, EACH: tl.constexpr):
    """Merge the moments of the parts ``first`` to ``last - 1``, in a fixed order; return base, low and M2.

    ``base`` is the mean of the first part, and ``low`` is the mean of all parts minus ``base``.

    M2 = sum(M2_part + n_part (mean_part - mean)^2) (Chan, Golub & LeVeque). The code subtracts ``base`` from the means
    before it adds them up. The term s1 * low that is subtracted at the end is n low^2, where n is the number of values.
    Little precision is lost, because M2 is at least 1/K of this term, where K is the number of parts: the first part
    has at least n / K values, and its mean_part - mean is -low, so it adds at least (n / K) low^2 to M2.
    """
    PARTS: tl.constexpr = 32
    C = shape[0]
    start = partial + first * (3 * C) + channel
    base = tl.load(start, mask=channel < C, other=0.0) + tl.load(start + C, mask=channel < C, other=0.0)
    s1 = tl.zeros_like(base)
    s2 = tl.zeros_like(base)
    for i in range(first, last, PARTS):
        part = i + tl.arange(0, PARTS)
        exists = (part < last)[:, None] & (channel < C)[None, :]
        at = partial + part[:, None] * (3 * C) + channel[None, :]
        near = tl.load(at, mask=exists, other=0.0)
        low = tl.load(at + C, mask=exists, other=0.0)
        m2 = tl.load(at + 2 * C, mask=exists, other=0.0)
        n = ((tl.minimum((part + 1) * share, shape[1]) - part * share) * EACH).to(tl.float32)[:, None]
        d = (near - base[None, :]) + low
        both = tl.where(exists[:, :, None], tl.join(n * d, tl.fma(n * d, d, m2)), 0.0)
        add1, add2 = tl.split(tl.sum(both, 0))
        s1 += add1
        s2 += add2
    count = ((tl.minimum(last * share, shape[1]) - first * share) * EACH).to(tl.float32)
    low = s1 / count
    return base, low, s2 - s1 * low


@triton.jit
def store_part(partial, part, near, low, m2, channel, C):
    """Write a part's near, low and M2 to ``partial``, which has 3 C floats per part."""
    at = partial + part * (3 * C) + channel
    tl.store(at, near, mask=channel < C)
    tl.store(at + C, low, mask=channel < C)
    tl.store(at + 2 * C, m2, mask=channel < C)


@triton.jit
def load_or(p, channel, C, default):
    """Return the parameter ``p`` of each channel as float32, or ``default`` for each channel if ``p`` is None."""
    if p is not None:
        return tl.load(p + channel, mask=channel < C, other=0.0).to(tl.float32)
    else:
        return tl.zeros_like(channel).to(tl.float32) + default


@triton.jit
def publish(stats, count, base, low, var, gamma, beta, eps, channel, C, write):
    """Return the slice's scale and offset, and store the slice's columns of ``stats`` if ``write`` is true."""
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
def settle(
    partial, parts, share, word, arrivals, words, slices, stats, before, gamma, beta, running, eps, momentum,
    channel, shape,
    EACH: tl.constexpr, CUMULATIVE: tl.constexpr,
):  # fmt: skip
    """Merge a slice's moments, store its statistics, release its waiting programs and update its running averages."""
    C = shape[0]
    count = shape[1] * EACH
    base, low, m2 = merge(partial, 0, parts, share, channel, shape, EACH)
    var = m2 / count
    publish(stats, count, base, low, var, gamma, beta, eps, channel, C, True)
    barrier.release(word, arrivals)
    if running[0] is not None:
        old = load_old(running, channel, C)
        move(words + 1, slices, before, C, count, base + low, var, running, old, momentum, channel, CUMULATIVE)


@triton.jit
def normalize_tile(
    tile, added, first, last, y, bits, strides, base, scale, offset, slope, piece, channel, shape,
    ACT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write a tile of y and, if ``bits`` is given, one bit per value: whether the activation's derivative is 1."""
    exists = inside(first, last, channel, shape, FORM)
    at = offsets(first + tl.arange(0, FORM[1]), strides, channel, shape, FORM)
    z = tl.fma(tile.to(tl.float32) - base[None, :], scale[None, :], offset[None, :])
    if added is not None:
        z += added.to(tl.float32)
    if bits is not None:
        store_bits(bits, passes(z, ACT) & exists, first, last, piece, shape, FORM)
    tl.store(y + at, activate(z, slope, ACT).to(y.dtype.element_ty), mask=exists)


@triton.jit
def place(words, slices, parts, beside, PHASE: tl.constexpr, TICKET: tl.constexpr):
    """Return the slice and the part of this program."""
    program = tl.program_id(0)
    if TICKET:
        program = barrier.take_ticket(words, slices * parts)
    elif PHASE == 2:
        # The second launch processes the parts in reverse order, because the values that the first launch read last are
        # probably still in the cache.
        program = slices * parts - 1 - program
    return barrier.place(program, slices, parts, beside)


@triton.jit
def normalize_part(
    x, y, residual, bits, gamma, beta, stats, partial, words, running, piece, part,
    shape, slices, parts, share, x_strides, y_strides, eps, momentum, slope,
    ACT: tl.constexpr, CUMULATIVE: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr,
    STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Do the work of one program, which processes one part of a slice.

    ALONE means that one program processes a whole slice, without a barrier. LAST means that the last program of a slice
    to arrive at the barrier merges the moments of all parts, and writes ``stats`` for the other programs. With neither
    LAST nor ALONE, each program merges the moments of all parts itself. TREE, which requires LAST, means that moments
    are merged in two steps: first those of each group of up to 32 parts (a twig), then those of the twigs.
    """
    R: tl.constexpr = FORM[1]
    EACH: tl.constexpr = 1 if FORM[0] else FORM[2]  # number of values per channel in a unit
    C = shape[0]
    units = shape[1]
    # `partial` starts with two floats per channel for the old running averages. The moments of the parts follow.
    before = partial
    partial = partial + 2 * C
    word = words + 2 + piece
    channel = channels_of(piece, FORM)
    here = channel < C
    first = part * share
    last = tl.minimum(first + share, units)
    count = units * EACH

    tiles = ()
    added = ()
    if T > 0:
        for t in tl.static_range(T):
            tiles = tiles + (load_tile(x, x_strides, first + t * R, last, channel, shape, FORM),)  # noqa: RUF005
        if residual is not None:
            for t in tl.static_range(T):
                added = added + (load_tile(residual, y_strides, first + t * R, last, channel, shape, FORM),)  # noqa: RUF005
    if PHASE & 1:
        # Load these few values here, while x is still being loaded, so that no later step has to wait for them.
        near = sample(x, x_strides, first, last, channel, shape, FORM)
        g = load_or(gamma, channel, C, 1.0)
        b = load_or(beta, channel, C, 0.0)
        if running[0] is not None and not LAST:
            old = load_old(running, channel, C)
        if PHASE == 3 and not ALONE:
            side = barrier.side_of(word)
        low, m2 = moments_of(x, x_strides, tiles, near, first, last, channel, shape, FORM, T, STAGES)
        if ALONE:
            base = near
        else:
            store_part(partial, part, near, low, m2, channel, C)
        if TREE:
            twig = part // 32
            final = tl.minimum((twig + 1) * 32, parts)
            leaf = words + 2 + slices + piece * 32 + twig
            if barrier.arrive(leaf, 1) == final - twig * 32 - 1:
                tl.store(leaf, 0)
                base, low, m2 = merge(partial, twig * 32, final, share, channel, shape, EACH)
                upper = partial + parts * (3 * C)
                twigs = (parts + 31) // 32
                store_part(upper, twig, base, low, m2, channel, C)
                if barrier.arrive(word, 1) == twigs - 1:
                    settle(
                        upper, twigs, share * 32, word, twigs, words, slices, stats, before, g, b, running, eps,
                        momentum, channel, shape, EACH, CUMULATIVE,
                    )  # fmt: skip
        elif LAST:
            if barrier.arrive(word, 1) == parts - 1:
                settle(
                    partial, parts, share, word, parts, words, slices, stats, before, g, b, running, eps, momentum,
                    channel, shape, EACH, CUMULATIVE,
                )  # fmt: skip
        elif not ALONE:
            barrier.arrive_to_turn(word, part, parts)
        if PHASE == 3 and not ALONE:
            barrier.wait(word, side)
        if not LAST:
            if not ALONE:
                base, low, m2 = merge(partial, 0, parts, share, channel, shape, EACH)
            var = m2 / count
            scale, offset = publish(stats, count, base, low, var, g, b, eps, channel, C, part == 0)
            if running[0] is not None:
                if part == 0:
                    move(
                        words + 1, slices, before, C, count, base + low, var, running, old, momentum,
                        channel, CUMULATIVE,
                    )  # fmt: skip
    if PHASE & 2:
        if LAST:
            base = tl.load(stats + 3 * C + channel, mask=here, other=0.0)
            scale = tl.load(stats + 5 * C + channel, mask=here, other=0.0)
            offset = tl.load(stats + 6 * C + channel, mask=here, other=0.0)
        if T > 0:
            first = opaque(first, ON_DEVICE)
            for t in tl.static_range(T):
                normalize_tile(
                    opaque(tiles[t], ON_DEVICE), added[t] if residual is not None else None,
                    first + t * R, last, y, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip
        else:
            tail = first + (last - first - 1) // R * R
            for back in tl.range(0, last - first, R, num_stages=STAGES):
                start = tail - back
                tile = load_tile(x, x_strides, start, last, channel, shape, FORM)
                extra = None
                if residual is not None:
                    extra = load_tile(residual, y_strides, start, last, channel, shape, FORM)
                normalize_tile(
                    tile, extra, start, last, y, bits, y_strides,
                    base, scale, offset, slope, piece, channel, shape, ACT, FORM,
                )  # fmt: skip


_NUMBERS = [
    *("C", "units", "slices", "parts", "share", "beside", "x_stride", "x_plane", "y_stride", "y_plane"),
    *("width", "magic", "shift", "eps", "momentum", "slope"),
]
# These small tensors may be views into one flat buffer, at any alignment. Triton must not compile the kernel again for
# each alignment.
_SMALL = ["gamma", "beta", "words", "running_mean", "running_var", "batches", "skipped"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def forward(
    x, y, residual, bits, gamma, beta, stats, partial, words, running_mean, running_var, batches, skipped,
    C, units, slices, parts, share, beside, x_stride, x_plane, y_stride, y_plane, width, magic, shift,
    eps, momentum, slope,
    ACT: tl.constexpr, CUMULATIVE: tl.constexpr, FORM: tl.constexpr, T: tl.constexpr,
    PHASE: tl.constexpr, ALONE: tl.constexpr, LAST: tl.constexpr, TREE: tl.constexpr,
    TICKET: tl.constexpr, STAGES: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Run the forward pass, or the phase that PHASE selects, with ``slices * parts`` programs.

    ``x_plane`` and ``y_plane`` are the strides of a channel. The residual has the strides of y. For channels last, the
    caller divides C by A (see tile.py).
    """
    shape = (C * (FORM[3] if FORM[0] else 1), units, width, magic, shift)
    piece, part = place(words, slices, parts, beside, PHASE, TICKET)
    normalize_part(
        x, y, residual, bits, gamma, beta, stats, partial, words, (running_mean, running_var, batches, skipped),
        piece, part, shape, slices, parts, share, (x_stride, x_plane), (y_stride, y_plane), eps, momentum, slope,
        ACT, CUMULATIVE, FORM, T, PHASE, ALONE, LAST, TREE, STAGES, ON_DEVICE,
    )  # fmt: skip
