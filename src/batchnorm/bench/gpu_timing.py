"""Time calls on a CUDA device without host overhead, and with data that is not in the cache, as in a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def require_gpu() -> None:
    """Raise ValueError if there is no GPU to measure on."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device, but torch finds none")


def buffers(size: int) -> int:
    """Return how many buffers of ``size`` bytes fill a 60 MB cache three times, but at least 3 and at most 64.

    64 buffers of less than 2.8 MB do not fill the cache three times, so data of the smallest layers may stay in it.
    """
    return max(3, min(64, -(-180_000_000 // size)))


class Stopwatch:
    """Time calls by replaying them as a CUDA graph at full clock speed; the result is the median over replays."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.load = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds(self, call: Callable[[int], Any], sets: int) -> float:
        """Return the seconds per call of ``call(i)``, averaged over ``i`` in ``range(sets)``.

        All results of the calls stay in memory until the timing ends.
        """
        graph = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(sets):
                kept.append(call(i))
        events = [(_event(), _event()) for _ in range(11)]
        # Keep the device busy until the replays start, because an idle device lowers its clock rate.
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
    """Return the bytes per second that an elementwise kernel reads and writes in total, with data outside the cache."""
    x = [torch.randn(1 << 28, device="cuda").to(torch.bfloat16) for _ in range(3)]

    def call(i: int) -> Tensor:
        return torch.relu(x[i])

    with torch.cuda.stream(watch.stream):
        call(0)
    torch.cuda.synchronize()
    return 2 * x[0].numel() * 2 / watch.seconds(call, len(x))
