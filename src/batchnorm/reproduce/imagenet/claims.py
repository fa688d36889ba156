"""The paper's claims about training on ImageNet, and whether the finished runs of a plan confirm them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ...train.metrics import steps_to
from .curves import (
    LEVEL,
    Curve,
    Seeds,
    behind_until,
    best,
    end_slope,
    faster_baseline,
    network_of,
    noise,
    seeds_of,
    show_init,
    times_fewer,
)
from .plan import Plan
from .result_files import Finished

CONFIRMED, REFUTED, UNRESOLVED, NOT_RUN = "confirmed", "refuted", "not resolved", "not run yet"
NOT_TESTED = "not tested"
# A claim is confirmed or refuted only if each network has at least this many seeds. With fewer seeds, "seen" and
# "not seen" replace "confirmed" and "refuted".
SEEDS = 3
# If a normalized network diverges within this many steps, faulty arithmetic is the likely cause (see `trusted`).
EARLY = 100
# A network overfits visibly if its training accuracy exceeds its validation accuracy by more than GAP, and its
# validation loss ends at more than RISE times its lowest value.
GAP, RISE = 0.1, 1.05
# A network trains if its best accuracy exceeds TRAINS times chance, or the midpoint between chance and 100% if that is
# lower. A network stays at chance if no validation accuracy is more than ERRORS standard errors above chance.
TRAINS, ERRORS = 10, 4


class Verdict(NamedTuple):
    """A claim, what the paper reports, the verdict, and the measurements behind the verdict."""

    claim: str
    paper: str
    verdict: str
    found: str

    def __str__(self) -> str:
        return f"{self.claim}: {self.verdict}" + (f", {self.found}" if self.found else "")


def trusted(finished: Mapping[str, Finished]) -> tuple[dict[str, Finished], list[str]]:
    """Return the runs that verdicts may use, and the names of the other runs.

    If a normalized network diverges within its first EARLY steps, the likely cause is faulty arithmetic on the device,
    not the learning rate. In that case, verdicts ignore all runs that diverged within their first EARLY steps,
    including those without batch normalization.
    """
    early = [name for name, one in finished.items() if one.diverged and one.result["steps"] <= EARLY]
    if not any(finished[name].run.recipe.batch_norm for name in early):
        return dict(finished), []
    return {name: one for name, one in finished.items() if name not in early}, early


def verdicts(plan: Plan, finished: Mapping[str, Finished]) -> list[Verdict]:
    """Judge the claims of Section 4.2.2, of Section 3.3 on learning rates, and of Section 3.4 on dropout.

    Paper: Sec. 3.3, 3.4, 4.2.2
    """
    inception, baseline, x5, x30, sigmoid = (
        network_of(finished, name) for name in ("inception", "bn-baseline", "bn-x5", "bn-x30", "bn-x5-sigmoid")
    )
    found = [
        _half_the_steps(inception, baseline),
        _a_fourteenth_of_the_steps(inception, x5),
        slower_start(inception, x5, x30),
        ends_higher(x5, x30),
        trains("BN-x5-Sigmoid", sigmoid),
    ]
    inits = {init: f"{show_init(init)} initialization" for init in ("kaiming", "xavier")}
    for init, name in inits.items():
        found.append(at_chance(name, seeds_of(finished, "figures", "inception-sigmoid", init=init)))
    for init, name in inits.items():
        found.append(diverges(name, seeds_of(finished, "figures", "inception-x5", init=init)))
    # The groups "rates" and "dropout" are judged only when all their runs are finished.
    whole = {group for group in ("rates", "dropout") if all(r.name in finished for r in plan.runs if r.group == group)}
    found.append(wider_range({n: o for n, o in finished.items() if o.run.group != "rates" or "rates" in whole}))
    return found + less_dropout(finished if "dropout" in whole else {})


def best_against_best(finished: Mapping[str, Finished]) -> list[Verdict]:
    """Judge how many times fewer steps BN-Baseline and BN-x5 take than Inception, each at its sweep's best rate."""
    inception = network_of(finished, "inception")
    baseline, x5 = (seeds_of(finished, "best", name) for name in ("bn-baseline", "bn-x5"))
    return [_half_the_steps(inception, baseline), _a_fourteenth_of_the_steps(inception, x5)]


