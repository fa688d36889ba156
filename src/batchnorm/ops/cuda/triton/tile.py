"""Access a tensor in tiles, with the same code for both layouts: channels last and channels first.

R and V are compile-time constants. A *row* of a channels-last tensor has the values of all channels at one location of
one example.

- A *slice* is a group of V neighboring channels of a channels-last tensor, or one channel of a channels-first tensor.
  If C is not a multiple of V, the last slice of a channels-last tensor has fewer than V channels.
- A *unit* is the piece of one row that lies in a slice (channels last), or the values at V adjacent locations of one
  channel (channels first).
- A *part* is a range of consecutive units of a slice. Each program processes one part.
- A *tile* is R consecutive units of a part. Its shape is [R, V] in both layouts.

Per-channel values v have the shape [W], where W is V (channels last) or 1 (channels first). So ``v[None, :]``
broadcasts over a tile in both layouts.

Most functions take some of these arguments:

- ``piece``: the index of a slice.
- ``channel``: the indices of the slice's channels, from :func:`channels_of`.
- ``first``: the index of the first unit of a tile or of a part.
- ``last``: one more than the index of the last unit of the program's part.
- ``FORM``: five constants: whether the layout is channels last, R, V, A, and whether offsets need 64 bits. A is a
  number that divides all strides. The caller divides the strides by A.
- ``shape``: five numbers: the number of channels C, the number of units of a slice, the number of units of a channel
  in one example, ``magic`` and ``shift``. The last three are used only for channels first. ``magic`` and ``shift``
  replace the division by the third number with a multiplication and a shift, which are faster.
- ``strides``: two strides of a tensor. The first is the stride of a row (channels last) or of an example (channels
  first). The second is the stride of a channel and is used only for channels first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...activation import NAMES

IDENTITY = tl.constexpr(NAMES.index("identity"))
RELU = tl.constexpr(NAMES.index("relu"))
LEAKY_RELU = tl.constexpr(NAMES.index("leaky_relu"))
SIGMOID = tl.constexpr(NAMES.index("sigmoid"))
TANH = tl.constexpr(NAMES.index("tanh"))
SILU = tl.constexpr(NAMES.index("silu"))
RELU6 = tl.constexpr(NAMES.index("relu6"))
HARDSWISH = tl.constexpr(NAMES.index("hardswish"))


@triton.jit
def channels_of(piece, FORM: tl.constexpr):
    """Return the indices of a slice's channels, as a tensor of shape [W]; the last slice may have indices >= C."""
    V: tl.constexpr = FORM[2]
    if FORM[0]:
        return piece * V + tl.arange(0, V)
    else:
        return piece + tl.arange(0, 1)


@triton.jit
def place_of(units, strides, shape, FORM: tl.constexpr):
    """Return the element offset at which each unit starts in channel 0 of a channels-first tensor."""
    width = shape[2]
    example = (tl.umulhi(units.to(tl.uint32), shape[3].to(tl.uint32, bitcast=True)) >> shape[4]).to(tl.int32)
    start = (units - example * width) * FORM[2]
    if FORM[4]:
        example = example.to(tl.int64)
    return start + example * (strides[0] * FORM[3])


@triton.jit
def offsets(units, strides, channel, shape, FORM: tl.constexpr):
    """Return the offsets of all elements of a slice's units, given the units' indices; the shape is [units, V]."""
    V: tl.constexpr = FORM[2]
    # Multiplying by A tells the compiler that the strides are multiples of A, so that it can use wide loads and stores.
    A: tl.constexpr = FORM[3]
    if FORM[4]:
        channel = channel.to(tl.int64)
    if FORM[0]:
        if FORM[4]:
            units = units.to(tl.int64)
        return units[:, None] * (strides[0] * A) + channel[None, :]
    else:
        start = place_of(units, strides, shape, FORM)
        return (start[:, None] + (channel * (strides[1] * A))[None, :]) + tl.arange(0, V)[None, :]


@triton.jit
def inside(first, last, channel, shape, FORM: tl.constexpr):
    """Return a mask of shape [R, W] that is true where the unit is inside the part and the channel is less than C."""
    return (first + tl.arange(0, FORM[1]) < last)[:, None] & (channel < shape[0])[None, :]


@triton.jit
def load_tile(x, strides, first, last, channel, shape, FORM: tl.constexpr):
    """Load the tile that starts at unit ``first``, with 0 where :func:`inside` is false."""
    at = offsets(first + tl.arange(0, FORM[1]), strides, channel, shape, FORM)
    return tl.load(x + at, mask=inside(first, last, channel, shape, FORM), other=0.0)


