"""Figure 4 as a table: the paper's rows, our rows, and whether more crops and more networks lower the error.

A member is one of the networks whose probabilities the ensemble averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...evaluate import Ensemble, Score
from ...evaluate.accuracy import label_ranks
from ...report.tables import table
from .result_files import CROPS, Finished, MemberFiles


class ErrorRow(NamedTuple):
    """One row of Figure 4; a value that the paper does not state is None (errors) or "-" (other columns)."""

    model: str
    resolution: str
    crops: str
    models: str
    top1: float | None
    top5: float | None


# Figure 4 of the paper: errors on ImageNet's 50,000 validation images.
PAPER = (
    ErrorRow("GoogLeNet ensemble", "224", "144", "7", None, 0.0667),
    ErrorRow("Deep Image low-res", "256", "-", "1", None, 0.0796),
    ErrorRow("Deep Image high-res", "512", "-", "1", 0.2488, 0.0742),
    ErrorRow("Deep Image ensemble", "variable", "-", "-", None, 0.0598),
    ErrorRow("BN-Inception single crop", "224", "1", "1", 0.252, 0.0782),
    ErrorRow("BN-Inception multicrop", "224", "144", "1", 0.2199, 0.0582),
    ErrorRow("BN-Inception ensemble", "224", "144", "6", 0.201, 0.049),
)
# Errors on ImageNet's test images. The first two are in the paper's text. The paper mentions human raters without a
# number; the number here is from Russakovsky et al. (2014).
CONTEXT = (
    ErrorRow("BN-Inception ensemble, test set", "224", "144", "6", None, 0.0482),
    ErrorRow("He et al. (2015), test set", "-", "-", "-", None, 0.0494),
    ErrorRow("human raters (Russakovsky et al., 2014), test set", "-", "-", "-", None, 0.051),
)


TOP = {"top-1": 1, "top-5": 5}


class Gain(NamedTuple):
    """An error before and after one change, such as more crops, and the standard error of the difference."""

    name: str
    error: str
    before: float
    after: float
    standard_error: float
    networks: tuple[str, ...] = ()
    """names of the networks in the best ensemble, if the change is from the best network to it (`_best_ensemble`)"""

    @property
    def verdict(self) -> str:
        """Whether the change lowers the error; "not resolved" if the difference is at most two standard errors."""
        gain = self.before - self.after
        if abs(gain) <= 2 * self.standard_error:
            return "not resolved"
        return "confirmed" if gain > 0 else "refuted"

    def __str__(self) -> str:
        where = " on the half of the images not used for the choice" if self.networks else ""
        spread = f"standard error of the difference {self.standard_error:.2%}"
        change = f"{self.before:.2%} to {self.after:.2%}{where} ({spread})"
        return f"with {self.name.rstrip(',')}, the {self.error} error is lower: {self.verdict}, {change}"

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers with the verdict, for ``fig4.json``."""
        fields = {key: value for key, value in self._asdict().items() if key != "networks" or value}
        return {**fields, "verdict": self.verdict, "says": str(self)}


class Figure4(NamedTuple):
    """Figure 4's results, computed from all members of the ensemble."""

    rows: tuple[ErrorRow, ...]
    steps: tuple[Gain, ...]
    disagreement: dict[str, float | None]
    together: dict[str, dict[str, Any]]
    chosen: tuple[Gain, ...] = ()
    """the best of all ensembles compared with the best network; both are chosen on half of the images and judged on
    the other half"""

    @property
    def statement(self) -> str | None:
        """A sentence on whether an ensemble is better than the best network, or None for a single network."""
        against_best = [step for step in self.steps if "the best of them" in step.name]
        if not against_best:
            return None
        better = [step.error for step in against_best if step.verdict == "confirmed"]
        if better:
            return f"The ensemble is better than its best member (by {' and '.join(better)} error)."
        better = [step.error for step in self.chosen if step.verdict == "confirmed"]
        if better:
            return (
                "The ensemble of all networks is not measurably better than its best member, but an ensemble of some is"
                f" (by {' and '.join(better)} error)."
            )
        return "At this scale, no ensemble of these networks is measurably better than the best network."


