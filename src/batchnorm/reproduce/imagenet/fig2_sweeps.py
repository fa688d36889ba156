"""Beside Figure 3: learning rates with and without BN, dropout, and the seven modifications one by one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .claims import rates_that_train
from .curves import Seeds, noise, seeds_of, times_fewer, unchanged_seeds_of
from .fig2_tables import Section, show_accuracy, show_times
from .result_files import Finished

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


def rates(finished: Mapping[str, Finished]) -> Section:
    """Tabulate the accuracy at each rate with and without batch normalization, and the step ratio best against best.

    Paper: Sec. 3.3
    """
    without, with_bn = (seeds_of(finished, "rates", name) for name in ("inception", "bn-baseline"))
    columns = [{one.run.recipe.rate: one for one in seeds.runs} for seeds in (without, with_bn)]
    rows = [["rate", "without BN", "with BN"]]
    for rate in sorted({rate for column in columns for rate in column}):
        rows.append([f"{rate:g}", *(show_accuracy(column.get(rate)) for column in columns)])
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
            f" normalized network takes {show_times(times)} times fewer steps to the other's best accuracy."
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
        cells = (show_accuracy(column.get(share), key) for column in columns for key in ("train_top1", "top1"))
        rows.append([f"{share:.0%}", *cells])
    text = "Accuracy of the folded network at the end, on the centre squares of both sets, one seed."
    repeated = _repeated(finished)
    if repeated is not None:
        text += (
            f" The runs at 40% are also in the table of rates, with the same seed: two runs of one recipe differ by up"
            f" to {100 * repeated:.1f} points, for the order of sums on a GPU is not always the same."
        )
    return Section("Dropout (Section 3.4)", text, rows)


def _repeated(finished: Mapping[str, Finished]) -> float | None:
    """Return by how much runs of the same recipe in two groups differ at the end; None if there are none."""
    ends: dict[object, list[float]] = {}
    for one in finished.values():
        if one.run.group in ("rates", "dropout") and one.result["top1"] is not None:
            ends.setdefault(replace(one.run.recipe, name=""), []).append(one.result["top1"])
    gaps = [max(values) - min(values) for values in ends.values() if len(values) > 1]
    return max(gaps, default=None)


def ablation(finished: Mapping[str, Finished]) -> Section:
    """Tabulate BN-x5 with each modification taken back; a difference within the noise of its seeds is not resolved.

    Paper: Sec. 4.2.1
    """
    seeds = unchanged_seeds_of(finished, "ablation", "bn-x5").final
    spread = noise(seeds)
    rows = [["modification", "BN-x5 without it", "the modification gives", ""]]
    for one in seeds_of(finished, "ablation", "bn-x5").runs:
        field = next((key for key in one.run.changed if key in MODIFICATIONS), None)
        if field is not None:
            rows.append([MODIFICATIONS[field], show_accuracy(one), *_difference(one, seeds, spread)])
    text = "Accuracy of the folded network at the end."
    if seeds:
        text += f" BN-x5 itself: {statistics.fmean(seeds):.2%} over {len(seeds)} seeds"
        if spread is not None:
            text += f"; one more run would lie within {100 * spread:.2f} points of it (95%, each of seven comparisons)"
        text += "."
    return Section("The seven modifications (Section 4.2.1)", text, rows)


def _difference(one: Finished, seeds: Sequence[float], spread: float | None) -> list[str]:
    if one.diverged:
        return ["-", "without it the network diverges"]
    if not seeds or spread is None:
        return ["-", "not resolved: BN-x5 needs more seeds"]
    gain = statistics.fmean(seeds) - one.result["top1"]
    verdict = "not resolved" if abs(gain) <= spread else "helps" if gain > 0 else "harms"
    return [f"{100 * gain:+.2f} points", verdict]
