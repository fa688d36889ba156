"""Figure 3, and tables of learning rates, dropout, Section 4.2.1's modifications, failures and runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...report.tables import table
from ...train.metrics import steps_to
from .claims import how_it_went, overfits_always, rates_that_train, show_rates
from .curves import (
    LEVEL,
    Seeds,
    best,
    end_slope,
    faster_baseline,
    network_of,
    noise,
    seeds_of,
    times_fewer,
    tuned_baseline,
    unchanged_seeds_of,
)
from .result_files import Finished

Rows = list[list[str]]
# From the paper's Figure 3: steps to 72.2%, Inception's steps divided by these steps, and maximum accuracy.
PAPER = {
    "inception": ("31.0M", "1.0", "72.2%"),
    "bn-baseline": ("13.3M", "2.3", "72.7%"),
    "bn-x5": ("2.1M", "14.8", "73.0%"),
    "bn-x30": ("2.7M", "11.5", "74.8%"),
    "bn-x5-sigmoid": ("not in the paper", "not in the paper", "69.8%"),
}

# The table of `on_the_way` has a column for each of these fractions of Inception's best accuracy.
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)
# The modifications of Section 4.2.1, in the paper's order; each key is the field of the recipe that changes.
MODIFICATIONS = {
    "rate": "increase learning rate",
    "dropout": "remove dropout",
    "weight_decay": "reduce the L2 weight regularization",
    "decay_epochs": "accelerate the learning rate decay",
    "local_response": "remove local response normalization",
    "shuffle": "shuffle training examples more thoroughly",
    "photometric": "reduce the photometric distortions",
}


# The recipes whose learning rates are swept, with their labels in the tables.
SWEPT = {"inception": "without BN", "bn-baseline": "with BN", "bn-x5": "with BN and all modifications"}


class Section(NamedTuple):
    """A table with a heading and a text above it; the first row is the header."""

    heading: str
    text: str
    rows: Rows


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
    """
    blocks = []
    for part in parts:
        blocks += [f"## {part.heading}", *([part.text] if part.text else []), table(part.rows)]
    return "\n\n".join(blocks)


def show_accuracy(one: Finished | None, key: str = "top1") -> str:
    """Return a run's final accuracy as text, or the reason why it has none."""
    if one is None:
        return "not run yet"
    if one.diverged:
        return f"diverged by step {one.result['steps']:,}"
    return f"{one.result[key]:.1%}"


def show_steps(value: int | None) -> str:
    """Return a number of steps as text; "never" for None."""
    return "never" if value is None else f"{value:,}"


def show_times(value: float | None) -> str:
    """Return a ratio of steps as text; "-" for None."""
    return "-" if value is None else f"{value:.1f}"


def show_name(name: str) -> str:
    """Return a network's name, capitalized; an initialization in the name is capitalized too.

    >>> show_name("inception-x5, kaiming")
    'Inception-x5, Kaiming'
    """
    for init in ("kaiming", "xavier"):
        name = name.replace(init, init.title())
    return name[:1].upper() + name[1:]


