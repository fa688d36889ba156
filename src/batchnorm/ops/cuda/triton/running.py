"""Update the running averages, by the rules of ops/running.py.

A slice is a group of channels of a layer. Its averages are updated as soon as its moments are known. But if the moments
of any channel of the layer are not finite, the batch must leave all averages of the layer unchanged. Some slices may
already have been updated when such moments are found. So the old averages are saved in the array ``before``, and the
program that finishes the last slice restores them if necessary. This way, no program has to wait until the moments of
all slices are known.

The tuple ``running`` has the running mean, the running variance, the number of batches and the number of skipped
batches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import barrier

BAD = tl.constexpr(1 << 16)  # added to the count of finished slices for each slice with a non-finite moment


@triton.jit
def is_number(v):
    """Return a mask that is true where v is finite."""
    return tl.abs(v) < float("inf")


@triton.jit
def load_old(running, channel, C):
    """Return a slice's running mean, its running variance, and the number of batches including this one."""
    here = channel < C
    mean = tl.load(running[0] + channel, mask=here, other=0.0)
    var = tl.load(running[1] + channel, mask=here, other=0.0)
    return mean, var, tl.load(running[2]) + 1


@triton.jit
def restore(before, C, running):
    """Restore the averages of all slices from ``before``, and count the batch as skipped."""
    BLOCK: tl.constexpr = 512
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(running[0] + c, tl.load(before + c, mask=c < C, other=0.0), mask=c < C)
        tl.store(running[1] + c, tl.load(before + C + c, mask=c < C, other=0.0), mask=c < C)
    tl.atomic_add(running[3], 1, sem="relaxed")


@triton.jit
def lerp(old, new, factor):
    """Return old + factor * (new - old), rounded as in torch.lerp: a factor of 1 gives exactly ``new``."""
    step = new - old
    return tl.where(factor < 0.5, old + factor * step, new - (1 - factor) * step)


@triton.jit
def move(done, slices, before, C, count, mean, var, running, old, momentum, channel, CUMULATIVE: tl.constexpr):
    """Update each average r of a slice to r + factor * (moment - r), and count the slice in ``done``.

    The moments are the mean and the unbiased variance. The factor is ``momentum`` or, if CUMULATIVE, 1 divided by the
    number of batches. A batch of one value per channel has no unbiased variance, so it changes nothing. The program
    that counts the last slice also counts the batch or, if any moment is not finite, calls :func:`restore`.
    """
    if count > 1:
        here = channel < C
        old_mean, old_var, seen = old
        factor = momentum
        if CUMULATIVE:
            factor = 1.0 / seen.to(tl.float32)
        unbias = count.to(tl.float32) / (count - 1).to(tl.float32)
        tl.store(before + channel, old_mean, mask=here)
        tl.store(before + C + channel, old_var, mask=here)
        tl.store(running[0] + channel, lerp(old_mean, mean, factor), mask=here)
        tl.store(running[1] + channel, lerp(old_var, var * unbias, factor), mask=here)
        bad = tl.max((here & ~(is_number(mean) & is_number(var))).to(tl.int32), 0)
        step = 1 + bad * BAD
        counted = barrier.arrive(done, step) + step
        if counted % BAD == slices:
            tl.store(done, 0)
            if counted < BAD:
                tl.atomic_add(running[2], 1, sem="relaxed")
            else:
                restore(before, C, running)
