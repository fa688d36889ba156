"""Measure how the GPU time of a training step divides among kinds of kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# A kernel belongs to the first kind whose pattern occurs in the kernel's name.
KINDS = (
    ("convolutions, forward", r"(?i:fprop)|^convolve\b"),
    ("convolutions, gradients of inputs", r"dgrad|convBwdData"),
    ("convolutions, gradients of weights", r"wgrad|convBwdFilter|^(kernel_gradient|add_parts)\b"),
    ("pooling", r"pool|^max_|^(average|spread)\b"),
    ("BN, forward", r"^(forward|forward_layers)\b"),
    ("BN, backward", r"^(backward|backward_layers)\b"),
    ("update of the weights", r"^update\b"),
    (
        "1x1 convolutions as matrix products, split-K sums, memsets",
        r"gemm|matMul|nvjet|splitk|cutlass|cublas|(?i:memset)|^fill\b",
    ),
)
REST = "rest"


class Launch(NamedTuple):
    """A kernel, copy or memset that ran on the GPU, with its start and end in microseconds."""

    name: str
    start: float
    end: float


def profile(step: Callable[[], Any], steps: int = 5) -> dict[str, Any]:
    """Run a step several times on a GPU and return the :func:`summary` of everything that ran there."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_gpu = [event for event in recorded.events() if event.device_type.name == "CUDA"]
    launches = [Launch(event.name, event.time_range.start, event.time_range.end) for event in on_gpu]
    return summary(launches, steps)


def summary(launches: Sequence[Launch], steps: int) -> dict[str, Any]:
    """Return the milliseconds per step of each kind of kernel, summed over streams, and the launches per step.

    ``busy`` is the share of the profiled time in which at least one kernel runs. ``longest_rest`` lists up to five
    kernels that match no pattern in ``KINDS``, the longest first, with their milliseconds per step.

    >>> found = summary([Launch("sm90_fprop", 0, 400), Launch("forward_layers", 300, 500), Launch("add", 700, 800)], 1)
    >>> found["milliseconds"], found["launches"], found["busy"]
    ({'convolutions, forward': 0.4, 'BN, forward': 0.2, 'rest': 0.1}, 3.0, 0.75)
    """
    if not launches:
        raise RuntimeError("the profiler recorded no kernels on the GPU")
    kinds, rest = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, start, end in launches:
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), REST)
        kinds[kind] += end - start
        if kind == REST:
            rest[name[:80]] += end - start
    busy, until = 0.0, min(start for _, start, _ in launches)
    first = until
    for _, start, end in sorted(launches, key=lambda launch: launch.start):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {
        "milliseconds": {kind: kinds[kind] / 1e3 / steps for kind in (*dict(KINDS), REST) if kind in kinds},
        "launches": len(launches) / steps,
        "busy": busy / (until - first),
        "longest_rest": {
            name: rest[name] / 1e3 / steps for name in sorted(rest, key=rest.__getitem__, reverse=True)[:5]
        },
    }
