"""Choose the Triton kernels' configuration by rules from measurements on one H200 (results/kernels-h200.json)."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from .layout import Geometry, vector

MEANING = (
    "resident and once: one launch, which reads x once if x fits on chip; stream: two launches, which read x twice"
)
# In the "once" path with up to this many parts per slice, every program merges the sums of all parts itself. With more
# parts, the last program to arrive merges the sums for all programs.
MERGED_BY_ALL = 64
# How many launches with barriers must fit on the GPU at the same time; 0 disables such launches. The default suits a
# network that trains on one or two streams. Set BATCHNORM_LAUNCHES_AT_ONCE to 0 if other processes use the GPU: how
# many multiprocessors they leave free is unknown, and programs that wait for each other could deadlock.
AT_ONCE = int(os.environ.get("BATCHNORM_LAUNCHES_AT_ONCE", "2"))
# The numbers of tiles that a program can hold in registers; a kernel is compiled for each number that is used.
HELD = (1, 2, 4, 7, 8, 12, 16)


class Tiling(NamedTuple):
    """Hold the launch parameters: a slice of channels is split into parts, and a program processes a part in tiles."""

    path: str  # "once": one launch, x held in registers; "stream": two launches, x read twice
    R: int  # a tile has R units of V values: see triton/tile.py
    V: int
    T: int  # tiles that a program holds in registers
    parts: int
    share: int  # units per part
    slices: int
    beside: int  # slices processed at a time
    warps: int
    stages: int  # software pipelining stages of the loop over tiles
    registers: int  # maximum number of registers per thread in the first or only launch; 0 means no limit
    steps: int  # tiles per program in the second launch
    ticket: bool  # whether programs number themselves as they start: see triton/barrier.py
    align: int

    @property
    def alone(self) -> bool:
        """Whether one program processes a whole slice, so that no program has to wait."""
        return self.parts == 1 and self.path != "stream"

    @property
    def tree(self) -> bool:
        """Whether parts are merged in two steps: first in groups of up to 32 parts, then the groups.

        The "once" path ignores this up to MERGED_BY_ALL parts, because every program then merges all parts itself.
        """
        return self.parts > 32

    @property
    def kept_parts(self) -> int:
        """The number of parts whose sums are stored in memory, including the merged groups of a tree."""
        return 0 if self.alone else self.parts + up(self.parts, 32) * self.tree

    @property
    def words(self) -> int:
        """The number of int32 counters: one for tickets, one for finished slices, and those of the slices.

        A slice has 1 counter, or 33 for a tree, or none if one program processes the whole slice.
        """
        return 2 if self.alone else 2 + self.slices * (33 if self.tree else 1)

    def second(self, units: int) -> Tiling:
        """Return the tiling of the second launch, which has smaller parts because it merges nothing."""
        share = self.R * self.steps
        return self._replace(share=share, parts=up(units, share))


def up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def megabytes_of(g: Geometry, itemsize: int) -> float:
    """Return a tensor's size in megabytes."""
    return g.rows * g.channels * itemsize / 1e6


def power_up(n: int) -> int:
    """Return the smallest power of two that is at least n."""
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
    """Make a tiling with about ``tile`` elements per tile.

    The path "once" has about ``parts`` parts, or more if a part would otherwise have more than ``tiles`` tiles. The
    path "stream" has at most ``parts`` parts, and at most 1024. In channels-last tensors, a slice has ``lanes``
    channels.
    """
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
    """How to hold a tensor in registers: warps and kilobytes per program and, for channels last, channels per slice."""

    warps: int
    kilobytes: int
    lanes: int = 0


@cache
def choose(geometry: Geometry, itemsize: int, backward: bool, residual: bool, processors: int) -> Tiling:
    """Choose the tiling for a device with this many multiprocessors."""
    way = _way(geometry, itemsize, backward, residual)
    tensors = 2 if backward or residual else 1
    plan = None if way is None else once(geometry, itemsize, tensors, way, processors)
    return stream(geometry, itemsize, backward, processors) if plan is None else plan


def _way(g: Geometry, itemsize: int, backward: bool, residual: bool) -> Way | None:
    """Return how to hold a tensor of this size in registers, or None if streaming is faster or the only option."""
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
        alone = values > 1 and 2 * g.rows * itemsize <= 64 * 1024  # one program holds a whole channel
        small = megabytes < (3 if not alone else 4 if residual else 5) if backward else megabytes < 10 or values == 1
        return Way(8, 64) if small else Way(4, 32)
    return None


def once(g: Geometry, itemsize: int, tensors: int, way: Way, processors: int) -> Tiling | None:
    """Return a tiling that holds ``tensors`` tensors (1 or 2) in registers, and so reads each of them once.

    Returns None if programs would wait for other programs that cannot run at the same time.
    """
    tile = 512 * way.warps // itemsize  # 16 bytes per thread
    tiles = way.kilobytes * 1024 // (tile * itemsize * tensors)
    # With 128 registers per thread, 16 warps fit on a multiprocessor.
    running = processors * 16 // way.warps
    room = running // AT_ONCE if AT_ONCE else 0
    p = make(g, itemsize, "once", tile, min(tiles, HELD[-1]), 1, way.lanes, way.warps, 128)
    if p.parts > max(room, 1):  # a program that is alone on its slice never waits
        return None
    beside = max(1, min(room // p.parts, p.slices))
    return p._replace(beside=beside, ticket=p.parts * p.slices > min(running // 4, room))


def stream(g: Geometry, itemsize: int, backward: bool, processors: int) -> Tiling:
    """Return a tiling that reads x twice, in two launches."""
    lanes = min(128 // itemsize, max(8, power_up(g.channels)))
    slices = up(g.channels, lanes) if g.nhwc else g.channels
    warps, registers = (3, 80) if g.nhwc else (4, 64)
    tile = 4096 if g.nhwc or not backward else 2048
    parts = max(1, min(warps * processors // slices, up(g.rows * (lanes if g.nhwc else 1), tile)))
    tile = tile * 2 // itemsize
    return make(g, itemsize, "stream", tile, 0, parts, lanes, 8, registers, beside=slices, stages=3, steps=4)
