"""The running averages, moved by whichever program finishes the last slice; the rules are those of ops/running.py."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


@triton.jit
def is_number(v):
    """Say where v is neither infinite nor NaN."""
    return tl.abs(v) < float("inf")


@triton.jit
def update(done, stats, C, count, running, momentum, CUMULATIVE: tl.constexpr):
    """Move the averages, with the unbiased variance, or count a batch that had to be skipped.

    A single value has no variance to average: it changes nothing, nor do the counts.
    """
    running_mean, running_var, batches, skipped = running
    tl.store(done, 0)
    seen = tl.load(batches) + 1
    missed = tl.load(skipped)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mean = tl.load(stats + c, mask=c < C, other=0.0)
        var = tl.load(stats + C + c, mask=c < C, other=0.0)
        bad += tl.where(is_number(mean) & is_number(var), 0, 1)
    usable = (tl.sum(bad, 0) == 0) & (count > 1)
    factor = momentum
    if CUMULATIVE:
        factor = 1.0 / seen.to(tl.float32)
    unbias = count.to(tl.float32) / tl.maximum(count - 1, 1).to(tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        here = (c < C) & usable
        mean = tl.load(stats + c, mask=here, other=0.0)
        var = tl.load(stats + C + c, mask=here, other=0.0) * unbias
        old_mean = tl.load(running_mean + c, mask=here, other=0.0)
        old_var = tl.load(running_var + c, mask=here, other=0.0)
        tl.store(running_mean + c, old_mean + factor * (mean - old_mean), mask=here)
        tl.store(running_var + c, old_var + factor * (var - old_var), mask=here)
    tl.store(batches, seen, mask=usable)
    tl.store(skipped, missed + 1, mask=(usable == 0) & (count > 1))