@triton.jit
def sample(x, strides, first, last, channel, shape, FORM: tl.constexpr):
    """Estimate the mean of each channel over the units ``first`` to ``last - 1`` from a few of the values.

    For channels last, the estimate is the first value. For channels first, it is the mean of the first 32 values, or of
    all values if there are fewer than 32. The result has the shape [W], and is 0 for a channel whose estimate is not
    finite.
    """
    V: tl.constexpr = FORM[2]
    A: tl.constexpr = FORM[3]
    if FORM[0]:
        at = offsets(first + tl.arange(0, 1), strides, channel, shape, FORM)
        values = tl.load(x + at, mask=(channel < shape[0])[None, :], other=0.0)
        near = tl.sum(values.to(tl.float32), 0)
    else:
        FEW: tl.constexpr = 32
        e = tl.arange(0, FEW)
        at = place_of(first + e // V, strides, shape, FORM) + e % V
        if FORM[4]:
            channel = channel.to(tl.int64)
        there = e < (last - first) * V
        values = tl.load(x + at[:, None] + (channel * (strides[1] * A))[None, :], mask=there[:, None], other=0.0)
        near = tl.sum(values.to(tl.float32), 0) / tl.minimum((last - first) * V, FEW)
    return tl.where(tl.abs(near) < float("inf"), near, 0.0)


@triton.jit
def totals(s, t, FORM: tl.constexpr):
    """Return the per-channel sums of tile ``s`` and of tile ``t``; it is faster to reduce both at once."""
    both = tl.join(s, t)
    if FORM[0]:
        return tl.split(tl.sum(both, 0))
    else:
        return tl.split(tl.sum(tl.sum(both, 1, keep_dims=True), 0))


@triton.jit
def opaque(v, ON_DEVICE: tl.constexpr):
    """Pass ``v`` through inline assembly, so that the compiler cannot know that the returned value is still ``v``.

    Otherwise, when a program loops over its tiles a second time, the compiler would reuse the float32 values and the
    addresses of the first loop. Holding them between the loops would take many registers. ON_DEVICE is false in
    Triton's interpreter, which does not support assembly.
    """
    if not ON_DEVICE:
        return v
    elif v.dtype.is_int():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], v.dtype, is_pure=False, pack=1)
    elif v.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], v.dtype, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [v], v.dtype, is_pure=False, pack=1)


@triton.jit
def bit_offsets(first, last, piece, shape, FORM: tl.constexpr):
    """Return the offsets of the bytes that hold a tile's bits, and a mask of the bytes to access.

    The mask excludes bytes outside the part and, for channels last, bytes past the end of a row. There is one bit per
    value. Bits are stored row by row (channels last) or channel by channel (channels first), and each row or channel is
    padded to whole bytes. Parts start at multiples of 8 units, so a byte never holds bits of two parts.
    """
    R: tl.constexpr = FORM[1]
    V: tl.constexpr = FORM[2]
    at = tl.arange(0, R * V // 8)
    if FORM[0]:
        line = first + at // (V // 8)
        byte = piece * (V // 8) + at % (V // 8)
        length = (shape[0] + 7) // 8
        exists = (line < last) & (byte < length)
    else:
        line = tl.zeros_like(at) + piece
        byte = first * V // 8 + at
        length = (shape[1] * V + 7) // 8
        exists = byte < (last * V + 7) // 8
    if FORM[4]:
        line = line.to(tl.int64)
    return line * length + byte, exists


@triton.jit
def store_bits(bits, t, first, last, piece, shape, FORM: tl.constexpr):
    """Write the tile ``t`` of booleans as bits; the first of each eight booleans becomes the lowest bit of a byte."""
    at, exists = bit_offsets(first, last, piece, shape, FORM)
    eights = tl.reshape(t, [FORM[1] * FORM[2] // 8, 8]).to(tl.int32)
    tl.store(bits + at, tl.sum(eights << tl.arange(0, 8)[None, :], 1).to(tl.uint8), mask=exists)


@triton.jit
def load_bits(bits, first, last, piece, shape, FORM: tl.constexpr):
    """Return the tile of booleans that :func:`store_bits` wrote."""
    at, exists = bit_offsets(first, last, piece, shape, FORM)
    packed = tl.load(bits + at, mask=exists, other=0).to(tl.int32)
    return tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, [FORM[1], FORM[2]]) != 0


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z))."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def tanh(z):
    """Return tanh(z)."""
    return 2.0 * sigmoid(2.0 * z) - 1.0


@triton.jit
def activate(z, slope, ACT: tl.constexpr):
    """Return g(z), where g is the activation ``NAMES[ACT]``; only leaky_relu uses ``slope``."""
    if ACT == RELU:
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == LEAKY_RELU:
        return tl.where(z < 0, z * slope, z)
    elif ACT == SIGMOID:
        return sigmoid(z)
    elif ACT == TANH:
        return tanh(z)
    elif ACT == SILU:
        return z * sigmoid(z)
    elif ACT == RELU6:
        low = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(low, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == HARDSWISH:
        return z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        return z


@triton.jit
def passes(z, ACT: tl.constexpr):
    """Return a mask that is true where g'(z) is 1, for the activations g whose derivative has only two values.

    If z is NaN, the result is true for relu and relu6, as in torch's CUDA kernels.
    """
    if ACT == RELU:
        return ~(z <= 0)
    elif ACT == RELU6:
        return ~((z <= 0) | (z >= 6))
    else:
        return z > 0


@triton.jit
def activate_backward(dy, z, slope, ACT: tl.constexpr):
    """Return g'(z) * dy, where g is the activation ``NAMES[ACT]``."""
    if ACT == RELU or ACT == RELU6:  # noqa: SIM109
        return tl.where(passes(z, ACT), dy, 0.0)
    elif ACT == LEAKY_RELU:
        return tl.where(passes(z, ACT), dy, dy * slope)
    elif ACT == SIGMOID:
        s = sigmoid(z)
        return dy * s * (1.0 - s)
    elif ACT == TANH:
        s = tanh(z)
        return dy * (1.0 - s * s)
    elif ACT == SILU:
        s = sigmoid(z)
        return dy * s * (1.0 + z * (1.0 - s))
    elif ACT == HARDSWISH:
        inner = tl.where(z < 3, dy * (z * (1.0 / 3.0) + 0.5), dy)
        return tl.where(z <= -3, 0.0, inner)
    else:
        return dy
