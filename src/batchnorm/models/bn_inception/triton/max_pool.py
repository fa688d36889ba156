"""Max pooling of 3x3 windows, with padding 1, in channels-last tensors, optionally after normalization and ReLU.

Columns of windows are numbered consecutively across all images. A unit is a block of windows, P columns wide and up to
``share`` rows high. A slice is a set of V consecutive channels. A program processes one slice of one unit, row by row;
in :func:`max_sums`, it processes one slice of several units. Except in :func:`max_backward_1`, a program keeps in
registers the values that the next row of windows also needs. The caller divides the number of channels C and the
strides between pixels by A, and the kernels multiply them by A again, so that the compiler knows the alignment of
memory accesses. Docstrings give the shapes of tensors in brackets, such as [P, V].

The position of a maximum in its window is encoded as UP, DOWN or 0, plus LEFT, RIGHT or 0; the middle of the window is
0. The positions of two neighboring channels share a position byte, with the first channel in the lower four bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....ops.cuda.triton.backward import settle
from ....ops.cuda.triton.tile import RELU, activate

LEFT = tl.constexpr(1)
RIGHT = tl.constexpr(2)
UP = tl.constexpr(4)
DOWN = tl.constexpr(8)
# NOWHERE is stored instead of a position if ReLU's derivative at the maximum is 0, so that no pixel gets the window's
# gradient. load_places also returns NOWHERE for windows that do not exist.
NOWHERE = tl.constexpr(15)


@triton.jit
def slice_of(program, C, A: tl.constexpr, V: tl.constexpr):
    """Return which slice of V channels a program processes, and what the slice contains.

    Returns:
        The program's index among the programs of its slice; the slice's index; the indices of the slice's channels [V]
        and of its position bytes [V / 2]; a mask of the channels that exist; a mask of the position bytes that exist;
        the number of slices; the number of position bytes per window.
    """
    pixel_bytes = C * (A // 2) if A > 1 else (C + 1) // 2
    C = C * A
    slices = (C + V - 1) // V
    number = program // slices
    piece = program - number * slices
    channel = piece * V + tl.arange(0, V)
    half = piece * (V // 2) + tl.arange(0, V // 2)
    return number, piece, channel, half, (channel < C)[None, :], (half < pixel_bytes)[None, :], slices, pixel_bytes


@triton.jit
def columns_of(unit, columns, rows, share, width, P: tl.constexpr):
    """Return the columns and rows of a unit's windows.

    If fewer than P columns are left, the last column is repeated, and the copies are masked out.

    Returns:
        The image of each column [P]; the column's index in its image [P]; a mask of the columns that exist; the first
        row of the unit; the row after its last row.
    """
    chunks = (rows + share - 1) // share
    block = unit // chunks
    first = (unit - block * chunks) * share
    at = block * P + tl.arange(0, P)
    exists = at < columns
    at = tl.minimum(at, columns - 1)
    image = at // width
    return image, at - image * width, exists[:, None], first, tl.minimum(first + share, rows)


@triton.jit
def pointers(x, image, column, lane, height, width, step):
    """Return the addresses of pixels in the first row of their images, and the stride between rows.

    ``lane`` holds offsets inside a pixel, and ``step`` is the stride between pixels.
    """
    pitch = (width * step).to(tl.int64)
    return (x + image * (height * pitch))[:, None] + ((column * step)[:, None] + lane[None, :]), pitch


@triton.jit
def pixels_of(x, image, column, channel, half, height, width, stride, A: tl.constexpr):
    """Return the addresses of pixels in the first row of their images, and the strides between pixels and between rows.

    If x is bfloat16 and A > 1, the pixels are read as int32 values: the addresses are pointers to int32, and the
    strides count int32 values. Each int32 holds two bfloat16 values; converting them to float32 in pairs takes fewer
    instructions.
    """
    if x.dtype.element_ty == tl.bfloat16 and A > 1:
        step = stride * (A // 2)
        pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
        p, pitch = pointers(pairs, image, column, half, height, width, step)
    else:
        step = stride * A
        p, pitch = pointers(x, image, column, channel, height, width, step)
    return p, step, pitch


@triton.jit
def load_raw(p, here, half_here):
    """Read pixels in the dtype of ``p``; pixels where the mask is False are read as 0.

    The mask is ``half_here`` if the dtype is int32, and ``here`` otherwise.
    """
    if p.dtype.element_ty == tl.int32:
        return tl.load(p, mask=half_here, other=0)
    else:
        return tl.load(p, mask=here, other=0.0)


@triton.jit
def as_floats(raw, flip, P: tl.constexpr, V: tl.constexpr):
    """Convert pixels to float32 [P, V]; if ``flip`` is given, it selects channels to negate.

    If ``raw`` is int32 (pairs of bfloat16 values), ``flip`` holds the sign bits to invert. For other types, ``flip``
    holds factors of 1 or -1.
    """
    if raw.dtype == tl.int32:
        if flip is not None:
            raw ^= flip
        first = (raw << 16).to(tl.float32, bitcast=True)
        second = (raw & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(first, second), [P, V])
    else:
        value = raw.to(tl.float32)
        if flip is not None:
            value *= flip
        return value


@triton.jit
def load_pixels(p, here, half_here, flip, P: tl.constexpr, V: tl.constexpr):
    """Read pixels [P, V] as float32."""
    return as_floats(load_raw(p, here, half_here), flip, P, V)


@triton.jit
def load_row(row, image_row, here, half_here, flip, P: tl.constexpr, V: tl.constexpr):
    """Read three neighboring pixels of a row with :func:`load_pixels`, and return them from left to right."""
    middle, left, right, pitch = image_row
    p = middle + row * pitch
    a = load_pixels(p + left, here, half_here, flip, P, V)
    b = load_pixels(p, here, half_here, flip, P, V)
    return a, b, load_pixels(p + right, here, half_here, flip, P, V)


@triton.jit
def three_columns(x, image, column, channel, half, H, W, stride, A: tl.constexpr):
    """Return the argument ``image_row`` of :func:`load_row`, and a mask of the position bits that point into the image.

    ``column`` is the column of the windows' middle pixels. If a window's left or right pixel is outside the image, the
    middle pixel replaces it, and the mask clears LEFT or RIGHT.
    """
    p, step, pitch = pixels_of(x, image, column, channel, half, H, W, stride, A)
    left = tl.maximum(column - 1, 0) - column
    right = tl.minimum(column + 1, W - 1) - column
    inside = NOWHERE - tl.where(left == 0, LEFT, 0) - tl.where(right == 0, RIGHT, 0)
    return (p, (left * step)[:, None], (right * step)[:, None], pitch), inside[:, None]


@triton.jit
def greatest(a, b):
    """Return the larger value, or NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest_in_row(row, image_row, here, half_here, flip, P: tl.constexpr, V: tl.constexpr):
    """Return the maximum of three neighboring pixels of a row, and its first position: LEFT, 0 or RIGHT."""
    a, b, c = load_row(row, image_row, here, half_here, flip, P, V)
    best = greatest(greatest(a, b), c)
    return best, tl.where(a == best, LEFT, tl.where(b == best, 0, RIGHT))