def figure4(members: Sequence[MemberFiles], size: int) -> Figure4:
    """Read the members' predictions, and score them alone and as an ensemble, with one crop and with many crops.

    Paper: Sec. 4.2.3; Fig. 4
    """
    wrong: dict[tuple[int, str], Tensor] = {}
    ensembles = {crops: _combine(members, crops, wrong) for crops in CROPS}
    count, many = str(len(members)), max(CROPS)
    rows = []
    for c, name in zip(CROPS, ("single crop", "multicrop"), strict=True):
        top1, top5 = (wrong[c, error].mean().item() for error in TOP)
        rows.append(ErrorRow(f"{name}, mean over networks", str(size), str(c), "1", top1, top5))
    if len(members) > 1:
        rows += [
            ErrorRow("ensemble", str(size), str(c), count, *_errors(ensembles[c].members[-1].together)) for c in CROPS
        ]
    steps = []
    for error in TOP:
        single, multi = wrong[1, error], wrong[many, error]
        steps.append(_step(f"{many} crops instead of 1", error, single, multi))
        if len(members) > 1:
            steps.append(_step(f"{count} networks instead of 1", error, multi, wrong[-many, error]))
            name, alone = _best(members, ensembles[many], error)
            steps.append(
                _step(f"{count} networks instead of the best of them, {name},", error, alone, wrong[-many, error])
            )
    return Figure4(
        tuple(rows),
        tuple(steps),
        {str(c): ensembles[c].disagreement() for c in CROPS},
        {str(c): ensembles[c].members[-1].together._asdict() for c in CROPS},
        tuple(_best_ensemble(members, error) for error in TOP) if len(members) > 1 else (),
    )


def _best_ensemble(members: Sequence[MemberFiles], error: str) -> Gain:
    """Compare the best ensemble of two or more networks with the best network.

    Both are chosen on every second image and judged on the other images, so that the choice does not bias the result.
    """
    found = [member.predictions(max(CROPS)) for member in members]
    labels = found[0][1]
    wrong = {
        names: _is_wrong(torch.stack([found[k][0] for k in names]).mean(0), labels, error)
        for count in range(1, len(members) + 1)
        for names in combinations(range(len(members)), count)
    }
    alone, together = (
        min(
            (names for names in wrong if (len(names) > 1) == several), key=lambda names: wrong[names][::2].mean().item()
        )
        for several in (False, True)
    )
    listed = ", ".join(members[k].name for k in together)
    name = (
        f"the best ensemble of two or more networks ({listed}) instead of the best network, {members[alone[0]].name},"
    )
    gain = _step(name, error, wrong[alone][1::2], wrong[together][1::2])
    return gain._replace(networks=tuple(members[k].name for k in together))


def _combine(members: Sequence[MemberFiles], crops: int, wrong: dict[tuple[int, str], Tensor]) -> Ensemble:
    """Average the members' probabilities, and add each image's errors to ``wrong``.

    The tensors in ``wrong`` have one number per image. ``wrong[crops, "top-1"]`` is the fraction of members that are
    wrong. With a minus sign, ``wrong[-crops, "top-1"]`` is 1 if the ensemble is wrong and 0 otherwise.
    """
    ensemble = Ensemble()
    for member in members:
        probabilities, labels = member.predictions(crops)
        ensemble.add(member.name, probabilities, labels)
        _note(wrong, crops, probabilities, labels, len(members))
    _note(wrong, -crops, ensemble.mean(), labels, 1)
    return ensemble


def _note(wrong: dict[tuple[int, str], Tensor], key: int, scores: Tensor, labels: Tensor, members: int) -> None:
    for error in TOP:
        so_far = wrong.get((key, error), torch.zeros(len(labels), dtype=torch.float64))
        wrong[key, error] = so_far + _is_wrong(scores, labels, error) / members


def _is_wrong(scores: Tensor, labels: Tensor, error: str) -> Tensor:
    return (label_ranks(scores, labels) >= TOP[error]).double()


