"""What the paper found, and whether these runs confirm it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ...train.metrics import steps_to
from .curves import (
    LEVEL,
    Curve,
    Seeds,
    at,
    behind_until,
    best,
    end_slope,
    network_of,
    noise,
    seeds_of,
    times_fewer,
    unchanged_seeds_of,
)
from .plan import Plan
from .result_files import Finished

CONFIRMED, REFUTED, UNRESOLVED, NOT_RUN = "confirmed", "refuted", "not resolved", "not yet run"
# A network trains if its accuracy exceeds ten times chance or, with few classes, half of the way from chance to 1. It
# stays at chance if no validation lies four standard errors above it.
TRAINS, ERRORS = 10, 4


class Verdict(NamedTuple):
    """A claim, the paper's number for it, the verdict, and what was found."""

    claim: str
    paper: str
    verdict: str
    found: str

    def __str__(self) -> str:
        return f"{self.claim}: {self.verdict}" + (f", {self.found}" if self.found else "")


def verdicts(plan: Plan, finished: Mapping[str, Finished]) -> list[Verdict]:
    """Judge every claim of Section 4.2.2, of Section 3.3 on rates, and of Section 3.4.

    Paper: Sec. 3.3, 3.4, 4.2.2
    """
    inception, baseline, x5, x30, sigmoid = (
        network_of(finished, name) for name in ("inception", "bn-baseline", "bn-x5", "bn-x30", "bn-x5-sigmoid")
    )
    found = [
        fewer_steps(
            "BN-Baseline", "more than 2 times fewer steps", inception, baseline, lambda times: times > 2, "2.3"
        ),
        fewer_steps("BN-x5", "14 times fewer steps", inception, x5, lambda times: times >= 14, "14"),
        slower_start(inception, x5, x30),
        ends_higher(x5, x30),
        trains("BN-x5-Sigmoid", sigmoid),
    ]
    for init in ("kaiming", "xavier"):
        name = f"{init} initialization"
        found.append(at_chance(name, seeds_of(finished, "figures", "inception-sigmoid", init=init)))
        found.append(diverges(name, seeds_of(finished, "figures", "inception-x5", init=init)))
    # A sweep says nothing before all of it is there.
    whole = {group for group in ("rates", "dropout") if all(r.name in finished for r in plan.runs if r.group == group)}
    found.append(wider_range(finished if "rates" in whole else {}))
    found.append(less_dropout(finished if "dropout" in whole else {}))
    return found


def decide(holds: Iterable[bool]) -> str:
    """Return the verdict of several seeds, or pairings of seeds: one that all of them share, or none.

    >>> decide([True, True]), decide([False, False]), decide([True, False]), decide([])
    ('confirmed', 'refuted', 'not resolved', 'not yet run')
    """
    seen = set(holds)
    if not seen:
        return NOT_RUN
    return UNRESOLVED if len(seen) > 1 else CONFIRMED if seen == {True} else REFUTED


def fewer_steps(
    name: str, claim: str, inception: Seeds, network: Seeds, enough: Callable[[float], bool], paper: str
) -> Verdict:
    """Judge how many times fewer steps a network takes to Inception's best accuracy, in every pairing of seeds.

    Paper: Fig. 3
    """
    claim = f"{name} reaches Inception's best in {claim}"
    if inception and network and all(_top(run.points) <= _chance(run) for run in inception.runs):
        return Verdict(claim, paper, UNRESOLVED, "Inception's best is chance")
    pairs = [times_fewer(a, b) for a, b in product(inception.curves, network.curves)]
    found = ""
    if pairs:
        found = f"{_times(times_fewer(inception.curve, network.curve))} ({', '.join(map(_times, pairs))} by seeds)"
        if (end_slope(inception.curve) or 0.0) >= LEVEL:
            found += "; at this length, for Inception has not levelled off"
    return Verdict(claim, paper, decide(times is not None and enough(times) for times in pairs), found)


def slower_start(inception: Seeds, x5: Seeds, x30: Seeds) -> Verdict:
    """Judge whether BN-x30 takes more steps than BN-x5 to Inception's best accuracy.

    Paper: Sec. 4.2.2, "somewhat slower initially"
    """
    claim, paper = "BN-x30 trails BN-x5 early: more steps to Inception's best", "2.7 against 2.1 million"
    top = best(inception.curve)
    if top is None or not x5 or not x30:
        return Verdict(claim, paper, NOT_RUN, "")
    pairs = [(steps_to(a, top[1]), steps_to(b, top[1])) for a, b in product(x5.curves, x30.curves)]
    comparable = [pair for pair in pairs if pair != (None, None)]
    verdict = decide((b or math.inf) > (a or math.inf) for a, b in comparable) if comparable else UNRESOLVED
    reached = [_steps(steps_to(seeds.curve, top[1])) for seeds in (x5, x30)]
    found = f"{reached[0]} (BN-x5) and {reached[1]} (BN-x30)"
    early = [at(seeds.curve, seeds.runs[0].result["steps"] / 10) for seeds in (x5, x30)]
    if early[0] and early[1]:
        found += f"; a tenth of the way, at step {early[0][0]:,}, {early[0][1]:.1%} and {early[1][1]:.1%}"
    behind = behind_until(x5.curve, x30.curve)
    if behind is not None:
        found += f"; BN-x30's mean is the lower one at every validation to step {behind:,}"
    return Verdict(claim, paper, verdict, found)


