"""Figures 2 and 3 and their companions as tables: rows of text, for Markdown and for the page alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...train.metrics import steps_to
from .claims import Verdict, rates_that_train, verdicts
from .curves import Seeds, all_seeds_of, best, end_slope, noise, seeds_of, times_fewer, tuned_baseline
from .files import Finished
from .plan import Plan

Rows = list[list[str]]
# Figure 3: steps to 72.2% in millions, maximum accuracy.
PAPER = {
    "inception": ("31.0M", "72.2%"),
    "bn-baseline": ("13.3M", "72.7%"),
    "bn-x5": ("2.1M", "73.0%"),
    "bn-x30": ("2.7M", "74.8%"),
    "bn-x5-sigmoid": ("", "69.8%"),
}
# Section 4.2.1, in its order: the field of the recipe, and what taking it back means.
MODIFICATIONS = {
    "rate": "increase learning rate",
    "dropout": "remove dropout",
    "weight_decay": "reduce the L2 weight regularization",
    "decay_epochs": "accelerate the learning rate decay",
    "local_response": "remove local response normalization",
    "shuffle": "shuffle training examples more thoroughly",
    "photometric": "reduce the photometric distortions",
}


class Section(NamedTuple):
    """Hold a table with what is to be said above it; the first row is the header.

    Beyond the paper: how results are shown.
    """

    heading: str
    text: str
    rows: Rows


def sections(plan: Plan, finished: Mapping[str, Finished]) -> list[Section]:
    """Return all tables; those of which nothing is finished are left out.

    Paper: Figs. 2, 3; Sec. 3.3, 3.4, 4.2.1
    """
    judged = verdicts(plan, finished)
    parts = [
        figure3(finished),
        Section("What the paper found", "", [list(Verdict._fields), *(list(v) for v in judged)]),
        failures(finished),
        rates(finished),
        dropout(finished),
        ablation(finished),
        ran(finished),
        Section(
            "Not yet run", "", [["run", "group"], *([r.name, r.group] for r in plan.runs if r.name not in finished)]
        ),
    ]
    return [part for part in parts if len(part.rows) > 1]


def figure3(finished: Mapping[str, Finished]) -> Section:
    """Tabulate steps to the baseline's best accuracy, maximum accuracy and steps to it, beside the paper's.

    Paper: Fig. 3
    """
    inception, tuned = seeds_of(finished, "figures", "inception"), tuned_baseline(finished)
    top = best(inception.curve)
    target = "the baseline's best" if top is None else f"{top[1]:.1%}"
    rows = [[
        "network", "seeds", f"steps to {target}", "times fewer", "maximum accuracy", "steps to it",
        "folded, at the end", "times fewer than the best-tuned baseline", "paper: steps to 72.2%", "paper: maximum",
    ]]  # fmt: skip
    for variant, (steps, accuracy) in PAPER.items():
        network = seeds_of(finished, "figures", variant)
        if network:
            rows.append([variant, *_row(network, inception, tuned[1] if tuned else inception), steps, accuracy])
    return Section("Figure 3", _figure3_text(inception, tuned), rows)


def _row(network: Seeds, inception: Seeds, tuned: Seeds) -> list[str]:
    target, own = best(inception.curve), best(network.curve)
    tops = [top[1] for curve in network.curves if (top := best(curve)) is not None]
    reached = [] if target is None else [steps_to(curve, target[1]) for curve in (network.curve, *network.curves)]
    return [
        str(len(network.runs)) + (f", {network.diverged} diverged" if network.diverged else ""),
        "-" if not reached else f"{_steps(reached[0])}{_spread([_steps(s) for s in reached[1:]])}",
        _times(times_fewer(inception.curve, network.curve)),
        "-" if own is None else f"{own[1]:.1%}{_spread([f'{top:.1%}' for top in tops])}",
        "-" if own is None else f"{own[0]:,}",
        f"{statistics.fmean(network.final):.1%}" if network.final else "-",
        _times(times_fewer(tuned.curve, network.curve)),
    ]


def _figure3_text(inception: Seeds, tuned: tuple[str, Seeds] | None) -> str:
    parts = ["Validation accuracy at 1 from a single crop, of the mean over seeds; each seed's own in brackets."]
    slope = end_slope(inception.curve) if inception.curve else None
    if slope is not None:
        verdict = "as asked" if slope < 0.01 else "more than asked: the runs are too short"
        parts.append(
            f"Over its last quarter Inception rises by {100 * slope:.2f} points (less than 1 was asked, {verdict})."
        )
    if tuned is not None and (top := best(tuned[1].curve)) is not None:
        parts.append(f"The best-tuned baseline of this length is {tuned[0]}: {top[1]:.1%} at step {top[0]:,}.")
    return " ".join(parts)


def failures(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the two networks that the paper could not train, with both initializations.

    Paper: Sec. 4.2.2
    """
    rows = [["network", "initialization", "steps", "diverged", "best accuracy", "at the end"]]
    for variant in ("inception-x5", "inception-sigmoid"):
        for one in seeds_of(finished, "figures", variant).runs:
            top = best(one.points)
            rows.append(
                [
                    variant,
                    one.run.recipe.init,
                    f"{one.result['steps']:,}",
                    "yes" if one.diverged else "no",
                    "-" if top is None else f"{top[1]:.1%}",
                    _accuracy(one),
                ]
            )
    return Section("The reported failures", "", rows)