def decide(holds: Iterable[bool], seeds: int = SEEDS) -> str:
    """Return the verdict on a claim.

    Args:
        holds: whether the claim holds, for each seed or, if networks are compared, for each combination of seeds.
        seeds: the smallest number of seeds of any network involved; below SEEDS, nothing is confirmed or refuted.

    >>> decide([True, True]), decide([False, False]), decide([True, False]), decide([])
    ('confirmed', 'refuted', 'not resolved', 'not run yet')
    >>> decide([True], seeds=1), decide([False, False], seeds=2)
    ('seen, 1 seed', 'not seen, 2 seeds')
    """
    outcomes = set(holds)
    if not outcomes:
        return NOT_RUN
    if len(outcomes) > 1:
        return UNRESOLVED
    if seeds < SEEDS:
        return f"{'seen' if True in outcomes else 'not seen'}, {seeds} seed{'s' if seeds > 1 else ''}"
    return CONFIRMED if True in outcomes else REFUTED


def _half_the_steps(inception: Seeds, baseline: Seeds) -> Verdict:
    claim = "more than 2 times fewer steps"
    return fewer_steps("BN-Baseline", claim, inception, baseline, lambda times: times > 2, "2.3")


def _a_fourteenth_of_the_steps(inception: Seeds, x5: Seeds) -> Verdict:
    return fewer_steps("BN-x5", "14 times fewer steps", inception, x5, lambda times: times >= 14, "14")


def fewer_steps(
    name: str, claim: str, inception: Seeds, network: Seeds, enough: Callable[[float], bool], paper: str
) -> Verdict:
    """Judge whether a network reaches Inception's best accuracy in few enough steps.

    Every seed of the network is compared with every seed of Inception. For each pair, ``enough`` takes the ratio of
    Inception's number of steps to the network's, and returns whether the claim holds.

    Paper: Fig. 3
    """
    claim = f"{name} reaches Inception's best in {claim}"
    if inception and network and all(_top(run.points) <= _chance(run) for run in inception.runs):
        return Verdict(claim, paper, UNRESOLVED, "Inception's best accuracy is not above chance")
    pairs = [times_fewer(a, b) for a, b in product(inception.curves, network.curves)]
    found = ""
    if pairs:
        found = f"{_times(times_fewer(inception.curve, network.curve))} ({_listed(pairs)} by seeds)"
        if (end_slope(inception.curve) or 0.0) >= LEVEL:
            found += "; Inception has not leveled off, so longer runs may give another ratio"
    holds = [times is not None and enough(times) for times in pairs]
    return Verdict(claim, paper, decide(holds, _fewest(inception, network)), found)


def slower_start(inception: Seeds, x5: Seeds, x30: Seeds) -> Verdict:
    """Judge whether BN-x30 takes more steps than BN-x5 to reach the best accuracy of Inception's mean curve.

    Every seed of BN-x30 is compared with every seed of BN-x5; pairs in which neither reaches this accuracy do not
    count.

    Paper: Sec. 4.2.2, "somewhat slower initially"
    """
    claim, paper = "BN-x30 trails BN-x5 early: more steps to Inception's best", "2.7 against 2.1 million"
    top = best(inception.curve)
    if top is None or not x5 or not x30:
        return Verdict(claim, paper, NOT_RUN, "")
    pairs = [(steps_to(a, top[1]), steps_to(b, top[1])) for a, b in product(x5.curves, x30.curves)]
    comparable = [pair for pair in pairs if pair != (None, None)]
    holds = [(b or math.inf) > (a or math.inf) for a, b in comparable]
    verdict = decide(holds, _fewest(inception, x5, x30)) if comparable else UNRESOLVED
    reached = [_steps(steps_to(seeds.curve, top[1])) for seeds in (x5, x30)]
    found = f"{reached[0]} (BN-x5) and {reached[1]} (BN-x30)"
    behind = behind_until(x5.curve, x30.curve)
    if behind is not None:
        until = "" if behind == x30.curve[-1][0] else f" up to step {behind:,}"
        found += f"; BN-x30's mean is lower at every validation{until}"
    return Verdict(claim, paper, verdict, found)


