"""Choose the Triton kernels' configuration by rules from measurements on one H200 (results/kernels-h200.json).

The channels are divided into *slices*, and the values of each slice into *parts*. A program (thread block) processes
one part, which it divides into *tiles*. There are two paths: "once" is one launch, which reads x once and holds it in
registers, and "stream" is two launches, each of which reads x.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from .layout import Geometry, vector

MEANING = (
    "resident and once: one launch, which reads x once if x fits on chip; stream: two launches, which read x twice"
)
# In the "once" path, if a slice has up to this many parts, each of its programs merges the sums of all parts. If the
# slice has more parts, they form groups of up to 32. The last program of each group to finish its sums merges the sums
# of the group, and the last of these programs merges the sums of all groups.
MERGED_BY_ALL = 64
# How many Triton launches with barriers must fit on the GPU at the same time. The default suits a network that trains
# on one or two streams. With 0, no launch has barriers. Set BATCHNORM_LAUNCHES_AT_ONCE to 0 if other processes use the
# GPU: they leave an unknown number of multiprocessors free, so programs that wait at a barrier could deadlock.
AT_ONCE = int(os.environ.get("BATCHNORM_LAUNCHES_AT_ONCE", "2"))
# The possible numbers of tiles that a program holds in registers in the "once" path. A program uses the smallest number
# that covers its whole part. There are only a few numbers, because each of them needs its own compiled kernel.
HELD = (1, 2, 4, 7, 8, 12, 16)


class Tiling(NamedTuple):
    """Hold the launch parameters of the Triton kernels."""

    path: str  # "once" or "stream"
    # A tile has R units of V values; triton/tile.py defines a unit.
    R: int
    V: int
    T: int  # tiles that a program holds in registers; 0 in the "stream" path
    parts: int  # parts per slice
    share: int  # units per part; the last part of a slice may have fewer
    slices: int
    beside: int  # slices processed at the same time
    warps: int
    stages: int  # software pipelining stages of the loop over tiles
    registers: int  # maximum number of registers per thread in the first or only launch; 0 means no limit
    steps: int  # tiles per program in the second launch of the "stream" path
    # Whether programs that wait for each other are numbered in the order in which they start (take_ticket in
    # triton/barrier.py).
    ticket: bool
    align: int  # a number that divides all strides

    @property
    def alone(self) -> bool:
        """Whether one program processes a whole slice in one launch, so that programs do not wait for each other."""
        return self.parts == 1 and self.path != "stream"

    @property
    def tree(self) -> bool:
        """Whether sums are merged in two steps: first within groups of up to 32 parts, then across the groups.

        A single "once" launch with up to MERGED_BY_ALL parts ignores this property: every program merges all sums.
        """
        return self.parts > 32

    @property
    def kept_parts(self) -> int:
        """How many sets of sums are stored per slice: one per part and, if ``tree``, one per group; 0 if ``alone``."""
        return 0 if self.alone else self.parts + up(self.parts, 32) * self.tree

    @property
    def words(self) -> int:
        """The number of int32 counters that a launch needs.

        One counter numbers the programs (see ``ticket``), and one counts finished slices. In addition, each slice has 1
        counter, or 33 if ``tree``, or none if one program processes the whole slice.
        """
        return 2 if self.alone else 2 + self.slices * (33 if self.tree else 1)

    def second(self, units: int) -> Tiling:
        """Return the tiling of the second launch of the "stream" path, for slices of ``units`` units.

        This launch merges no sums, so it may have any number of parts. Each part has up to ``steps`` tiles.
        """
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

    In the path "once", a slice has about ``parts`` parts, or more if a part would otherwise have more than ``tiles``
    tiles. In the path "stream", a slice has at most ``parts`` parts, and never more than 1024. If the tensor is
    channels last, a slice has up to ``lanes`` channels.
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
    # Let parts start at multiples of 8 units, so that two programs never write sign bits (see sign_bits.py) to the same
    # byte.
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
    """Choose the tiling for a device with ``processors`` multiprocessors."""
    way = _way(geometry, itemsize, backward, residual)
    tensors = 2 if backward or residual else 1
    plan = None if way is None else once(geometry, itemsize, tensors, way, processors)
    return stream(geometry, itemsize, backward, processors) if plan is None else plan


def _way(g: Geometry, itemsize: int, backward: bool, residual: bool) -> Way | None:
    """Return how to hold a tensor in registers, or None to use the "stream" path."""
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
        # Whether a program can hold a whole channel of both x and dy in 64 KB, and can load several values per access.
        alone = values > 1 and 2 * g.rows * itemsize <= 64 * 1024
        small = megabytes < (3 if not alone else 4 if residual else 5) if backward else megabytes < 10 or values == 1
        return Way(8, 64) if small else Way(4, 32)
    return None


def once(g: Geometry, itemsize: int, tensors: int, way: Way, processors: int) -> Tiling | None:
    """Return a tiling that holds ``tensors`` tensors (1 or 2) in registers, and so reads each of them once.

    Returns None if the programs of a slice, which wait for each other, might not all run at the same time.
    """
    tile = 512 * way.warps // itemsize  # a tile has 16 bytes per thread
    tiles = way.kilobytes * 1024 // (tile * itemsize * tensors)
    # With 128 registers per thread, 16 warps can run on a multiprocessor at the same time.
    running = processors * 16 // way.warps
    room = running // AT_ONCE if AT_ONCE else 0
    p = make(g, itemsize, "once", tile, min(tiles, HELD[-1]), 1, way.lanes, way.warps, 128)
    if p.parts > max(room, 1):  # a single part is always possible, because its program waits for no other program
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