def ends_higher(x5: Seeds, x30: Seeds) -> Verdict:
    """Judge whether BN-x30's best accuracy is higher than BN-x5's, in every pairing of seeds.

    Paper: Sec. 4.2.2, "a higher final accuracy"
    """
    holds = [_top(b) > _top(a) for a, b in product(x5.curves, x30.curves)]
    found = f"{_top(x5.curve):.1%} (BN-x5) and {_top(x30.curve):.1%} (BN-x30)" if holds else ""
    return Verdict("BN-x30's best accuracy is higher than BN-x5's", "74.8% against 73.0%", decide(holds), found)


def trains(name: str, network: Seeds) -> Verdict:
    """Judge whether a network trains.

    Paper: Sec. 4.2.2, BN-x5-Sigmoid
    """
    holds = [_top(run.points) > _trained(run) for run in network.runs]
    found = f"best accuracy {_top(network.curve):.1%}" if holds else ""
    return Verdict(f"{name} trains", "69.8%", decide(holds), found)


def at_chance(name: str, network: Seeds) -> Verdict:
    """Judge whether Inception with sigmoid stays at chance.

    Paper: Sec. 4.2.2, "never achieves better than 1/1000"
    """
    holds = [_top(run.points) <= _chance(run) for run in network.runs]
    found = (
        f"best accuracy {_top(network.curve):.1%}, chance {1 / network.runs[0].data['classes']:.1%}" if holds else ""
    )
    return Verdict(f"Inception with sigmoid stays at chance ({name})", "1/1000", decide(holds), found)


def diverges(name: str, network: Seeds) -> Verdict:
    """Judge whether Inception at five times its rate diverges.

    Paper: Sec. 4.2.2, "machine infinity"
    """
    found = ", ".join(
        f"diverged by step {run.result['steps']:,}" if run.diverged else f"best accuracy {_top(run.points):.1%}"
        for run in network.runs
    )
    verdict = decide(run.diverged for run in network.runs)
    return Verdict(f"Inception at 5 times the rate diverges ({name})", "machine infinity", verdict, found)


def wider_range(finished: Mapping[str, Finished]) -> Verdict:
    """Judge whether the highest rate that trains is higher with batch normalization than without.

    A rate trains when the network does not diverge and comes to half of its best accuracy at any rate.

    Paper: Sec. 3.3
    """
    claim, paper = "BN trains at higher rates", '"much higher learning rates"'
    without, with_bn = (
        rates_that_train(seeds_of(finished, "rates", name).runs) for name in ("inception", "bn-baseline")
    )
    if without is None or with_bn is None:
        return Verdict(claim, paper, NOT_RUN, "")
    found = f"{without[0]:g} to {without[1]:g} without BN and {with_bn[0]:g} to {with_bn[1]:g} with BN"
    return Verdict(claim, paper, decide([with_bn[1] > without[1]]), f"rates that train: {found}")


def rates_that_train(runs: Sequence[Finished]) -> tuple[float, float] | None:
    """Return the lowest and the highest rate at which a network comes to half of its best accuracy at any rate."""
    if not runs:
        return None
    ends = {run.run.recipe.rate: run.result["top1"] or 0.0 for run in runs}
    good = [rate for rate, accuracy in ends.items() if accuracy >= max(ends.values()) / 2]
    return min(good), max(good)


def less_dropout(finished: Mapping[str, Finished]) -> Verdict:
    """Judge whether less dropout does a normalized network no harm that exceeds the noise of BN-x5's seeds.

    Paper: Sec. 3.4
    """
    claim, paper = "with BN, dropout can be removed or reduced", '"either removed or reduced in strength"'
    runs = {one.run.recipe.dropout: one for one in seeds_of(finished, "dropout", "bn-baseline").runs}
    spread = noise(unchanged_seeds_of(finished, "ablation", "bn-x5").final)
    accuracies = {share: one.result["top1"] or 0.0 for share, one in runs.items()}
    if len(accuracies) < 2 or spread is None:
        return Verdict(claim, paper, NOT_RUN, "")
    most = max(accuracies)
    gain = max(accuracy for share, accuracy in accuracies.items() if share < most) - accuracies[most]
    found = f"validation accuracy {', '.join(f'{a:.1%} at {s:.0%}' for s, a in sorted(accuracies.items()))}"
    return Verdict(claim, paper, decide([gain >= -spread]), f"{found} (noise of BN-x5's seeds: {spread:.1%})")


def _trained(run: Finished) -> float:
    chance = 1.0 / int(run.data["classes"])
    return min(TRAINS * chance, (1 + chance) / 2)


def _chance(run: Finished) -> float:
    chance = 1.0 / int(run.data["classes"])
    return chance + ERRORS * math.sqrt(chance * (1 - chance) / int(run.data["val"]))


def _top(curve: Curve) -> float:
    top = best(curve)
    return 0.0 if top is None else top[1]


def _times(value: float | None) -> str:
    return "never reached" if value is None else f"{value:.1f}"


def _steps(value: int | None) -> str:
    return "never" if value is None else f"{value:,} steps"