def ends_higher(x5: Seeds, x30: Seeds) -> Verdict:
    """Judge whether BN-x30's best accuracy is higher than BN-x5's, for every seed of one with every seed of the other.

    Paper: Sec. 4.2.2, "a higher final accuracy"
    """
    holds = [_top(b) > _top(a) for a, b in product(x5.curves, x30.curves)]
    found = f"{_top(x5.curve):.1%} (BN-x5) and {_top(x30.curve):.1%} (BN-x30)" if holds else ""
    return Verdict(
        "BN-x30's best accuracy is higher than BN-x5's", "74.8% against 73.0%", decide(holds, _fewest(x5, x30)), found
    )


def trains(name: str, network: Seeds) -> Verdict:
    """Judge whether a network trains, as defined by TRAINS.

    Paper: Sec. 4.2.2, BN-x5-Sigmoid
    """
    holds = [_top(run.points) > _trained(run) for run in network.runs]
    found = f"best accuracy {_top(network.curve):.1%}" if holds else ""
    return Verdict(f"{name} trains", "69.8%", decide(holds, _fewest(network)), found)


def at_chance(name: str, network: Seeds) -> Verdict:
    """Judge whether Inception with sigmoid fails to train: it stays at chance, as in the paper, or diverges.

    Paper: Sec. 4.2.2, "never achieves better than 1/1000"
    """
    return _fails(f"Inception with sigmoid fails to train ({name})", "stays at 1/1000", network)


def diverges(name: str, network: Seeds) -> Verdict:
    """Judge whether Inception fails to train at five times its rate: it overflows, as in the paper, or stays at chance.

    Paper: Sec. 4.2.2, "machine infinity"
    """
    return _fails(f"Inception at 5 times the rate fails to train ({name})", "machine infinity", network)


def _fails(claim: str, paper: str, network: Seeds) -> Verdict:
    holds = [run.diverged or _top(run.points) <= _chance(run) for run in network.runs]
    return Verdict(claim, paper, decide(holds, _fewest(network)), _how_they_went(network))


def how_it_went(run: Finished) -> str:
    """Return how a run went: it overflowed, stayed at chance, or reached a higher accuracy."""
    if run.diverged:
        return f"overflowed by step {run.result['steps']:,}"
    if _top(run.points) <= _chance(run):
        return f"stayed at chance ({_top(run.points):.1%})"
    return f"reached {_top(run.points):.1%}"


def _how_they_went(network: Seeds) -> str:
    """Return how the runs of a network went; "stayed at chance" or "reached" appears once if it applies to all runs."""
    went = [how_it_went(run) for run in network.runs]
    if len(went) > 1 and len({text.split(" (")[0] for text in went}) == 1 and went[0].endswith(")"):
        return f"{went[0].split(' (')[0]} ({', '.join(text.split(' (')[1][:-1] for text in went)})"
    if all(text.startswith("reached ") for text in went):
        return ", ".join([*went[:1], *(text.removeprefix("reached ") for text in went[1:])])
    return ", ".join(went)