def figure3(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the steps to Inception's best accuracy and the maximum accuracies, next to the paper's numbers.

    Paper: Fig. 3
    """
    inception, tuned = network_of(finished, "inception"), tuned_baseline(finished)
    top = best(inception.curve)
    target = "the baseline's best" if top is None else f"{top[1]:.1%}"
    rows = [[
        "network", "seeds", f"steps to {target}", "paper, to 72.2%", "times fewer", "paper", "maximum accuracy",
        "paper", "steps to the maximum", "folded, at the end",
    ]]  # fmt: skip
    if tuned is not None and tuned[0] == "inception":
        tuned = None  # leave out the column of the best unnormalized network, which would repeat "times fewer"
    for variant, paper in PAPER.items():
        network = network_of(finished, variant)
        if network:
            more = [_times_of_seeds(tuned[1], network)] if tuned else []
            rows.append([variant, *_row(network, inception, paper), *more])
    if tuned is not None:
        rows[0].append("times fewer than the best unnormalized")
    return Section("Figure 3", _figure3_text(inception, tuned), rows)


def _row(network: Seeds, inception: Seeds, paper: tuple[str, str, str]) -> list[str]:
    target, own = best(inception.curve), best(network.curve)
    tops = [top[1] for curve in network.curves if (top := best(curve)) is not None]
    reached = [] if target is None else [steps_to(curve, target[1]) for curve in (network.curve, *network.curves)]
    return [
        str(len(network.runs)) + (f", {network.diverged} diverged" if network.diverged else ""),
        "-" if not reached else f"{show_steps(reached[0])}{_spread([show_steps(s) for s in reached[1:]])}",
        paper[0],
        show_times(times_fewer(inception.curve, network.curve)),
        paper[1],
        "-" if own is None else f"{own[1]:.1%}{_spread([f'{top:.1%}' for top in tops])}",
        paper[2],
        "-" if own is None else f"{own[0]:,}",
        f"{statistics.fmean(network.final):.1%}" if network.final else "-",
    ]


def _times_of_seeds(baseline: Seeds, network: Seeds) -> str:
    mean, *seeds = (show_times(times_fewer(baseline.curve, curve)) for curve in (network.curve, *network.curves))
    return mean + (_spread(seeds) if {*seeds} != {show_times(None)} else "")


def _figure3_text(inception: Seeds, tuned: tuple[str, Seeds] | None) -> str:
    parts = [
        "Accuracy is top-1 on validation images, with a single crop. A network's mean curve is its accuracy, averaged"
        " over its seeds at each validation. Steps and maximum accuracies are those of the mean curve and, in"
        " parentheses, of each seed's curve."
    ]
    slope = end_slope(inception.curve)
    if slope is not None:
        verdict = "less than 1, so it has leveled off" if slope < LEVEL else "1 or more, so the runs are too short"
        own = [f"{100 * rise:.2f}" for curve in inception.curves if (rise := end_slope(curve)) is not None]
        seeds = f"; by seeds: {', '.join(own)}" if len(own) > 1 else ""
        parts.append(
            f"Over the last quarter of the steps, Inception's accuracy rises by {100 * slope:.2f} points"
            f" ({verdict}{seeds})."
        )
    if tuned is not None and (top := best(tuned[1].curve)) is not None:
        best_run = f"The best unnormalized network is {tuned[0]}, with {top[1]:.1%} at step {top[0]:,}"
        rise = end_slope(tuned[1].curve)
        parts.append(
            best_run
            + ("." if rise is None else f"; over the last quarter, its accuracy rises by {100 * rise:.2f} points.")
        )
    return " ".join(parts)


def on_the_way(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the steps that each network takes to reach fractions of Inception's best accuracy.

    The table also shows how many times fewer steps each network takes than Inception.
    """
    inception = network_of(finished, "inception").curve
    top = best(inception)
    networks = {name: curve for name in PAPER if (curve := network_of(finished, name).curve)}
    if top is None or len(networks) < 2:
        return Section("On the way there", "", [])
    targets = [round(share * top[1], 9) for share in SHARES]
    rows = [["network", *(f"{target:.1%}" for target in targets)]]
    baseline = [steps_to(inception, target) for target in targets]
    for name, curve in networks.items():
        reached = [steps_to(curve, target) for target in targets]
        cells = zip(baseline, reached, strict=True)
        rows.append([name, *(show_steps(b) + (f" ({a / b:.1f})" if a and b else "") for a, b in cells)])
    shares = f"{', '.join(f'{share:.0%}' for share in SHARES[:-1])} and 100%"
    text = (
        f"Steps until the mean accuracy over seeds reaches {shares} of Inception's best accuracy."
        " In parentheses: how many times fewer steps than Inception."
    )
    return Section("On the way there", text, rows)


def best_rates(finished: Mapping[str, Finished]) -> Section:
    """Tabulate Inception, BN-Baseline and BN-x5 as in Figure 3, but each at the best rate of its own sweep."""
    inception = network_of(finished, "inception")
    top = best(inception.curve)
    normalized = {name: runs for name in ("bn-baseline", "bn-x5") if (runs := seeds_of(finished, "best", name))}
    if top is None or not normalized:
        return Section("Each network at its best rate", "", [])
    rows = [["network", "rate", "seeds", f"steps to {top[1]:.1%}", "times fewer", "maximum accuracy", "at the end"]]
    for name, network in {"inception": inception, **normalized}.items():
        cells = _row(network, inception, ("", "", ""))
        rate = f"{network.runs[0].run.recipe.rate:g}"
        rows.append([name, rate, *(cells[k] for k in (0, 1, 3, 5, 8))])
    text = "Each network is trained at the best rate of its own sweep. The runs of Inception are those of Figure 3."
    return Section("Each network at its best rate", text, rows)


def failures(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the two networks that the paper could not train, and BN-Baseline at the rate of inception-x5.

    Paper: Sec. 4.2.2
    """
    rows = [["network", "initialization", "seed", "rate", "steps", "what happened", "at the end"]]
    failed = {name: seeds_of(finished, "figures", name) for name in ("inception-x5", "inception-sigmoid")}
    normalized = faster_baseline(finished)
    for name, network in {**failed, "bn-baseline": normalized}.items():
        for one in network.runs:
            recipe = one.run.recipe
            settings = [recipe.init, str(recipe.seed), f"{recipe.rate:g}", f"{one.result['steps']:,}"]
            rows.append([name, *settings, how_it_went(one), show_accuracy(one)])
    text = "BN-Baseline at the same rate as inception-x5 is listed for comparison." if normalized else ""
    return Section("The reported failures", text, rows)


def rates(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the final accuracy at each rate of the sweeps, with and without batch normalization.

    Paper: Sec. 3.3
    """
    sweeps = {name: seeds for variant, name in SWEPT.items() if (seeds := seeds_of(finished, "rates", variant))}
    columns = [{one.run.recipe.rate: one for one in seeds.runs} for seeds in sweeps.values()]
    rows = [["rate", *sweeps]]
    for rate in sorted({rate for column in columns for rate in column}):
        rows.append([f"{rate:g}", *(show_accuracy(column[rate]) if rate in column else "-" for column in columns)])
    text = _rates_text(sweeps)
    # Compare the networks, each at its best rate, only if the table of `best_rates` does not do this.
    if not seeds_of(finished, "best", "bn-baseline"):
        text += _best_of_the_sweeps(sweeps)
    return Section("Learning rates (Section 3.3)", text, rows)


def _rates_text(sweeps: Mapping[str, Seeds]) -> str:
    text = "Final accuracy of the folded network, from one seed per rate."
    for name, seeds in sweeps.items():
        good = rates_that_train(seeds.runs)
        if not good:
            continue
        swept = sorted({one.run.recipe.rate for one in seeds.runs})
        ends, told = (swept[0], swept[-1]), show_rates(good, seeds.runs)
        some = f"the rate{'s' * (len(good) > 1)} {told} (tried: {ends[0]:g} to {ends[1]:g})"
        where = f"every rate tried, {told}" if good == swept else some
        text += f" The network {name} reaches at least half of its best accuracy at {where}."
        if len(swept) > 2 and _best_of_sweep(seeds).run.recipe.rate in ends:
            text += f" The best rate {name} is at an end of its sweep, so a rate outside the sweep may be better."
    return text


def _best_of_the_sweeps(sweeps: Mapping[str, Seeds]) -> str:
    if not {"without BN", "with BN"} <= sweeps.keys():
        return ""
    plain, normalized = (_best_of_sweep(sweeps[name]) for name in ("without BN", "with BN"))
    times = times_fewer(plain.points, normalized.points)
    reached = "never reaches" if times is None else f"takes {times:.1f} times fewer steps to reach"
    rates = f"{plain.run.recipe.rate:g} without BN, {normalized.run.recipe.rate:g} with BN"
    return (
        f" With each network at its best rate ({rates}), the network with BN {reached} the best accuracy of the network"
        " without BN."
    )


def _best_of_sweep(seeds: Seeds) -> Finished:
    return max(seeds.runs, key=lambda one: one.result["top1"] or 0.0)


def dropout(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the training and validation accuracy for each dropout probability, with and without BN.

    Paper: Sec. 3.4
    """
    networks = [seeds_of(finished, "dropout", name) for name in ("inception", "bn-baseline")]
    rows = [
        ["dropout", *(f"{name}: {what}" for name in ("without BN", "with BN") for what in ("training", "validation"))]
    ]
    for share in sorted({one.run.recipe.dropout for seeds in networks for one in seeds.runs}):
        row = [f"{share:.0%}"]
        for seeds in networks:
            runs: list[Finished | None] = [one for one in seeds.runs if one.run.recipe.dropout == share]
            row += [", ".join(show_accuracy(one, key) for one in runs or [None]) for key in ("train_top1", "top1")]
        rows.append(row)
    text = (
        "Final accuracy of each seed's folded network, on the center squares of the training and of the validation"
        " images."
    )
    overfit = [name for seeds, name in zip(networks, ("without BN", "with BN"), strict=True) if _overfits_most(seeds)]
    if overfit:
        text += f" With the least dropout, all runs {' and all runs '.join(overfit)} overfit visibly."
    repeated = _repeated(finished)
    if repeated is not None:
        text += (
            " Some recipes are also in the table of rates, so they were trained twice with the same seed. The final"
            f" accuracies of the two runs differ by up to {100 * repeated:.1f} points, because a GPU does not always"
            " add numbers in the same order."
        )
    return Section("Dropout (Section 3.4)", text, rows)


def _overfits_most(network: Seeds) -> bool:
    """Return whether all runs with the lowest dropout probability overfit visibly."""
    least = min((one.run.recipe.dropout for one in network.runs), default=0.0)
    return overfits_always(Seeds(tuple(one for one in network.runs if one.run.recipe.dropout == least)))


def _repeated(finished: Mapping[str, Finished]) -> float | None:
    """Return the largest difference in final accuracy between runs of one recipe, or None if no recipe has two runs."""
    ends: dict[object, list[float]] = {}
    for one in finished.values():
        if one.run.group in ("rates", "dropout") and one.result["top1"] is not None:
            ends.setdefault(replace(one.run.recipe, name=""), []).append(one.result["top1"])
    gaps = [max(values) - min(values) for values in ends.values() if len(values) > 1]
    return max(gaps, default=None)


def ablation(finished: Mapping[str, Finished]) -> Section:
    """Tabulate BN-x5's accuracy without each modification; a difference within the seeds' noise is not resolved.

    Paper: Sec. 4.2.1
    """
    seeds = unchanged_seeds_of(finished, "ablation", "bn-x5").final
    spread = noise(seeds)
    rows = [["modification", "BN-x5 without it", "the modification gives", "verdict"]]
    for one in seeds_of(finished, "ablation", "bn-x5").runs:
        field = next((key for key in one.run.changed if key in MODIFICATIONS), None)
        if field is not None:
            rows.append([MODIFICATIONS[field], show_accuracy(one), *_difference(one, seeds, spread)])
    text = "Final accuracy of the folded network."
    if seeds:
        text += f" BN-x5 itself has a mean of {statistics.fmean(seeds):.2%} over {len(seeds)} seeds"
        if spread is not None:
            text += f"; one more run would be within {100 * spread:.2f} points of this mean"
            text += " (95% prediction interval, not corrected for seven comparisons)"
        text += "."
    return Section("The seven modifications (Section 4.2.1)", text, rows)


def _difference(one: Finished, seeds: Sequence[float], spread: float | None) -> list[str]:
    if one.diverged:
        return ["-", "without it, the network diverges"]
    if not seeds or spread is None:
        return ["-", "not resolved: BN-x5 needs more seeds"]
    gain = statistics.fmean(seeds) - one.result["top1"]
    verdict = "not resolved" if abs(gain) <= spread else "helps" if gain > 0 else "harms"
    return [f"{100 * gain:+.2f} points", verdict]


def ran(finished: Mapping[str, Finished]) -> Section:
    """Tabulate each run's speed, hardware, version of torch and commit."""
    rows = [["run", "steps", "seconds", "steps/s", "on", "torch", "commit"]]
    for name, one in finished.items():
        env = one.environment
        machine = env["gpu"] or f"{env['hardware']}, {env['cores']} cores"
        pace = "-" if one.steps_per_second is None else f"{one.steps_per_second:g}"
        steps, commit = f"{one.result['steps']:,}", (env["commit"] or "-")[:12]
        rows.append([name, steps, f"{one.seconds:.0f}", pace, machine, env["torch"], commit])
    text = (
        "Steps/s count training alone. Seconds also include validation and the final evaluation, but not the startup"
        " before the first step."
    )
    return Section("The runs", text, rows)


def _spread(values: Sequence[str]) -> str:
    return f" ({', '.join(values)})" if len(values) > 1 else ""
