"""Which kernel configuration a tensor gets: a table that was measured (results/kernels-h200.json)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .geometry import Geometry, vector


MEANING = "once: x is read once; again: a second time, from the cache; stream: twice, in two launches"
# Up to so many parts every program merges all parts' sums itself; past it the last to arrive does it for all.
MERGED_BY_ALL = 64
# Numbers of tiles held; each is a kernel to compile.
HELD = (1, 2, 4, 7, 8, 12, 16)


class Plan(NamedTuple):
    """Say how the kernels run: R x V tiles, T of them held in registers, each slice of channels in parts.

    Beyond the paper: the choices behind one launch.
    """

    path: str  # stream: two launches; once: one launch, x read once; again: one launch, x read again from L2
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
    ticket: bool  # whether programs number themselves as they start: see kernels/meet.py
    align: int

    @property
    def alone(self) -> bool:
        """Whether one program has a whole slice, so that nobody waits."""
        return self.parts == 1 and self.path != "stream"


    def second(self, units: int) -> Plan:
        """Return the plan of the second launch: smaller parts, since nothing is merged after it."""
        share = self.R * self.steps
        return self._replace(share=share, parts=up(units, share))


def up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_up(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def make(
    geometry: Geometry, itemsize: int, path: str, tile: int, tiles: int, parts: int, lanes: int, warps: int,
    registers: int = 0,
    beside: int = 1,
    stages: int = 1,
    steps: int = 4,
    ticket: bool = True,
) -> Plan:
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
    if path == "once":
        parts = max(parts, up(units, R * tiles))
    # Parts start at multiples of 8 units, so that their bits start at whole bytes.
    share = up(up(units, parts), 8) * 8
    parts = up(units, share)
    T = next(t for t in HELD if t * R >= share) if path == "once" else 0
    return Plan(path, R, V, T, parts, share, slices, min(beside, slices), warps, stages, registers, steps, ticket, align)


@cache
def choose(geometry: Geometry, itemsize: int, backward: bool, residual: bool, programs: int) -> Plan:
    """Choose for a device on which ``programs`` programs can wait for each other."""
    parts = max(1, 4 * programs // up(geometry.channels, 64 if geometry.nhwc else 1))
    parts = max(1, min(parts, up(geometry.rows, 1024)))
    return make(geometry, itemsize, "stream", 4096, 0, parts, min(64, max(8, power_up(geometry.channels))), 8)