def wider_range(finished: Mapping[str, Finished]) -> Verdict:
    """Judge whether the network with batch normalization trains at rates at which the network without it does not.

    If there are finished runs of BN-Baseline at five times Inception's rate, the claim holds if BN-Baseline trains at
    that rate, and Inception with Kaiming's initialization diverges or stays at chance. Otherwise, the sweeps of rates
    decide: the claim holds if the highest rate that trains is higher with BN. If a sweep has no finished runs, or if
    the two sweeps do not end at the same rate, the verdict is NOT_RUN.

    Paper: Sec. 3.3
    """
    claim, paper = "BN trains at higher rates", '"much higher learning rates"'
    fast = faster_baseline(finished)
    plain = seeds_of(finished, "figures", "inception-x5", init="kaiming")
    if fast:
        holds = [
            _top(b.points) > _trained(b) and (a.diverged or _top(a.points) <= _chance(a))
            for a, b in product(plain.runs, fast.runs)
        ]
        sides = (("without BN", plain), ("with BN", fast))
        ends = "; ".join(f"{name} {_how_they_went(seeds)}" for name, seeds in sides)
        found = f"at rate {fast.runs[0].run.recipe.rate:g}, {ends}" if holds else ""
        return Verdict(claim, paper, decide(holds, _fewest(plain, fast)), found)
    sweeps = [seeds_of(finished, "rates", name).runs for name in ("inception", "bn-baseline")]
    highest = {max((one.run.recipe.rate for one in runs), default=0.0) for runs in sweeps}
    if not all(sweeps) or len(highest) > 1:
        return Verdict(claim, paper, NOT_RUN, "")
    without, with_bn = ranges = [rates_that_train(runs) for runs in sweeps]
    told = [show_rates(good, runs) if good else "none" for good, runs in zip(ranges, sweeps, strict=True)]
    higher = max(with_bn, default=0.0) > max(without, default=0.0)
    return Verdict(claim, paper, decide([higher], 1), f"rates that train: {told[0]} without BN and {told[1]} with BN")


def rates_that_train(runs: Sequence[Finished]) -> list[float]:
    """Return the rates with at least half of the best final accuracy, in order; none if the best is 0."""
    ends = {run.run.recipe.rate: run.result["top1"] or 0.0 for run in runs}
    return sorted(rate for rate, accuracy in ends.items() if 0 < max(ends.values()) <= 2 * accuracy)


def show_rates(good: Sequence[float], runs: Sequence[Finished]) -> str:
    """Return the rates in ``good`` as text: as a range if it skips no rate of ``runs``, otherwise one by one."""
    between = {one.run.recipe.rate for one in runs if good[0] <= one.run.recipe.rate <= good[-1]}
    if len(good) > 1 and between == set(good):
        return f"{good[0]:g} to {good[-1]:g}"
    return ", ".join(f"{rate:g}" for rate in good)


