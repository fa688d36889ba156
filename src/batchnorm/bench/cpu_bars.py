"""What the CPU path is to reach against torch, and by how much each bar is reached or missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# What the ratios must stay below: BN + ReLU beats two calls in both layouts, and few channels in channels_last win
# clearly; BN alone is never much slower. One channel lies in memory as contiguous images do, and is judged as they are.
BARS = {"relu": 1.0, "none": 1.25, "few channels": 1 / 3}
FEW = 8


class Bar(NamedTuple):
    """One requirement, over the cases it is about.

    Beyond the paper: a line of results/cpu.json.
    """

    level: str
    what: str
    below: float | None  # None where nothing is required
    worst: float
    worst_case: str
    met: int
    cases: int

    @property
    def reached(self) -> bool | None:
        """Whether every case is below it; None where nothing is required."""
        return None if self.below is None else self.met == self.cases

    def line(self) -> str:
        """Return it as a sentence."""
        start = f"{self.level}: {self.what}: worst {self.worst:.3f} ({self.worst_case})"
        if self.below is None:
            return f"{start}, {self.met} of {self.cases} below 1"
        told = "reached" if self.reached else "MISSED"
        return f"{start}, to be below {self.below:.3g}, {self.met} of {self.cases} are: {told}"


def bar_of(layout: str, shape: Sequence[int], activation: str) -> float:
    """Return what a case's ratio has to stay below.

    >>> bar_of("contiguous", (8, 64), "relu"), bar_of("channels_last", (8, 64, 7, 7), "none")
    (1.0, 1.25)
    >>> bar_of("channels_last", (32, 3, 112, 112), "relu") < 0.34
    True

    Beyond the paper: speed.
    """
    few = layout == "channels_last" and 1 < shape[1] < FEW
    return BARS["few channels"] if few else BARS[activation]


def bars(rows: Iterable[dict[str, Any]]) -> list[Bar]:
    """Judge measured rows: ratios to torch's calls, ReLU into new memory. In place is for information.

    >>> case = {"name": "images", "shape": (64, 512, 7, 7), "layout": "contiguous", "dtype": "float32"}
    >>> row = {"level": "layers", "activation": "relu", "case": case, "ratios": {"relu": 0.9, "relu in place": 1.1}}
    >>> for bar in bars([row]):
    ...     print(bar.line())
    layers: BN+ReLU over two calls, contiguous: worst 0.900 (images float32), to be below 1, 1 of 1 are: reached
    layers: BN+ReLU over BN and ReLU in place: worst 1.100 (images float32), 0 of 1 below 1

    Beyond the paper: speed.
    """
    rows = list(rows)
    found = []
    for level in dict.fromkeys(row["level"] for row in rows):
        here = [row for row in rows if row["level"] == level]
        relu, alone = ([row for row in here if row["activation"] == a] for a in ("relu", "none"))
        for layout in ("contiguous", "channels_last"):
            wanted = [row for row in relu if row["case"]["layout"] == layout]
            found.append(_judged(level, f"BN+ReLU over two calls, {layout}", BARS["relu"], wanted))
        found.append(_judged(level, "BN alone over torch's", BARS["none"], alone))
        few = [row for row in here if _bar(row) == BARS["few channels"]]
        found.append(_judged(level, f"channels_last with 2 to {FEW - 1} channels", BARS["few channels"], few))
        found.append(_judged(level, "BN+ReLU over BN and ReLU in place", None, relu, "relu in place"))
    return [bar for bar in found if bar is not None]


def _bar(row: dict[str, Any]) -> float:
    return bar_of(row["case"]["layout"], row["case"]["shape"], row["activation"])


def _judged(level: str, what: str, below: float | None, rows: list[dict[str, Any]], form: str = "") -> Bar | None:
    if not rows:
        return None
    # The first form is torch's plain one.
    ratios = [row["ratios"][form] if form else next(iter(row["ratios"].values())) for row in rows]
    worst = max(range(len(rows)), key=ratios.__getitem__)
    case = rows[worst]["case"]
    met = sum(ratio < (1 if below is None else below) for ratio in ratios)
    return Bar(level, what, below, ratios[worst], f"{case['name']} {case['dtype']}", met, len(rows))
