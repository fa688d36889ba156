"""The running averages, moved by whichever program finishes the last slice; the rules are those of ops/running.py."""

from __future__ import annotations

import triton
import triton.language as tl

from . import meet

BLOCK = tl.constexpr(512)


@triton.jit
def count_bad(stats, C):
    """Count the channels whose mean or variance is no number."""
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mean = tl.load(stats + c, mask=c < C, other=0.0)
        var = tl.load(stats + C + c, mask=c < C, other=0.0)
        bad += tl.where((tl.abs(mean) < float("inf")) & (tl.abs(var) < float("inf")), 0, 1)
    return tl.sum(bad, 0)


@triton.jit
def update(stats, C, count, running, momentum, CUMULATIVE: tl.constexpr):
    """Move the averages by r + factor * (moment - r), with the unbiased variance, and count the batch."""
    seen = tl.load(running[2]) + 1
    tl.debug_barrier()
    tl.store(running[2], seen)
    factor = momentum
    if CUMULATIVE:
        factor = 1.0 / seen.to(tl.float32)
    unbias = count.to(tl.float32) / (count - 1).to(tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mean = tl.load(stats + c, mask=c < C, other=0.0)
        var = tl.load(stats + C + c, mask=c < C, other=0.0) * unbias
        old_mean = tl.load(running[0] + c, mask=c < C, other=0.0)
        old_var = tl.load(running[1] + c, mask=c < C, other=0.0)
        tl.store(running[0] + c, old_mean + factor * (mean - old_mean), mask=c < C)
        tl.store(running[1] + c, old_var + factor * (var - old_var), mask=c < C)


@triton.jit
def finish_slice(done, slices, stats, C, count, running, momentum, CUMULATIVE: tl.constexpr):
    """Count a slice as done; with the last one, move the averages, or count a batch that had to be skipped."""
    if running[0] is not None:
        if meet.arrive(done) == slices - 1:
            tl.store(done, 0)
            if count > 1:
                if count_bad(stats, C) == 0:
                    update(stats, C, count, running, momentum, CUMULATIVE)
                else:
                    tl.store(running[3], tl.load(running[3]) + 1)
