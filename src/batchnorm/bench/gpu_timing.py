"""Time a call on a CUDA device as a training step meets it: data not in the cache, no host in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def require_gpu() -> None:
    """Refuse to start if there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device, and torch finds none")


def buffers(size: int) -> int:
    """Return how many sets of tensors of ``size`` bytes it takes to leave nothing of the first in a 60 MB cache."""
    return max(3, min(64, -(-180_000_000 // size)))


class Stopwatch:
    """Replay captured calls with the clocks up, and take the median."""

    def __init__(self, repeats: int = 11) -> None:
        self.repeats = repeats
        self.stream = torch.cuda.Stream()
        self.load = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds(self, call: Callable[[int], Any], sets: int) -> float:
        """Return the seconds of one ``call(i)``, i running over the sets; what the calls return stays alive."""
        graph = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(sets):
                kept.append(call(i))
        events = [(_event(), _event()) for _ in range(self.repeats)]
        # An idle device has slow clocks: give it something to do first, and no pause before the replays.
        for _ in range(6):
            torch.mm(self.load, self.load)
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = sorted(start.elapsed_time(end) for start, end in events)
        return float(times[len(times) // 2]) * 1e-3 / sets


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def copy_bandwidth(watch: Stopwatch) -> float:
    """Return the bytes read and written per second by an elementwise kernel on a tensor far larger than the cache."""
    x = [torch.randn(1 << 28, device="cuda").to(torch.bfloat16) for _ in range(3)]

    def call(i: int) -> Tensor:
        return torch.relu(x[i])

    with torch.cuda.stream(watch.stream):
        call(0)
    torch.cuda.synchronize()
    return 2 * x[0].numel() * 2 / watch.seconds(call, len(x))