def less_dropout(finished: Mapping[str, Finished]) -> list[Verdict]:
    """Judge whether a network with BN needs dropout, and whether dropout helps less with BN than without BN.

    The claims are tested only if at least one of the two networks overfits visibly in all its runs with the least
    dropout in the plan. Otherwise, there is no overfitting for dropout to prevent.

    Paper: Sec. 3.4
    """
    claims = (
        ("with BN, removing dropout costs no accuracy", '"either removed or reduced in strength"'),
        ("dropout raises the accuracy less with BN than without", '"reduces the need for Dropout"'),
    )
    shares = sorted({one.run.recipe.dropout for one in seeds_of(finished, "dropout", "bn-baseline").runs})
    if len(shares) < 2:
        return [Verdict(*claim, NOT_RUN, "") for claim in claims]
    least, most = shares[0], shares[-1]
    plain, normalized = (
        [seeds_of(finished, "dropout", name, dropout=share) for share in (least, most)]
        for name in ("inception", "bn-baseline")
    )
    sides = {"without BN": plain[0], "with BN": normalized[0]}
    if not any(map(overfits_always, sides.values())):
        told = "; ".join(f"{name} {', '.join(map(_gap, seeds.runs))}" for name, seeds in sides.items() if seeds)
        found = f"no network overfits visibly at {least:.0%} dropout (training and validation accuracy: {told})"
        return [Verdict(*claims[0], NOT_TESTED, found), Verdict(*claims[1], NOT_TESTED, "no network overfits visibly")]
    spread = noise(normalized[1].final)
    if not normalized[0].final or spread is None:
        return [Verdict(*claim, UNRESOLVED, "too few runs with BN ended without diverging") for claim in claims]
    cost = statistics.fmean(normalized[1].final) - statistics.fmean(normalized[0].final)
    gains = [[b - a for a, b in product(free.final, dropped.final)] for free, dropped in (plain, normalized)]
    found = (
        f"{least:.0%} instead of {most:.0%} dropout: {-100 * cost:+.2f} points ({-100 * max(gains[1]):+.2f} to"
        f" {-100 * min(gains[1]):+.2f} by seeds; noise of one run: {100 * spread:.2f})"
    )
    removed = Verdict(*claims[0], decide([cost <= spread], _fewest(*normalized)), found)
    holds = [with_bn < without for without, with_bn in product(*gains)]
    found = "; ".join(
        f"{name} {statistics.fmean(free.final):.1%} to {statistics.fmean(dropped.final):.1%}"
        f" ({100 * min(gain):+.2f} to {100 * max(gain):+.2f} points by seeds)"
        for name, (free, dropped), gain in zip(sides, (plain, normalized), gains, strict=True)
        if gain
    )
    return [removed, Verdict(*claims[1], decide(holds, _fewest(*plain, *normalized)), found if holds else "")]


def overfits_always(network: Seeds) -> bool:
    """Return whether a network overfits visibly in all its runs."""
    return bool(network) and all(map(overfits, network.runs))


def overfits(run: Finished) -> bool:
    """Return whether a run overfits visibly, as defined by GAP and RISE."""
    losses = [point.val_loss for point in run.curve if point.val_loss is not None]
    training, validation = run.result["train_top1"], run.result["top1"]
    if training is None or validation is None or not losses:
        return False
    return bool(training - validation > GAP and losses[-1] > RISE * min(losses))


def _gap(run: Finished) -> str:
    if run.result["top1"] is None or run.result["train_top1"] is None:
        return "diverged"
    return f"{run.result['train_top1']:.1%} and {run.result['top1']:.1%}"


def _fewest(*networks: Seeds) -> int:
    return min(len(network.runs) for network in networks)


def _trained(run: Finished) -> float:
    chance = 1.0 / int(run.data["classes"])
    return min(TRAINS * chance, (1 + chance) / 2)


def _chance(run: Finished) -> float:
    chance = 1.0 / int(run.data["classes"])
    return chance + ERRORS * math.sqrt(chance * (1 - chance) / int(run.data["val"]))


def _top(curve: Curve) -> float:
    top = best(curve)
    return 0.0 if top is None else top[1]


def _listed(pairs: Sequence[float | None]) -> str:
    """Return the ratios of all pairs of seeds as text; if there are more than four pairs, only the lowest and highest.

    >>> _listed([2.0, None]), _listed([3.0] * 5 + [2.0]), _listed([2.0] * 6 + [None] * 3), _listed([None] * 9)
    ('2.0, never', '2.0 to 3.0', '2.0 to 2.0, never in 3 of 9', 'never')
    """
    reached = [times for times in pairs if times is not None]
    if not reached:
        return "never"
    if len(pairs) <= 4:
        return ", ".join("never" if times is None else f"{times:.1f}" for times in pairs)
    missed = f", never in {len(pairs) - len(reached)} of {len(pairs)}" * (len(reached) < len(pairs))
    return f"{min(reached):.1f} to {max(reached):.1f}{missed}"


def _times(value: float | None) -> str:
    return "never reached" if value is None else f"{value:.1f}"


def _steps(value: int | None) -> str:
    return "never" if value is None else f"{value:,} steps"
