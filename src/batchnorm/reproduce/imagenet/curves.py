"""Measurements on curves of validation accuracy: best values, steps to a value, slopes, and noise between seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...train.metrics import steps_to
from .result_files import Finished

Curve = list[tuple[int, float]]
# A baseline has leveled off if its accuracy rises by less than this over the last quarter of its steps.
LEVEL = 0.01
# Quantiles of Student's t for two-sided 95% intervals, with 1 to 9 degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class Seeds:
    """The finished runs of one network, usually with different seeds; there may be no runs."""

    runs: tuple[Finished, ...]

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def diverged(self) -> int:
        """How many of the runs diverged."""
        return sum(run.diverged for run in self.runs)

    @property
    def curve(self) -> Curve:
        """The mean of the seeds' curves, at the steps that all curves have."""
        return mean_curve([run.points for run in self.runs])

    @property
    def curves(self) -> list[Curve]:
        """Each seed's curve."""
        return [run.points for run in self.runs]

    @property
    def final(self) -> list[float]:
        """The final accuracy of the folded network, for each seed that did not diverge."""
        return [run.result["top1"] for run in self.runs if run.result["top1"] is not None]


def seeds_of(finished: Mapping[str, Finished], group: str, variant: str, **changed: Any) -> Seeds:
    """Return the runs of a group that derive from the recipe ``variant`` and have the field values in ``changed``."""
    return Seeds(
        tuple(
            one
            for one in finished.values()
            if one.run.group == group
            and one.run.variant == variant
            and all(getattr(one.run.recipe, key) == value for key, value in changed.items())
        )
    )


def unchanged_seeds_of(finished: Mapping[str, Finished], group: str, variant: str) -> Seeds:
    """Return a group's runs of ``variant`` whose entries in the plan set no recipe field except the seed."""
    return Seeds(tuple(one for one in seeds_of(finished, group, variant).runs if set(one.run.changed) <= {"seed"}))


def network_of(finished: Mapping[str, Finished], variant: str) -> Seeds:
    """Return Figure 2's runs of ``variant`` whose entries in the plan set no recipe field except the seed."""
    return unchanged_seeds_of(finished, "figures", variant)


def faster_baseline(finished: Mapping[str, Finished]) -> Seeds:
    """Return Figure 2's runs of BN-Baseline for which the plan sets another rate, such as five times Inception's."""
    runs = seeds_of(finished, "figures", "bn-baseline").runs
    return Seeds(tuple(one for one in runs if "rate" in one.run.changed))


def show_init(init: str) -> str:
    """Return the possessive form of an initialization's name.

    >>> show_init("kaiming")
    "Kaiming's"
    """
    return f"{init.title()}'s"


def unnormalized(finished: Mapping[str, Finished]) -> dict[str, Seeds]:
    """Return Figure 2's runs without batch normalization, keyed by recipe and changed fields (except the seed)."""
    networks: dict[str, list[Finished]] = {}
    for one in finished.values():
        recipe = one.run.recipe
        if one.run.group == "figures" and not recipe.batch_norm:
            changed = {key: getattr(recipe, key) for key in one.run.changed if key != "seed"}
            told = (value if isinstance(value, str) else f"{key} {value:g}" for key, value in changed.items())
            networks.setdefault(", ".join((one.run.variant, *told)), []).append(one)
    return {name: Seeds(tuple(runs)) for name, runs in networks.items()}


def tuned_baseline(finished: Mapping[str, Finished]) -> tuple[str, Seeds] | None:
    """Return the name and runs of Figure 2's most accurate unnormalized ReLU network, or None if there is none."""
    networks = {
        k: seeds for k, seeds in unnormalized(finished).items() if seeds.runs[0].run.recipe.activation == "relu"
    }
    tops = {name: top for name, seeds in networks.items() if (top := best(seeds.curve)) is not None}
    if not tops:
        return None
    name = max(tops, key=lambda name: tops[name][1])
    return name, networks[name]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of several curves, at the steps that all curves have.

    >>> mean_curve([[(1, 0.25), (2, 0.5)], [(1, 0.75), (3, 0.5)]])
    [(1, 0.5)]
    """
    if not curves:
        return []
    tables = [dict(curve) for curve in curves]
    # Round the mean. Otherwise, the mean of equal accuracies could be slightly lower than each of them, and `steps_to`
    # would not count that accuracy as reached.
    return [
        (step, round(statistics.fmean(table[step] for table in tables), 9))
        for step, _ in curves[0]
        if all(step in table for table in tables)
    ]


def best(curve: Curve) -> tuple[int, float] | None:
    """Return the first step with the highest accuracy, and that accuracy, or None for an empty curve.

    >>> best([(1, 0.5), (2, 0.75), (3, 0.75)])
    (2, 0.75)
    """
    return max(curve, key=lambda point: (point[1], -point[0]), default=None)


def times_fewer(baseline: Curve, curve: Curve) -> float | None:
    """Return how many times fewer steps ``curve`` takes to reach the baseline's best accuracy; None if it never does.

    >>> times_fewer([(100, 0.3), (200, 0.5)], [(40, 0.5)])
    5.0

    Paper: Fig. 3, "14 times fewer steps"
    """
    top = best(baseline)
    reached = None if top is None else steps_to(curve, top[1])
    return None if top is None or reached is None else top[0] / reached


def end_slope(curve: Curve) -> float | None:
    """Return how much a straight line, fitted to the last quarter of the curve, rises over that quarter.

    The result is None if the quarter has fewer than two points.

    >>> end_slope([(s, 0.5 + 0.001 * s) for s in range(0, 101, 5)])
    0.025
    """
    last = [(step, value) for step, value in curve if step >= 0.75 * curve[-1][0]]
    if len(last) < 2:
        return None
    slope = statistics.linear_regression(*zip(*last, strict=True)).slope
    return round(slope * 0.25 * curve[-1][0], 6)


def behind_until(curve: Curve, other: Curve) -> int | None:
    """Return the last step up to which ``other`` stays below ``curve``, or None if ``other`` does not start below it.

    >>> behind_until([(1, 0.2), (2, 0.3), (3, 0.4)], [(1, 0.1), (2, 0.2), (3, 0.5)])
    2

    Paper: Sec. 4.2.2, "somewhat slower initially"
    """
    values = dict(other)
    both = [(step, value) for step, value in curve if step in values]
    return max((step for step, _ in takewhile(lambda point: values[point[0]] < point[1], both)), default=None)


def noise(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% prediction interval for one more run, given the values of earlier runs.

    The half width is t s sqrt(1 + 1/n), where s is the standard deviation of the n values and t is the quantile
    in STUDENT for n - 1 degrees of freedom, or for 9 if n is larger than 10. The result is None for fewer than two
    values.

    >>> round(noise([0.48, 0.50, 0.52]), 4)
    0.0993
    """
    n = len(values)
    if n < 2:
        return None
    student = STUDENT[min(n - 2, len(STUDENT) - 1)]
    return student * statistics.stdev(values) * math.sqrt(1 + 1 / n)