def _best(members: Sequence[MemberFiles], ensemble: Ensemble, error: str) -> tuple[str, Tensor]:
    """Return the name of the member with the lowest error, and which images this member gets wrong.

    The member is chosen on the same images that it is judged on, so it may look better than it is.
    """
    errors = [_errors(member.alone)[list(TOP).index(error)] for member in ensemble.members]
    best = members[errors.index(min(errors))]
    return best.name, _is_wrong(*best.predictions(max(CROPS)), error)


def _step(name: str, error: str, before: Tensor, after: Tensor) -> Gain:
    spread = (before - after).std().item() / len(before) ** 0.5
    return Gain(name, error, before.mean().item(), after.mean().item(), spread)


def _errors(found: Score) -> tuple[float, float]:
    return found.top1_error, found.top5_error


def alone(results: Mapping[str, Mapping[str, Any]]) -> list[ErrorRow]:
    """Return the rows of single networks, from their result files."""
    return [
        ErrorRow(name, str(result["recipe"]["size"]), crops, "1", one["top1_error"], one["top5_error"])
        for name, result in results.items()
        for crops, one in result["crops"].items()
    ]


def sweep_table(sweep: Mapping[str, Finished], best: Mapping[str, float]) -> str:
    """Return the sweeps of rates as Markdown, or "" if there are none."""
    if not sweep:
        return ""
    rows = [["network", "rate", "top-1 accuracy at the end", ""]]
    for one in sweep.values():
        recipe, top1 = one.run.recipe, one.result["top1"]
        chosen = "chosen" if best.get(one.run.variant) == recipe.rate else ""
        rows.append([one.run.variant, f"{recipe.rate:g}", "diverged" if top1 is None else f"{top1:.1%}", chosen])
    epochs = next(iter(sweep.values())).run.recipe.epochs
    return f"The sweeps of rates, {epochs:g} epochs and one seed each:\n\n{table(rows)}"


def notes(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return notes on images that were enlarged or left out."""
    first = next((one for result in results.values() for one in result["crops"].values()), None)
    if first is None:
        return []
    found = []
    if first["enlarged"]:
        found.append(f"{first['enlarged']:,} images are smaller than the crop and were enlarged")
    if first["corrupt"]:
        listed = ", ".join(first["corrupt"][:5])
        found.append(f"{len(first['corrupt'])} files could not be read and were left out: {listed}")
    return found


def markdown(
    figure: Figure4 | None,
    rows: Sequence[ErrorRow],
    images: str,
    missing: Mapping[str, str],
    remarks: Sequence[str] = (),
) -> str:
    """Return the figure as Markdown.

    Args:
        figure: the results of all members, if there are any.
        rows: the rows of single networks.
        images: the numbers of images and networks, as text.
        missing: the names of the missing members, with the reasons why they are missing.
        remarks: further notes.

    >>> print(markdown(None, [], "", {"bn-x30-dropout-5": "not yet run"}).splitlines()[-1])
    - bn-x30-dropout-5: not yet run
    """
    lines = ["| model | resolution | crops | models | top-1 error | top-5 error |", "|---|---|---|---|---|---|"]
    lines += [_line(row) for row in PAPER] + [_line(row) for row in CONTEXT]
    if rows:
        lines += [f"| **measured here: {images}** | | | | | |", *map(_line, rows)]
    if figure is not None:
        lines += [*map(_line, figure.rows), "", *(f"- {step}" for step in (*figure.steps, *figure.chosen))]
        lines += [
            f"- on average, two networks disagree on {share:.2%} of the images"
            f" ({crops} {'crop' if crops == '1' else 'crops'})"
            for crops, share in figure.disagreement.items()
            if share is not None
        ]
    lines += ["", figure.statement] if figure is not None and figure.statement else []
    lines += ["", *(f"- {remark}" for remark in remarks)] if remarks else []
    if missing:
        lines += ["", *(f"- {name}: {why}" for name, why in missing.items())]
    return "\n".join(lines)


def _line(row: ErrorRow) -> str:
    errors = ("-" if value is None else f"{value:.2%}" for value in (row.top1, row.top5))
    # Only rows of PAPER and CONTEXT have "-".
    cells = ("not in the paper" if cell == "-" else cell for cell in (*row[:4], *errors))
    return f"| {' | '.join(cells)} |"
