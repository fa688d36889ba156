"""Which kernel configuration a tensor gets: rules drawn from measurements on one H200 (results/kernels-h200.json)."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from .layout import Geometry, vector

MEANING = "resident, once: x is read once where it fits on chip, in one launch; stream: twice, in two launches"
# Up to so many parts every program merges all parts' sums itself; past it the last to arrive does it for all.
MERGED_BY_ALL = 64
# So many launches whose programs wait for each other may run at the same time and none has to wait for room; 0: none
# is made. One network trains on two streams. What processes that share a GPU leave each other nobody knows.
AT_ONCE = int(os.environ.get("BATCHNORM_LAUNCHES_AT_ONCE", "2"))
# Numbers of tiles held; each is a kernel to compile.
HELD = (1, 2, 4, 7, 8, 12, 16)


class Tiling(NamedTuple):
    """Say how the kernels run: R x V tiles, T of them held in registers, each slice of channels in parts.

    Beyond the paper: the choices behind one launch.
    """

    path: str  # once: one launch, x held in registers; stream: two launches, x read twice
    R: int
    V: int
    T: int
    parts: int
    share: int  # units of one part
    slices: int
    beside: int  # slices worked on at a time
    warps: int
    stages: int  # loads in flight in a loop over tiles; 1: what the compiler makes of it
    registers: int  # a thread may use so many up to the statistics; 0: as many as the compiler likes
    steps: int  # tiles of a program of the second launch
    ticket: bool  # whether programs number themselves as they start: see triton/barrier.py
    align: int

    @property
    def alone(self) -> bool:
        """Whether one program has a whole slice, so that nobody waits."""
        return self.parts == 1 and self.path != "stream"

    @property
    def tree(self) -> bool:
        """Whether parts are merged in two steps, of at most 32 each."""
        return self.parts > 32

    @property
    def kept_parts(self) -> int:
        """How many parts' sums need a place."""
        return 0 if self.alone else self.parts + up(self.parts, 32) * self.tree

    @property
    def words(self) -> int:
        """How many words the programs meet at: one for tickets, one for slices done, one a slice, 32 more a slice."""
        return 2 if self.alone else 2 + self.slices * (33 if self.tree else 1)

    def second(self, units: int) -> Tiling:
        """Return the plan of the second launch: smaller parts, since nothing is merged after it."""
        share = self.R * self.steps
        return self._replace(share=share, parts=up(units, share))


def up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def megabytes_of(g: Geometry, itemsize: int) -> float:
    """Return a tensor's size."""
    return g.rows * g.channels * itemsize / 1e6


def power_up(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def make(
    geometry: Geometry,
    itemsize: int,
    path: str,
    tile: int,
    tiles: int,
    parts: int,
    lanes: int,
    warps: int,
    registers: int = 0,
    beside: int = 1,
    stages: int = 1,
    steps: int = 4,
    ticket: bool = True,
) -> Tiling:
    """Make a plan of ``tile`` elements per tile, at most ``tiles`` held, about ``parts`` parts, ``lanes`` channels."""
    if geometry.nhwc:
        V = lanes
        slices, units = up(geometry.channels, V), geometry.rows
        align = 1
        while align < 16 and geometry.channels % (2 * align) == 0 and geometry.stride % (2 * align) == 0:
            align *= 2
    else:
        V = vector(geometry, itemsize)
        slices, units, align = geometry.channels, geometry.rows // V, V
    R = max(tile // V, 8)
    parts = max(parts, up(units, R * tiles)) if path == "once" else min(parts, 1024)
    # Parts start at multiples of 8 units, so that their bits start at whole bytes.
    share = up(up(units, parts), 8) * 8
    parts = up(units, share)
    T = next(t for t in HELD if t * R >= share) if path == "once" else 0
    return Tiling(
        path, R, V, T, parts, share, slices, min(beside, slices), warps, stages, registers, steps, ticket, align
    )


class Way(NamedTuple):
    """Hold a tensor in registers: threads of a program, bytes it may hold, channels of a slice if channels last."""

    warps: int
    kilobytes: int
    lanes: int = 0


@cache
def choose(geometry: Geometry, itemsize: int, backward: bool, residual: bool, processors: int) -> Tiling:
    """Choose for a device with so many multiprocessors."""
    way = _way(geometry, itemsize, backward, residual)
    tensors = 2 if backward or residual else 1
    plan = None if way is None else once(geometry, itemsize, tensors, way, processors)
    return stream(geometry, itemsize, backward, processors) if plan is None else plan


def _way(g: Geometry, itemsize: int, backward: bool, residual: bool) -> Way | None:
    """Return how to hold a tensor of this size, or None where streaming is faster or all that is possible."""
    megabytes = megabytes_of(g, itemsize)
    if g.nhwc:
        if megabytes < 6:
            return Way(4, 32 if backward and megabytes > 3 else 16, 32 // itemsize)
        if megabytes < 10 and backward:
            return Way(8, 64, 32 // itemsize)
        return Way(4, 32, 64 // itemsize) if megabytes < 20 and not backward else None
    values = vector(g, itemsize)
    if residual and megabytes > 8 and values * itemsize == 16:
        return None
    if megabytes < 60 or g.rows * itemsize <= 512 * 1024:
        alone = values > 1 and 2 * g.rows * itemsize <= 64 * 1024  # a program has a channel and waits for nobody
        small = megabytes < (3 if not alone else 4 if residual else 5) if backward else megabytes < 10 or values == 1
        return Way(8, 64) if small else Way(4, 32)
    return None


def once(g: Geometry, itemsize: int, tensors: int, way: Way, processors: int) -> Tiling | None:
    """Plan to read each of 1 or 2 ``tensors`` once, or return None where programs would wait for some not running."""
    tile = 512 * way.warps // itemsize  # 16 bytes a thread
    tiles = way.kilobytes * 1024 // (tile * itemsize * tensors)
    # 128 registers a thread: 16 warps fit on a multiprocessor.
    running = processors * 16 // way.warps
    room = running // AT_ONCE if AT_ONCE else 0
    p = make(g, itemsize, "once", tile, min(tiles, HELD[-1]), 1, way.lanes, way.warps, 128)
    if p.parts > max(room, 1):  # a part alone waits for nobody
        return None
    beside = max(1, min(room // p.parts, p.slices))
    return p._replace(beside=beside, ticket=p.parts * p.slices > min(running // 4, room))


def stream(g: Geometry, itemsize: int, backward: bool, processors: int) -> Tiling:
    """Plan to read x twice, in two launches."""
    lanes = min(128 // itemsize, max(8, power_up(g.channels)))
    slices = up(g.channels, lanes) if g.nhwc else g.channels
    warps, registers = (3, 80) if g.nhwc else (4, 64)
    tile = 4096 if g.nhwc or not backward else 2048
    parts = max(1, min(warps * processors // slices, up(g.rows * (lanes if g.nhwc else 1), tile)))
    tile = tile * 2 // itemsize
    return make(g, itemsize, "stream", tile, 0, parts, lanes, 8, registers, beside=slices, stages=3, steps=4)