def rates(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the accuracy at each rate with and without batch normalization, and the step ratio best against best.

    Paper: Sec. 3.3
    """
    without, with_bn = (seeds_of(finished, "rates", name) for name in ("inception", "bn-baseline"))
    columns = [{one.run.recipe.rate: one for one in seeds.runs} for seeds in (without, with_bn)]
    rows = [["rate", "without BN", "with BN"]]
    for rate in sorted({rate for column in columns for rate in column}):
        rows.append([f"{rate:g}", *(_accuracy(column.get(rate)) for column in columns)])
    return Section("Learning rates (Section 3.3)", _rates_text(without, with_bn), rows)


def _rates_text(without: Seeds, with_bn: Seeds) -> str:
    text = "Accuracy of the folded network at the end of a shorter run, one seed."
    ranges = [rates_that_train(seeds.runs) for seeds in (without, with_bn)]
    for found, name in zip(ranges, ("without BN", "with BN"), strict=True):
        if found is not None:
            text += f" Half of the best accuracy or more {name}: rates {found[0]:g} to {found[1]:g}."
    if without and with_bn:
        tops = [max(seeds.runs, key=lambda one: one.result["top1"] or 0.0) for seeds in (without, with_bn)]
        times = times_fewer(tops[0].points, tops[1].points)
        text += (
            f" Best against best ({tops[0].run.recipe.rate:g} without, {tops[1].run.recipe.rate:g} with BN), the"
            f" normalized network takes {_times(times)} times fewer steps to the other's best accuracy."
        )
    return text


def dropout(finished: Mapping[str, Finished]) -> Section:
    """Tabulate training and validation accuracy by dropout with and without batch normalization.

    Paper: Sec. 3.4
    """
    columns = [
        {one.run.recipe.dropout: one for one in seeds_of(finished, "dropout", name).runs}
        for name in ("inception", "bn-baseline")
    ]
    rows = [
        ["dropout", *(f"{name}: {what}" for name in ("without BN", "with BN") for what in ("training", "validation"))]
    ]
    for share in sorted({share for column in columns for share in column}):
        cells = (_accuracy(column.get(share), key) for column in columns for key in ("train_top1", "top1"))
        rows.append([f"{share:.0%}", *cells])
    text = "Accuracy of the folded network at the end, on the centre squares of both sets, one seed."
    return Section("Dropout (Section 3.4)", text, rows)


def ablation(finished: Mapping[str, Finished]) -> Section:
    """Tabulate BN-x5 with each modification taken back; a difference within the noise of its seeds is not resolved.

    Paper: Sec. 4.2.1
    """
    seeds = all_seeds_of(finished, "bn-x5").final
    spread = noise(seeds)
    rows = [["modification", "BN-x5 without it", "the modification gives", ""]]
    for one in seeds_of(finished, "ablation", "bn-x5").runs:
        field = next((key for key in one.run.changed if key in MODIFICATIONS), None)
        if field is not None:
            rows.append([MODIFICATIONS[field], _accuracy(one), *_difference(one, seeds, spread)])
    text = "Accuracy of the folded network at the end."
    if seeds:
        text += f" BN-x5 itself: {statistics.fmean(seeds):.2%} over {len(seeds)} seeds"
        text += "." if spread is None else f"; one more run would lie within {100 * spread:.2f} points of it (95%)."
    return Section("The seven modifications (Section 4.2.1)", text, rows)


def _difference(one: Finished, seeds: Sequence[float], spread: float | None) -> list[str]:
    if one.diverged:
        return ["-", "without it the network diverges"]
    if not seeds or spread is None:
        return ["-", "not resolved: BN-x5 needs more seeds"]
    gain = statistics.fmean(seeds) - one.result["top1"]
    verdict = "not resolved" if abs(gain) <= spread else "helps" if gain > 0 else "harms"
    return [f"{100 * gain:+.2f} points", verdict]


def ran(finished: Mapping[str, Finished]) -> Section:
    """Tabulate what ran where and how fast."""
    rows = [["run", "steps", "seconds", "steps/s", "on", "torch", "commit"]]
    for name, one in finished.items():
        env = one.environment
        machine = env["gpu"] or f"{env['hardware']}, {env['cores']} cores"
        pace = "-" if one.steps_per_second is None else f"{one.steps_per_second:g}"
        cells = [f"{one.result['steps']:,}", f"{one.seconds:.0f}", pace, machine, env["torch"], env["commit"] or "-"]
        rows.append([name, *cells])
    return Section("The runs", "", rows)


def markdown(parts: Sequence[Section]) -> str:
    """Return the tables as Markdown.

    >>> print(markdown([Section("Heading", "Text.", [["a", "b"], ["1", "2"]])]))
    ## Heading
    <BLANKLINE>
    Text.
    <BLANKLINE>
    | a | b |
    |---|---|
    | 1 | 2 |

    Beyond the paper: how results are shown.
    """
    blocks = []
    for part in parts:
        table = [f"| {' | '.join(row)} |" for row in part.rows]
        table.insert(1, "|---" * len(part.rows[0]) + "|")
        blocks += [f"## {part.heading}", *([part.text] if part.text else []), "\n".join(table)]
    return "\n\n".join(blocks)


def _accuracy(one: Finished | None, key: str = "top1") -> str:
    if one is None:
        return "not yet run"
    if one.diverged:
        return f"diverged by step {one.result['steps']:,}"
    return f"{one.result[key]:.1%}"


def _spread(values: Sequence[str]) -> str:
    return f" ({', '.join(values)})" if len(values) > 1 else ""


def _steps(value: int | None) -> str:
    return "never" if value is None else f"{value:,}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