@triton.jit
def store_places(p, place, half_here, P: tl.constexpr, V: tl.constexpr):
    """Write the positions of maxima, with two channels in each byte."""
    first, second = tl.split(tl.reshape(place, [P, V // 2, 2]))
    tl.store(p, (first | (second << 4)).to(tl.uint8), mask=half_here)


@triton.jit
def load_places(p, half_here, P: tl.constexpr, V: tl.constexpr):
    """Return the positions that :func:`store_places` wrote, and NOWHERE for windows that do not exist."""
    both = tl.load(p, mask=half_here, other=255).to(tl.int32)
    return tl.reshape(tl.join(both & 15, both >> 4), [P, V])


_SIZES = ["columns", "C", "H", "W", "out_H", "out_W", "share"]
# These arguments may be views of one flat buffer, with any alignment. Do not compile a kernel again for each alignment.
_SMALL = ["dgamma", "dbeta", "words"]


@triton.jit(do_not_specialize=[*_SIZES, "x_stride", "y_stride"])
def max_forward(
    x, y, where, stats, columns, C, H, W, out_H, out_W, share, x_stride, y_stride,
    STRIDE: tl.constexpr, P: tl.constexpr, V: tl.constexpr, A: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write each window's maximum and the position of the first pixel that has this value.

    If a window contains NaN, the position is arbitrary, but inside the image. If ``stats`` is given, normalize and
    apply ReLU before pooling. Normalization and ReLU are monotone, so the kernel applies them only to each window's
    maximum or, if the scale is negative, to its minimum. If ReLU's derivative at that value is 0, the position is
    NOWHERE.
    """
    unit, _, channel, half, here, half_here, _, pixel_bytes = slice_of(tl.program_id(0), C, A, V)
    C = C * A
    image, column, exists, first, last = columns_of(unit, columns, out_H, share, out_W, P)
    image_row, sides = three_columns(x, image, column * STRIDE, channel, half, H, W, x_stride, A)
    out, y_pitch = pointers(y, image, column, channel, out_H, out_W, y_stride * A)
    places, places_pitch = pointers(where, image, column, half, out_H, out_W, pixel_bytes)
    flip = None
    if stats is not None:
        base = tl.load(stats + 3 * C + channel, mask=channel < C, other=0.0)[None, :]
        scale = tl.load(stats + 5 * C + channel, mask=channel < C, other=0.0)[None, :]
        offset = tl.load(stats + 6 * C + channel, mask=channel < C, other=0.0)[None, :]
        sign = tl.where(scale < 0, -1.0, 1.0)
        flip = sign
        if image_row[0].dtype.element_ty == tl.int32:
            even, odd = tl.split(tl.reshape(tl.where(scale < 0, 1, 0), [1, V // 2, 2]))
            flip = (even << 15) | (odd << 31)

    # A row above or below the image is replaced by the nearest row inside, which does not change the maximum.
    top, at_top = greatest_in_row(tl.maximum(first * STRIDE - 1, 0), image_row, here, half_here, flip, P, V)
    if STRIDE == 1:
        mid, at_mid = greatest_in_row(first, image_row, here, half_here, flip, P, V)
    for i in tl.range(0, last - first, loop_unroll_factor=UNROLL):
        r = first + i
        if STRIDE == 2:
            mid, at_mid = greatest_in_row(2 * r, image_row, here, half_here, flip, P, V)
        below = r * STRIDE + 1
        low, at_low = greatest_in_row(tl.minimum(below, H - 1), image_row, here, half_here, flip, P, V)
        best = greatest(greatest(top, mid), low)
        place = tl.where(top == best, at_top | UP, tl.where(mid == best, at_mid, at_low | DOWN))
        place &= sides - tl.where(r == 0, UP, 0) - tl.where(below == H, DOWN, 0)
        if stats is not None:
            z = tl.fma(best * sign - base, scale, offset)
            place = tl.where(z <= 0, NOWHERE, place)
            best = activate(z, 0.0, RELU)
        tl.store(out + r * y_pitch, best.to(y.dtype.element_ty), mask=here & exists)
        store_places(places + r * places_pitch, place, half_here & exists, P, V)
        if STRIDE == 1:
            top, at_top = mid, at_mid
            mid, at_mid = low, at_low
        else:
            top, at_top = low, at_low


@triton.jit(do_not_specialize=[*_SIZES, "dy_stride", "parts", "units", "each"], do_not_specialize_on_alignment=_SMALL)
def max_sums(
    dy, where, x, stats, dgamma, dbeta, partial, words,
    columns, C, H, W, out_H, out_W, share, dy_stride, parts, units, each,
    P: tl.constexpr, V: tl.constexpr, A: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gamma and beta, for a normalization followed by ReLU and max pooling at stride 2.

    A window's gradient goes to at most one pixel, so the kernel sums over windows, not pixels. Each program adds up at
    most ``each`` units. The program that finishes last in its slice then adds up the sums of all programs of this
    slice, in a fixed order. If TREE, the sums of groups of up to 32 programs are added up first.
    """
    part, piece, channel, half, here, half_here, slices, pixel_bytes = slice_of(tl.program_id(0), C, A, V)
    base = tl.load(stats + 3 * C * A + channel, mask=channel < C * A, other=0.0)[None, :]
    t1 = tl.zeros([P, V], tl.float32)
    t2 = tl.zeros([P, V], tl.float32)
    start = part * each
    for k in range(tl.minimum(each, units - start)):
        image, column, exists, first, last = columns_of(start + k, columns, out_H, share, out_W, P)
        image_row, _ = three_columns(x, image, 2 * column, channel, half, H, W, C, A)
        gradients, _, dy_pitch = pixels_of(dy, image, column, channel, half, out_H, out_W, dy_stride, A)
        places, places_pitch = pointers(where, image, column, half, out_H, out_W, pixel_bytes)
        a, b, c = load_row(tl.maximum(2 * first - 1, 0), image_row, here, half_here, None, P, V)
        for i in range(last - first):
            r = first + i
            d = load_pixels(gradients + r * dy_pitch, here & exists, half_here & exists, None, P, V)
            place = load_places(places + r * places_pitch, half_here & exists, P, V)
            on_left = (place & LEFT) != 0
            on_right = (place & RIGHT) != 0
            top = tl.where(on_left, a, tl.where(on_right, c, b))
            a, b, c = load_row(2 * r, image_row, here, half_here, None, P, V)
            mid = tl.where(on_left, a, tl.where(on_right, c, b))
            a, b, c = load_row(tl.minimum(2 * r + 1, H - 1), image_row, here, half_here, None, P, V)
            low = tl.where(on_left, a, tl.where(on_right, c, b))
            value = tl.where((place & UP) != 0, top, tl.where((place & DOWN) != 0, low, mid))
            d = tl.where(place == NOWHERE, 0.0, d)
            t1 += d
            t2 = tl.fma(d, value - base, t2)
    s1, s2 = tl.split(tl.sum(tl.join(t1, t2), 0))
    word = words + 2 + piece
    settle(partial, part, parts, word, words, piece, slices, stats, dgamma, dbeta, s1, s2, channel, C * A, TREE)


@triton.jit
def load_window(d, p, here, half_here, P: tl.constexpr, V: tl.constexpr):
    """Return the windows' gradients [P, V] and positions of maxima; where the masks are False, return 0 and NOWHERE."""
    return load_pixels(d, here, half_here, None, P, V), load_places(p, half_here, P, V)


@triton.jit
def selected(d, place, wanted: tl.constexpr):
    """Return the gradients of the windows whose maximum is at position ``wanted``, and 0 for the other windows."""
    return tl.where(place == wanted, d, 0.0)


@triton.jit
def store_pixel(dx, raw, dz, here, base, scale, k2, k0, P: tl.constexpr, V: tl.constexpr):
    """Write the gradients of pixels.

    If ``raw`` is None, the gradient is dz. Otherwise, let v be ``raw`` in float32: the gradient is dz + v if ``scale``
    is None, and scale dz + k2 (v - base) + k0 if ``scale`` is given.
    """
    if raw is not None:
        v = as_floats(raw, None, P, V)
        if scale is None:
            dz += v
        else:
            dz = tl.fma(dz, scale, tl.fma(v - base, k2, k0))
    tl.store(dx, dz.to(dx.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=[*_SIZES, "dy_stride"], do_not_specialize_on_alignment=_SMALL)
def max_backward_2(
    dy, where, dx, other, stats, dgamma, dbeta, columns, C, H, W, out_H, out_W, share, dy_stride,
    P: tl.constexpr, V: tl.constexpr, A: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute the backward pass of max pooling at stride 2, or of normalization, ReLU and this pooling together.

    If ``stats`` is None, write the gradient of max pooling's input, plus ``other`` if it is given. If ``stats`` is
    given, ``other`` is x, the input of the normalization. In that case, write the gradient of x,
    dx = scale dz + k2 (x - base) + k0. Here dz is the gradient of ReLU's input, and k2 and k0 are computed from the
    gradients of gamma and beta.
    """
    # Process the units in reverse order, because the values that max_sums read last may still be in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    unit, _, channel, half, here, half_here, _, pixel_bytes = slice_of(program, C, A, V)
    base, scale, k2, k0 = None, None, None, None
    if stats is not None:
        known = channel < C * A
        count = tl.load(stats + 2 * C * A)
        stats += channel
        base = tl.load(stats + 3 * C * A, mask=known, other=0.0)[None, :]
        low = tl.load(stats + 4 * C * A, mask=known, other=0.0)[None, :]
        scale = tl.load(stats + 5 * C * A, mask=known, other=0.0)[None, :]
        invstd = tl.load(stats + 7 * C * A, mask=known, other=0.0)[None, :]
        k2 = -scale * (tl.load(dgamma + channel, mask=known, other=0.0)[None, :] * invstd / count)
        k0 = -scale * (tl.load(dbeta + channel, mask=known, other=0.0)[None, :] / count) - low * k2
    image, column, exists, first, last = columns_of(unit, columns, out_H, share, out_W, P)
    gradients, dy_step, dy_pitch = pixels_of(dy, image, column, channel, half, out_H, out_W, dy_stride, A)
    places, places_pitch = pointers(where, image, column, half, out_H, out_W, pixel_bytes)
    out, pitch = pointers(dx, image, 2 * column, channel, H, W, C * A)
    read, step, read_pitch = None, 0, 0
    if other is not None:
        read, step, read_pitch = pixels_of(other, image, 2 * column, channel, half, H, W, C, A)

    # Four windows overlap each block of 2x2 pixels: `a`, whose middle is the block's top left pixel; `b`, to the right
    # of `a`; `c`, below `a`; and `d`, below `b`.
    beside = exists & (column + 1 < out_W)[:, None]
    within = exists & (2 * column + 1 < W)[:, None]
    p = gradients + first * dy_pitch
    q = places + first * places_pitch
    a, at_a = load_window(p, q, here & exists, half_here & exists, P, V)
    b, at_b = load_window(p + dy_step, q + pixel_bytes, here & beside, half_here & beside, P, V)
    for i in tl.range(0, last - first, loop_unroll_factor=UNROLL):
        r = first + i
        p = gradients + (r + 1) * dy_pitch
        q = places + (r + 1) * places_pitch
        there = exists & (r + 1 < out_H)
        beyond = beside & (r + 1 < out_H)
        c, at_c = load_window(p, q, here & there, half_here & there, P, V)
        d, at_d = load_window(p + dy_step, q + pixel_bytes, here & beyond, half_here & beyond, P, V)
        lower = exists & (2 * r + 1 < H)
        corner = within & (2 * r + 1 < H)
        v1, v2, v3, v4 = None, None, None, None
        if other is not None:
            # Load these pixels before the first store, because the compiler does not move loads ahead of stores.
            v = read + (2 * r) * read_pitch
            v1 = load_raw(v, here & exists, half_here & exists)
            v2 = load_raw(v + step, here & within, half_here & within)
            v3 = load_raw(v + read_pitch, here & lower, half_here & lower)
            v4 = load_raw(v + read_pitch + step, here & corner, half_here & corner)
        to = out + (2 * r) * pitch
        dz = selected(a, at_a, 0)
        store_pixel(to, v1, dz, here & exists, base, scale, k2, k0, P, V)
        dz = selected(a, at_a, RIGHT + 0) + selected(b, at_b, LEFT + 0)
        store_pixel(to + C * A, v2, dz, here & within, base, scale, k2, k0, P, V)
        dz = selected(a, at_a, DOWN + 0) + selected(c, at_c, UP + 0)
        store_pixel(to + pitch, v3, dz, here & lower, base, scale, k2, k0, P, V)
        dz = selected(a, at_a, DOWN + RIGHT) + selected(b, at_b, DOWN + LEFT)
        dz += selected(c, at_c, UP + RIGHT) + selected(d, at_d, UP + LEFT)
        store_pixel(to + pitch + C * A, v4, dz, here & corner, base, scale, k2, k0, P, V)
        a, at_a, b, at_b = c, at_c, d, at_d


@triton.jit
def window_gradient(
    windows, row, exists, here, half_here, H, W,
    BELOW: tl.constexpr, BESIDE: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return the gradients that pixels get from the windows at a given offset.

    The middle of each window is BELOW rows below its pixel and BESIDE columns to the right. BELOW and BESIDE are -1, 0
    or 1.
    """
    # Seen from the window below a pixel (BELOW is 1), the pixel is UP; from the window above it (BELOW is -1), DOWN.
    PLACE: tl.constexpr = (0 if BELOW == 0 else UP if BELOW == 1 else DOWN) + (
        0 if BESIDE == 0 else LEFT if BESIDE == 1 else RIGHT
    )
    gradients, step, dy_pitch, places, pixel_bytes, places_pitch, column = windows
    row += BELOW
    column += BESIDE
    there = exists & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    p = gradients + row * dy_pitch + BESIDE * step
    q = places + row * places_pitch + BESIDE * pixel_bytes
    d, place = load_window(p, q, here & there, half_here & there, P, V)
    return selected(d, place, PLACE)


@triton.jit(do_not_specialize=[*_SIZES, "dy_stride"])
def max_backward_1(
    dy, where, dx, other, columns, C, H, W, out_H, out_W, share, dy_stride,
    P: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Write the gradient of max pooling's input at stride 1, plus ``other`` if it is given."""
    unit, _, channel, half, here, half_here, _, pixel_bytes = slice_of(tl.program_id(0), C, A, V)
    image, column, exists, first, last = columns_of(unit, columns, H, share, W, P)
    gradients, step, dy_pitch = pixels_of(dy, image, column, channel, half, H, W, dy_stride, A)
    places, places_pitch = pointers(where, image, column, half, H, W, pixel_bytes)
    windows = (gradients, step, dy_pitch, places, pixel_bytes, places_pitch, column[:, None])
    out, pitch = pointers(dx, image, column, channel, H, W, C * A)
    read, read_pitch = None, 0
    if other is not None:
        read, _, read_pitch = pixels_of(other, image, column, channel, half, H, W, C, A)
    for i in range(last - first):
        r = first + i
        total = tl.zeros([P, V], tl.float32)
        for k in tl.static_range(9):
            total += window_gradient(windows, r, exists, here, half_here, H, W, 1 - k // 3, 1 - k % 3, P, V)
        if other is not None:
            total += load_pixels(read + r * read_pitch, here & exists, half_here & exists, None, P, V)
        tl.store(out + r * pitch, total.to(dx.dtype.element_ty), mask=here & exists)
