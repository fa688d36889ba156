"""Memory that launches share: floats for intermediate results, and words, which are int32 counters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import extension
from .schedule import up


class Workspace:
    """Keep memory for the floats and words of each stream's launches.

    The words start at zero, and every launch leaves them ready for the next launch. Launches on one stream run one
    after the other, so they can share memory. A launch captured in a CUDA graph has its own memory, because the graph
    may be replayed while other launches run.
    """

    ARENA = 1 << 22  # words per device for launches that are captured in CUDA graphs

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.arenas: dict[int, tuple[Tensor, int]] = {}
        self.retired: list[tuple[Tensor, Tensor]] = []  # memory since replaced; the C++ extension may still use it

    def __call__(self, x: Tensor, floats: int, words: int) -> tuple[Tensor, Tensor]:
        """Return memory for at least this many floats and words."""
        index = x.get_device()
        if index < 0:
            return x.new_empty(floats, dtype=torch.float32), torch.zeros(words, dtype=torch.int32)
        if torch._C._cuda_isCurrentStreamCapturing():
            return x.new_empty(floats, dtype=torch.float32), self.captured(x.device, up(words, 32) * 32)
        key = (index, torch._C._cuda_getCurrentRawStream(index))
        found = self.by_stream.get(key)
        if found is None or found[0].shape[0] < floats or found[1].shape[0] < words:
            self.retired += [] if found is None else [found]
            found = self.by_stream[key] = self.grown(x.device, floats, words, found)
            self.share(index)
        return found

    def share(self, index: int) -> None:
        """Give the C++ extension the addresses of the current stream's memory."""
        stream = torch._C._cuda_getCurrentRawStream(index)
        found = self.by_stream.get((index, stream))
        if extension.module is not None and found is not None:
            floats, words = found
            rooms = (floats.data_ptr(), floats.numel(), words.data_ptr(), words.numel())
            extension.module.set_room(index, stream, *rooms)

    def grown(self, device: torch.device, floats: int, words: int, old: Any) -> tuple[Tensor, Tensor]:
        """Allocate a stream's memory, at least as large as its old memory.

        ``torch.compile(mode="reduce-overhead")`` and ``torch.cuda.use_mem_pool`` redirect the current thread's
        allocations to a pool of their own. The workspace must outlive such a pool, so another thread allocates the
        workspace.
        """
        floats = max(floats, 0 if old is None else old[0].shape[0], 1 << 16)
        words = max(up(words, 32) * 32, 0 if old is None else old[1].shape[0], 4096)  # 32 words fill a cache line
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self.allocated, device, floats, words).result()

    def allocated(self, device: torch.device, floats: int, words: int) -> tuple[Tensor, Tensor]:
        """Allocate memory for a stream and, in the first call for a device, the words for the device's CUDA graphs."""
        if device.index not in self.arenas:
            self.arenas[device.index] = (torch.zeros(self.ARENA, dtype=torch.int32, device=device), 0)
        made = (
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(words, dtype=torch.int32, device=device),
        )
        # Launches on any stream may use the words, so wait until they have been set to zero.
        torch.cuda.current_stream(device).synchronize()
        return made

    def captured(self, device: torch.device, n: int) -> Tensor:
        """Return ``n`` words for a launch that is being captured."""
        arena, used = self.arenas.get(device.index, (None, 0))
        if arena is None or used + n > arena.numel():
            # The graph captures this memset too, so each replay sets the words to zero again.
            return torch.zeros(n, dtype=torch.int32, device=device)
        self.arenas[device.index] = (arena, used + n)
        return arena[used : used + n]


workspace = Workspace()
