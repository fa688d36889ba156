"""Bars: goals for measured numbers, and whether the numbers reach them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, or None if there are no values."""
    return statistics.geometric_mean(values) if values else None


class Bar(NamedTuple):
    """A goal for a measured number.

    >>> Bar("speedup", 1.5, 2.0, True, 3).line()
    'speedup: 2.000, goal at least 1.5, 3 rows: reached'
    """

    what: str
    wanted: float
    measured: float | None
    at_least: bool
    rows: int

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached, or None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted

    def line(self) -> str:
        """Return the goal, the measured number and the verdict as one line of text."""
        told = {None: "not measured", True: "reached", False: "MISSED"}[self.reached]
        number = "" if self.measured is None else f"{self.measured:.3f}, "
        way = "at least" if self.at_least else "at most"
        return f"{self.what}: {number}goal {way} {self.wanted:g}, {self.rows} rows: {told}"
