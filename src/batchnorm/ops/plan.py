"""Which kernel configuration a tensor gets: a table that was measured (results/kernels-h200.json)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .geometry import Geometry, vector


# Up to so many parts every program merges all parts' sums itself; past it the last to arrive does it for all.
MERGED_BY_ALL = 64


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
    warps: int
    align: int

    @property
    def alone(self) -> bool:
        """Whether one program has a whole slice, so that nobody waits."""
        return self.parts == 1 and self.path != "stream"


def up(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_up(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def make(geometry: Geometry, itemsize: int, path: str, tile: int, tiles: int, parts: int, lanes: int, warps: int) -> Plan:
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
    T = up(share, R) if path == "once" else 0
    return Plan(path, R, V, T, parts, share, slices, warps, align)


@cache
def choose(geometry: Geometry, itemsize: int, backward: bool, residual: bool, programs: int) -> Plan:
    """Choose for a device on which ``programs`` programs can wait for each other."""
    parts = max(1, 4 * programs // up(geometry.channels, 64 if geometry.nhwc else 1))
    parts = max(1, min(parts, up(geometry.rows, 1024)))
    return make(geometry, itemsize, "stream", 4096, 0, parts, min(64, max(8, power_up(geometry.channels))), 8)
