"""What the kernels are to reach on an H200 in bfloat16, and by how much each bar is reached or missed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

CHIP = 26.4e6  # bytes that stay on chip between the passes: 132 multiprocessors with 200 KB of shared memory
MOVED = 20e6  # bytes; with less, a launch's own time is most of it
# Tensors that must move if all is read once, and if what both passes need is read twice: forward, backward.
ONCE, TWICE = (2, 3), (3, 5)


class Bar(NamedTuple):
    """One requirement, over the layers it is about.

    Beyond the paper: a line of results/kernels-h200.json.
    """

    layout: str
    op: str
    what: str
    wanted: float
    measured: float | None  # None where no layer was measured
    at_least: bool
    layers: int

    @property
    def reached(self) -> bool | None:
        """Whether it is; None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted

    def line(self) -> str:
        """Return it as a sentence."""
        told = {None: "not measured", True: "reached", False: "MISSED"}[self.reached]
        number = "" if self.measured is None else f"{self.measured:.2f}, "
        way = "at least" if self.at_least else "at most"
        return f"{self.op} {self.layout}: {self.what}: {number}{way} {self.wanted:g}, {self.layers} passes: {told}"


def bars(rows: Iterable[dict[str, Any]]) -> list[Bar]:
    """Judge measured rows.

    >>> row = {"layout": "NHWC", "op": "BN+ReLU", "dtype": "bfloat16", "megabytes": 20.0, "limit_us": [10.0, 15.0]}
    >>> row["us"] = {"batchnorm": [12.0, 18.0], "compile": [30.0, 30.0], "eager": [60.0, 90.0]}
    >>> [(bar.what, round(bar.measured, 2), bar.reached) for bar in bars([row]) if bar.measured is not None][:2]
    [('geometric mean of torch.compile over ours', 2.0, True), ('geometric mean of eager over ours', 5.0, True)]

    Beyond the paper: speed.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["dtype"] == "bfloat16" and "batchnorm" in row["us"]:
            groups.setdefault((row["layout"], row["op"]), []).append(row)
    return [bar for (layout, op), members in groups.items() for bar in _judged(layout, op, members)]


def _judged(layout: str, op: str, rows: Sequence[dict[str, Any]]) -> list[Bar]:
    compiled, eager = ([_ratio(row, name) for row in rows if name in row["us"]] for name in ("compile", "eager"))
    kept, streamed = [], []
    for row in rows:
        for i in (0, 1):
            times = row["us"]["batchnorm"][i] / row["limit_us"][i]
            tensor, added = row["megabytes"] * 1e6, op != "BN+ReLU"
            if tensor * (i + 1) > CHIP:
                streamed.append(times * (ONCE[i] + added) / (TWICE[i] + added))
            elif tensor * (ONCE[i] + added) >= MOVED:
                kept.append(times)

    def bar(what: str, wanted: float, values: Sequence[float], measured: float | None, at_least: bool) -> Bar:
        return Bar(layout, op, what, wanted, measured if values else None, at_least, len(values))

    return [
        bar("geometric mean of torch.compile over ours", 1.5, compiled, _mean(compiled), True),
        bar("geometric mean of eager over ours", 4.0, eager, _mean(eager), True),
        bar("worst layer, torch.compile over ours", 0.95, compiled, min(compiled, default=None), True),
        bar("worst pass over the one-read limit, data on chip", 1.25, kept, max(kept, default=None), False),
        bar("worst pass over the streaming limit, data too large", 1.15, streamed, max(streamed, default=None), False),
    ]


def _ratio(row: dict[str, Any], other: str) -> float:
    return float(sum(row["us"][other]) / sum(row["us"]["batchnorm"]))


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
